//! One unit: tiles of K and V against a block of query rows.
//!
//! Owns the loop over chunks and tiles. Must not know: threads, other units.

use crate::{
    attention::{Attention, Sequence},
    micro::{self, TILE},
    pack::{self, RowPointers},
    partition::{CHUNK, Unit, partial_row},
    rows::{Format, Rows},
    scratch::{MAX_ROWS, Scratch, Shape},
    simd::Simd,
    softmax::{self, Row, State, Weights},
};
use std::{marker::PhantomData, ops::Range};

/// The keys of a tile.
pub(crate) struct KeyRows<'a> {
    pub rows: &'a RowPointers,
    pub format: Format,
    /// Those that some row of the unit may see, within the tile.
    pub seen: Range<usize>,
}

/// The values of a tile.
pub(crate) struct ValueRows<'a> {
    pub rows: &'a RowPointers,
    pub format: Format,
    /// Those that some row of the unit may see, within the tile.
    pub seen: Range<usize>,
    /// Elements of each.
    pub row_len: usize,
}

/// How products are computed.
///
/// # Safety
/// As [`Simd`]; buffers must be as large as the function of `micro`, `pack` or `amx` says, and what
/// `set_up` made must live.
pub(crate) trait Products: Weights {
    /// Rows are computed in blocks of so many; buffers hold whole blocks.
    const ROW_BLOCK: usize = 1;
    /// What a thread holds while it computes a unit.
    type Setup;

    /// Prepares this thread for a unit of so many rows.
    unsafe fn set_up(rows: usize) -> Self::Setup;
    /// Keeps query row `at`.
    unsafe fn query(row: *const u8, format: Format, head_size: usize, at: usize, q: *mut f32, q_stride: usize);
    /// Scores of `rows` rows into `s`, `[rows][TILE]`; `k` is room for the keys of a tile.
    unsafe fn scores(
        q: *const f32,
        q_stride: usize,
        rows: usize,
        head_size: usize,
        keys: &KeyRows<'_>,
        k: *mut f32,
        s: *mut f32,
    );
    /// `o = o·alpha + p·values` for `rows` rows; `v` is room for the values of a tile.
    unsafe fn values(
        p: *const f32,
        values: &ValueRows<'_>,
        v: *mut f32,
        alpha: *const f32,
        o: *mut f32,
        o_stride: usize,
        rows: usize,
    );
}

/// Products in f32.
pub(crate) struct Floats<S>(PhantomData<S>);

impl<S: Simd> Weights for Floats<S> {
    type V = S;

    #[inline(always)]
    unsafe fn keep(p: *mut f32, c: usize, weights: S) -> S {
        // SAFETY: the caller vouches for the row.
        unsafe { weights.store(p.add(c * S::LANES)) };
        weights
    }
}

// SAFETY of every block below: the trait's callers vouch for the same things as those of the
// functions that are called.
impl<S: Simd> Products for Floats<S> {
    type Setup = ();

    #[inline(always)]
    unsafe fn set_up(_rows: usize) {}

    #[inline(always)]
    unsafe fn query(row: *const u8, format: Format, head_size: usize, at: usize, q: *mut f32, q_stride: usize) {
        for d in (0..head_size).step_by(S::LANES) {
            // SAFETY: see above; the buffer is padded to whole vectors.
            unsafe {
                let (from, left) = (row.add(d * format.size()), head_size - d);
                let vector =
                    if left >= S::LANES { S::load_any(from, format) } else { S::load_any_partial(from, format, left) };
                vector.store(q.add(at * q_stride + d));
            }
        }
    }

    #[inline(always)]
    unsafe fn scores(
        q: *const f32,
        q_stride: usize,
        rows: usize,
        head_size: usize,
        keys: &KeyRows<'_>,
        k: *mut f32,
        s: *mut f32,
    ) {
        // SAFETY: see above.
        unsafe {
            pack::keys::<S>(keys.rows, keys.format, keys.seen.clone(), head_size, k);
            micro::scores::<S>(q, q_stride, rows, head_size, k, s);
        }
    }

