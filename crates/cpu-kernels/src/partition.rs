//! A ragged batch, cut into units of about equal cost.
//!
//! The cut changes who computes what and when, never a result: see the crate's promise.

use crate::{mask::Mask, scratch::MAX_ROWS};
use std::ops::Range;

/// Keys of a chunk: sums start anew at each multiple, and chunks are merged in order.
pub const CHUNK: usize = 1024;
/// Units a worker should find, so that no one waits long at the end.
const UNITS_PER_WORKER: usize = 4;
/// Most f32 values of partial results (64 MiB): what would need more is not split.
const MAX_PARTIAL_LEN: usize = 16 << 20;

/// What the partition needs to know of a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestShape<'a> {
    /// Query tokens.
    pub query_len: usize,
    /// Keys.
    pub kv_len: usize,
    /// Position of the first query; negative where there are more queries than keys.
    pub first_position: i64,
    /// What a query sees.
    pub mask: Mask<'a>,
}

impl RequestShape<'_> {
    /// All keys that the queries `tokens` see, and what lies between.
    pub(crate) fn seen(&self, tokens: Range<usize>) -> Range<usize> {
        let mut all = 0..0;
        for token in tokens {
            let seen = self.mask.visible(self.first_position.saturating_add(token as i64), self.kv_len);
            if seen.is_empty() {
                continue;
            }
            all = if all.is_empty() { seen } else { all.start.min(seen.start)..all.end.max(seen.end) };
        }
        all
    }
}

/// A block of query rows against a range of keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unit {
    /// The request.
    pub request: usize,
    /// The KV head.
    pub kv_head: usize,
    /// Query tokens, within the request.
    pub tokens: Range<usize>,
    /// Query heads, within those of the KV head.
    pub heads: Range<usize>,
    /// Chunks of keys.
    pub chunks: Range<usize>,
    /// Where the partial results go, in f32 values; absent = the unit is whole and writes its output.
    pub partial: Option<usize>,
}

impl Unit {
    pub(crate) fn num_rows(&self) -> usize {
        self.tokens.len() * self.heads.len()
    }
}

/// The units of a batch.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Partition {
    pub(crate) units: Vec<Unit>,
    /// Split units as a whole: `partial` is where the results of their first chunk begin.
    pub(crate) merges: Vec<Unit>,
    /// f32 values of all partial results.
    pub(crate) partial_len: usize,
}

/// Heads that a partition is made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeadShape {
    /// KV heads.
    pub num_kv_heads: usize,
    /// Query heads of a KV head.
    pub group: usize,
    /// Elements of a value head.
    pub head_size_v: usize,
}

