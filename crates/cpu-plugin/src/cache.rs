//! A paged cache in host memory: its shape, writing rows into it, copying its blocks.
//!
//! Owns the meaning of layouts, slots and block pairs. Must not know attention.

use crate::{
    numbers::Number,
    views::{elements, expect_contiguous_rows},
    with_number,
};
use attache_cpu_kernels::Rows;
use attache_sdk::prelude::*;

/// Bytes at which a cache tensor is aligned.
const ALIGNMENT: u64 = 64;

/// In which order the dimensions of a cache tensor stand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// `[num_blocks, num_kv_heads, block_size, size]`.
    HeadMajor,
    /// `[num_blocks, block_size, num_kv_heads, size]`.
    TokenMajor,
    /// `[num_blocks, block_size, size]`: one row for all heads.
    Latent,
}

impl Layout {
    /// The layout of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::HeadMajor, Self::TokenMajor, Self::Latent].into_iter().find(|layout| layout.name() == name)
    }

    /// The name in descriptors.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::HeadMajor => LAYOUT_HEAD_MAJOR,
            Self::TokenMajor => LAYOUT_TOKEN_MAJOR,
            Self::Latent => LAYOUT_LATENT,
        }
    }
}

/// The element type of a cache format, or `None` for a format that is not plain floats.
#[must_use]
pub fn element_type(format: KvCacheDtype, compute: Dtype) -> Option<DataType> {
    match format.name() {
        "auto" => Some(compute.data_type()),
        "float32" => Some(DataType::F32),
        "float16" => Some(DataType::F16),
        "bfloat16" => Some(DataType::BF16),
        _ => None,
    }
}

/// One tensor of a layer's cache: rows by block, token and head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheRows {
    /// What it holds.
    pub role: TensorRole,
    /// Element type.
    pub dtype: DataType,
    /// Order of dimensions.
    pub layout: Layout,
    /// KV heads; latent: 1.
    pub num_heads: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Elements of a row.
    pub size: usize,
}

impl CacheRows {
    /// The tensor as the ABI describes it.
    ///
    /// # Errors
    /// When a block would be larger than memory.
    pub fn spec(&self) -> Result<CacheTensorSpec> {
        let bytes_per_block = [self.block_size, self.num_heads, self.size]
            .into_iter()
            .try_fold(self.dtype.size(), usize::checked_mul)
            .ok_or_else(|| BackendError::invalid(format!("a block of {} tokens is too large", self.block_size)))?;
        Ok(CacheTensorSpec {
            role: self.role,
            dtype: self.dtype,
            shape: self.shape(),
            alignment: ALIGNMENT,
            bytes_per_block: bytes_per_block as u64,
        })
    }

    fn shape(&self) -> Vec<i64> {
        let [heads, tokens, size] = [self.num_heads, self.block_size, self.size].map(|size| size as i64);
        match self.layout {
            Layout::HeadMajor => vec![-1, heads, tokens, size],
            Layout::TokenMajor => vec![-1, tokens, heads, size],
            Layout::Latent => vec![-1, tokens, size],
        }
    }

    fn name(&self) -> String {
        format!("the cache tensor of {:?}", self.role)
    }

    /// From block to block, from token to token and from head to head, in elements.
    fn strides(&self, tensor: &TensorView<'_>) -> Result<[usize; 3]> {
        let name = self.name();
        tensor.expect_shape(&name, &self.shape())?;
        if tensor.dtype() != self.dtype {
            return Err(BackendError::invalid(format!(
                "{name} holds {}; the layer was made for {}",
                tensor.dtype(),
                self.dtype
            )));
        }
        expect_contiguous_rows(&name, tensor)?;
        let strides = tensor.strides();
        let [block, second] = [strides[0] as usize, strides[1] as usize];
        Ok(match self.layout {
            Layout::HeadMajor => [block, strides[2] as usize, second],
            Layout::TokenMajor => [block, second, strides[2] as usize],
            Layout::Latent => [block, second, 0],
        })
    }