    #[inline(always)]
    unsafe fn values(
        p: *const f32,
        values: &ValueRows<'_>,
        v: *mut f32,
        alpha: *const f32,
        o: *mut f32,
        o_stride: usize,
        rows: usize,
    ) {
        let seen = values.seen.clone();
        // SAFETY: see above.
        unsafe {
            pack::values::<S>(values.rows, values.format, seen.clone(), values.row_len, v, o_stride);
            micro::values::<S>(p, (seen.start, seen.end), v, alpha, o, o_stride, rows);
        }
    }
}

/// Products of pairs of bf16: q, k, v and the weights in bf16, sums in f32.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Pairs;

#[cfg(target_arch = "x86_64")]
mod pairs {
    use super::*;
    use crate::simd::Avx512;
    use std::arch::x86_64::*;

    impl Weights for Pairs {
        type V = Avx512;

        #[inline(always)]
        unsafe fn keep(p: *mut f32, c: usize, weights: Avx512) -> Avx512 {
            // SAFETY: the caller vouches for the row and for AVX-512 BF16; the two types have the
            // same bits. The denominator is summed from what the product sees.
            unsafe {
                let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(weights.0));
                _mm256_storeu_si256(p.cast::<u16>().add(16 * c).cast(), rounded);
                Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(rounded))))
            }
        }
    }

    // SAFETY of every block below: as for `Floats`; all rows are bf16.
    impl Products for Pairs {
        type Setup = ();

        #[inline(always)]
        unsafe fn set_up(_rows: usize) {}

        #[inline(always)]
        unsafe fn query(row: *const u8, _format: Format, head_size: usize, at: usize, q: *mut f32, q_stride: usize) {
            // SAFETY: see above; an odd size ends with a zero.
            unsafe {
                let q = q.add(at * q_stride).cast::<u16>();
                q.add(head_size).write(0);
                std::ptr::copy_nonoverlapping(row.cast::<u16>(), q, head_size);
            }
        }

        #[inline(always)]
        unsafe fn scores(
            q: *const f32,
            q_stride: usize,
            rows: usize,
            head_size: usize,
            keys: &KeyRows<'_>,
            k: *mut f32,
            s: *mut f32,
        ) {
            // SAFETY: see above.
            unsafe {
                pack::pairs::keys(keys.rows, keys.seen.clone(), head_size, k.cast());
                micro::pairs::scores(q.cast(), q_stride, rows, head_size.div_ceil(2), k.cast(), s);
            }
        }

        #[inline(always)]
        unsafe fn values(
            p: *const f32,
            values: &ValueRows<'_>,
            v: *mut f32,
            alpha: *const f32,
            o: *mut f32,
            o_stride: usize,
            rows: usize,
        ) {
            let pairs = (values.seen.start / 2, values.seen.end.div_ceil(2));
            // SAFETY: see above. A row of weights takes half of its place: rows lie `TILE` f32 apart.
            unsafe {
                pack::pairs::values(values.rows, values.seen.clone(), values.row_len, v.cast(), o_stride);
                micro::pairs::values(p.cast(), pairs, v.cast(), alpha, o, o_stride, rows);
            }
        }
    }
}

/// Where the results of a chunk go.
pub(crate) enum Sink<'a> {
    /// Into the output.
    Output,
    /// Into a buffer of partial results, one chunk after the other.
    Partial(&'a mut [f32]),
}

/// The rows of a unit.
pub(crate) struct UnitRows {
    rows: [Row; MAX_ROWS],
    count: usize,
}

impl UnitRows {
    pub fn new(call: &Attention<'_>, sequence: &Sequence<'_>, unit: &Unit) -> Self {
        let empty = Row { seen: (0, 0), position: 0, slope: 0.0 };
        let mut all = Self { rows: [empty; MAX_ROWS], count: 0 };
        let group = call.group();
        for token in unit.tokens.clone() {
            let position = sequence.shape.first_position.saturating_add(token as i64);
            let seen = sequence.shape.mask.visible(position, sequence.shape.kv_len);
            for head in unit.heads.clone() {
                let slope = call.alibi_slopes.get(unit.kv_head * group + head).copied().unwrap_or(0.0);
                all.rows[all.count] = Row { seen: (seen.start, seen.end), position, slope };
                all.count += 1;
            }
        }
        all
    }

    fn as_slice(&self) -> &[Row] {
        &self.rows[..self.count]
    }
}

