//! The two products of a tile: scores `S = Q·Kᵀ` and values `O = O·α + P·V`.
//!
//! Each element is one chain of multiply-adds in ascending order of the inner index, however many
//! rows and columns are computed beside it. Must not know: masks, softmax, where rows come from.

use crate::simd::Simd;

/// Keys of a tile.
pub(crate) const TILE: usize = 64;
/// Rows that are computed together.
const ROWS: usize = 6;

/// Runs `$body` for as many rows as there are, six at a time, with the number as a constant.
macro_rules! by_rows {
    ($rows:expr, |$row:ident, $count:ident| $body:expr) => {
        let mut $row = 0;
        while $row < $rows {
            match ($rows - $row).min(ROWS) {
                6 => by_rows!(@call 6, $count, $body),
                5 => by_rows!(@call 5, $count, $body),
                4 => by_rows!(@call 4, $count, $body),
                3 => by_rows!(@call 3, $count, $body),
                2 => by_rows!(@call 2, $count, $body),
                _ => by_rows!(@call 1, $count, $body),
            }
            $row += ($rows - $row).min(ROWS);
        }
    };
    (@call $n:literal, $count:ident, $body:expr) => {{
        const $count: usize = $n;
        $body
    }};
}

/// Scores of `rows` queries: `q` `[rows][q_stride]`, `k` `[head_size][TILE]`, `s` `[rows][TILE]`.
///
/// # Safety
/// As [`Simd`]; the buffers must be as large as stated.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd>(
    q: *const f32,
    q_stride: usize,
    rows: usize,
    head_size: usize,
    k: *const f32,
    s: *mut f32,
) {
    by_rows!(rows, |row, R| {
        // SAFETY: the caller vouches for `rows` rows.
        let (q, s) = unsafe { (q.add(row * q_stride), s.add(row * TILE)) };
        let columns = if S::LANES == 16 { 4 } else { 2 } * S::LANES;
        for column in (0..TILE).step_by(columns) {
            // SAFETY: as above; the columns lie inside the tile.
            unsafe {
                let (k, s) = (k.add(column), s.add(column));
                if S::LANES == 16 {
                    scores_block::<S, R, 4>(q, q_stride, head_size, k, s);
                } else {
                    scores_block::<S, R, 2>(q, q_stride, head_size, k, s);
                }
            }
        }
    });
}

