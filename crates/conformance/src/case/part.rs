//! A request of a case, as a case of its own.
//!
//! Owns the cutting. Must not know how a case is run or checked.

use super::{Case, TopK};

impl Case {
    /// Requests.
    #[must_use]
    pub fn num_requests(&self) -> usize {
        self.seq_lens.len()
    }

    /// Query tokens of a request, as a range of rows; empty for a request that there is not.
    #[must_use]
    pub fn query_range(&self, request: usize) -> std::ops::Range<usize> {
        let at = |index: usize| self.query_start_loc.get(index).map_or(0, |start| usize::try_from(*start).unwrap_or(0));
        at(request)..at(request + 1)
    }

    /// Key tokens of a request, as a range of rows; empty for a request that there is not.
    #[must_use]
    pub fn kv_range(&self, request: usize) -> std::ops::Range<usize> {
        let mut lens = self.seq_lens.iter().map(|len| usize::try_from(*len).unwrap_or(0));
        let start = lens.by_ref().take(request).sum();
        start..start + lens.next().unwrap_or(0)
    }

    /// The request alone; `None` when there is no such request, or the case contradicts itself.
    #[must_use]
    pub fn alone(&self, request: usize) -> Option<Self> {
        let (queries, keys) = (self.query_range(request), self.kv_range(request));
        let rows = |range: &std::ops::Range<usize>, row: usize| range.start * row..range.end * row;
        let (q_row, k_row) = (self.num_heads * self.q_head_size(), self.num_kv_heads * self.head_size);
        let v_row = self.num_kv_heads * self.head_size_v;
        Some(Self {
            q: self.q.part(rows(&queries, q_row), 0)?,
            k: self.k.part(rows(&keys, k_row), 0)?,
            v: match &self.v {
                Some(v) => Some(v.part(rows(&keys, v_row), 0)?),
                None => None,
            },
            query_start_loc: vec![0, i32::try_from(queries.len()).ok()?],
            seq_lens: vec![*self.seq_lens.get(request)?],
            causal_per_request: match &self.causal_per_request {
                Some(flags) => Some(vec![*flags.get(request)?]),
                None => None,
            },
            prefix_spans: self
                .prefix_spans
                .iter()
                .filter(|span| usize::try_from(span[0]) == Ok(request))
                .map(|span| [0, span[1], span[2]])
                .collect(),
            topk: match &self.topk {
                Some(topk) => {
                    Some(TopK { indices: topk.indices.get(rows(&queries, topk.width))?.to_vec(), width: topk.width })
                }
                None => None,
            },
            // Other blocks than in the whole batch.
            seed: self.seed.wrapping_add(1 + request as u64),
            ..self.clone()
        })
    }
}
