//! A whole attention call: its parts, checked together, and its units, to be run on any threads.

#[cfg(target_arch = "x86_64")]
use crate::amx;
use crate::{
    isa::Isa,
    partition::{Partition, RequestShape},
    rows::{Format, Rows, RowsMut},
    scratch::{Scratch, Shape},
    simd::with_isa,
    softmax::Logits,
    tile::{self, Floats, Sink},
};
use std::sync::atomic::{AtomicBool, Ordering};

/// A request's part of a call.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// First query token, in the batch.
    pub query_start: usize,
    /// Lengths and mask.
    pub shape: RequestShape<'a>,
    /// Ids of its blocks; without a cache `[0]`: one block holds all tokens.
    pub blocks: &'a [i32],
    /// Row of its first key within the blocks; 0 with a cache.
    pub first_row: usize,
}

/// Where results go.
#[derive(Debug)]
pub struct Output<'a> {
    /// `[tokens, num_heads]` rows of `head_size_v`.
    pub out: RowsMut<'a>,
    /// `[tokens, num_heads]` rows of one f32: the log-sum-exp, natural logarithm.
    pub lse: Option<RowsMut<'a>>,
}

/// What a call is made of.
#[derive(Debug)]
pub struct Parts<'a> {
    /// Instruction set.
    pub isa: Isa,
    /// `[tokens, num_heads, 1]` rows of `head_size`.
    pub q: Rows<'a>,
    /// `[blocks, block_size, num_kv_heads]` rows of `head_size`.
    pub k: Rows<'a>,
    /// `[blocks, block_size, num_kv_heads]` rows of `head_size_v`.
    pub v: Rows<'a>,
    /// Softmax scale.
    pub scale: f64,
    /// Soft-cap; 0 or less = off.
    pub softcap: f64,
    /// One slope a query head, or none.
    pub alibi_slopes: &'a [f32],
    /// One sink a query head, or none.
    pub sinks: &'a [f32],
    /// The requests.
    pub sequences: &'a [Sequence<'a>],
    /// Their units.
    pub partition: &'a Partition,
    /// Where results go.
    pub output: Output<'a>,
}

/// Parts that do not fit together, or memory that does not suffice.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CallError {
    /// Two parts contradict each other.
    #[error("{what}: found {found}, expected {expected}")]
    Mismatch {
        /// Of what.
        what: &'static str,
        /// What was found.
        found: usize,
        /// What the other parts say.
        expected: usize,
    },
    /// A block id lies outside the cache.
    #[error("block id {id} of request {request} is not among the {num_blocks} blocks of the cache")]
    Block {
        /// The request.
        request: usize,
        /// The id.
        id: i32,
        /// Blocks of the cache.
        num_blocks: usize,
    },
    /// The workspace is too small.
    #[error("the workspace holds {found} f32 values, the call needs {needed}")]
    Workspace {
        /// What is needed.
        needed: usize,
        /// What there is.
        found: usize,
    },
    /// A unit was started twice, or two tasks run as one worker.
    #[error("task {task} cannot run as worker {worker}: the engine's thread pool breaks its contract")]
    Pool {
        /// The task.
        task: usize,
        /// The worker.
        worker: usize,
    },
}

/// A call that is ready to run.
pub struct Attention<'a> {
    isa: Isa,
    uses_pairs: bool,
    pub(crate) q: Rows<'a>,
    pub(crate) k: Rows<'a>,
    pub(crate) v: Rows<'a>,
    pub(crate) logits: Logits,
    pub(crate) alibi_slopes: &'a [f32],
    pub(crate) sinks: &'a [f32],
    pub(crate) sequences: &'a [Sequence<'a>],
    partition: &'a Partition,
    pub(crate) output: Output<'a>,
    workers: Vec<Claimed<'a>>,
    partial: Vec<Claimed<'a>>,
    started: Vec<AtomicBool>,
}

/// Memory that one task at a time may have.
struct Claimed<'a> {
    is_taken: AtomicBool,
    memory: std::cell::UnsafeCell<&'a mut [f32]>,
}

// SAFETY: the memory is reached only by whoever set the flag.
unsafe impl Sync for Claimed<'_> {}

impl<'a> Claimed<'a> {
    fn new(memory: &'a mut [f32]) -> Self {
        Self { is_taken: AtomicBool::new(false), memory: std::cell::UnsafeCell::new(memory) }
    }

    /// Lends the memory, unless somebody has it.
    fn with<T>(&self, function: impl FnOnce(&mut [f32]) -> T) -> Option<T> {
        if self.is_taken.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: the flag was not set, so nobody else has it.
        let result = function(unsafe { &mut *self.memory.get() });
        self.is_taken.store(false, Ordering::Release);
        Some(result)
    }
}

