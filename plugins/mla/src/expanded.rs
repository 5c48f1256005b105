//! The expanded form: keys and values of every head, made from the latent rows a chunk at a time.
//!
//! Chunks begin at multiples of a fixed length, and each query merges the chunks that it sees in
//! order; a query that sees one chunk alone needs no merge. So a row's result does not depend on
//! where a prompt was cut, nor on the batch. Must not know when this form is taken.

use crate::{
    keys::{self, Expanded, Keys},
    lanes::{self, Heads},
    layer::{Call, Parameters},
    merge::Merged,
    plan::Request,
    views::{Held, Part, Target, cut, reach},
};
use attache_cpu_kernels::{Output, Partition, RowsMut, Sequence};
use attache_sdk::prelude::*;
use half::bf16;
use std::ops::Range;

fn heads(parameters: &Parameters, count: usize) -> Heads {
    let dimensions = &parameters.dimensions;
    Heads { kv_heads: count, group: 1, head_size: dimensions.qk_head_dim(), head_size_v: dimensions.v_head_dim }
}

/// f32 values that lanes work in.
fn work_len(parameters: &Parameters, workers: usize) -> usize {
    // More heads mean more units, not more partial results.
    let max_keys = parameters.settings.workspace_tokens;
    let attend = heads(parameters, 1).workspace_len(max_keys, parameters.cut_for, workers);
    attend.max(workers.saturating_mul(keys::lane_len(parameters)))
}

/// f32 values of workspace that [`forward`] needs at most.
pub fn forward_len(parameters: &Parameters, workers: usize, max_query_len: usize, max_seq_len: usize) -> usize {
    let limit = parameters.settings.workspace_tokens;
    // Results so far and those of a chunk, each with its LSE.
    let merged = if max_seq_len > limit { max_query_len } else { 0 };
    work_len(parameters, workers)
        .saturating_add(keys::held_len(parameters, limit))
        .saturating_add(merged.saturating_mul(2 * (parameters.dimensions.v_head_dim + 1)))
}

/// Query tokens of a request (counted within it) that see the same chunks.
struct Run {
    tokens: Range<usize>,
    chunks: Range<usize>,
}

/// All query tokens of a request, cut into runs.
fn runs(request: &Request, parameters: &Parameters) -> Vec<Run> {
    let limit = parameters.settings.workspace_tokens;
    let mask = parameters.window.mask(request.causal);
    let mut runs: Vec<Run> = Vec::new();
    for token in 0..request.tokens.len() {
        let seen = mask.visible(request.first_position() + token as i64, request.seq_len);
        let chunks = if seen.is_empty() { 0..0 } else { seen.start / limit..seen.end.div_ceil(limit) };
        match runs.last_mut() {
            Some(run) if run.chunks == chunks => run.tokens.end = token + 1,
            _ => runs.push(Run { tokens: token..token + 1, chunks }),
        }
    }
    runs
}

/// The keys of a chunk that any query token of a request sees.
fn seen_keys(request: &Request, chunk: usize, parameters: &Parameters) -> Keys {
    let limit = parameters.settings.workspace_tokens;
    let start = chunk * limit;
    let mask = parameters.window.mask(request.causal);
    let inside = Range { start, end: start.saturating_add(limit).min(request.seq_len) };
    let mut seen: Option<Range<usize>> = None;
    for token in 0..request.tokens.len() {
        let one = mask.visible(request.first_position() + token as i64, request.seq_len);
        let one = one.start.max(inside.start)..one.end.min(inside.end);
        if !one.is_empty() {
            seen = Some(seen.map_or(one.clone(), |all| all.start.min(one.start)..all.end.max(one.end)));
        }
    }
    Keys::new(start, seen.unwrap_or(start..start))
}

/// Attention of queries `[tokens, num_heads, nope + rope]` of some requests over expanded keys.
///
/// # Errors
/// When a tensor does not fit, or the engine's pool breaks its contract.
pub fn forward(call: &Call<'_, '_>, target: &mut Target<'_>, requests: &[&Request], memory: &mut [f32]) -> Result<()> {
    if call.parameters.uses_pairs {
        run::<bf16>(call, target, requests, memory)
    } else {
        run::<f32>(call, target, requests, memory)
    }
}

fn run<H: Held>(
    call: &Call<'_, '_>,
    target: &mut Target<'_>,
    requests: &[&Request],
    mut memory: &mut [f32],
) -> Result<()> {
    let parameters = call.parameters;
    let limit = parameters.settings.workspace_tokens;
    let memory = &mut memory;
    let work = cut(memory, work_len(parameters, call.workers))?;
    let held = H::buffer(cut(memory, keys::held_len(parameters, limit))?);
    let mut step: Vec<(&Request, Keys)> = Vec::new();
    for request in requests {
        let runs = runs(request, parameters);
        let chunk = runs.first().map_or(0, |run| run.chunks.start);
        if runs.iter().any(|run| run.chunks.len() > 1 || run.chunks.start != chunk) {
            long(call, target, request, &runs, work, held, memory)?;
            continue;
        }
        let keys = seen_keys(request, chunk, parameters);
        let room = limit - step.iter().map(|(_, keys)| keys.rows()).sum::<usize>();
        if keys.rows() > room {
            whole(call, target, &std::mem::take(&mut step), work, held)?;
        }
        step.push((request, keys));
    }
    whole(call, target, &step, work, held)
}

