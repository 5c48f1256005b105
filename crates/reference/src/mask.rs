//! Visibility: the one definition of which key position a query position sees.
//!
//! Owns causal alignment, windows, chunks and multimodal spans. Must not know logits,
//! heads, caches or batches.

use crate::error::ReferenceError;

/// Absolute positions `start..end` (half-open), in tokens, inside which attention is
/// bidirectional (one image of a multimodal prompt).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First position, ≥ 0.
    pub start: i64,
    /// One past the last position, ≥ `start`; may lie beyond `seq_len` (a span whose tail is
    /// not in the cache yet).
    pub end: i64,
}

impl Span {
    /// True when `position` lies inside.
    pub fn contains(self, position: i64) -> bool {
        self.start <= position && position < self.end
    }
}

/// Everything that decides visibility within one request.
///
/// Key `j` is visible to a query at absolute position `p` when **either** both lie in one of
/// `prefix_spans`, **or** all of these hold:
///
/// | rule | holds when |
/// |---|---|
/// | `causal` | `j ≤ p` |
/// | `sliding_window` = w > 0 | `\|p − j\| < w`, so that a causal query sees `p−w+1 ..= p` |
/// | `window_left` = l | `p − j ≤ l` |
/// | `window_right` = r | `j − p ≤ r` |
/// | `chunked_local` = c > 0 | `floor(p/c) = floor(j/c)` |
///
/// A span therefore lifts causality, window and chunk alike, inside itself only. Encoder
/// attention is `causal: false`; cross attention is `causal: false` without windows, over
/// `seq_len = encoder_len` keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskSpec<'a> {
    /// No key after the query.
    pub causal: bool,
    /// Window size in tokens, **the query's own position included**; ≤ 0 is off.
    pub sliding_window: i64,
    /// Tokens visible to the left, **the query's own position not counted**; `None` is
    /// unlimited. The form of encoder models; not together with `sliding_window`.
    pub window_left: Option<u64>,
    /// Tokens visible to the right, own position not counted; `None` is unlimited.
    pub window_right: Option<u64>,
    /// Chunk size in tokens; ≤ 0 is off. Causality stays a separate rule.
    pub chunked_local: i64,
    /// Bidirectional spans; they may overlap, each is judged alone.
    pub prefix_spans: &'a [Span],
}

impl<'a> MaskSpec<'a> {
    /// `j ≤ p` and no other rule.
    pub const fn causal() -> Self {
        MaskSpec { causal: true, ..Self::bidirectional() }
    }

    /// Every key: encoder and cross attention.
    pub const fn bidirectional() -> Self {
        MaskSpec {
            causal: false,
            sliding_window: 0,
            window_left: None,
            window_right: None,
            chunked_local: 0,
            prefix_spans: &[],
        }
    }

    /// Refuses a mask that says two things at once.
    ///
    /// # Errors
    /// [`ReferenceError::Conflict`] when `sliding_window` and `window_left`/`window_right`
    /// are both on; [`ReferenceError::Index`] for a span with `start < 0` or `end < start`.
    pub fn validate(&self) -> Result<(), ReferenceError> {
        if self.sliding_window > 0 && (self.window_left.is_some() || self.window_right.is_some()) {
            return Err(ReferenceError::Conflict { first: "sliding_window", second: "window_left/window_right" });
        }
        for (index, span) in self.prefix_spans.iter().enumerate() {
            if span.start < 0 {
                return Err(ReferenceError::Index {
                    name: "prefix_spans.start",
                    index,
                    found: span.start,
                    rule: "a span starts at position 0 or later".into(),
                });
            }
            if span.end < span.start {
                return Err(ReferenceError::Index {
                    name: "prefix_spans.end",
                    index,
                    found: span.end,
                    rule: format!("a span is [start, end), so end is at least {}", span.start),
                });
            }
        }
        Ok(())
    }

    /// True when a query at absolute position `p` sees the key at position `j`.
    ///
    /// `p` may be negative (more queries than keys); a negative `j` is never visible.
    pub fn visible(&self, p: i64, j: i64) -> bool {
        if j < 0 {
            return false;
        }
        if self.prefix_spans.iter().any(|s| s.contains(p) && s.contains(j)) {
            return true;
        }
        // 128 bits: no input overflows.
        let right = i128::from(j) - i128::from(p);
        let left = -right;
        if self.causal && right > 0 {
            return false;
        }
        if self.sliding_window > 0 && right.abs() >= i128::from(self.sliding_window) {
            return false;
        }
        if self.window_left.is_some_and(|limit| left > i128::from(limit)) {
            return false;
        }
        if self.window_right.is_some_and(|limit| right > i128::from(limit)) {
            return false;
        }
        // Floor division, so that a negative p shares no chunk with any key.
        self.chunked_local <= 0 || p.div_euclid(self.chunked_local) == j.div_euclid(self.chunked_local)
    }

