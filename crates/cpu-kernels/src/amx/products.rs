//! The products of a tile on AMX: for a block of many query rows, and for the few of a decode.
//!
//! Both add up an element's products in the same order, so that a row's result does not depend on
//! which of them computes it: along the head in steps of 32, and along the keys in steps of 32 that
//! begin at multiples of 32.
//! Must not know: masks, softmax, where rows come from.

use super::{SIDE, Tiles, dot, load, store, zero};
use crate::{
    micro::TILE,
    pack::{self, RowPointers},
    rows::Format,
    simd::{Avx512, Simd},
    softmax::Weights,
    tile::{KeyRows, Pairs, Products, ValueRows},
};
use std::arch::x86_64::*;

/// Elements of a row that one product step takes.
const STEP: usize = 2 * SIDE;

/// Any number of query rows: keys are transposed once and multiplied with all rows.
pub(crate) struct Wide;

/// Up to 16 query rows: keys are multiplied as they lie in the cache, and the scores transposed.
pub(crate) struct Narrow;

impl Weights for Wide {
    type V = Avx512;
    #[inline(always)]
    unsafe fn keep(p: *mut f32, c: usize, weights: Avx512) -> Avx512 {
        // SAFETY: the caller vouches for the same things.
        unsafe { Pairs::keep(p, c, weights) }
    }
}

impl Weights for Narrow {
    type V = Avx512;
    #[inline(always)]
    unsafe fn keep(p: *mut f32, c: usize, weights: Avx512) -> Avx512 {
        // SAFETY: the caller vouches for the same things.
        unsafe { Pairs::keep(p, c, weights) }
    }
}

/// `o *= alpha`, row by row; a factor of 1 changes no bit and costs nothing.
///
/// # Safety
/// AVX-512 must be enabled; the buffers must hold `rows` rows.
#[inline(always)]
unsafe fn scale(o: *mut f32, o_stride: usize, alpha: *const f32, rows: usize) {
    for row in 0..rows {
        // SAFETY: the caller vouches for the buffers; the stride is whole vectors.
        unsafe {
            let factor = *alpha.add(row);
            if factor == 1.0 {
                continue;
            }
            let factor = _mm512_set1_ps(factor);
            for column in (0..o_stride).step_by(16) {
                let at = o.add(row * o_stride + column);
                _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), factor));
            }
        }
    }
}

/// Packs the values of a tile for whole steps of 32 keys, and gives those steps.
///
/// # Safety
/// AVX-512 must be enabled; as [`Products::values`].
#[inline(always)]
unsafe fn packed_values(from: &ValueRows<'_>, v: *mut u32, stride: usize) -> std::ops::Range<usize> {
    let steps = from.seen.start / STEP..from.seen.end.div_ceil(STEP);
    // SAFETY: the caller vouches for rows and buffer; rows that are not seen are null and become zeros.
    unsafe { pack::pairs::values(from.rows, steps.start * STEP..steps.end * STEP, from.row_len, v, stride) };
    steps
}

// SAFETY of every block below: the trait's callers vouch for AMX, for the configuration that
// `configure` made, and for the buffers, which hold whole blocks of 16 rows.
impl Products for Wide {
    const ROW_BLOCK: usize = SIDE;
    type Setup = Tiles;

    #[inline(always)]
    unsafe fn set_up(_rows: usize) -> Tiles {
        // SAFETY: see above.
        unsafe { Tiles::new([SIDE; 8]) }
    }