impl Partition {
    /// Cuts a batch for `workers` threads.
    #[must_use]
    pub fn new<'a>(requests: impl IntoIterator<Item = RequestShape<'a>>, heads: HeadShape, workers: usize) -> Self {
        let heads_per_unit = heads.group.clamp(1, MAX_ROWS);
        let tokens_per_unit = (MAX_ROWS / heads_per_unit).max(1);
        let mut whole: Vec<(usize, Unit)> = Vec::new();
        for (request, shape) in requests.into_iter().enumerate() {
            for first in (0..shape.query_len).step_by(tokens_per_unit) {
                let tokens = first..(first + tokens_per_unit).min(shape.query_len);
                let seen = shape.seen(tokens.clone());
                let chunks = if seen.is_empty() { 0..0 } else { seen.start / CHUNK..seen.end.div_ceil(CHUNK) };
                for kv_head in 0..heads.num_kv_heads {
                    for head in (0..heads.group).step_by(heads_per_unit) {
                        let heads = head..(head + heads_per_unit).min(heads.group);
                        let (tokens, chunks) = (tokens.clone(), chunks.clone());
                        let unit = Unit { request, kv_head, tokens, heads, chunks, partial: None };
                        // A key costs as much as some rows: it is fetched and packed.
                        whole.push((seen.len() * (unit.num_rows() + 16), unit));
                    }
                }
            }
        }
        let wanted = workers.max(1) * UNITS_PER_WORKER;
        let too_few = whole.len() < wanted;
        let pieces = wanted.div_ceil(whole.len().max(1));
        let mut partition = Self::default();
        let mut costs: Vec<(usize, Unit)> = Vec::with_capacity(whole.len());
        for (cost, unit) in whole {
            let needed = unit.num_rows() * unit.chunks.len() * partial_row(heads.head_size_v);
            let fits = partition.partial_len + needed <= MAX_PARTIAL_LEN;
            if too_few && fits && unit.chunks.len() > 1 && workers > 1 {
                costs.extend(
                    partition.split(unit, pieces, heads.head_size_v).into_iter().map(|unit| (cost / pieces, unit)),
                );
            } else {
                costs.push((cost, unit));
            }
        }
        // The dearest first; equal ones in order.
        costs.sort_by_key(|(cost, _)| std::cmp::Reverse(*cost));
        partition.units = costs.into_iter().map(|(_, unit)| unit).collect();
        partition
    }

    /// Cuts a unit between chunks; remembers how to merge.
    fn split(&mut self, unit: Unit, pieces: usize, head_size_v: usize) -> Vec<Unit> {
        let base = self.partial_len;
        let chunk_len = unit.num_rows() * partial_row(head_size_v);
        self.partial_len += chunk_len * unit.chunks.len();
        let per_piece = unit.chunks.len().div_ceil(pieces);
        let cut = |first: usize| Unit {
            chunks: first..(first + per_piece).min(unit.chunks.end),
            partial: Some(base + (first - unit.chunks.start) * chunk_len),
            ..unit.clone()
        };
        let units = unit.chunks.clone().step_by(per_piece).map(cut).collect();
        self.merges.push(Unit { partial: Some(base), ..unit });
        units
    }

    /// Units.
    #[must_use]
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// f32 values of all partial results.
    #[must_use]
    pub fn partial_len(&self) -> usize {
        self.partial_len
    }

    /// The most f32 values of partial results that a batch can need: it is split only when there are
    /// too few units.
    #[must_use]
    pub fn max_partial_len(heads: HeadShape, max_seq_len: usize, workers: usize) -> usize {
        let units = workers.max(1) * UNITS_PER_WORKER;
        units
            .saturating_mul(MAX_ROWS)
            .saturating_mul(max_seq_len.div_ceil(CHUNK))
            .saturating_mul(partial_row(heads.head_size_v))
            .min(MAX_PARTIAL_LEN)
    }
}

/// f32 values of a row's partial result: sums, maximum, sum.
pub(crate) fn partial_row(head_size_v: usize) -> usize {
    head_size_v + 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_meets_every_chunk_that_it_sees_once() {
        let causal = Mask { causal: true, ..Mask::NONE };
        let windowed = Mask { left: Some(99), ..causal };
        let shape = |query_len: usize, kv_len: usize, mask| RequestShape {
            query_len,
            kv_len,
            first_position: kv_len as i64 - query_len as i64,
            mask,
        };
        let requests = [
            shape(1, 9000, causal),
            shape(0, 40, causal),
            shape(300, 2100, causal),
            shape(3, 1, causal),
            shape(2, 5000, windowed),
        ];
        for (workers, group) in [(1, 4), (2, 4), (64, 1), (64, 200)] {
            let heads = HeadShape { num_kv_heads: 2, group, head_size_v: 8 };
            let partition = Partition::new(requests, heads, workers);
            for (request, shape) in requests.iter().enumerate() {
                for token in 0..shape.query_len {
                    let seen = shape.seen(token..token + 1);
                    for head in 0..group {
                        let mut chunks: Vec<usize> = partition
                            .units
                            .iter()
                            .filter(|u| u.request == request && u.kv_head == 1)
                            .filter(|u| u.tokens.contains(&token) && u.heads.contains(&head))
                            .flat_map(|u| u.chunks.clone())
                            .collect();
                        chunks.sort_unstable();
                        assert!(chunks.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{chunks:?}");
                        let needed = if seen.is_empty() { 0..0 } else { seen.start / CHUNK..seen.end.div_ceil(CHUNK) };
                        assert!(needed.clone().all(|chunk| chunks.contains(&chunk)), "{seen:?} {chunks:?}");
                    }
                }
            }
            let used: usize = partition.merges.iter().map(|m| m.chunks.len() * m.num_rows() * partial_row(8)).sum();
            assert_eq!(used, partition.partial_len);
            assert!(used <= Partition::max_partial_len(heads, 9000, workers));
        }
    }

    #[test]
    fn a_window_touches_only_its_own_keys() {
        let mask = Mask { causal: true, left: Some(127), ..Mask::NONE };
        let request = RequestShape { query_len: 1, kv_len: 100_000, first_position: 99_999, mask };
        let heads = HeadShape { num_kv_heads: 1, group: 1, head_size_v: 8 };
        let partition = Partition::new([request], heads, 8);
        assert_eq!(partition.units.len(), 1);
        assert_eq!(partition.units[0].chunks, 97..98);
    }
}
