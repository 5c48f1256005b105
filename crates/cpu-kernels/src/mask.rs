//! Which keys a query sees: always one interval of positions.

use std::ops::Range;

/// What decides visibility within one request. Positions count from the start of the sequence.
///
/// A key `j` is visible to a query at `p` when both lie in one of `spans`, or when all of these hold:
/// `j ≤ p` if causal; `p − j ≤ left`; `j − p ≤ right`; `p` and `j` lie in the same chunk. A span
/// and the other rules both hold for `j = p`, so that what a query sees is one interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mask<'a> {
    /// No key after the query.
    pub causal: bool,
    /// Tokens visible to the left, the query's own not counted; absent = all.
    pub left: Option<u64>,
    /// Tokens visible to the right, the query's own not counted; absent = all.
    pub right: Option<u64>,
    /// Tokens of a chunk; 0 = off.
    pub chunk: u64,
    /// Spans `[start, end)` inside which all see all.
    pub spans: &'a [(usize, usize)],
}

impl Mask<'_> {
    /// Every key.
    pub const NONE: Self = Self { causal: false, left: None, right: None, chunk: 0, spans: &[] };

    /// The keys that a query at `position` sees among the first `kv_len`. A negative position (more
    /// queries than keys) is legal.
    #[must_use]
    pub fn visible(&self, position: i64, kv_len: usize) -> Range<usize> {
        let limit = i128::try_from(kv_len).unwrap_or(i128::MAX);
        let p = i128::from(position);
        let (mut low, mut high) = (0, limit);
        if self.causal {
            high = high.min(p + 1);
        }
        if let Some(left) = self.left {
            low = low.max(p - i128::from(left));
        }
        if let Some(right) = self.right {
            high = high.min(p + i128::from(right) + 1);
        }
        if self.chunk > 0 {
            let chunk = i128::from(self.chunk);
            let first = p.div_euclid(chunk) * chunk;
            low = low.max(first);
            high = high.min(first + chunk);
        }
        for (start, end) in self.spans {
            let (start, end) = (*start as i128, *end as i128);
            if start <= p && p < end {
                low = low.min(start);
                high = high.max(end.min(limit));
            }
        }
        if high <= low { 0..0 } else { low.max(0) as usize..high as usize }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_corners_chunks_and_spans() {
        let causal = Mask { causal: true, ..Mask::NONE };
        assert_eq!(causal.visible(3, 10), 0..4);
        assert_eq!(causal.visible(-1, 10), 0..0);
        assert_eq!(Mask { left: Some(1), ..causal }.visible(3, 10), 2..4);
        assert_eq!(Mask { left: Some(1), right: Some(2), ..Mask::NONE }.visible(9, 10), 8..10);
        assert_eq!(Mask { chunk: 4, ..causal }.visible(6, 10), 4..7);
        assert_eq!(Mask { chunk: 4, ..Mask::NONE }.visible(-1, 10), 0..0);
        let spans = [(2, 6), (5, 20)];
        assert_eq!(Mask { spans: &spans, ..causal }.visible(3, 10), 0..6);
        assert_eq!(Mask { spans: &spans, left: Some(0), ..causal }.visible(5, 10), 2..10);
        assert_eq!(Mask { left: Some(u64::MAX), right: Some(u64::MAX), ..Mask::NONE }.visible(i64::MAX, 10), 0..10);
    }
}
