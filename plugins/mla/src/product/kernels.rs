//! The micro-kernels of a product: a few rows by one panel, for each instruction set.
//!
//! All `unsafe` of the products lies here. Must not know packing beyond one panel.

use super::PANEL;
use attache_cpu_kernels::Isa;
use half::bf16;

/// The values of one panel, `[inner][PANEL]`.
#[derive(Clone, Copy)]
pub enum Panel<'a> {
    Bf16(&'a [bf16]),
    F32(&'a [f32]),
}

/// Vectors of an instruction set.
///
/// # Safety
/// The functions may be called only where the instruction set is present; pointers must be valid
/// for `WIDTH` elements.
trait Vector: Copy {
    const WIDTH: usize;
    unsafe fn zero() -> Self;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_bf16(from: *const bf16) -> Self;
    /// `self + a · b`.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
    unsafe fn store(self, to: *mut f32);
}

/// Elements of a panel.
trait Weight: Copy {
    /// # Safety
    /// As [`Vector`].
    unsafe fn load<V: Vector>(from: *const Self) -> V;
}

impl Weight for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller vouches for it.
        unsafe { V::load(from) }
    }
}

impl Weight for bf16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller vouches for it.
        unsafe { V::load_bf16(from) }
    }
}

/// `ROWS` rows of `x` times a panel, into `out` (`ROWS` rows of `PANEL`). `VECTORS` vectors make a panel.
///
/// # Safety
/// As [`Vector`]; `x` must have `ROWS` rows of `inner` elements, `panel` `inner · PANEL` elements.
#[inline(always)]
unsafe fn tile<V: Vector, W: Weight, const ROWS: usize, const VECTORS: usize>(
    inner: usize,
    panel: *const W,
    x: *const f32,
    x_stride: usize,
    out: &mut [[f32; PANEL]; ROWS],
) {
    const { assert!(VECTORS * V::WIDTH == PANEL) };
    // SAFETY: the caller vouches for the instruction set and for every index below.
    unsafe {
        let mut sums = [[V::zero(); VECTORS]; ROWS];
        for i in 0..inner {
            let mut weights = [V::zero(); VECTORS];
            for (at, weight) in weights.iter_mut().enumerate() {
                *weight = W::load(panel.add(i * PANEL + at * V::WIDTH));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let value = V::splat(*x.add(row * x_stride + i));
                for (sum, weight) in sums.iter_mut().zip(weights) {
                    *sum = sum.add_product(value, weight);
                }
            }
        }
        for (sums, out) in sums.iter().zip(out) {
            for (at, sum) in sums.iter().enumerate() {
                sum.store(out.as_mut_ptr().add(at * V::WIDTH));
            }
        }
    }
}

/// All rows times a panel, `ROWS` at a time.
///
/// # Safety
/// As [`tile`], for all rows; `out` must hold `width` elements of each row.
#[inline(always)]
unsafe fn rows_by_panel<V: Vector, W: Weight, const ROWS: usize, const VECTORS: usize>(
    panel: &[W],
    rows: usize,
    (x, x_stride): (&[f32], usize),
    (out, out_stride): (&mut [f32], usize),
    width: usize,
) {
    let inner = panel.len() / PANEL;
    let mut row = 0;
    while row < rows {
        let from = x[row * x_stride..].as_ptr();
        // SAFETY: the caller vouches for the instruction set; the rows lie in `x`.
        let (step, tiles) = unsafe {
            let mut tiles = [[0.0; PANEL]; ROWS];
            if rows - row >= ROWS {
                tile::<V, W, ROWS, VECTORS>(inner, panel.as_ptr(), from, x_stride, &mut tiles);
                (ROWS, tiles)
            } else {
                let mut one = [[0.0; PANEL]];
                tile::<V, W, 1, VECTORS>(inner, panel.as_ptr(), from, x_stride, &mut one);
                tiles[0] = one[0];
                (1, tiles)
            }
        };
        for (at, values) in tiles.iter().take(step).enumerate() {
            out[(row + at) * out_stride..][..width].copy_from_slice(&values[..width]);
        }
        row += step;
    }
}

