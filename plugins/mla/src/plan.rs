//! A batch, owned: what every layer of a shape needs to know of it.
//!
//! Must not know kernels or weights. In which form a layer computes a request is `choice`'s.

use crate::choice::Window;
use attache_cpu_kernels::{HeadShape, Partition, RequestShape};
use attache_sdk::prelude::*;
use std::ops::Range;

/// One request of a batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Its query tokens among those of the batch.
    pub tokens: Range<usize>,
    /// Tokens in the cache, the new ones included.
    pub seq_len: usize,
    /// Its blocks in [`Batch::blocks`].
    pub blocks: Range<usize>,
    /// No query token sees a later one.
    pub causal: bool,
}

impl Request {
    /// Position of the first query token; negative where there are more queries than tokens.
    pub fn first_position(&self) -> i64 {
        self.seq_len as i64 - self.tokens.len() as i64
    }

    /// Its query tokens `tokens` (counted within the request) against all its keys.
    pub fn shape(&self, tokens: Range<usize>, window: Window) -> RequestShape<'static> {
        RequestShape {
            query_len: tokens.len(),
            kv_len: self.seq_len,
            first_position: self.first_position() + tokens.start as i64,
            mask: window.mask(self.causal),
        }
    }
}

/// A checked batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batch {
    /// The requests, those of no tokens included.
    pub requests: Vec<Request>,
    /// Ids of the blocks in use, request after request; all below `num_blocks`.
    pub blocks: Vec<i32>,
    /// Query tokens of all requests.
    pub num_tokens: usize,
    /// Blocks that the cache must have.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
}

impl Batch {
    fn read(batch: &BatchView<'_>, block_size: usize) -> Result<Self> {
        let host = batch.on_host(block_size)?;
        let refuse = |what: &str| Err(BackendError::unsupported(format!("CPU_MLA does not take batches with {what}")));
        if !host.prefix_spans.is_empty() {
            return refuse("multimodal prefix spans");
        }
        if host.encoder_seq_lens.is_some() {
            return refuse("encoder lengths");
        }
        if host.dcp.is_some() {
            return refuse("decode context parallelism");
        }
        if !host.has_block_table && host.num_requests() > 0 {
            return Err(BackendError::invalid("the batch has no block_table; MLA layers read a latent cache"));
        }
        let mut blocks = Vec::new();
        let requests = (0..host.num_requests())
            .map(|request| {
                let start = host.query_start(request);
                let first_block = blocks.len();
                blocks.extend_from_slice(host.blocks(request));
                Request {
                    tokens: start..start + host.query_len(request),
                    seq_len: host.seq_len(request),
                    blocks: first_block..blocks.len(),
                    causal: host.is_causal(request),
                }
            })
            .collect();
        Ok(Self { requests, blocks, num_tokens: host.num_tokens(), num_blocks: host.num_blocks, block_size })
    }

    /// Ids of the blocks of a request.
    pub fn blocks(&self, request: &Request) -> &[i32] {
        &self.blocks[request.blocks.clone()]
    }
}

/// What of a layer a plan depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanShape {
    /// Tokens of a block.
    pub block_size: usize,
    /// Heads of attention over the latent rows.
    pub heads: HeadShape,
    /// The sliding window.
    pub window: Window,
    /// Threads that the work is cut for.
    pub cut_for: usize,
}

impl PlanShape {
    /// How attention over the latent rows of a whole batch is cut.
    pub fn partition(&self, batch: &Batch) -> Partition {
        let shapes = batch.requests.iter().map(|request| request.shape(0..request.tokens.len(), self.window));
        Partition::new(shapes, self.heads, self.cut_for)
    }
}

/// The plan of a batch.
pub struct MlaPlan {
    shape: PlanShape,
    batch: Batch,
    partition: Partition,
}

impl MlaPlan {
    /// Reads and checks a batch, and cuts the work of it.
    ///
    /// # Errors
    /// When it breaks the contract, or needs what this backend does not do.
    pub fn new(batch: &BatchView<'_>, shape: PlanShape) -> Result<Self> {
        let batch = Batch::read(batch, shape.block_size)?;
        Ok(Self { partition: shape.partition(&batch), batch, shape })
    }

    /// The batch.
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// How attention over the latent rows is cut, if the plan was made for that shape.
    pub fn partition(&self, shape: &PlanShape) -> Option<&Partition> {
        (self.shape == *shape).then_some(&self.partition)
    }
}

impl Plan for MlaPlan {
    fn update(&mut self, batch: &BatchView<'_>) -> Result<()> {
        *self = Self::new(batch, self.shape)?;
        Ok(())
    }
}
