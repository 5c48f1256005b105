//! Tiles of K and V as the products want them: keys transposed, values padded.
//!
//! A null row stands for a position that no query of the unit sees: what its slot holds never
//! matters, not even NaN.

use crate::{micro::TILE, rows::Format, simd::Simd};
use std::ops::Range;

/// Addresses of the rows of a tile; null = not seen.
pub(crate) type RowPointers = [*const u8; TILE];

/// # Safety
/// As [`Simd`]; a row that is not null must hold `row_len` elements.
#[inline(always)]
unsafe fn load<S: Simd>(row: *const u8, format: Format, at: usize, row_len: usize) -> S {
    // SAFETY: the caller vouches for the row.
    unsafe {
        if row.is_null() {
            return S::zero();
        }
        let from = row.add(at * format.size());
        match row_len - at {
            left if left >= S::LANES => S::load_any(from, format),
            left => S::load_any_partial(from, format, left),
        }
    }
}

/// Keys `[n][head_size]` → `k` `[head_size][TILE]`, for the groups of keys that hold one of `seen`.
///
/// # Safety
/// As [`Simd`]; rows that are not null must hold `head_size` elements, `k` as many as stated.
#[inline(always)]
pub(crate) unsafe fn keys<S: Simd>(
    rows: &RowPointers,
    format: Format,
    seen: Range<usize>,
    head_size: usize,
    k: *mut f32,
) {
    let first = seen.start / S::LANES * S::LANES;
    for n in (first..seen.end).step_by(S::LANES) {
        for d in (0..head_size).step_by(S::LANES) {
            // SAFETY: the caller vouches for rows and buffer; `count` keeps inside `head_size`.
            unsafe {
                let mut block = [S::zero(); 16];
                for (vector, row) in block.iter_mut().zip(&rows[n..n + S::LANES]) {
                    *vector = load(*row, format, d, head_size);
                }
                S::transpose(&mut block[..S::LANES]);
                let count = S::LANES.min(head_size - d);
                for (i, vector) in block[..count].iter().enumerate() {
                    vector.store(k.add((d + i) * TILE + n));
                }
            }
        }
    }
}

/// Values `[n][row_len]` → `v` `[TILE][stride]`, padded with zeros, for the rows in `seen`.
///
/// # Safety
/// As [`Simd`]; rows that are not null must hold `row_len` elements, `v` as many as stated; `stride`
/// is a multiple of 16 and not below `row_len`.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd>(
    rows: &RowPointers,
    format: Format,
    seen: Range<usize>,
    row_len: usize,
    v: *mut f32,
    stride: usize,
) {
    for n in seen {
        for d in (0..stride).step_by(S::LANES) {
            // SAFETY: the caller vouches for rows and buffer.
            unsafe {
                let vector: S = if d < row_len { load(rows[n], format, d, row_len) } else { S::zero() };
                vector.store(v.add(n * stride + d));
            }
        }
    }
}

/// The same for pairs of bf16.
#[cfg(target_arch = "x86_64")]
pub(crate) mod pairs {
    use super::{RowPointers, TILE};
    use crate::simd::{Avx512, Simd};
    use std::{arch::x86_64::*, ops::Range};

    /// Up to 32 bf16 of a row, zeros behind.
    ///
    /// # Safety
    /// AVX-512 must be enabled; a row that is not null must hold `row_len` bf16.
    #[inline(always)]
    pub(crate) unsafe fn load(row: *const u8, at: usize, row_len: usize) -> __m512i {
        // SAFETY: the caller vouches for the row; the mask keeps inside it.
        unsafe {
            if row.is_null() {
                return _mm512_setzero_si512();
            }
            let from = row.add(2 * at);
            match row_len - at {
                left if left >= 32 => _mm512_loadu_si512(from.cast()),
                left => _mm512_maskz_loadu_epi16((1 << left) - 1, from.cast()),
            }
        }
    }

    /// Keys `[n][head_size]` → `k` `[head_size / 2][TILE]` of pairs along the head, with zeros behind
    /// up to a multiple of 16 pairs.
    ///
    /// # Safety
    /// As [`super::keys`], with AVX-512.
    #[inline(always)]
    pub(crate) unsafe fn keys(rows: &RowPointers, seen: Range<usize>, head_size: usize, k: *mut u32) {
        let first = seen.start / 16 * 16;
        for n in (first..seen.end).step_by(16) {
            for d in (0..head_size).step_by(32) {
                // SAFETY: the caller vouches for rows and buffer; `count` keeps inside.
                unsafe {
                    let mut block = [Avx512::zero(); 16];
                    for (vector, row) in block.iter_mut().zip(&rows[n..n + 16]) {
                        *vector = Avx512(_mm512_castsi512_ps(load(*row, d, head_size)));
                    }
                    Avx512::transpose(&mut block);
                    for (i, vector) in block.iter().enumerate() {
                        vector.store(k.cast::<f32>().add((d / 2 + i) * TILE + n));
                    }
                }
            }
        }
    }

    /// Values `[n][row_len]` → `v` `[TILE / 2][stride]` of pairs of rows.
    ///
    /// # Safety
    /// As [`super::values`], with AVX-512.
    #[inline(always)]
    pub(crate) unsafe fn values(rows: &RowPointers, seen: Range<usize>, row_len: usize, v: *mut u32, stride: usize) {
        // Elements 0 … 15 of two rows, and 16 … 31, each beside its neighbour of the other row.
        let (mut low, mut high) = ([0_u16; 32], [0_u16; 32]);
        for i in 0..32 {
            let from = i as u16 / 2 + 32 * (i as u16 % 2);
            (low[i], high[i]) = (from, from + 16);
        }
        // SAFETY: the caller vouches for AVX-512, rows and buffer; only whole halves are stored.
        unsafe {
            let (low, high) = (_mm512_loadu_si512(low.as_ptr().cast()), _mm512_loadu_si512(high.as_ptr().cast()));
            for pair in seen.start / 2..seen.end.div_ceil(2) {
                let (first, second) = (rows[2 * pair], rows[2 * pair + 1]);
                let to = v.add(pair * stride);
                for d in (0..stride).step_by(32) {
                    let left = row_len.saturating_sub(d);
                    let (a, b) = if left == 0 {
                        (_mm512_setzero_si512(), _mm512_setzero_si512())
                    } else {
                        (load(first, d, row_len), load(second, d, row_len))
                    };
                    _mm512_storeu_si512(to.add(d).cast(), _mm512_permutex2var_epi16(a, low, b));
                    if stride - d > 16 {
                        _mm512_storeu_si512(to.add(d + 16).cast(), _mm512_permutex2var_epi16(a, high, b));
                    }
                }
            }
        }
    }
}
