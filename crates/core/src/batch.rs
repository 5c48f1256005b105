//! A ragged batch of requests: who has how many query tokens, and where its cache blocks are.

use crate::{
    error::{BackendError, Result},
    tensor::TensorView,
};

/// The most that a batch will hold, for worst-case answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchLimits {
    /// Requests.
    pub max_num_requests: usize,
    /// Query tokens of all requests together.
    pub max_num_tokens: usize,
    /// Query tokens of one request.
    pub max_query_len: usize,
    /// Tokens of one request in the cache.
    pub max_seq_len: usize,
    /// Threads that may run the tasks of one call: what the engine's pool says.
    pub parallelism: usize,
}

/// Whether a token sees later ones.
#[derive(Clone, Copy, Debug)]
pub enum Causality<'a> {
    /// No token sees a later one; aligned to the bottom right: the last query token is the last
    /// token of the sequence.
    Causal,
    /// Every token sees every other.
    NonCausal,
    /// `[n]` u8: 1 = causal.
    PerRequest(TensorView<'a>),
}

/// Decode context parallelism: this rank holds a part of each request's tokens.
#[derive(Clone, Copy, Debug)]
pub struct DcpView<'a> {
    /// Ranks.
    pub world_size: u32,
    /// This rank.
    pub rank: u32,
    /// `[n]` i32: tokens of each request on this rank.
    pub local_seq_lens: TensorView<'a>,
}

/// A ragged batch, as tensors that lie on the host or on the device.
#[derive(Clone, Copy, Debug)]
pub struct BatchView<'a> {
    /// Requests, `n`.
    pub num_requests: usize,
    /// Blocks of the cache: every id in use is below.
    pub num_blocks: usize,
    /// Most query tokens of a request.
    pub max_query_len: usize,
    /// Most tokens of a request in the cache.
    pub max_seq_len: usize,
    /// `[n + 1]` i32.
    pub query_start_loc: TensorView<'a>,
    /// `[n]` i32: tokens in the cache, the new ones included.
    pub seq_lens: TensorView<'a>,
    /// `[n, max_blocks]` i32; absent for layers without a cache.
    pub block_table: Option<TensorView<'a>>,
    /// Causal or not.
    pub causality: Causality<'a>,
    /// `[m, 3]` i32: request, first position, one past the last.
    pub prefix_spans: Option<TensorView<'a>>,
    /// `[n]` i32: encoder tokens of each request.
    pub encoder_seq_lens: Option<TensorView<'a>>,
    /// Decode context parallelism.
    pub dcp: Option<DcpView<'a>>,
}

impl<'a> BatchView<'a> {
    /// A causal batch in host memory. `block_table` is `[n, width]` with its width.
    ///
    /// # Errors
    /// When the lengths do not fit each other. The values are checked by [`BatchView::on_host`].
    pub fn from_host(
        query_start_loc: &'a [i32],
        seq_lens: &'a [i32],
        block_table: Option<(&'a [i32], usize)>,
        num_blocks: usize,
    ) -> Result<Self> {
        let num_requests = seq_lens.len();
        let max = |values: &mut dyn Iterator<Item = i32>| usize::try_from(values.max().unwrap_or(0)).unwrap_or(0);
        Ok(Self {
            num_requests,
            num_blocks,
            max_query_len: max(&mut query_start_loc.windows(2).map(|pair| pair[1].saturating_sub(pair[0]))),
            max_seq_len: max(&mut seq_lens.iter().copied()),
            query_start_loc: TensorView::from_slice(query_start_loc, &[query_start_loc.len()])?,
            seq_lens: TensorView::from_slice(seq_lens, &[num_requests])?,
            block_table: match block_table {
                Some((table, width)) => Some(TensorView::from_slice(table, &[num_requests, width])?),
                None => None,
            },
            causality: Causality::Causal,
            prefix_spans: None,
            encoder_seq_lens: None,
            dcp: None,
        })
    }

    /// The batch as slices, with every value that a kernel would use checked: starts do not fall,
    /// lengths are not negative, and each block id in use is below `num_blocks`. Table entries
    /// beyond the used blocks may hold anything.
    ///
    /// # Errors
    /// Names the request, the value and the limit; also when a tensor is not in host memory.
    pub fn on_host(&self, block_size: usize) -> Result<HostBatch<'a>> {
        HostBatch::checked(self, block_size)
    }
}

/// The span of a multimodal prefix: positions in it see each other in both directions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefixSpan {
    /// Request.
    pub request: usize,
    /// First position.
    pub start: usize,
    /// One past the last position.
    pub end: usize,
}

