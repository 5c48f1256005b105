//! Keys and values of some heads, made from latent rows in the workspace.
//!
//! Owns their layout. Must not know attention.

use crate::{
    lanes,
    layer::{Call, Parameters},
    plan::Request,
    views::{Held, reach},
};
use attache_cpu_kernels::{RequestShape, Rows, partition::CHUNK};
use attache_cpu_plugin::{Number, with_number};
use attache_sdk::prelude::*;
use std::ops::Range;

/// Keys that a lane expands at a time.
const TILE: usize = 64;

/// f32 values of a lane that expands.
pub fn lane_len(parameters: &Parameters) -> usize {
    let dimensions = &parameters.dimensions;
    TILE * (dimensions.kv_lora_rank + dimensions.qk_nope_head_dim.max(dimensions.v_head_dim))
}

/// f32 values that hold the keys and values of so many tokens, those of each head counted.
pub fn held_len(parameters: &Parameters, tokens: usize) -> usize {
    tokens.saturating_mul(parameters.dimensions.qk_head_dim() + parameters.dimensions.v_head_dim)
}

/// Positions of a request whose keys are expanded.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    /// Position of the first row of the buffer.
    base: usize,
    /// Positions that are expanded.
    start: usize,
    end: usize,
}

impl Keys {
    /// The positions `seen` of a chunk that begins at `chunk_start`. Rows are counted from where
    /// the kernels' own chunk begins, so that their sums begin at the same positions whatever is seen;
    /// rows before `seen` are left as they are.
    pub fn new(chunk_start: usize, seen: Range<usize>) -> Self {
        let base = chunk_start + (seen.start - chunk_start) / CHUNK * CHUNK;
        Self { base, start: seen.start, end: seen.end }
    }

    /// Rows of the buffer.
    pub fn rows(&self) -> usize {
        self.end - self.base
    }

    /// Query tokens of a request (counted within it) against these keys.
    pub fn shape(&self, request: &Request, tokens: Range<usize>, parameters: &Parameters) -> RequestShape<'static> {
        let shape = request.shape(tokens, parameters.window);
        RequestShape { kv_len: self.rows(), first_position: shape.first_position - self.base as i64, ..shape }
    }
}

/// Expanded keys `[rows][heads][nope + rope]` and values `[rows][heads][v_head_dim]`.
pub struct Expanded<'a, H> {
    keys: &'a [H],
    values: &'a [H],
    rows: usize,
    heads: usize,
    sizes: [usize; 2],
}

/// A few rows that one lane expands.
struct Tile<'a, H> {
    request: &'a Request,
    positions: Range<usize>,
    keys: &'a mut [H],
    values: &'a mut [H],
}

impl<'a, H: Held> Expanded<'a, H> {
    /// Expands keys for `heads`, request after request.
    ///
    /// # Errors
    /// When the buffer is too small, or the cache holds no floats.
    pub fn make(
        call: &Call<'_, '_>,
        requests: &[(&Request, Keys)],
        heads: Range<usize>,
        work: &mut [f32],
        held: &'a mut [H],
    ) -> Result<Self> {
        let parameters = call.parameters;
        let sizes = [parameters.dimensions.qk_head_dim(), parameters.dimensions.v_head_dim];
        let rows: usize = requests.iter().map(|(_, keys)| keys.rows()).sum();
        let [key_row, value_row] = sizes.map(|size| size * heads.len());
        let needed = rows * (key_row + value_row);
        let found = held.len();
        let held = held.get_mut(..needed).ok_or_else(|| {
            BackendError::new(ErrorCode::Internal, format!("{needed} expanded values where there is room for {found}"))
        })?;
        let (keys, values) = held.split_at_mut(rows * key_row);
        let mut tiles = Vec::new();
        let (mut keys_left, mut values_left) = (&mut *keys, &mut *values);
        let mut next = |count: usize| {
            let (k, rest) = std::mem::take(&mut keys_left).split_at_mut(count * key_row);
            keys_left = rest;
            let (v, rest) = std::mem::take(&mut values_left).split_at_mut(count * value_row);
            values_left = rest;
            (k, v)
        };
        for (request, keys) in requests {
            next(keys.start - keys.base);
            for first in (keys.start..keys.end).step_by(TILE) {
                let positions = first..(first + TILE).min(keys.end);
                let (keys, values) = next(positions.len());
                tiles.push(Tile { request, positions, keys, values });
            }
        }
        let (batch, latent) = (call.batch, call.latent);
        lanes::each(call, work, lane_len(parameters), tiles.into_iter(), |tile, memory| {
            expand(parameters, batch.blocks(tile.request), &latent, heads.clone(), tile, memory)
        })?;
        Ok(Self { keys, values, rows, heads: heads.len(), sizes })
    }

