//! Keys and values of some heads, made from latent rows in the workspace.
//!
//! Owns their layout. Must not know attention.

use crate::{
    lanes,
    layer::{Call, Parameters},
    plan::Request,
    views::{Held, reach},
    weights::Head,
};
use attache_cpu_kernels::{PackedPairs, RequestShape, Rows, partition::CHUNK};
use attache_cpu_plugin::{Number, call_error, with_number};
use attache_sdk::prelude::*;
use half::bf16;
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
        let (batch, tensor, weights) = (call.batch, call.latent, &parameters.weights()?.heads[heads.clone()]);
        lanes::each(call, work, lane_len(parameters), tiles.into_iter(), |tile, memory| {
            let latent = LatentRows { tensor: &tensor, blocks: batch.blocks(tile.request) };
            expand(parameters, &latent, weights, tile, memory)
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

/// The cache, as a request finds its rows in it.
struct LatentRows<'a> {
    tensor: &'a TensorView<'a>,
    blocks: &'a [i32],
}

impl LatentRows<'_> {
    /// Where the row of a position begins. Ids were checked when the plan was made.
    fn at(&self, position: usize) -> usize {
        let (block, token) = (self.blocks[position / self.tensor.dim(1)] as usize, position % self.tensor.dim(1));
        block * self.tensor.strides()[0] as usize + token * self.tensor.strides()[1] as usize
    }
}

/// Expands the rows of a tile for some heads.
fn expand<H: Held>(
    parameters: &Parameters,
    latent: &LatentRows<'_>,
    heads: &[Head],
    tile: Tile<'_, H>,
    memory: &mut [f32],
) -> Result<()> {
    let dimensions = &parameters.dimensions;
    let (rank, nope, key) = (dimensions.kv_lora_rank, dimensions.qk_nope_head_dim, dimensions.qk_head_dim());
    with_number!(latent.tensor.dtype(), T => {
        let all = latent.tensor.span::<T>()?;
        for (position, row) in tile.positions.clone().zip(tile.keys.chunks_exact_mut(key * heads.len())) {
            let rope = &all[latent.at(position) + rank..][..key - nope];
            for key in row.chunks_exact_mut(key) {
                key[nope..].iter_mut().zip(rope).for_each(|(to, value)| *to = H::from_f32(value.to_f32()));
            }
        }
        Ok(())
    })?;
    let pairs = heads.iter().map(|head| head.pairs.as_ref()).collect::<Option<Vec<_>>>();
    match (pairs, latent.tensor.dtype(), H::as_bf16(tile.keys), H::as_bf16(tile.values)) {
        (Some(pairs), DataType::BF16, Some(keys), Some(values)) => {
            let tile = Tile { request: tile.request, positions: tile.positions, keys, values };
            project_pairs(parameters, latent, &pairs, tile, memory)
        }
        _ => project(parameters, latent, heads, tile, memory),
    }
}

/// Makes keys without their rotary part, and values, in f32.
fn project<H: Held>(
    parameters: &Parameters,
    latent: &LatentRows<'_>,
    heads: &[Head],
    tile: Tile<'_, H>,
    memory: &mut [f32],
) -> Result<()> {
    let dimensions = &parameters.dimensions;
    let (rank, nope, value) = (dimensions.kv_lora_rank, dimensions.qk_nope_head_dim, dimensions.v_head_dim);
    let (key, count) = (dimensions.qk_head_dim(), tile.positions.len());
    let (x, y) = memory.split_at_mut(TILE * rank);
    with_number!(latent.tensor.dtype(), T => {
        let all = latent.tensor.span::<T>()?;
        for (position, x) in tile.positions.zip(x.chunks_exact_mut(rank)) {
            x.iter_mut().zip(&all[latent.at(position)..][..rank]).for_each(|(to, value)| *to = value.to_f32());
        }
        Ok(())
    })?;
    for (at, head) in heads.iter().enumerate() {
        parameters.multiply(&head.keys, count, (&*x, rank), (&mut *y, nope))?;
        round(&y[..count * nope], nope, &mut tile.keys[at * key..], key * heads.len());
        parameters.multiply(&head.values, count, (&*x, rank), (&mut *y, value))?;
        round(&y[..count * value], value, &mut tile.values[at * value..], value * heads.len());
    }
    Ok(())
}

/// As [`project`], from bf16 to bf16.
fn project_pairs(
    parameters: &Parameters,
    latent: &LatentRows<'_>,
    heads: &[&[PackedPairs; 2]],
    tile: Tile<'_, bf16>,
    memory: &mut [f32],
) -> Result<()> {
    let rank = parameters.dimensions.kv_lora_rank;
    let (key, value) = (parameters.dimensions.qk_head_dim(), parameters.dimensions.v_head_dim);
    let (stride, count) = (rank.next_multiple_of(2), tile.positions.len());
    let x = &mut bf16::buffer(memory)[..TILE * stride];
    let all = latent.tensor.span::<bf16>()?;
    for (position, x) in tile.positions.zip(x.chunks_exact_mut(stride)) {
        x[..rank].copy_from_slice(&all[latent.at(position)..][..rank]);
        x[rank..].fill(bf16::ZERO);
    }
    for (at, [keys, values]) in heads.iter().enumerate() {
        keys.multiply(count, (&*x, stride), (&mut tile.keys[at * key..], key * heads.len()))
            .and_then(|()| values.multiply(count, (&*x, stride), (&mut tile.values[at * value..], value * heads.len())))
            .map_err(|error| call_error(&error))?;
    }
    Ok(())
}

/// Rounds rows of `size` elements into rows that lie `stride` apart.
fn round<H: Held>(rows: &[f32], size: usize, to: &mut [H], stride: usize) {
    for (row, to) in rows.chunks_exact(size).zip(to.chunks_mut(stride)) {
        to.iter_mut().zip(row).for_each(|(to, value)| *to = H::from_f32(*value));
    }
}