/// f32 values of workspace that a call needs.
#[must_use]
pub fn workspace_len(head_size: usize, head_size_v: usize, workers: usize, partial_len: usize) -> usize {
    Shape::new(head_size, head_size_v).len() * workers.max(1) + partial_len
}

impl<'a> Attention<'a> {
    /// Checks the parts against each other. `workspace` holds [`workspace_len`] values for as many
    /// workers as tasks may run at once.
    ///
    /// # Errors
    /// When parts contradict each other, a block id is out of range, or the workspace is too small.
    pub fn new(parts: Parts<'a>, workspace: &'a mut [f32], workers: usize) -> Result<Self, CallError> {
        let Parts { isa, q, k, v, scale, softcap, alibi_slopes, sinks, sequences, partition, output } = parts;
        let equal = |what, found, expected| {
            if found == expected { Ok(()) } else { Err(CallError::Mismatch { what, found, expected }) }
        };
        let [tokens, num_heads, _] = q.shape();
        let [num_blocks, block_size, num_kv_heads] = k.shape();
        equal("elements of a query row", q.row_len(), k.row_len())?;
        equal("KV heads of the values", v.shape()[2], num_kv_heads)?;
        equal("blocks of the values", v.shape()[0], num_blocks)?;
        equal("tokens of a block of the values", v.shape()[1], block_size)?;
        equal("query heads left over by the KV heads", num_heads % num_kv_heads.max(1), 0)?;
        equal("elements of an output row", output.out.row_len(), v.row_len())?;
        equal("tokens of the output", output.out.shape()[0], tokens)?;
        equal("heads of the output", output.out.shape()[1], num_heads)?;
        if let Some(lse) = &output.lse {
            equal("elements of an LSE row", lse.row_len(), 1)?;
            equal("tokens of the LSE", lse.shape()[0], tokens)?;
            equal("heads of the LSE", lse.shape()[1], num_heads)?;
        }
        for (what, values) in [("ALiBi slopes", alibi_slopes), ("sinks", sinks)] {
            if !values.is_empty() {
                equal(what, values.len(), num_heads)?;
            }
        }
        for (request, sequence) in sequences.iter().enumerate() {
            let end = sequence.query_start + sequence.shape.query_len;
            if end > tokens {
                return Err(CallError::Mismatch { what: "query tokens", found: tokens, expected: end });
            }
            let rows = sequence.first_row + sequence.shape.kv_len;
            let needed = if sequence.shape.kv_len == 0 { 0 } else { rows.div_ceil(block_size.max(1)) };
            let Some(used) = sequence.blocks.get(..needed) else {
                return Err(CallError::Mismatch {
                    what: "blocks of a request",
                    found: sequence.blocks.len(),
                    expected: needed,
                });
            };
            if let Some(id) = used.iter().find(|id| usize::try_from(**id).map_or(true, |id| id >= num_blocks)) {
                return Err(CallError::Block { request, id: *id, num_blocks });
            }
        }
        let fits = |unit: &crate::Unit| {
            let sequence = sequences.get(unit.request);
            sequence.is_some_and(|sequence| {
                unit.tokens.end <= sequence.shape.query_len
                    && unit.kv_head < num_kv_heads
                    && unit.heads.end <= num_heads / num_kv_heads
            })
        };
        let misfit = partition.units.iter().filter(|unit| !fits(unit)).count();
        equal("units of another batch", misfit, 0)?;

        let shape = Shape::new(k.row_len(), v.row_len());
        let needed = workspace_len(k.row_len(), v.row_len(), workers, partition.partial_len);
        if workspace.len() < needed {
            return Err(CallError::Workspace { needed, found: workspace.len() });
        }
        let (scratch, mut rest) = workspace.split_at_mut(shape.len() * workers.max(1));
        let workers = scratch.chunks_exact_mut(shape.len()).map(Claimed::new).collect();
        // One piece a unit that is merged; each of its tasks has a part of its own.
        let mut partial = Vec::new();
        let mut pieces: Vec<(usize, usize)> = partition
            .units
            .iter()
            .filter_map(|unit| {
                let len = unit.chunks.len() * unit.num_rows() * crate::partition::partial_row(v.row_len());
                unit.partial.map(|at| (at, len))
            })
            .collect();
        pieces.sort_unstable();
        for (_, len) in &pieces {
            let (piece, behind) = std::mem::take(&mut rest).split_at_mut(*len);
            rest = behind;
            partial.push(Claimed::new(piece));
        }
        let uses_pairs =
            isa.has_bf16_dot() && [q.format(), k.format(), v.format()].iter().all(|format| *format == Format::Bf16);
        let started = (0..partition.units.len() + partition.merges.len()).map(|_| AtomicBool::new(false)).collect();
        Ok(Self {
            isa,
            uses_pairs,
            q,
            k,
            v,
            logits: Logits::new(scale, softcap),
            alibi_slopes,
            sinks,
            sequences,
            partition,
            output,
            workers,
            partial,
            started,
        })
    }

