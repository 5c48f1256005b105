//! Work on the engine's threads, with memory for each of them.
//!
//! Must not know what the work is.

use crate::{layer::Call, views::cut};
use attache_cpu_kernels::{Attention, HeadShape, Output, Partition, Parts, Rows, Sequence, workspace_len};
use attache_cpu_plugin::call_error;
use attache_sdk::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Runs `function` once for each piece, on the engine's threads; each call has `lane_len` values of
/// `memory` for itself.
///
/// # Errors
/// The first error of a piece; when `memory` is too small.
pub fn each<T: Send>(
    call: &Call<'_, '_>,
    mut memory: &mut [f32],
    lane_len: usize,
    pieces: impl Iterator<Item = T>,
    function: impl Fn(T, &mut [f32]) -> Result<()> + Sync,
) -> Result<()> {
    let pieces: Vec<Mutex<Option<T>>> = pieces.map(|piece| Mutex::new(Some(piece))).collect();
    let memory = &mut memory;
    let lanes: Vec<_> = (0..call.workers).map(|_| cut(memory, lane_len).map(Mutex::new)).collect::<Result<_>>()?;
    call.context.parallel_for(pieces.len(), |task, worker| {
        let (Some(piece), Some(lane)) = (pieces.get(task), lanes.get(worker)) else {
            return Err(BackendError::new(
                ErrorCode::Internal,
                format!("the engine's pool runs task {task} as worker {worker}; there are {} workers", lanes.len()),
            ));
        };
        let mut lane = lane.lock().unwrap_or_else(PoisonError::into_inner);
        let piece = piece.lock().unwrap_or_else(PoisonError::into_inner).take();
        piece.map_or(Ok(()), |piece| function(piece, &mut lane))
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

    /// f32 values of workspace that a call can need, over at most `max_keys` keys a sequence: cut
    /// for `cut_for` threads, run by `workers`.
    pub fn workspace_len(&self, max_keys: usize, cut_for: usize, workers: usize) -> usize {
        let partial_len = Partition::max_partial_len(self.shape(), max_keys, cut_for);
        workspace_len(self.head_size, self.head_size_v, workers, partial_len)
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
pub fn attend(call: &Call<'_, '_>, attend: Attend<'_>, memory: &mut [f32]) -> Result<()> {
    let Attend { q, k, v, sinks, sequences, partition, output } = attend;
    let parts = Parts {
        isa: call.parameters.settings.isa,
        q,
        k,
        v,
        scale: call.parameters.scale,
        softcap: call.parameters.softcap,
        alibi_slopes: &[],
        sinks,
        sequences,
        partition,
        output,
    };
    let attention = Attention::new(parts, memory, call.workers).map_err(|error| call_error(&error))?;
    call.context.parallel_for(attention.num_units(), |unit, worker| {
        attention.unit(unit, worker).map_err(|error| call_error(&error))
    })?;
    call.context.parallel_for(attention.num_merges(), |unit, worker| {
        attention.merge(unit, worker).map_err(|error| call_error(&error))
    })
}
