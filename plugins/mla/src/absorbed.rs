//! The absorbed form: attention of all heads over the latent rows as they are.
//!
//! Owns the way of queries into the latent space and of outputs out of it. Must not know when this
//! form is taken.

use crate::{
    lanes::{self, Heads},
    layer::{Call, Parameters},
    plan::Request,
    views::{Held, Part, Target, cut, reach},
};
use attache_cpu_kernels::{Output, Partition, Rows, RowsMut, Sequence};
use attache_cpu_plugin::{Number, with_number};
use attache_sdk::prelude::*;
use half::bf16;
use std::{borrow::Cow, ops::Range};

/// Query rows that a lane projects at a time.
const TILE: usize = 64;

/// The heads of attention over the latent rows.
pub fn heads(parameters: &Parameters) -> Heads {
    let dimensions = &parameters.dimensions;
    Heads {
        kv_heads: 1,
        group: dimensions.num_heads,
        head_size: dimensions.row(),
        head_size_v: dimensions.kv_lora_rank,
    }
}

/// f32 values of workspace that attention over latent rows needs, for sequences of at most `max_seq_len`.
pub fn decode_len(parameters: &Parameters, workers: usize, max_seq_len: usize) -> usize {
    heads(parameters).workspace_len(max_seq_len, parameters.cut_for, workers)
}

/// Attention of absorbed queries `[tokens, num_heads, kv_lora_rank + rope]` of a whole batch.
///
/// # Errors
/// When a tensor does not fit, or the engine's pool breaks its contract.
pub fn decode(call: &Call<'_, '_>, target: &mut Target<'_>, memory: &mut [f32]) -> Result<()> {
    let parameters = call.parameters;
    let all = Part { tokens: 0..call.batch.num_tokens, heads: 0..parameters.dimensions.num_heads };
    let sequences: Vec<Sequence<'_>> = call
        .batch
        .requests
        .iter()
        .map(|request| Sequence {
            query_start: request.tokens.start,
            shape: request.shape(0..request.tokens.len(), parameters.window),
            blocks: call.batch.blocks(request),
            first_row: 0,
        })
        .collect();
    let parts = lanes::Attend {
        q: all.queries(&call.q)?,
        k: call.cache,
        v: call.cache.shortened(parameters.dimensions.kv_lora_rank),
        sinks: &parameters.sinks,
        sequences: &sequences,
        partition: &call.partition,
        output: target.output(&all)?,
    };
    lanes::attend(call, parts, memory)
}

/// Tokens of a block that is projected at once.
fn block_tokens(parameters: &Parameters) -> usize {
    (parameters.settings.workspace_tokens / parameters.dimensions.num_heads).max(1)
}

/// f32 values of a lane that projects.
fn lane_len(parameters: &Parameters) -> usize {
    let dimensions = &parameters.dimensions;
    TILE * (dimensions.qk_nope_head_dim + dimensions.kv_lora_rank)
}

fn work_len(parameters: &Parameters, workers: usize, max_seq_len: usize) -> usize {
    decode_len(parameters, workers, max_seq_len).max(workers.saturating_mul(lane_len(parameters)))
}

/// f32 values of workspace that [`forward`] needs for at most so many tokens.
pub fn forward_len(parameters: &Parameters, workers: usize, max_num_tokens: usize, max_seq_len: usize) -> usize {
    let dimensions = &parameters.dimensions;
    let rows = block_tokens(parameters).min(max_num_tokens).saturating_mul(dimensions.num_heads);
    let row = dimensions.row() + dimensions.kv_lora_rank + dimensions.v_head_dim + 1;
    work_len(parameters, workers, max_seq_len).saturating_add(rows.saturating_mul(row))
}

/// Query tokens of a request that are computed in one block.
struct Piece<'a> {
    request: &'a Request,
    /// Within the request.
    tokens: Range<usize>,
}

impl Piece<'_> {
    /// Within the batch.
    fn batch_tokens(&self) -> Range<usize> {
        let first = self.request.tokens.start;
        first + self.tokens.start..first + self.tokens.end
    }
}

/// Cuts requests into blocks of at most `limit` tokens together.
fn blocks<'a>(requests: &[&'a Request], limit: usize) -> Vec<Vec<Piece<'a>>> {
    let mut blocks = Vec::new();
    let mut block: Vec<Piece<'a>> = Vec::new();
    let mut room = limit;
    for request in requests {
        let mut first = 0;
        while first < request.tokens.len() {
            let last = request.tokens.len().min(first + room);
            room -= last - first;
            block.push(Piece { request, tokens: first..last });
            first = last;
            if room == 0 {
                blocks.push(std::mem::take(&mut block));
                room = limit;
            }
        }
    }
    if !block.is_empty() {
        blocks.push(block);
    }
    blocks
}

/// Attention of queries `[tokens, num_heads, nope + rope]` of some requests by way of the latent space.
///
/// # Errors
/// When a tensor does not fit, or the engine's pool breaks its contract.
pub fn forward(call: &Call<'_, '_>, target: &mut Target<'_>, requests: &[&Request], memory: &mut [f32]) -> Result<()> {
    let limit = block_tokens(call.parameters);
    let batch = call.batch;
    // All of a batch at once: the plan has cut it already.
    let (blocks, partition) =
        if requests.iter().map(|r| r.tokens.len()).sum::<usize>() == batch.num_tokens && batch.num_tokens <= limit {
            let whole = |request| Piece { request, tokens: 0..request.tokens.len() };
            (vec![batch.requests.iter().map(whole).collect()], Some(&*call.partition))
        } else {
            (blocks(requests, limit), None)
        };
    for block in blocks {
        if call.parameters.uses_pairs {
            run::<bf16>(call, target, &block, partition, memory)?;
        } else {
            run::<f32>(call, target, &block, partition, memory)?;
        }
    }
    Ok(())
}