/// A checked batch in host memory.
#[derive(Clone, Debug)]
pub struct HostBatch<'a> {
    /// `[n + 1]`, not falling, starts at 0.
    pub query_start_loc: &'a [i32],
    /// `[n]`, not negative.
    pub seq_lens: &'a [i32],
    block_table: &'a [i32],
    block_table_stride: usize,
    block_table_width: usize,
    /// Blocks of the cache.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Whether there is a cache.
    pub has_block_table: bool,
    causal: bool,
    causal_per_request: Option<&'a [u8]>,
    /// Multimodal prefixes.
    pub prefix_spans: Vec<PrefixSpan>,
    /// `[n]`, not negative.
    pub encoder_seq_lens: Option<&'a [i32]>,
    /// World size, rank and `[n]` local lengths.
    pub dcp: Option<(u32, u32, &'a [i32])>,
}

impl<'a> HostBatch<'a> {
    fn checked(batch: &BatchView<'a>, block_size: usize) -> Result<Self> {
        let n = batch.num_requests;
        if block_size == 0 {
            return Err(BackendError::invalid("block_size must be above 0"));
        }
        let starts = batch.query_start_loc.as_slice::<i32>()?;
        if starts.len() != n + 1 {
            return Err(BackendError::invalid(format!(
                "query_start_loc has {} values; {} requests need {}",
                starts.len(),
                n,
                n + 1
            )));
        }
        if starts[0] != 0 {
            return Err(BackendError::invalid(format!("query_start_loc starts with {}, not 0", starts[0])));
        }
        if let Some(i) = starts.windows(2).position(|pair| pair[1] < pair[0]) {
            return Err(BackendError::invalid(format!(
                "query_start_loc falls from {} to {} at request {i}",
                starts[i],
                starts[i + 1]
            )));
        }
        let seq_lens = lengths("seq_lens", &batch.seq_lens, n)?;
        let encoder_seq_lens = match &batch.encoder_seq_lens {
            Some(tensor) => Some(lengths("encoder_seq_lens", tensor, n)?),
            None => None,
        };
        let (table, stride, width) = match &batch.block_table {
            None => (&[][..], 0, 0),
            Some(tensor) => {
                tensor.expect_shape("block_table", &[n as i64, -1])?;
                if tensor.dim(1) > 1 && tensor.strides()[1] != 1 {
                    return Err(BackendError::unsupported("block_table rows must be contiguous"));
                }
                (tensor.span::<i32>()?, tensor.strides()[0] as usize, tensor.dim(1))
            }
        };
        let dcp = match &batch.dcp {
            None => None,
            Some(dcp) => {
                if dcp.world_size == 0 || dcp.rank >= dcp.world_size {
                    return Err(BackendError::invalid(format!("dcp rank {} of {}", dcp.rank, dcp.world_size)));
                }
                Some((dcp.world_size, dcp.rank, lengths("dcp_local_seq_lens", &dcp.local_seq_lens, n)?))
            }
        };
        let (causal, causal_per_request) = match &batch.causality {
            Causality::Causal => (true, None),
            Causality::NonCausal => (false, None),
            Causality::PerRequest(tensor) => {
                tensor.expect_shape("causal_per_request", &[n as i64])?;
                (true, Some(tensor.as_slice::<u8>()?))
            }
        };
        let mut checked = Self {
            query_start_loc: starts,
            seq_lens,
            block_table: table,
            block_table_stride: stride,
            block_table_width: width,
            num_blocks: batch.num_blocks,
            block_size,
            has_block_table: batch.block_table.is_some(),
            causal,
            causal_per_request,
            prefix_spans: Vec::new(),
            encoder_seq_lens,
            dcp,
        };
        checked.check_table()?;
        if let Some(tensor) = &batch.prefix_spans {
            checked.read_prefix_spans(tensor)?;
        }
        Ok(checked)
    }

    fn check_table(&self) -> Result<()> {
        if !self.has_block_table {
            return Ok(());
        }
        for request in 0..self.num_requests() {
            let tokens = self.cached_len(request);
            let used = tokens.div_ceil(self.block_size);
            if used > self.block_table_width {
                return Err(BackendError::out_of_range(format!(
                    "request {request} has {tokens} tokens in the cache and needs {used} blocks of {}; its block_table row holds {}",
                    self.block_size, self.block_table_width
                )));
            }
            for (index, id) in self.blocks(request).iter().enumerate() {
                if usize::try_from(*id).map_or(true, |id| id >= self.num_blocks) {
                    return Err(BackendError::out_of_range(format!(
                        "block_table of request {request} holds id {id} at index {index}; valid are 0 … {}",
                        self.num_blocks as i64 - 1
                    ))
                    .with("request", request)
                    .with("block_id", id));
                }
            }
        }
        Ok(())
    }