    #[inline(always)]
    unsafe fn query(row: *const u8, _format: Format, head_size: usize, at: usize, q: *mut f32, q_stride: usize) {
        // SAFETY: see above; a row ends with zeros up to a whole step, which its place has room for.
        unsafe {
            let to = q.add(at * q_stride).cast::<u16>();
            std::ptr::copy_nonoverlapping(row.cast::<u16>(), to, head_size);
            std::ptr::write_bytes(to.add(head_size), 0, head_size.next_multiple_of(STEP) - head_size);
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
        let steps = head_size.div_ceil(STEP);
        let (q_bytes, k_bytes, s_bytes) = (q_stride * 4, TILE * 4, TILE * 4);
        // SAFETY: see above.
        unsafe {
            pack::pairs::keys(keys.rows, keys.seen.clone(), head_size, k.cast());
            for row in (0..rows).step_by(2 * SIDE) {
                let (q, s) = (q.add(row * q_stride), s.add(row * TILE));
                if rows - row > SIDE {
                    for column in (keys.seen.start / STEP * STEP..keys.seen.end).step_by(STEP) {
                        zero!("tmm0");
                        zero!("tmm1");
                        zero!("tmm2");
                        zero!("tmm3");
                        for step in 0..steps {
                            let (q, k) = (q.add(step * SIDE), k.add(step * SIDE * TILE + column));
                            load!("tmm4", q, q_bytes);
                            load!("tmm6", k, k_bytes);
                            dot!("tmm0", "tmm4", "tmm6");
                            load!("tmm7", k.add(SIDE), k_bytes);
                            dot!("tmm1", "tmm4", "tmm7");
                            load!("tmm5", q.add(SIDE * q_stride), q_bytes);
                            dot!("tmm2", "tmm5", "tmm6");
                            dot!("tmm3", "tmm5", "tmm7");
                        }
                        let below = s.add(SIDE * TILE + column);
                        store!("tmm0", s.add(column), s_bytes);
                        store!("tmm1", s.add(column + SIDE), s_bytes);
                        store!("tmm2", below, s_bytes);
                        store!("tmm3", below.add(SIDE), s_bytes);
                    }
                } else {
                    for column in (keys.seen.start / STEP * STEP..keys.seen.end).step_by(STEP) {
                        zero!("tmm0");
                        zero!("tmm1");
                        for step in 0..steps {
                            let (q, k) = (q.add(step * SIDE), k.add(step * SIDE * TILE + column));
                            load!("tmm4", q, q_bytes);
                            load!("tmm6", k, k_bytes);
                            dot!("tmm0", "tmm4", "tmm6");
                            load!("tmm7", k.add(SIDE), k_bytes);
                            dot!("tmm1", "tmm4", "tmm7");
                        }
                        store!("tmm0", s.add(column), s_bytes);
                        store!("tmm1", s.add(column + SIDE), s_bytes);
                    }
                }
            }
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
        let (p_bytes, o_bytes) = (TILE * 4, o_stride * 4);
        // SAFETY: see above.
        unsafe {
            let steps = packed_values(values, v.cast(), o_stride);
            scale(o, o_stride, alpha, rows);
            for row in (0..rows).step_by(2 * SIDE) {
                let (p, o) = (p.add(row * TILE), o.add(row * o_stride));
                let two = rows - row > SIDE;
                let mut column = 0;
                while column < o_stride {
                    let v = v.add(column);
                    let above = o.add(column);
                    let below = above.add(SIDE * o_stride);
                    match (two, o_stride - column > SIDE) {
                        (true, true) => {
                            load!("tmm0", above, o_bytes);
                            load!("tmm1", above.add(SIDE), o_bytes);
                            load!("tmm2", below, o_bytes);
                            load!("tmm3", below.add(SIDE), o_bytes);
                            for step in steps.clone() {
                                let (p, v) = (p.add(step * SIDE), v.add(step * SIDE * o_stride));
                                load!("tmm4", p, p_bytes);
                                load!("tmm6", v, o_bytes);
                                dot!("tmm0", "tmm4", "tmm6");
                                load!("tmm7", v.add(SIDE), o_bytes);
                                dot!("tmm1", "tmm4", "tmm7");
                                load!("tmm5", p.add(SIDE * TILE), p_bytes);
                                dot!("tmm2", "tmm5", "tmm6");
                                dot!("tmm3", "tmm5", "tmm7");
                            }
                            store!("tmm0", above, o_bytes);
                            store!("tmm1", above.add(SIDE), o_bytes);
                            store!("tmm2", below, o_bytes);
                            store!("tmm3", below.add(SIDE), o_bytes);
                        }
                        (true, false) => {
                            load!("tmm0", above, o_bytes);
                            load!("tmm2", below, o_bytes);
                            for step in steps.clone() {
                                let (p, v) = (p.add(step * SIDE), v.add(step * SIDE * o_stride));
                                load!("tmm6", v, o_bytes);
                                load!("tmm4", p, p_bytes);
                                dot!("tmm0", "tmm4", "tmm6");
                                load!("tmm5", p.add(SIDE * TILE), p_bytes);
                                dot!("tmm2", "tmm5", "tmm6");
                            }
                            store!("tmm0", above, o_bytes);
                            store!("tmm2", below, o_bytes);
                        }
                        (false, _) => {
                            load!("tmm0", above, o_bytes);
                            for step in steps.clone() {
                                load!("tmm4", p.add(step * SIDE), p_bytes);
                                load!("tmm6", v.add(step * SIDE * o_stride), o_bytes);
                                dot!("tmm0", "tmm4", "tmm6");
                            }
                            store!("tmm0", above, o_bytes);
                        }
                    }
                    column += if two { 2 * SIDE } else { SIDE };
                }
            }
        }
    }
}

// SAFETY of every block below: as above, with at most 16 rows.
impl Products for Narrow {
    const ROW_BLOCK: usize = SIDE;
    type Setup = Tiles;

    #[inline(always)]
    unsafe fn set_up(rows: usize) -> Tiles {
        // Tiles 4 … 7 hold rows of queries: weights and sums. Fewer rows are faster.
        // SAFETY: see above.
        unsafe { Tiles::new([SIDE, SIDE, SIDE, SIDE, rows, rows, rows, rows]) }
    }

    #[inline(always)]
    unsafe fn query(row: *const u8, _format: Format, head_size: usize, at: usize, q: *mut f32, _q_stride: usize) {
        let row = row.cast::<u16>();
        // Pairs along the head go down, rows go across: the second operand of a product.
        // SAFETY: see above; the place holds 16 rows of whole steps.
        unsafe {
            let element = |d: usize| if d < head_size { u32::from(row.add(d).read_unaligned()) } else { 0 };
            for pair in 0..head_size.next_multiple_of(STEP) / 2 {
                let both = element(2 * pair) | element(2 * pair + 1) << 16;
                q.cast::<u32>().add(pair * SIDE + at).write(both);
            }
        }
    }

    #[inline(always)]
    unsafe fn scores(
        q: *const f32,
        _q_stride: usize,
        rows: usize,
        head_size: usize,
        keys: &KeyRows<'_>,
        k: *mut f32,
        s: *mut f32,
    ) {
        let steps = head_size.div_ceil(STEP);
        for n in (keys.seen.start / SIDE * SIDE..keys.seen.end).step_by(SIDE) {
            // SAFETY: see above.
            unsafe {
                let (from, bytes) = key_block(keys.rows, n, head_size, k);
                zero!("tmm0");
                for step in 0..steps {
                    load!("tmm2", from.add(step * 64), bytes);
                    load!("tmm3", q.add(step * SIDE * SIDE), 64_usize);
                    dot!("tmm0", "tmm2", "tmm3");
                }
                let mut block = [Avx512::zero(); SIDE];
                store!("tmm0", block.as_mut_ptr(), 64_usize);
                Avx512::transpose(&mut block);
                for (row, vector) in block.iter().enumerate().take(rows) {
                    vector.store(s.add(row * TILE + n));
                }
            }
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
        let (p_bytes, o_bytes) = (TILE * 4, o_stride * 4);
        // SAFETY: see above.
        unsafe {
            let steps = packed_values(values, v.cast(), o_stride);
            scale(o, o_stride, alpha, rows);
            let mut column = 0;
            while column < o_stride {
                let (v, o) = (v.add(column), o.add(column));
                if o_stride - column > SIDE {
                    load!("tmm4", o, o_bytes);
                    load!("tmm5", o.add(SIDE), o_bytes);
                    for step in steps.clone() {
                        let v = v.add(step * SIDE * o_stride);
                        load!("tmm6", p.add(step * SIDE), p_bytes);
                        load!("tmm2", v, o_bytes);
                        dot!("tmm4", "tmm6", "tmm2");
                        load!("tmm3", v.add(SIDE), o_bytes);
                        dot!("tmm5", "tmm6", "tmm3");
                    }
                    store!("tmm4", o, o_bytes);
                    store!("tmm5", o.add(SIDE), o_bytes);
                } else {
                    load!("tmm4", o, o_bytes);
                    for step in steps.clone() {
                        load!("tmm6", p.add(step * SIDE), p_bytes);
                        load!("tmm2", v.add(step * SIDE * o_stride), o_bytes);
                        dot!("tmm4", "tmm6", "tmm2");
                    }
                    store!("tmm4", o, o_bytes);
                }
                column += 2 * SIDE;
            }
        }
    }
}

/// Sixteen rows of keys, and the bytes from one to the next: as they lie in the cache where they lie
/// evenly and are whole steps, else copied to `k`.
///
/// # Safety
/// AVX-512 must be enabled; rows that are not null hold `head_size` bf16, `k` 16 rows of whole steps.
#[inline(always)]
unsafe fn key_block(rows: &RowPointers, first: usize, head_size: usize, k: *mut f32) -> (*const u8, usize) {
    let rows = &rows[first..first + SIDE];
    let bytes = (rows[1] as usize).wrapping_sub(rows[0] as usize);
    let is_even = head_size.is_multiple_of(STEP)
        && !rows[0].is_null()
        && rows.windows(2).all(|pair| !pair[1].is_null() && (pair[1] as usize).wrapping_sub(pair[0] as usize) == bytes);
    if is_even {
        return (rows[0], bytes);
    }
    let len = head_size.next_multiple_of(STEP);
    for (at, row) in rows.iter().enumerate() {
        for d in (0..len).step_by(STEP) {
            // SAFETY: the caller vouches for rows and buffer.
            unsafe {
                let vector = pack::pairs::load(*row, d, head_size);
                _mm512_storeu_si512(k.cast::<u16>().add(at * len + d).cast(), vector);
            }
        }
    }
    (k.cast_const().cast(), 2 * len)
}