fn run<H: Held>(
    call: &Call<'_, '_>,
    target: &mut Target<'_>,
    block: &[Piece<'_>],
    partition: Option<&Partition>,
    mut memory: &mut [f32],
) -> Result<()> {
    let parameters = call.parameters;
    let (dimensions, weights) = (&parameters.dimensions, parameters.weights()?);
    let (row, rank, value) = (dimensions.row(), dimensions.kv_lora_rank, dimensions.v_head_dim);
    let num_heads = dimensions.num_heads;
    let count: usize = block.iter().map(|piece| piece.tokens.len()).sum();
    let max_seq_len = block.iter().map(|piece| piece.request.seq_len).max().unwrap_or(0);
    let memory = &mut memory;
    let work = cut(memory, work_len(parameters, call.workers, max_seq_len))?;
    let latent_q = &mut H::buffer(cut(memory, num_heads * count * row)?)[..num_heads * count * row];
    let latent_out = cut(memory, num_heads * count * rank)?;
    let projected = cut(memory, num_heads * count * value)?;
    let lse = cut(memory, num_heads * count)?;

    let tokens: Vec<usize> = block.iter().flat_map(Piece::batch_tokens).collect();
    let q = call.q;
    let lane = lane_len(parameters);
    let by_head = latent_q.chunks_exact_mut(count * row).zip(&weights.heads).enumerate();
    lanes::each(call, work, lane, by_head, |(head, (rows, weights)), memory| {
        let (x, y) = memory.split_at_mut(TILE * dimensions.qk_nope_head_dim);
        for (tokens, rows) in tokens.chunks(TILE).zip(rows.chunks_mut(TILE * row)) {
            read_queries(&q, head, tokens, dimensions.qk_nope_head_dim, x, rows, row)?;
            let (from, to) = ((&*x, dimensions.qk_nope_head_dim), (&mut *y, rank));
            parameters.multiply(&weights.absorb, tokens.len(), from, to)?;
            for (to, from) in rows.chunks_exact_mut(row).zip(y.chunks_exact(rank)) {
                to.iter_mut().zip(from).for_each(|(to, value)| *to = H::from_f32(*value));
            }
        }
        Ok(())
    })?;

    let mut start = 0;
    let sequences: Vec<Sequence<'_>> = block
        .iter()
        .map(|piece| {
            let query_start = start;
            start += piece.tokens.len();
            Sequence {
                query_start,
                shape: piece.request.shape(piece.tokens.clone(), parameters.window),
                blocks: call.batch.blocks(piece.request),
                first_row: 0,
            }
        })
        .collect();
    let heads = heads(parameters);
    let partition = partition.map_or_else(
        || {
            Cow::Owned(Partition::new(
                sequences.iter().map(|sequence| sequence.shape),
                heads.shape(),
                parameters.cut_for,
            ))
        },
        Cow::Borrowed,
    );
    let parts = lanes::Attend {
        q: Rows::new(H::elements(latent_q), [count, num_heads, 1], [row, count * row, 0], row).map_err(reach)?,
        k: call.cache,
        v: call.cache.shortened(rank),
        sinks: &parameters.sinks,
        sequences: &sequences,
        partition: &partition,
        output: Output {
            out: RowsMut::f32(latent_out, [count, num_heads], [rank, count * rank], rank).map_err(reach)?,
            lse: Some(RowsMut::f32(lse, [count, num_heads], [1, count], 1).map_err(reach)?),
        },
    };
    lanes::attend(call, parts, work)?;

    let by_head =
        latent_out.chunks_exact(count * rank).zip(projected.chunks_exact_mut(count * value)).zip(&weights.heads);
    lanes::each(call, work, 0, by_head, |((from, to), weights), _| {
        parameters.multiply(&weights.values, count, (from, rank), (to, value))
    })?;
    let mut start = 0;
    for piece in block {
        let len = piece.tokens.len();
        for head in 0..num_heads {
            let part = Part { tokens: piece.batch_tokens(), heads: head..head + 1 };
            let first = head * count + start;
            target.write(&part, &projected[first * value..(first + len) * value], &lse[first..first + len])?;
        }
        start += len;
    }
    Ok(())
}

/// Reads the parts without rotary position of one head's queries as f32 `[tokens][nope]`, and copies
/// the rotary parts behind the latent ones of `rows`.
fn read_queries<H: Held>(
    q: &TensorView<'_>,
    head: usize,
    tokens: &[usize],
    nope: usize,
    x: &mut [f32],
    rows: &mut [H],
    row: usize,
) -> Result<()> {
    let (token_stride, head_stride, size) = (q.strides()[0] as usize, q.strides()[1] as usize, q.dim(2));
    with_number!(q.dtype(), T => {
        let all = q.span::<T>()?;
        for ((token, x), to) in tokens.iter().zip(x.chunks_exact_mut(nope)).zip(rows.chunks_exact_mut(row)) {
            let from = &all[token * token_stride + head * head_stride..][..size];
            x.iter_mut().zip(from).for_each(|(x, value)| *x = value.to_f32());
            let rope = to[row - (size - nope)..].iter_mut().zip(&from[nope..]);
            rope.for_each(|(to, value)| *to = H::from_f32(value.to_f32()));
        }
        Ok(())
    })
}