/// Eight lanes for every machine; the compiler makes of them what it can.
#[derive(Clone, Copy)]
struct Portable([f32; 8]);

impl Vector for Portable {
    const WIDTH: usize = 8;
    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; 8])
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for it.
        Self(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller vouches for it.
        Self(unsafe { from.cast::<[bf16; 8]>().read_unaligned() }.map(bf16::to_f32))
    }
    #[inline(always)]
    unsafe fn add_product(mut self, a: Self, b: Self) -> Self {
        for ((sum, a), b) in self.0.iter_mut().zip(a.0).zip(b.0) {
            *sum += a * b;
        }
        self
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for it.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) };
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Vector, bf16};
    use std::arch::x86_64::*;

    macro_rules! vector {
        ($name:ident, $register:ty, $width:literal, $zero:ident, $splat:ident, $load:ident, $fma:ident, $store:ident,
         |$pointer:ident| $load_bf16:expr) => {
            #[derive(Clone, Copy)]
            pub struct $name($register);

            impl Vector for $name {
                const WIDTH: usize = $width;
                #[inline(always)]
                unsafe fn zero() -> Self {
                    // SAFETY: the caller vouches for the instruction set, here and below.
                    Self(unsafe { $zero() })
                }
                #[inline(always)]
                unsafe fn splat(value: f32) -> Self {
                    // SAFETY: as above.
                    Self(unsafe { $splat(value) })
                }
                #[inline(always)]
                unsafe fn load(from: *const f32) -> Self {
                    // SAFETY: as above, and for the pointer.
                    Self(unsafe { $load(from) })
                }
                #[inline(always)]
                unsafe fn load_bf16($pointer: *const bf16) -> Self {
                    // SAFETY: as above. The bits of a bf16 are the upper half of an f32's.
                    Self(unsafe { $load_bf16 })
                }
                #[inline(always)]
                unsafe fn add_product(self, a: Self, b: Self) -> Self {
                    // SAFETY: as above.
                    Self(unsafe { $fma(a.0, b.0, self.0) })
                }
                #[inline(always)]
                unsafe fn store(self, to: *mut f32) {
                    // SAFETY: as above, and for the pointer.
                    unsafe { $store(to, self.0) };
                }
            }
        };
    }

    vector!(
        Avx512,
        __m512,
        16,
        _mm512_setzero_ps,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_fmadd_ps,
        _mm512_storeu_ps,
        |from| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))))
    );
    vector!(
        Avx2,
        __m256,
        8,
        _mm256_setzero_ps,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_fmadd_ps,
        _mm256_storeu_ps,
        |from| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))))
    );
}

macro_rules! entry {
    ($name:ident, $vector:ty, $rows:literal, $vectors:literal $(, $feature:literal)?) => {
        /// # Safety
        /// As [`rows_by_panel`].
        $(#[target_feature(enable = $feature)])?
        unsafe fn $name(
            panel: Panel<'_>,
            rows: usize,
            x: (&[f32], usize),
            out: (&mut [f32], usize),
            width: usize,
        ) {
            // SAFETY: the caller vouches for it.
            unsafe {
                match panel {
                    Panel::Bf16(panel) => rows_by_panel::<$vector, bf16, $rows, $vectors>(panel, rows, x, out, width),
                    Panel::F32(panel) => rows_by_panel::<$vector, f32, $rows, $vectors>(panel, rows, x, out, width),
                }
            }
        }
    };
}
entry!(portable, Portable, 1, 4);
#[cfg(target_arch = "x86_64")]
entry!(avx2, x86::Avx2, 2, 4, "avx2,fma");
#[cfg(target_arch = "x86_64")]
entry!(avx512, x86::Avx512, 8, 2, "avx512f");

/// All rows times a panel: `width` elements of each row of `out` are written.
pub fn run(isa: Isa, panel: Panel<'_>, rows: usize, x: (&[f32], usize), out: (&mut [f32], usize), width: usize) {
    // SAFETY: the instruction set is present, and `multiply` has checked that `x` and `out` hold the
    // rows.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if isa.is_available() => avx512(panel, rows, x, out, width),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if isa.is_available() => avx2(panel, rows, x, out, width),
            _ => portable(panel, rows, x, out, width),
        }
    }
}
