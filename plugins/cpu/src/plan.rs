//! A batch, owned: what every layer of a shape needs to know of it, and its cut into units.
//!
//! Must not know kernels beyond the cut.

use attache_cpu_kernels::{HeadShape, Mask, Partition, RequestShape, Sequence};
use attache_sdk::prelude::*;
use std::ops::Range;

/// What a layer's configuration says of who sees whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MaskRule {
    window: Option<u64>,
    right: Option<u64>,
    chunk: u64,
    /// Keys are an encoder's: all are seen.
    is_cross: bool,
    pub has_cache: bool,
}

impl MaskRule {
    pub fn new(config: &LayerConfig<'_>) -> Self {
        Self {
            window: u64::try_from(config.sliding_window).ok().filter(|window| *window > 0),
            right: u64::try_from(config.window_right).ok(),
            chunk: u64::try_from(config.chunked_local).unwrap_or(0),
            is_cross: config.attn_type == AttentionType::EncoderDecoder,
            has_cache: !matches!(config.attn_type, AttentionType::Encoder | AttentionType::EncoderOnly),
        }
    }

    fn mask<'a>(&self, causal: bool, spans: &'a [(usize, usize)]) -> Mask<'a> {
        if self.is_cross {
            return Mask::NONE;
        }
        // A window counts the query's own token.
        let left = self.window.map(|window| window - 1);
        let right = [self.right, left.filter(|_| !causal)].into_iter().flatten().min();
        Mask { causal, left, right, chunk: self.chunk, spans }
    }
}

/// One request of a batch.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Request {
    query_start: usize,
    query_len: usize,
    kv_len: usize,
    first_position: i64,
    causal: bool,
    spans: Vec<(usize, usize)>,
    blocks: Range<usize>,
    first_row: usize,
}

/// A checked batch and its units.
pub(crate) struct CpuPlan {
    rule: MaskRule,
    heads: HeadShape,
    block_size: usize,
    workers: usize,
    requests: Vec<Request>,
    blocks: Vec<i32>,
    /// Query tokens of all requests.
    pub num_tokens: usize,
    /// Keys of all requests.
    pub num_keys: usize,
    /// The units.
    pub partition: Partition,
}

impl CpuPlan {
    /// Reads, checks and cuts a batch.
    ///
    /// # Errors
    /// When it breaks the contract, or needs what this backend does not do.
    pub fn new(
        batch: &BatchView<'_>,
        rule: MaskRule,
        heads: HeadShape,
        block_size: usize,
        workers: usize,
    ) -> Result<Self> {
        let host = batch.on_host(block_size)?;
        if host.dcp.is_some() {
            return Err(BackendError::unsupported("CPU_ATTN does not take batches of decode context parallelism"));
        }
        if rule.is_cross != host.encoder_seq_lens.is_some() {
            return Err(BackendError::invalid(if rule.is_cross {
                "cross attention needs encoder_seq_lens"
            } else {
                "encoder_seq_lens are for cross attention; this layer is none"
            }));
        }
        if rule.is_cross && !host.prefix_spans.is_empty() {
            return Err(BackendError::unsupported("CPU_ATTN has no multimodal prefixes in cross attention"));
        }
        let num_requests = host.num_requests();
        if rule.has_cache != host.has_block_table && num_requests > 0 {
            return Err(BackendError::invalid(if rule.has_cache {
                "the batch has no block_table; this layer reads a cache"
            } else {
                "the batch has a block_table; this layer has no cache"
            }));
        }
        let mut spans = vec![Vec::new(); num_requests];
        for span in &host.prefix_spans {
            spans[span.request].push((span.start, span.end));
        }
        // Without a cache one block holds the keys of all requests.
        let mut blocks = if rule.has_cache { Vec::new() } else { vec![0] };
        let mut num_keys = 0_usize;
        let mut requests = Vec::with_capacity(num_requests);
        for (request, spans) in spans.into_iter().enumerate() {
            let kv_len = host.cached_len(request);
            let first_block = blocks.len();
            if rule.has_cache {
                blocks.extend_from_slice(host.blocks(request));
            }
            requests.push(Request {
                query_start: host.query_start(request),
                query_len: host.query_len(request),
                kv_len,
                first_position: kv_len as i64 - host.query_len(request) as i64,
                causal: host.is_causal(request),
                spans,
                blocks: if rule.has_cache { first_block..blocks.len() } else { 0..1 },
                first_row: if rule.has_cache { 0 } else { num_keys },
            });
            num_keys += kv_len;
        }
        let mut plan = Self {
            rule,
            heads,
            block_size,
            workers,
            requests,
            blocks,
            num_tokens: host.num_tokens(),
            num_keys,
            partition: Partition::default(),
        };
        plan.partition = Partition::new(plan.requests.iter().map(|request| plan.shape(request)), heads, workers);
        Ok(plan)
    }

    fn shape<'a>(&self, request: &'a Request) -> RequestShape<'a> {
        RequestShape {
            query_len: request.query_len,
            kv_len: request.kv_len,
            first_position: request.first_position,
            mask: self.rule.mask(request.causal, &request.spans),
        }
    }

    /// The requests as the kernels see them.
    pub fn sequences(&self) -> Vec<Sequence<'_>> {
        self.requests.iter().map(|request| self.sequence(request)).collect()
    }

    fn sequence<'a>(&'a self, request: &'a Request) -> Sequence<'a> {
        Sequence {
            query_start: request.query_start,
            shape: self.shape(request),
            blocks: &self.blocks[request.blocks.clone()],
            first_row: request.first_row,
        }
    }

    /// Whether a layer of this mask and shape may use the plan.
    pub fn serves(&self, rule: &MaskRule, heads: &HeadShape, block_size: usize) -> bool {
        self.rule == *rule && self.heads == *heads && self.block_size == block_size
    }
}

impl Plan for CpuPlan {
    fn update(&mut self, batch: &BatchView<'_>) -> Result<()> {
        *self = Self::new(batch, self.rule, self.heads, self.block_size, self.workers)?;
        Ok(())
    }
}