/// Computes a unit.
///
/// # Safety
/// The instruction set of `P` must be present, and q, k, v be in a format that it takes. Nobody else
/// may write the unit's output rows.
#[inline(always)]
pub(crate) unsafe fn unit<P: Products>(
    call: &Attention<'_>,
    unit: &Unit,
    scratch: &mut Scratch<'_>,
    mut sink: Sink<'_>,
) {
    let sequence = &call.sequences[unit.request];
    let all = UnitRows::new(call, sequence, unit);
    let rows = all.as_slice();
    let shape = call.scratch_shape();
    let (head_size, row_len_v) = (call.k.row_len(), call.v.row_len());
    // SAFETY: as the caller vouches.
    let _setup = unsafe { P::set_up(rows.len()) };
    let mut row = 0;
    for token in unit.tokens.clone() {
        for head in unit.heads.clone() {
            let index = [sequence.query_start + token, unit.kv_head * call.group() + head, 0];
            // SAFETY: the row is valid for `head_size` elements, the buffer has room for it.
            unsafe {
                let q = scratch.q.as_mut_ptr();
                P::query(call.q.row(index), call.q.format(), head_size, row, q, shape.q_stride);
            }
            row += 1;
        }
    }
    scratch.total_state[..rows.len()].fill(State::EMPTY);
    for chunk in unit.chunks.clone() {
        // SAFETY: as the caller vouches.
        unsafe { one_chunk::<P>(call, sequence, unit.kv_head, rows, chunk, scratch, shape) };
        for row in 0..rows.len() {
            let out = row * shape.o_stride..row * shape.o_stride + row_len_v;
            match &mut sink {
                Sink::Output => {
                    let (state, part) = (scratch.state[row], &scratch.o[out.clone()]);
                    softmax::merge(&mut scratch.total_state[row], &mut scratch.total[out], state, part);
                }
                Sink::Partial(buffer) => {
                    let len = partial_row(row_len_v);
                    let to = &mut buffer[((chunk - unit.chunks.start) * rows.len() + row) * len..][..len];
                    to[..row_len_v].copy_from_slice(&scratch.o[out]);
                    to[row_len_v] = scratch.state[row].max;
                    to[row_len_v + 1] = scratch.state[row].sum;
                }
            }
        }
    }
    if let Sink::Output = sink {
        // SAFETY: nobody else writes these rows.
        unsafe { write_out(call, sequence, unit, scratch) };
    }
}

/// The partial results of a unit on their way into its output.
pub(crate) struct Merging<'m, 'a, 's> {
    call: &'m Attention<'a>,
    unit: &'m Unit,
    scratch: &'m mut Scratch<'s>,
}

impl<'m, 'a, 's> Merging<'m, 'a, 's> {
    pub fn new(call: &'m Attention<'a>, unit: &'m Unit, scratch: &'m mut Scratch<'s>) -> Self {
        scratch.total_state[..unit.num_rows()].fill(State::EMPTY);
        Self { call, unit, scratch }
    }

    /// Adds the next chunks, and says how many they are.
    pub fn add(&mut self, partial: &[f32]) -> usize {
        let row_len = self.call.v.row_len();
        let stride = self.call.scratch_shape().o_stride;
        let (rows, len) = (self.unit.num_rows(), partial_row(row_len));
        for (at, part) in partial.chunks_exact(len).enumerate() {
            let row = at % rows;
            let state = State { max: part[row_len], sum: part[row_len + 1] };
            let total = &mut self.scratch.total[row * stride..][..row_len];
            softmax::merge(&mut self.scratch.total_state[row], total, state, &part[..row_len]);
        }
        partial.len() / (rows * len)
    }

    /// Writes the output.
    ///
    /// # Safety
    /// Nobody else may write the unit's output rows.
    pub unsafe fn finish(self) {
        // SAFETY: as the caller vouches.
        unsafe { write_out(self.call, &self.call.sequences[self.unit.request], self.unit, self.scratch) }
    }
}

/// # Safety
/// Nobody else may write the unit's output rows.
unsafe fn write_out(call: &Attention<'_>, sequence: &Sequence<'_>, unit: &Unit, scratch: &mut Scratch<'_>) {
    let stride = call.scratch_shape().o_stride;
    let mut row = 0;
    for token in unit.tokens.clone() {
        for head in unit.heads.clone() {
            let (token, head) = (sequence.query_start + token, unit.kv_head * call.group() + head);
            let values = &mut scratch.total[row * stride..][..call.v.row_len()];
            let lse = softmax::finish(scratch.total_state[row], values, call.sinks.get(head).copied());
            // SAFETY: as the caller vouches.
            unsafe {
                call.output.out.write(token, head, values);
                if let Some(to) = &call.output.lse {
                    to.write(token, head, &[lse]);
                }
            }
            row += 1;
        }
    }
}