    /// The keys, ascending, that query row `query` of `q_len` sees among `seq_len` keys.
    pub fn visible_keys(&self, query: usize, q_len: usize, seq_len: usize) -> Vec<usize> {
        let p = query_position(query, q_len, seq_len);
        (0..seq_len).filter(|&j| self.visible(p, to_i64(j))).collect()
    }
}

/// Absolute position of query row `query`: `p = seq_len − q_len + query`, in tokens.
///
/// This aligns the causal mask to the **bottom right**: the last query is the last token.
/// Negative for the first rows when there are more queries than keys.
pub fn query_position(query: usize, q_len: usize, seq_len: usize) -> i64 {
    to_i64(seq_len).saturating_sub(to_i64(q_len)).saturating_add(to_i64(query))
}

fn to_i64(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(mask: &MaskSpec<'_>, p: i64) -> Vec<i64> {
        (0..20).filter(|&j| mask.visible(p, j)).collect()
    }

    #[test]
    fn causal_is_bottom_right() {
        assert_eq!(query_position(0, 1, 16), 15);
        assert_eq!(query_position(0, 2, 5), 3);
        assert_eq!(query_position(0, 3, 1), -2);
        assert_eq!(seen(&MaskSpec::causal(), 3), [0, 1, 2, 3]);
        assert!(seen(&MaskSpec::causal(), -1).is_empty());
    }

    #[test]
    fn window_counts_the_current_token() {
        let mut mask = MaskSpec::causal();
        mask.sliding_window = 3;
        assert_eq!(seen(&mask, 10), [8, 9, 10]);
        mask.causal = false;
        assert_eq!(seen(&mask, 10), [8, 9, 10, 11, 12]);
        for off in [0, -1, i64::MIN] {
            mask.sliding_window = off;
            assert_eq!(seen(&mask, 10).len(), 20);
        }
        mask.sliding_window = i64::MAX;
        assert_eq!(seen(&mask, 10).len(), 20);
    }

    #[test]
    fn left_and_right_do_not_count_it() {
        let mut mask = MaskSpec::bidirectional();
        mask.window_left = Some(2);
        mask.window_right = Some(1);
        assert_eq!(seen(&mask, 10), [8, 9, 10, 11]);
        mask.causal = true;
        assert_eq!(seen(&mask, 10), [8, 9, 10]);
        mask.window_left = None;
        mask.causal = false;
        assert_eq!(seen(&mask, 2), [0, 1, 2, 3]);
    }

    #[test]
    fn chunks_do_not_look_back() {
        let mut mask = MaskSpec::causal();
        mask.chunked_local = 4;
        assert_eq!(seen(&mask, 3), [0, 1, 2, 3]);
        assert_eq!(seen(&mask, 4), [4]);
        assert_eq!(seen(&mask, 6), [4, 5, 6]);
        assert!(seen(&mask, -1).is_empty());
        mask.causal = false;
        assert_eq!(seen(&mask, 6), [4, 5, 6, 7]);
        assert!(seen(&mask, -1).is_empty());
    }

    #[test]
    fn spans_lift_every_rule_inside_themselves() {
        let spans = [Span { start: 3, end: 7 }, Span { start: 10, end: 10 }];
        let mut mask = MaskSpec::causal();
        mask.prefix_spans = &spans;
        assert_eq!(seen(&mask, 4), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(seen(&mask, 7), [0, 1, 2, 3, 4, 5, 6, 7]);
        mask.sliding_window = 2;
        assert_eq!(seen(&mask, 6), [3, 4, 5, 6]);
        assert_eq!(seen(&mask, 3), [2, 3, 4, 5, 6]);
        mask.sliding_window = 0;
        mask.chunked_local = 4;
        assert_eq!(seen(&mask, 4), [3, 4, 5, 6]);
        assert_eq!(seen(&mask, 10), [8, 9, 10]);
    }

    #[test]
    fn contradictions_are_refused() {
        let mut mask = MaskSpec::causal();
        mask.sliding_window = 4;
        assert!(mask.validate().is_ok());
        mask.window_left = Some(3);
        assert!(matches!(mask.validate(), Err(ReferenceError::Conflict { .. })));
        for span in [Span { start: -1, end: 2 }, Span { start: 3, end: 2 }] {
            let spans = [span];
            let mut mask = MaskSpec::causal();
            mask.prefix_spans = &spans;
            assert!(matches!(mask.validate(), Err(ReferenceError::Index { .. })));
        }
    }

    #[test]
    fn extreme_positions_do_not_overflow() {
        let mut mask = MaskSpec::bidirectional();
        mask.sliding_window = 1;
        assert!(!mask.visible(i64::MIN, i64::MAX));
        assert!(!mask.visible(i64::MAX, 0));
        assert!(!mask.visible(3, -3));
        mask.chunked_local = i64::MAX;
        assert!(mask.visible(5, 5));
    }
}