/// # Safety
/// As [`scores`], for `R` rows and `C` vectors of columns.
#[inline(always)]
unsafe fn scores_block<S: Simd, const R: usize, const C: usize>(
    q: *const f32,
    q_stride: usize,
    head_size: usize,
    k: *const f32,
    s: *mut f32,
) {
    // SAFETY: the caller vouches for the buffers.
    unsafe {
        let mut sums = [[S::zero(); C]; R];
        for d in 0..head_size {
            let mut keys = [S::zero(); C];
            for (c, key) in keys.iter_mut().enumerate() {
                *key = S::load(k.add(d * TILE + c * S::LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let query = S::splat(*q.add(r * q_stride + d));
                for (sum, key) in sums.iter_mut().zip(keys) {
                    *sum = query.mul_add(key, *sum);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (c, sum) in sums.into_iter().enumerate() {
                sum.store(s.add(r * TILE + c * S::LANES));
            }
        }
    }
}

/// `o = o·alpha + p·v` for `rows` rows: `p` `[rows][TILE]` of which the keys `first..last` count, `v`
/// `[TILE][o_stride]`, `o` `[rows][o_stride]`, `alpha` `[rows]`. `o_stride` is a multiple of 16.
///
/// # Safety
/// As [`Simd`]; the buffers must be as large as stated.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd>(
    p: *const f32,
    (first, last): (usize, usize),
    v: *const f32,
    alpha: *const f32,
    o: *mut f32,
    o_stride: usize,
    rows: usize,
) {
    let wide = if S::LANES == 16 { 4 } else { 2 };
    let mut column = 0;
    while column < o_stride {
        let all = o_stride - column >= wide * S::LANES;
        by_rows!(rows, |row, R| {
            // SAFETY: the caller vouches for `rows` rows; the columns lie inside the stride.
            unsafe {
                let (p, alpha) = (p.add(row * TILE), alpha.add(row));
                let (v, o) = (v.add(column), o.add(row * o_stride + column));
                match (all, S::LANES) {
                    (true, 16) => values_block::<S, R, 4>(p, (first, last), v, alpha, o, o_stride),
                    (true, _) => values_block::<S, R, 2>(p, (first, last), v, alpha, o, o_stride),
                    (false, _) => values_block::<S, R, 1>(p, (first, last), v, alpha, o, o_stride),
                }
            }
        });
        column += if all { wide * S::LANES } else { S::LANES };
    }
}

/// # Safety
/// As [`values`], for `R` rows and `C` vectors of columns.
#[inline(always)]
unsafe fn values_block<S: Simd, const R: usize, const C: usize>(
    p: *const f32,
    (first, last): (usize, usize),
    v: *const f32,
    alpha: *const f32,
    o: *mut f32,
    o_stride: usize,
) {
    // SAFETY: the caller vouches for the buffers.
    unsafe {
        let mut sums = [[S::zero(); C]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            let alpha = S::splat(*alpha.add(r));
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum = S::load(o.add(r * o_stride + c * S::LANES)).mul(alpha);
            }
        }
        for n in first..last {
            let mut row = [S::zero(); C];
            for (c, value) in row.iter_mut().enumerate() {
                *value = S::load(v.add(n * o_stride + c * S::LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let weight = S::splat(*p.add(r * TILE + n));
                for (sum, value) in sums.iter_mut().zip(row) {
                    *sum = weight.mul_add(value, *sum);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (c, sum) in sums.into_iter().enumerate() {
                sum.store(o.add(r * o_stride + c * S::LANES));
            }
        }
    }
}

/// The same products by dot products of pairs of bf16, summed in f32.
#[cfg(target_arch = "x86_64")]
pub(crate) mod pairs {
    use super::{ROWS, TILE};
    use std::arch::x86_64::*;

    /// # Safety
    /// AVX-512 BF16 must be enabled; `at` must be valid for sixteen pairs.
    #[inline(always)]
    unsafe fn load(at: *const u32) -> __m512bh {
        // SAFETY: the caller vouches for it; the two types have the same bits.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(at.cast())) }
    }

    /// # Safety
    /// As [`load`], for one pair.
    #[inline(always)]
    unsafe fn splat(at: *const u32) -> __m512bh {
        // SAFETY: as above.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(at.read().cast_signed())) }
    }

    /// As [`super::scores`], with `q` `[rows][q_stride]` and `k` `[pairs][TILE]` of pairs.
    ///
    /// # Safety
    /// AVX-512 BF16 must be enabled; the buffers must be as large as stated.
    #[inline(always)]
    pub(crate) unsafe fn scores(
        q: *const u32,
        q_stride: usize,
        rows: usize,
        num_pairs: usize,
        k: *const u32,
        s: *mut f32,
    ) {
        by_rows!(rows, |row, R| {
            // SAFETY: the caller vouches for the buffers.
            unsafe {
                let (q, s) = (q.add(row * q_stride), s.add(row * TILE));
                let mut sums = [[_mm512_setzero_ps(); 4]; R];
                for d in 0..num_pairs {
                    let mut keys = [load(k.add(d * TILE)); 4];
                    for (c, key) in keys.iter_mut().enumerate() {
                        *key = load(k.add(d * TILE + 16 * c));
                    }
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let query = splat(q.add(r * q_stride + d));
                        for (sum, key) in sums.iter_mut().zip(keys) {
                            *sum = _mm512_dpbf16_ps(*sum, key, query);
                        }
                    }
                }
                for (r, sums) in sums.into_iter().enumerate() {
                    for (c, sum) in sums.into_iter().enumerate() {
                        _mm512_storeu_ps(s.add(r * TILE + 16 * c), sum);
                    }
                }
            }
        });
    }

    /// As [`super::values`], with `p` `[rows][TILE]`, of which the first half is used, and `v` `[TILE / 2][o_stride]` of pairs of
    /// keys, of which the pairs `first..last` count.
    ///
    /// # Safety
    /// AVX-512 BF16 must be enabled; the buffers must be as large as stated.
    #[inline(always)]
    pub(crate) unsafe fn values(
        p: *const u32,
        range: (usize, usize),
        v: *const u32,
        alpha: *const f32,
        o: *mut f32,
        o_stride: usize,
        rows: usize,
    ) {
        let mut column = 0;
        while column < o_stride {
            let all = o_stride - column >= 64;
            by_rows!(rows, |row, R| {
                // SAFETY: the caller vouches for the buffers; the columns lie inside the stride.
                unsafe {
                    let (p, alpha) = (p.add(row * TILE), alpha.add(row));
                    let (v, o) = (v.add(column), o.add(row * o_stride + column));
                    if all {
                        values_block::<R, 4>(p, range, v, alpha, o, o_stride);
                    } else {
                        values_block::<R, 1>(p, range, v, alpha, o, o_stride);
                    }
                }
            });
            column += if all { 64 } else { 16 };
        }
    }

    /// # Safety
    /// As [`values`], for `R` rows and `C` vectors of columns.
    #[inline(always)]
    unsafe fn values_block<const R: usize, const C: usize>(
        p: *const u32,
        (first, last): (usize, usize),
        v: *const u32,
        alpha: *const f32,
        o: *mut f32,
        o_stride: usize,
    ) {
        // SAFETY: the caller vouches for the buffers.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); C]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                let alpha = _mm512_set1_ps(*alpha.add(r));
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm512_mul_ps(_mm512_loadu_ps(o.add(r * o_stride + 16 * c)), alpha);
                }
            }
            for n in first..last {
                let mut row = [load(v.add(n * o_stride)); C];
                for (c, value) in row.iter_mut().enumerate() {
                    *value = load(v.add(n * o_stride + 16 * c));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let weight = splat(p.add(r * TILE + n));
                    for (sum, value) in sums.iter_mut().zip(row) {
                        *sum = _mm512_dpbf16_ps(*sum, value, weight);
                    }
                }
            }
            for (r, sums) in sums.into_iter().enumerate() {
                for (c, sum) in sums.into_iter().enumerate() {
                    _mm512_storeu_ps(o.add(r * o_stride + 16 * c), sum);
                }
            }
        }
    }
}