    /// Keys and values as one block of the kernels' rows.
    ///
    /// # Errors
    /// When they reach outside their buffers.
    pub fn rows(&self) -> Result<(Rows<'_>, Rows<'_>)> {
        let rows = |values, size| {
            Rows::new(H::elements(values), [1, self.rows, self.heads], [0, self.heads * size, size], size)
                .map_err(reach)
        };
        Ok((rows(self.keys, self.sizes[0])?, rows(self.values, self.sizes[1])?))
    }
}

/// Expands the rows of a tile for some heads.
fn expand<H: Held>(
    parameters: &Parameters,
    blocks: &[i32],
    latent: &TensorView<'_>,
    heads: Range<usize>,
    tile: Tile<'_, H>,
    memory: &mut [f32],
) -> Result<()> {
    let dimensions = &parameters.dimensions;
    let (rank, nope, value) = (dimensions.kv_lora_rank, dimensions.qk_nope_head_dim, dimensions.v_head_dim);
    let [key_row, value_row] = [dimensions.qk_head_dim(), value].map(|size| size * heads.len());
    let (x, y) = memory.split_at_mut(TILE * rank);
    read_latent(latent, blocks, dimensions.row(), tile.positions.clone(), |index, row: &[f32]| {
        x[index * rank..][..rank].copy_from_slice(&row[..rank]);
        for key in tile.keys[index * key_row..][..key_row].chunks_exact_mut(nope + row.len() - rank) {
            key[nope..].iter_mut().zip(&row[rank..]).for_each(|(to, value)| *to = H::from_f32(*value));
        }
    })?;
    let count = tile.positions.len();
    for (at, weights) in parameters.weights()?.heads[heads].iter().enumerate() {
        parameters.multiply(&weights.keys, count, (&*x, rank), (&mut *y, nope))?;
        let (first, size) = (at * dimensions.qk_head_dim(), nope);
        for (key, y) in tile.keys.chunks_exact_mut(key_row).zip(y.chunks_exact(size)) {
            key[first..first + size].iter_mut().zip(y).for_each(|(to, value)| *to = H::from_f32(*value));
        }
        parameters.multiply(&weights.values, count, (&*x, rank), (&mut *y, value))?;
        for (row, y) in tile.values.chunks_exact_mut(value_row).zip(y.chunks_exact(value)) {
            row[at * value..][..value].iter_mut().zip(y).for_each(|(to, value)| *to = H::from_f32(*value));
        }
    }
    Ok(())
}

/// Reads cache rows as f32.
fn read_latent(
    latent: &TensorView<'_>,
    blocks: &[i32],
    size: usize,
    positions: Range<usize>,
    mut row: impl FnMut(usize, &[f32]),
) -> Result<()> {
    let (block_stride, token_stride) = (latent.strides()[0] as usize, latent.strides()[1] as usize);
    let block_size = latent.dim(1);
    let mut values = vec![0.0; size];
    with_number!(latent.dtype(), T => {
        let all = latent.span::<T>()?;
        for (index, position) in positions.enumerate() {
            // Ids were checked when the plan was made.
            let at = blocks[position / block_size] as usize * block_stride + position % block_size * token_stride;
            values.iter_mut().zip(&all[at..at + size]).for_each(|(to, value)| *to = value.to_f32());
            row(index, &values);
        }
        Ok(())
    })
}