/// Sums of one chunk.
///
/// # Safety
/// As [`unit`].
#[inline(always)]
unsafe fn one_chunk<P: Products>(
    call: &Attention<'_>,
    sequence: &Sequence<'_>,
    kv_head: usize,
    rows: &[Row],
    chunk: usize,
    scratch: &mut Scratch<'_>,
    shape: Shape,
) {
    scratch.state[..rows.len()].fill(State::EMPTY);
    scratch.o[..rows.len() * shape.o_stride].fill(0.0);
    for tile in (chunk * CHUNK..(chunk + 1) * CHUNK).step_by(TILE) {
        let meets = |row: &Row| row.seen.0 < tile + TILE && row.seen.1 > tile;
        let Some(first) = rows.iter().position(meets) else { continue };
        let last = rows.iter().rposition(meets).map_or(first, |last| last + 1);
        let first = first / P::ROW_BLOCK * P::ROW_BLOCK;
        let met = &rows[first..last.next_multiple_of(P::ROW_BLOCK).min(rows.len())];
        let seen = met.iter().filter(|row| meets(row)).fold((usize::MAX, 0), |all, row| {
            (all.0.min(row.seen.0.max(tile)), all.1.max(row.seen.1.min(tile + TILE)))
        });
        let inside = seen.0 - tile..seen.1 - tile;
        let (mut k_rows, mut v_rows) = ([std::ptr::null(); TILE], [std::ptr::null(); TILE]);
        sequence.addresses(&call.k, kv_head, seen.0..seen.1, &mut k_rows[inside.clone()]);
        sequence.addresses(&call.v, kv_head, seen.0..seen.1, &mut v_rows[inside.clone()]);
        let (head_size, row_len_v) = (call.k.row_len(), call.v.row_len());
        // SAFETY: the rows are valid for their lengths, the scratch has room for `MAX_ROWS` rows and
        // a tile of each.
        unsafe {
            let q = scratch.q.as_ptr().add(first * shape.q_stride);
            let s = scratch.s.as_mut_ptr().add(first * TILE);
            let p = scratch.p.as_mut_ptr().add(first * TILE);
            let o = scratch.o.as_mut_ptr().add(first * shape.o_stride);
            let alpha = scratch.alpha.as_mut_ptr().add(first);
            let (k, v) = (scratch.k.as_mut_ptr(), scratch.v.as_mut_ptr());
            let keys = KeyRows { rows: &k_rows, format: call.k.format(), seen: inside.clone() };
            P::scores(q, shape.q_stride, met.len(), head_size, &keys, k, s);
            for (at, row) in met.iter().enumerate() {
                let state = &mut scratch.state[first + at];
                *alpha.add(at) = softmax::row::<P>(s.add(at * TILE), p.add(at * TILE), tile, row, call.logits, state);
            }
            let values = ValueRows { rows: &v_rows, format: call.v.format(), seen: inside, row_len: row_len_v };
            P::values(p, &values, v, alpha, o, shape.o_stride, met.len());
        }
    }
}

impl Sequence<'_> {
    /// The addresses of the rows of some positions.
    #[inline(always)]
    fn addresses(&self, rows: &Rows<'_>, kv_head: usize, positions: Range<usize>, out: &mut [*const u8]) {
        let (block_size, step) = (rows.shape()[1], rows.token_step());
        let first = positions.start + self.first_row;
        let (mut index, mut token) = (first / block_size, first % block_size);
        let mut out = &mut out[..positions.len()];
        while !out.is_empty() {
            let (here, behind) = out.split_at_mut((block_size - token).min(out.len()));
            // Ids were checked against the cache when the call was made.
            let start = rows.row([self.blocks[index] as usize, token, kv_head]);
            for (at, to) in here.iter_mut().enumerate() {
                *to = start.wrapping_add(at * step);
            }
            out = behind;
            index += 1;
            token = 0;
        }
    }
}