    pub(crate) fn group(&self) -> usize {
        self.q.shape()[1] / self.k.shape()[2].max(1)
    }

    pub(crate) fn scratch_shape(&self) -> Shape {
        Shape::new(self.k.row_len(), self.v.row_len())
    }

    /// Units: run each once, on any threads.
    #[must_use]
    pub fn num_units(&self) -> usize {
        self.partition.units.len()
    }

    /// Merges: run each once, after all units.
    #[must_use]
    pub fn num_merges(&self) -> usize {
        self.partition.merges.len()
    }

    fn start(&self, flag: usize, task: usize, worker: usize) -> Result<&Claimed<'a>, CallError> {
        let refused = CallError::Pool { task, worker };
        match (self.started.get(flag), self.workers.get(worker)) {
            (Some(flag), Some(memory)) if !flag.swap(true, Ordering::Relaxed) => Ok(memory),
            _ => Err(refused),
        }
    }

    /// Where the partial results that begin at `at` lie, as an index of `partial`.
    fn piece(&self, at: usize) -> usize {
        self.partition.units.iter().filter(|unit| unit.partial.is_some_and(|other| other < at)).count()
    }

    /// Computes a unit.
    ///
    /// # Errors
    /// When it ran before, or another task runs as this worker.
    pub fn unit(&self, task: usize, worker: usize) -> Result<(), CallError> {
        let refused = || CallError::Pool { task, worker };
        let unit = self.partition.units.get(task).ok_or_else(refused)?;
        let memory = self.start(task, task, worker)?;
        memory
            .with(|memory| {
                let mut scratch = Scratch::new(memory, self.scratch_shape());
                match unit.partial {
                    None => {
                        self.dispatch(unit, &mut scratch, Sink::Output);
                        Some(())
                    }
                    Some(at) => self.partial[self.piece(at)]
                        .with(|piece| self.dispatch(unit, &mut scratch, Sink::Partial(piece))),
                }
            })
            .flatten()
            .ok_or_else(refused)
    }

    /// Merges the partial results of a split unit.
    ///
    /// # Errors
    /// As [`Attention::unit`].
    pub fn merge(&self, task: usize, worker: usize) -> Result<(), CallError> {
        let refused = || CallError::Pool { task, worker };
        let unit = self.partition.merges.get(task).ok_or_else(refused)?;
        let memory = self.start(self.num_units() + task, task, worker)?;
        memory
            .with(|memory| {
                let mut scratch = Scratch::new(memory, self.scratch_shape());
                let first = self.piece(unit.partial?);
                let mut chunk = unit.chunks.start;
                let mut merging = tile::Merging::new(self, unit, &mut scratch);
                for piece in &self.partial[first..] {
                    if chunk >= unit.chunks.end {
                        break;
                    }
                    chunk += piece.with(|piece| merging.add(piece))?;
                }
                // SAFETY: the unit's rows belong to this merge alone, which runs once.
                unsafe { merging.finish() };
                Some(())
            })
            .flatten()
            .ok_or_else(refused)
    }

    fn dispatch(&self, unit: &crate::Unit, scratch: &mut Scratch<'_>, sink: Sink<'_>) {
        #[cfg(target_arch = "x86_64")]
        if self.uses_pairs {
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
            unsafe fn tiles<P: tile::Products>(
                call: &Attention<'_>,
                unit: &crate::Unit,
                scratch: &mut Scratch<'_>,
                sink: Sink<'_>,
            ) {
                // SAFETY: the instruction set is enabled here; the rest is the caller's word.
                unsafe { tile::unit::<P>(call, unit, scratch, sink) }
            }
            // SAFETY: it was found present, all formats are bf16, and the unit runs once.
            return unsafe {
                match (self.isa, unit.num_rows()) {
                    (Isa::Amx, 0..=amx::SIDE) => tiles::<amx::Narrow>(self, unit, scratch, sink),
                    (Isa::Amx, _) => tiles::<amx::Wide>(self, unit, scratch, sink),
                    _ => tiles::<tile::Pairs>(self, unit, scratch, sink),
                }
            };
        }
        let call = self;
        with_isa!(self.isa, floats(call: &Attention<'_>, unit: &crate::Unit, scratch: &mut Scratch<'_>, sink: Sink<'_>));
    }
}

/// # Safety
/// As [`tile::unit`].
#[inline(always)]
unsafe fn floats<S: crate::simd::Simd>(
    call: &Attention<'_>,
    unit: &crate::Unit,
    scratch: &mut Scratch<'_>,
    sink: Sink<'_>,
) {
    // SAFETY: as the caller vouches.
    unsafe { tile::unit::<Floats<S>>(call, unit, scratch, sink) }
}
