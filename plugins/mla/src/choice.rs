//! Absorbed or expanded: what each form costs for a request, and which one is taken.
//!
//! Owns the count of operations. Must not know how either form is computed.

use crate::{options::Path, plan::Request};
use attache_cpu_kernels::Mask;

/// Dimensions of an MLA layer, in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dimensions {
    /// Query heads.
    pub num_heads: usize,
    /// Latent part of a row.
    pub kv_lora_rank: usize,
    /// Rotary part of a row, of a query and of a key.
    pub qk_rope_head_dim: usize,
    /// Part of a query or key head without rotary position.
    pub qk_nope_head_dim: usize,
    /// A value head.
    pub v_head_dim: usize,
}

impl Dimensions {
    /// Elements of a cache row, and of an absorbed query head.
    pub fn row(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// Elements of a query or key head that is not absorbed.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Multiply-adds of one request in the absorbed form, a head.
    fn absorbed_cost(&self, queries: u64, pairs: u64) -> u64 {
        let project = self.kv_lora_rank as u64 * (self.qk_nope_head_dim + self.v_head_dim) as u64;
        let attend = (self.row() + self.kv_lora_rank) as u64;
        queries.saturating_mul(project).saturating_add(pairs.saturating_mul(attend))
    }

    /// Multiply-adds of one request in the expanded form, a head.
    fn expanded_cost(&self, keys: u64, pairs: u64) -> u64 {
        let project = self.kv_lora_rank as u64 * (self.qk_nope_head_dim + self.v_head_dim) as u64;
        let attend = (self.qk_head_dim() + self.v_head_dim) as u64;
        keys.saturating_mul(project).saturating_add(pairs.saturating_mul(attend))
    }

    /// Whether a request is better computed in the absorbed form: few queries do not pay for
    /// expanding every key that they see.
    pub fn absorbed_is_cheaper(&self, request: &Request, window: Window) -> bool {
        let queries = request.tokens.len() as u64;
        let (keys, pairs) = visible(queries, request.seq_len as u64, request.causal, window.size);
        self.absorbed_cost(queries, pairs) <= self.expanded_cost(keys, pairs)
    }
}

/// Keys that any query of a request sees, and pairs of a query and a key that it sees; an upper
/// bound where the window reaches over an end of the sequence.
fn visible(queries: u64, seq_len: u64, causal: bool, window: Option<u64>) -> (u64, u64) {
    let before = seq_len.saturating_sub(queries);
    let all = if causal {
        let new = queries.min(seq_len);
        (new * before).saturating_add(new.saturating_mul(new + 1) / 2)
    } else {
        queries.saturating_mul(seq_len)
    };
    match window {
        None => (seq_len, all),
        Some(window) => {
            let per_query = if causal { window } else { window.saturating_mul(2) };
            (seq_len.min(queries.saturating_add(per_query)), all.min(queries.saturating_mul(per_query)))
        }
    }
}

/// A sliding window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Window {
    /// In tokens, the current one included; absent = off.
    pub size: Option<u64>,
    /// Tokens visible to the right without causal masking; absent = as the window says.
    pub right: Option<u64>,
}

impl Window {
    /// What a query sees.
    pub fn mask(self, causal: bool) -> Mask<'static> {
        let side = self.size.map(|size| size - 1);
        let right = [self.right, side].into_iter().flatten().min();
        Mask { causal, left: side, right, ..Mask::NONE }
    }
}

/// Which form a layer's `forward` takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// Always the same one: asked for, or needed so that a row's result depends on nothing else.
    Always(Form),
    /// The cheaper one, request by request.
    Cheaper,
}

/// A form of computation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Over the latent rows.
    Absorbed,
    /// Over expanded keys and values.
    Expanded,
}

impl Rule {
    /// The rule of a layer. With batch invariance a choice by cost is none: how many tokens of a
    /// request are computed at once depends on the batch. Then the absorbed form is taken, because
    /// the other one would expand the whole cache for every new token.
    pub fn new(path: Path, batch_invariant: bool) -> Self {
        match path {
            Path::Absorbed => Self::Always(Form::Absorbed),
            Path::Expanded => Self::Always(Form::Expanded),
            Path::Auto if batch_invariant => Self::Always(Form::Absorbed),
            Path::Auto => Self::Cheaper,
        }
    }

    /// The form for a request.
    pub fn form(self, dimensions: &Dimensions, request: &Request, window: Window) -> Form {
        match self {
            Self::Always(form) => form,
            Self::Cheaper if dimensions.absorbed_is_cheaper(request, window) => Form::Absorbed,
            Self::Cheaper => Form::Expanded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEEPSEEK: Dimensions =
        Dimensions { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64, qk_nope_head_dim: 128, v_head_dim: 128 };

    fn request(queries: usize, seq_len: usize) -> Request {
        Request { tokens: 0..queries, seq_len, blocks: 0..0, causal: true }
    }

    #[test]
    fn decoding_is_absorbed_and_a_prompt_is_expanded_unless_a_rule_says_otherwise() {
        let rule = Rule::new(Path::Auto, false);
        for (queries, seq_len, expected) in [
            (1, 4096, Form::Absorbed),
            (4, 4096, Form::Absorbed),
            (2048, 2048, Form::Expanded),
            (512, 8192, Form::Expanded),
        ] {
            let request = request(queries, seq_len);
            assert_eq!(rule.form(&DEEPSEEK, &request, Window::default()), expected, "{queries} of {seq_len}");
            assert_eq!(Rule::new(Path::Auto, true).form(&DEEPSEEK, &request, Window::default()), Form::Absorbed);
            assert_eq!(Rule::new(Path::Absorbed, false).form(&DEEPSEEK, &request, Window::default()), Form::Absorbed);
            assert_eq!(Rule::new(Path::Expanded, true).form(&DEEPSEEK, &request, Window::default()), Form::Expanded);
        }
    }

    #[test]
    fn pairs_are_counted_as_the_mask_lets_them_through() {
        assert_eq!(visible(3, 5, true, None), (5, 3 + 4 + 5));
        assert_eq!(visible(3, 5, false, None), (5, 15));
        assert_eq!(visible(1, 1000, true, Some(10)), (11, 10));
        assert_eq!(visible(5, 2, true, None), (2, 3), "more queries than keys");
        assert_eq!(visible(0, 0, true, None), (0, 0));
    }
}