    fn read_prefix_spans(&mut self, tensor: &TensorView<'a>) -> Result<()> {
        tensor.expect_shape("prefix_spans", &[-1, 3])?;
        for row in tensor.as_slice::<i32>()?.chunks_exact(3) {
            let valid = usize::try_from(row[0]).ok().filter(|request| *request < self.num_requests());
            let (Some(request), true) = (valid, 0 <= row[1] && row[1] <= row[2]) else {
                return Err(BackendError::invalid(format!(
                    "prefix span (request {}, {} … {}): no such request, or not a span",
                    row[0], row[1], row[2]
                )));
            };
            self.prefix_spans.push(PrefixSpan { request, start: row[1] as usize, end: row[2] as usize });
        }
        Ok(())
    }

    /// Requests.
    #[must_use]
    pub fn num_requests(&self) -> usize {
        self.seq_lens.len()
    }

    /// Query tokens of all requests.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.query_start_loc.last().map_or(0, |last| *last as usize)
    }

    /// First query token of a request.
    #[must_use]
    pub fn query_start(&self, request: usize) -> usize {
        self.query_start_loc[request] as usize
    }

    /// Query tokens of a request.
    #[must_use]
    pub fn query_len(&self, request: usize) -> usize {
        (self.query_start_loc[request + 1] - self.query_start_loc[request]) as usize
    }

    /// Tokens of a request, the new ones included.
    #[must_use]
    pub fn seq_len(&self, request: usize) -> usize {
        self.seq_lens[request] as usize
    }

    /// Tokens of a request that this rank's cache holds (the encoder's, for cross attention).
    #[must_use]
    pub fn cached_len(&self, request: usize) -> usize {
        match (self.dcp, self.encoder_seq_lens) {
            (Some((_, _, local)), _) => local[request] as usize,
            (None, Some(encoder)) => encoder[request] as usize,
            (None, None) => self.seq_len(request),
        }
    }

    /// Ids of the blocks in use by a request; checked to be below `num_blocks`.
    #[must_use]
    pub fn blocks(&self, request: usize) -> &'a [i32] {
        let used = self.cached_len(request).div_ceil(self.block_size);
        let start = request * self.block_table_stride;
        &self.block_table[start..start + used]
    }

    /// Whether a request is causal.
    #[must_use]
    pub fn is_causal(&self, request: usize) -> bool {
        self.causal_per_request.map_or(self.causal, |flags| flags[request] != 0)
    }
}

fn lengths<'a>(name: &str, tensor: &TensorView<'a>, n: usize) -> Result<&'a [i32]> {
    let values = tensor.as_slice::<i32>()?;
    if values.len() != n {
        return Err(BackendError::invalid(format!("{name} has {} values; there are {n} requests", values.len())));
    }
    if let Some(request) = values.iter().position(|length| *length < 0) {
        return Err(BackendError::invalid(format!("{name} of request {request} is {}", values[request])));
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch<'a>(starts: &'a [i32], lens: &'a [i32], table: &'a [i32], width: usize) -> Result<HostBatch<'a>> {
        BatchView::from_host(starts, lens, Some((table, width)), 4)?.on_host(16)
    }

    #[test]
    fn ids_in_use_are_checked_and_the_rest_is_ignored() {
        assert!(batch(&[0, 1], &[20], &[1, 3], 2).is_ok());
        for bad in [4, -1, i32::MAX] {
            let error = batch(&[0, 1], &[20], &[1, bad], 2).unwrap_err();
            assert_eq!(error.code, crate::ErrorCode::OutOfRange, "{error}");
            assert!(batch(&[0, 1], &[16], &[1, bad], 2).is_ok(), "beyond the used blocks");
        }
        assert!(batch(&[0, 1], &[33], &[1, 2], 2).is_err(), "the row is too narrow");
    }

    #[test]
    fn lengths_are_checked() {
        assert!(batch(&[0, 2, 1], &[2, 2], &[0, 1], 1).is_err());
        assert!(batch(&[1, 2], &[2], &[0], 1).is_err());
        assert!(batch(&[0, 1], &[-1], &[0], 1).is_err());
        assert!(batch(&[0], &[], &[], 0).is_ok(), "an empty batch is legal");
        assert!(batch(&[0, 0, 2], &[0, 2], &[9, 1], 1).is_ok(), "a request of no tokens is legal");
        assert!(batch(&[0, 1], &[1, 1], &[0, 1], 1).is_err());
    }
}