/// Requests each of which sees one chunk: keys of as many heads as there is room for, and all
/// requests at once.
fn whole<H: Held>(
    call: &Call<'_, '_>,
    target: &mut Target<'_>,
    requests: &[(&Request, Keys)],
    work: &mut [f32],
    held: &mut [H],
) -> Result<()> {
    if requests.is_empty() {
        return Ok(());
    }
    let parameters = call.parameters;
    let num_heads = parameters.dimensions.num_heads;
    let rows: usize = requests.iter().map(|(_, keys)| keys.rows()).sum();
    let at_once = (parameters.settings.workspace_tokens / rows.max(1)).clamp(1, num_heads);
    let mut first_row = 0;
    let sequences: Vec<Sequence<'_>> = requests
        .iter()
        .map(|(request, keys)| {
            let sequence = Sequence {
                query_start: request.tokens.start,
                shape: keys.shape(request, 0..request.tokens.len(), parameters),
                blocks: &[0],
                first_row,
            };
            first_row += keys.rows();
            sequence
        })
        .collect();
    for first in (0..num_heads).step_by(at_once) {
        let part = Part { tokens: 0..call.batch.num_tokens, heads: first..(first + at_once).min(num_heads) };
        let expanded = Expanded::make(call, requests, part.heads.clone(), work, held)?;
        let output = target.output(&part)?;
        attend(call, &part, &expanded, Some(&parameters.sinks), &sequences, output, work)?;
    }
    Ok(())
}

/// A request that sees several chunks: head by head, chunk by chunk.
fn long<H: Held>(
    call: &Call<'_, '_>,
    target: &mut Target<'_>,
    request: &Request,
    runs: &[Run],
    work: &mut [f32],
    held: &mut [H],
    mut memory: &mut [f32],
) -> Result<()> {
    let parameters = call.parameters;
    let size = parameters.dimensions.v_head_dim;
    let rows = request.tokens.len();
    let memory = &mut memory;
    let (out, part_out) = (cut(memory, rows * size)?, cut(memory, rows * size)?);
    let (lse, part_lse) = (cut(memory, rows)?, cut(memory, rows)?);
    let first_chunk = runs.iter().filter(|run| !run.chunks.is_empty()).map(|run| run.chunks.start).min().unwrap_or(0);
    let last_chunk = runs.iter().map(|run| run.chunks.end).max().unwrap_or(0);
    let chunks: Vec<(usize, Keys)> =
        (first_chunk..last_chunk).map(|chunk| (chunk, seen_keys(request, chunk, parameters))).collect();
    for head in 0..parameters.dimensions.num_heads {
        let part = Part { tokens: request.tokens.clone(), heads: head..head + 1 };
        let mut merged = Merged::new(&mut *out, &mut *lse, size);
        for &(chunk, keys) in &chunks {
            let expanded = Expanded::make(call, &[(request, keys)], part.heads.clone(), work, held)?;
            let sequence = |run: &Run| Sequence {
                query_start: run.tokens.start,
                shape: keys.shape(request, run.tokens.clone(), parameters),
                blocks: &[0],
                first_row: 0,
            };
            // Rows that see nothing at all are written with the first chunk.
            let alone = |run: &&Run| match run.chunks.len() {
                0 => chunk == first_chunk,
                1 => run.chunks.start == chunk,
                _ => false,
            };
            let sequences: Vec<_> = runs.iter().filter(alone).map(sequence).collect();
            if !sequences.is_empty() {
                let output = target.output(&part)?;
                attend(call, &part, &expanded, Some(&parameters.sinks), &sequences, output, work)?;
            }
            let among = |run: &&Run| run.chunks.len() > 1 && run.chunks.contains(&chunk);
            let sequences: Vec<_> = runs.iter().filter(among).map(sequence).collect();
            if sequences.is_empty() {
                continue;
            }
            let output = Output {
                out: RowsMut::f32(part_out, [rows, 1], [size, 0], size).map_err(reach)?,
                lse: Some(RowsMut::f32(part_lse, [rows, 1], [1, 0], 1).map_err(reach)?),
            };
            attend(call, &part, &expanded, None, &sequences, output, work)?;
            for row in runs.iter().filter(among).flat_map(|run| run.tokens.clone()) {
                merged.add(row, &part_out[row * size..][..size], part_lse[row]);
            }
        }
        for run in runs.iter().filter(|run| run.chunks.len() > 1) {
            if let Some(sink) = parameters.sinks.get(head) {
                run.tokens.clone().for_each(|row| merged.sink(row, *sink));
            }
            let first = request.tokens.start;
            let to = Part { tokens: first + run.tokens.start..first + run.tokens.end, heads: head..head + 1 };
            let out = &merged.out[run.tokens.start * size..run.tokens.end * size];
            target.write(&to, out, &merged.lse[run.tokens.clone()])?;
        }
    }
    Ok(())
}

/// Attention of a part of q over expanded keys; `sinks` are those of all heads.
fn attend<H: Held>(
    call: &Call<'_, '_>,
    part: &Part,
    expanded: &Expanded<'_, H>,
    sinks: Option<&[f32]>,
    sequences: &[Sequence<'_>],
    output: Output<'_>,
    work: &mut [f32],
) -> Result<()> {
    let parameters = call.parameters;
    let shapes = sequences.iter().map(|sequence| sequence.shape);
    let partition = Partition::new(shapes, heads(parameters, part.heads.len()).shape(), parameters.cut_for);
    let sinks = sinks.and_then(|all| all.get(part.heads.clone())).unwrap_or(&[]);
    let (k, v) = expanded.rows()?;
    let attend = lanes::Attend { q: part.queries(&call.q)?, k, v, sinks, sequences, partition: &partition, output };
    lanes::attend(call, attend, work)
}
