//! Work on the engine's threads, with memory for each of them.
//!
//! A lane is a piece of the workspace and whoever works in it. There are never more lanes than
//! memory was reserved for, however many workers the engine has. Must not know what the work is.

use crate::{layer::Parameters, views::cut};
use attache_cpu_kernels::{
    Attention, Output, Partition, Rows, Sequence,
    attention::{Parts, workspace_len},
    partition::HeadShape,
};
use attache_cpu_plugin::call_error;
use attache_sdk::prelude::*;
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

/// Runs `function` once for each piece, on at most `lanes` threads; each call has `lane_len` values
/// of `memory` for itself.
///
/// # Errors
/// The first error of a piece.
pub fn each<T: Send>(
    context: &ExecContext<'_>,
    mut memory: &mut [f32],
    lanes: usize,
    lane_len: usize,
    pieces: impl Iterator<Item = T>,
    function: impl Fn(T, &mut [f32]) -> Result<()> + Sync,
) -> Result<()> {
    let pieces: Vec<Mutex<Option<T>>> = pieces.map(|piece| Mutex::new(Some(piece))).collect();
    let lanes = lanes.min(context.parallelism()).min(pieces.len());
    let memory = &mut memory;
    let memory: Vec<_> = (0..lanes).map(|_| cut(memory, lane_len).map(Mutex::new)).collect::<Result<_>>()?;
    let next = AtomicUsize::new(0);
    context.parallel_for(lanes, |lane, _worker| {
        let mut memory = memory[lane].lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(piece) = piece.lock().unwrap_or_else(PoisonError::into_inner).take() {
                function(piece, &mut memory)?;
            }
        }
        Ok(())
    })
}

/// The heads of an attention call.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads of a KV head.
    pub group: usize,
    /// Elements of a query or key head.
    pub head_size: usize,
    /// Elements of a value head.
    pub head_size_v: usize,
}

impl Heads {
    /// As a partition needs it.
    pub fn shape(&self) -> HeadShape {
        HeadShape { num_kv_heads: self.kv_heads, group: self.group, head_size_v: self.head_size_v }
    }

    /// f32 values of workspace that a call can need, over at most `max_keys` keys a sequence.
    pub fn workspace_len(&self, max_keys: usize, lanes: usize) -> usize {
        let partial_len = Partition::max_partial_len(self.shape(), max_keys, lanes);
        workspace_len(self.head_size, self.head_size_v, lanes, partial_len)
    }
}

/// An attention call, without what the layer knows anyway.
pub struct Attend<'a> {
    /// `[tokens, heads, 1]` rows.
    pub q: Rows<'a>,
    /// `[blocks, block_size, kv_heads]` rows.
    pub k: Rows<'a>,
    /// `[blocks, block_size, kv_heads]` rows.
    pub v: Rows<'a>,
    /// One a query head, or none.
    pub sinks: &'a [f32],
    /// The requests.
    pub sequences: &'a [Sequence<'a>],
    /// How the work is cut.
    pub partition: &'a Partition,
    /// Where results go.
    pub output: Output<'a>,
}

/// Runs an attention call: all units, then all merges.
///
/// # Errors
/// When parts contradict each other, or the engine's pool breaks its contract.
pub fn attend(context: &ExecContext<'_>, parameters: &Parameters, call: Attend<'_>, memory: &mut [f32]) -> Result<()> {
    let Attend { q, k, v, sinks, sequences, partition, output } = call;
    let lanes = parameters.lanes;
    let parts = Parts {
        isa: parameters.settings.isa,
        q,
        k,
        v,
        scale: parameters.scale,
        softcap: parameters.softcap,
        alibi_slopes: &[],
        sinks,
        sequences,
        partition,
        output,
    };
    let call = Attention::new(parts, memory, lanes).map_err(|error| call_error(&error))?;
    let lanes = lanes.min(context.parallelism());
    for (tasks, is_merge) in [(call.num_units(), false), (call.num_merges(), true)] {
        let next = AtomicUsize::new(0);
        context.parallel_for(lanes.min(tasks), |lane, _worker| {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    return Ok(());
                }
                let done = if is_merge { call.merge(task, lane) } else { call.unit(task, lane) };
                done.map_err(|error| call_error(&error))?;
            }
        })?;
    }
    Ok(())
}