    /// The rows of a tensor, to read.
    ///
    /// # Errors
    /// When it is not what the layer was made for.
    pub fn rows<'a>(&self, tensor: &TensorView<'a>) -> Result<Rows<'a>> {
        let strides = self.strides(tensor)?;
        let shape = [tensor.dim(0), self.block_size, self.num_heads];
        Rows::new(elements("the cache", tensor)?, shape, strides, self.size)
            .map_err(|error| BackendError::invalid(format!("{}: {error}", self.name())))
    }

    /// Checks what [`CacheRows::write`] needs, and gives the slots.
    ///
    /// # Errors
    /// When shapes differ or a slot is out of range.
    pub fn check_write<'a>(
        &self,
        name: &str,
        values: &TensorView<'_>,
        slot_mapping: &TensorView<'a>,
        tensor: &TensorView<'_>,
    ) -> Result<&'a [i64]> {
        self.strides(tensor)?;
        let slots = slots(slot_mapping, tensor.dim(0), self.block_size)?;
        let tokens = slots.len() as i64;
        match self.layout {
            Layout::Latent => values.expect_shape(name, &[tokens, self.size as i64])?,
            _ => values.expect_shape(name, &[tokens, self.num_heads as i64, self.size as i64])?,
        }
        expect_contiguous_rows(name, values)?;
        with_number!(values.dtype(), T => {
            values.span::<T>().map(drop)
        })?;
        Ok(slots)
    }

    /// Writes values to slots that [`CacheRows::check_write`] has checked; −1 is skipped. Another
    /// float type is converted, rounding to nearest.
    ///
    /// # Errors
    /// When the tensor is not what the layer was made for.
    pub fn write(&self, values: &TensorView<'_>, slots: &[i64], tensor: &mut TensorViewMut<'_>) -> Result<()> {
        let [block, token, head] = self.strides(&tensor.as_view())?;
        let from_strides = values.strides();
        let (from_token, from_head) = match self.layout {
            Layout::Latent => (from_strides[0] as usize, 0),
            _ => (from_strides[0] as usize, from_strides[1] as usize),
        };
        let (num_heads, block_size, size) = (self.num_heads, self.block_size, self.size);
        let placed = slots.iter().enumerate().filter_map(|(row, slot)| Some((row, usize::try_from(*slot).ok()?)));
        let placed = placed.flat_map(|(row, slot)| {
            let to = slot / block_size * block + slot % block_size * token;
            (0..num_heads).map(move |at| (row * from_token + at * from_head, to + at * head))
        });
        if values.dtype() == self.dtype {
            // A plain copy, NaN patterns included.
            return with_number!(self.dtype, T => {
                let (from, to) = (values.span::<T>()?, tensor.span_mut::<T>()?);
                placed.for_each(|(source, target)| to[target..][..size].copy_from_slice(&from[source..][..size]));
                Ok(())
            });
        }
        with_number!(values.dtype(), From => {
            with_number!(self.dtype, To => {
                let (from, to) = (values.span::<From>()?, tensor.span_mut::<To>()?);
                for (source, target) in placed {
                    let row = to[target..][..size].iter_mut().zip(&from[source..][..size]);
                    row.for_each(|(to, from)| *to = To::from_f32(from.to_f32()));
                }
                Ok(())
            })
        })
    }

    /// Copies blocks inside a tensor, pair by pair in order.
    ///
    /// # Errors
    /// When the tensor is not what the layer was made for.
    pub fn copy_blocks(&self, pairs: &[(usize, usize)], tensor: &mut TensorViewMut<'_>) -> Result<()> {
        let strides = self.strides(&tensor.as_view())?;
        with_number!(self.dtype, T => {
            let all = tensor.span_mut::<T>()?;
            for (source, target) in pairs {
                for row in self.rows_of_a_block(strides) {
                    let from = source * strides[0] + row;
                    all.copy_within(from..from + self.size, target * strides[0] + row);
                }
            }
            Ok(())
        })
    }

    /// Copies blocks from one tensor to another.
    ///
    /// # Errors
    /// When a tensor is not what the layer was made for.
    pub fn swap_blocks(
        &self,
        pairs: &[(usize, usize)],
        source: &TensorView<'_>,
        destination: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let (from_strides, to_strides) = (self.strides(source)?, self.strides(&destination.as_view())?);
        with_number!(self.dtype, T => {
            let (from, to) = (source.span::<T>()?, destination.span_mut::<T>()?);
            for (source, target) in pairs {
                let rows = self.rows_of_a_block(from_strides).zip(self.rows_of_a_block(to_strides));
                for (source_row, target_row) in rows {
                    let (source, target) = (source * from_strides[0] + source_row, target * to_strides[0] + target_row);
                    to[target..][..self.size].copy_from_slice(&from[source..][..self.size]);
                }
            }
            Ok(())
        })
    }

    fn rows_of_a_block(&self, [_, token, head]: [usize; 3]) -> impl Iterator<Item = usize> + use<> {
        let num_heads = self.num_heads;
        (0..self.block_size).flat_map(move |at| (0..num_heads).map(move |h| at * token + h * head))
    }
}

/// Reads a `slot_mapping` `[tokens]`, all of it checked.
///
/// # Errors
/// When a slot is neither −1 nor inside the cache.
pub fn slots<'a>(slot_mapping: &TensorView<'a>, num_blocks: usize, block_size: usize) -> Result<&'a [i64]> {
    slot_mapping.expect_shape("slot_mapping", &[-1])?;
    let slots = slot_mapping.as_slice::<i64>()?;
    let end = i64::try_from(num_blocks.saturating_mul(block_size)).unwrap_or(i64::MAX);
    if let Some(token) = slots.iter().position(|slot| *slot < -1 || *slot >= end) {
        return Err(BackendError::out_of_range(format!(
            "slot_mapping of token {token} is {}; valid are -1 (not written) and 0 … {}",
            slots[token],
            end - 1
        ))
        .with("token", token)
        .with("slot", slots[token]));
    }
    Ok(slots)
}

/// Reads `[n, 2]` i64 pairs of source and destination block, all of them checked.
///
/// # Errors
/// When a block is out of range.
pub fn block_pairs(pairs: &TensorView<'_>, sources: usize, destinations: usize) -> Result<Vec<(usize, usize)>> {
    pairs.expect_shape("pairs", &[-1, 2])?;
    let within = |what: &str, id: i64, count: usize| {
        usize::try_from(id).ok().filter(|id| *id < count).ok_or_else(|| {
            BackendError::out_of_range(format!("the {what} block is {id}; valid are 0 … {}", count as i64 - 1))
                .with("block_id", id)
        })
    };
    pairs
        .as_slice::<i64>()?
        .chunks_exact(2)
        .map(|pair| Ok((within("source", pair[0], sources)?, within("destination", pair[1], destinations)?)))
        .collect()
}
