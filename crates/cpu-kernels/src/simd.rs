//! Vectors of f32 on each instruction set, and the exponential on them.
//!
//! The functions are inlined into ones that enable the instruction set; called anywhere else they
//! would be slow, and on a machine without it wrong.

use crate::rows::Format;
use half::{bf16, f16};

/// A vector of f32.
///
/// # Safety
/// Functions may be called only where the instruction set is present. Pointers must be valid for
/// `LANES` elements, or for `count` where one is given.
pub(crate) trait Simd: Copy {
    /// Elements of a vector.
    const LANES: usize;

    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_f16(from: *const f16) -> Self;
    unsafe fn load_bf16(from: *const bf16) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self · a + b`, rounded once (on the portable path twice).
    unsafe fn mul_add(self, a: Self, b: Self) -> Self;
    unsafe fn max(self, other: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// Nearest whole number.
    unsafe fn round(self) -> Self;
    /// 2 to a whole number in −126 … 127.
    unsafe fn power_of_two(self) -> Self;
    /// Where `self < other`: `yes`, elsewhere `no`.
    unsafe fn select_less(self, other: Self, yes: Self, no: Self) -> Self;
    /// Rows become columns: `LANES` vectors of `LANES`.
    unsafe fn transpose(rows: &mut [Self]);

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: as the caller vouches.
        unsafe { Self::splat(0.0) }
    }

    /// 0, 1, 2, …
    #[inline(always)]
    unsafe fn iota() -> Self {
        const COUNT: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
        // SAFETY: no vector is longer than 16.
        unsafe { Self::load(COUNT.as_ptr()) }
    }

    /// The elements, in a fixed place.
    #[inline(always)]
    unsafe fn to_array(self) -> [f32; 16] {
        let mut all = [0.0; 16];
        // SAFETY: no vector is longer than 16.
        unsafe { self.store(all.as_mut_ptr()) };
        all
    }

    #[inline(always)]
    unsafe fn horizontal_max(self) -> f32 {
        // SAFETY: as the caller vouches.
        let all = unsafe { self.to_array() };
        all[..Self::LANES].iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }

    /// The sum, always in the same order.
    #[inline(always)]
    unsafe fn horizontal_sum(self) -> f32 {
        // SAFETY: as the caller vouches.
        let mut all = unsafe { self.to_array() };
        let mut half = Self::LANES / 2;
        while half > 0 {
            for lane in 0..half {
                all[lane] += all[lane + half];
            }
            half /= 2;
        }
        all[0]
    }

    /// Elements of any format.
    #[inline(always)]
    unsafe fn load_any(from: *const u8, format: Format) -> Self {
        // SAFETY: as the caller vouches.
        unsafe {
            match format {
                Format::F32 => Self::load(from.cast()),
                Format::F16 => Self::load_f16(from.cast()),
                Format::Bf16 => Self::load_bf16(from.cast()),
            }
        }
    }

    /// The first `count` elements, zeros behind.
    #[inline(always)]
    unsafe fn load_any_partial(from: *const u8, format: Format, count: usize) -> Self {
        let mut padded = [0_u32; 16];
        let bytes = count.min(Self::LANES) * format.size();
        // SAFETY: the caller vouches for `count` elements; the copy is as large as any vector.
        unsafe {
            std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr().cast(), bytes);
            Self::load_any(padded.as_ptr().cast(), format)
        }
    }

    /// 2 to the power of `self ≤ 0`, with a relative error below 1.5e-7; exactly 1 for 0 and exactly 0
    /// below −126.
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // Least squares in the relative error, constrained to 1 at 0; exact coefficients would err
        // by 2e-9.
        const C: [f32; 6] =
            [std::f32::consts::LN_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_5, 0.000_153_533_53];
        // SAFETY: as the caller vouches.
        unsafe {
            let least = Self::splat(-126.0);
            let x = self.max(least);
            let whole = x.round();
            let f = x.sub(whole);
            let mut p = Self::splat(C[5]);
            for c in [C[4], C[3], C[2], C[1], C[0]] {
                p = p.mul_add(f, Self::splat(c));
            }
            let p = p.mul_add(f, Self::splat(1.0)).mul(whole.power_of_two());
            self.select_less(least, Self::zero(), p)
        }
    }

    /// Hyperbolic tangent, with an absolute error below 2e-7.
    #[inline(always)]
    unsafe fn tanh(self) -> Self {
        // SAFETY: as the caller vouches.
        unsafe {
            let one = Self::splat(1.0);
            let e = self.abs().mul(Self::splat(-2.0 * std::f32::consts::LOG2_E)).exp2();
            let magnitude = one.sub(e).div(one.add(e));
            self.select_less(Self::zero(), Self::zero().sub(magnitude), magnitude)
        }
    }
}

/// Eight f32 in plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; 8]);

macro_rules! lanes {
    (|$lane:ident| $value:expr) => {
        Portable(std::array::from_fn(|$lane| $value))
    };
}

impl Simd for Portable {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for eight elements.
        Self(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the caller vouches for eight elements.
        let all = unsafe { from.cast::<[f16; 8]>().read_unaligned() };
        lanes!(|i| all[i].to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller vouches for eight elements.
        let all = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        lanes!(|i| f32::from_bits(u32::from(all[i]) << 16))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for eight elements.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        lanes!(|i| self.0[i] + other.0[i])
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        lanes!(|i| self.0[i] - other.0[i])
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        lanes!(|i| self.0[i] * other.0[i])
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        lanes!(|i| self.0[i] / other.0[i])
    }
    #[inline(always)]
    unsafe fn mul_add(self, a: Self, b: Self) -> Self {
        lanes!(|i| self.0[i] * a.0[i] + b.0[i])
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        lanes!(|i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        lanes!(|i| self.0[i].abs())
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // Adding and taking away 1.5·2²³ rounds what is small to a whole number, ties to even.
        const LARGE: f32 = 12_582_912.0;
        lanes!(|i| (self.0[i] + LARGE) - LARGE)
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        lanes!(|i| f32::from_bits(((self.0[i] as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn select_less(self, other: Self, yes: Self, no: Self) -> Self {
        lanes!(|i| if self.0[i] < other.0[i] { yes.0[i] } else { no.0[i] })
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self]) {
        for row in 1..8 {
            for column in 0..row {
                let other = rows[column].0[row];
                rows[column].0[row] = std::mem::replace(&mut rows[row].0[column], other);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Simd;
    use half::{bf16, f16};
    use std::arch::x86_64::*;

    /// Eight f32 in a register of AVX2.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256);

    // SAFETY of every block below: the trait's callers vouch for the instruction set and for the
    // pointers.
    impl Simd for Avx2 {
        const LANES: usize = 8;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_set1_ps(value) })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn load_f16(from: *const f16) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) })
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const bf16) -> Self {
            // SAFETY: see above.
            unsafe {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see above.
            unsafe { _mm256_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn div(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_div_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul_add(self, a: Self, b: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_fmadd_ps(self.0, a.0, b.0) })
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_max_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn abs(self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0) })
        }
        #[inline(always)]
        unsafe fn round(self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0) })
        }
        #[inline(always)]
        unsafe fn power_of_two(self) -> Self {
            // SAFETY: see above.
            unsafe {
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
                Self(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
            }
        }
        #[inline(always)]
        unsafe fn select_less(self, other: Self, yes: Self, no: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0)) })
        }
        #[inline(always)]
        unsafe fn transpose(rows: &mut [Self]) {
            // SAFETY: see above; pairs, then quads, then halves of registers change places.
            unsafe {
                let mut t = [_mm256_setzero_ps(); 8];
                for i in 0..4 {
                    t[2 * i] = _mm256_unpacklo_ps(rows[2 * i].0, rows[2 * i + 1].0);
                    t[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i].0, rows[2 * i + 1].0);
                }
                let mut u = [_mm256_setzero_ps(); 8];
                for i in 0..2 {
                    for j in 0..2 {
                        u[4 * i + 2 * j] = _mm256_shuffle_ps::<0x44>(t[4 * i + j], t[4 * i + j + 2]);
                        u[4 * i + 2 * j + 1] = _mm256_shuffle_ps::<0xee>(t[4 * i + j], t[4 * i + j + 2]);
                    }
                }
                for i in 0..4 {
                    rows[i] = Self(_mm256_permute2f128_ps::<0x20>(u[i], u[i + 4]));
                    rows[i + 4] = Self(_mm256_permute2f128_ps::<0x31>(u[i], u[i + 4]));
                }
            }
        }
    }

    /// Sixteen f32 in a register of AVX-512.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(pub(crate) __m512);

    // SAFETY of every block below: as for AVX2.
    impl Simd for Avx512 {
        const LANES: usize = 16;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_set1_ps(value) })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn load_f16(from: *const f16) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const bf16) -> Self {
            // SAFETY: see above.
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see above.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn div(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_div_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul_add(self, a: Self, b: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_fmadd_ps(self.0, a.0, b.0) })
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_max_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn abs(self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_abs_ps(self.0) })
        }
        #[inline(always)]
        unsafe fn round(self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0) })
        }
        #[inline(always)]
        unsafe fn power_of_two(self) -> Self {
            // SAFETY: see above.
            unsafe {
                let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
            }
        }
        #[inline(always)]
        unsafe fn select_less(self, other: Self, yes: Self, no: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0), no.0, yes.0) })
        }
        #[inline(always)]
        unsafe fn horizontal_max(self) -> f32 {
            // SAFETY: see above.
            unsafe { _mm512_reduce_max_ps(self.0) }
        }
        #[inline(always)]
        unsafe fn horizontal_sum(self) -> f32 {
            // SAFETY: see above.
            unsafe { _mm512_reduce_add_ps(self.0) }
        }
        #[inline(always)]
        unsafe fn transpose(rows: &mut [Self]) {
            // SAFETY: see above; pairs, quads, then quarters of registers change places.
            unsafe {
                let mut t = [_mm512_setzero_ps(); 16];
                for i in 0..8 {
                    t[2 * i] = _mm512_unpacklo_ps(rows[2 * i].0, rows[2 * i + 1].0);
                    t[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].0, rows[2 * i + 1].0);
                }
                let mut u = [_mm512_setzero_ps(); 16];
                for i in 0..4 {
                    for j in 0..2 {
                        u[4 * i + 2 * j] = _mm512_shuffle_ps::<0x44>(t[4 * i + j], t[4 * i + j + 2]);
                        u[4 * i + 2 * j + 1] = _mm512_shuffle_ps::<0xee>(t[4 * i + j], t[4 * i + j + 2]);
                    }
                }
                // u[4i + k] holds, in quarter q, column 4q + k of rows 4i … 4i + 3.
                for k in 0..4 {
                    let a = _mm512_shuffle_f32x4::<0x88>(u[k], u[4 + k]);
                    let b = _mm512_shuffle_f32x4::<0xdd>(u[k], u[4 + k]);
                    let c = _mm512_shuffle_f32x4::<0x88>(u[8 + k], u[12 + k]);
                    let d = _mm512_shuffle_f32x4::<0xdd>(u[8 + k], u[12 + k]);
                    rows[k] = Self(_mm512_shuffle_f32x4::<0x88>(a, c));
                    rows[8 + k] = Self(_mm512_shuffle_f32x4::<0xdd>(a, c));
                    rows[4 + k] = Self(_mm512_shuffle_f32x4::<0x88>(b, d));
                    rows[12 + k] = Self(_mm512_shuffle_f32x4::<0xdd>(b, d));
                }
            }
        }
    }
}

/// Runs a generic function with the vectors of an instruction set, inside a function that enables it.
macro_rules! with_isa {
    ($isa:expr, $function:ident($($name:ident : $type:ty),* $(,)?) $(-> $result:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2($($name: $type),*) $(-> $result)? {
            // SAFETY: the instruction set is enabled here; the rest is the caller's word.
            unsafe { $function::<$crate::simd::Avx2>($($name),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
        unsafe fn avx512($($name: $type),*) $(-> $result)? {
            // SAFETY: as above.
            unsafe { $function::<$crate::simd::Avx512>($($name),*) }
        }
        match $isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` in use is available; the rest is the caller's word.
            $crate::isa::Isa::Avx512 | $crate::isa::Isa::Amx => unsafe { avx512($($name),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            $crate::isa::Isa::Avx2 => unsafe { avx2($($name),*) },
            // SAFETY: plain Rust; the rest is the caller's word.
            _ => unsafe { $function::<$crate::simd::Portable>($($name),*) },
        }
    }};
}
pub(crate) use with_isa;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[inline(always)]
    unsafe fn exponentials<S: Simd>(x: &[f32], exp: &mut [f32], tanh: &mut [f32]) {
        for at in (0..x.len()).step_by(S::LANES) {
            // SAFETY: the slices hold whole vectors.
            unsafe {
                let v = S::load(x[at..].as_ptr());
                v.exp2().store(exp[at..].as_mut_ptr());
                v.tanh().store(tanh[at..].as_mut_ptr());
            }
        }
    }

    #[test]
    fn the_exponential_and_the_tangent_are_as_exact_as_they_say() {
        let n = 1 << 16;
        let mut x: Vec<f32> = (0..n).map(|i| -130.0 * i as f32 / n as f32).collect();
        x[1..3].copy_from_slice(&[f32::NEG_INFINITY, -1e30]);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let (mut exp, mut tanh) = (vec![0.0; n], vec![0.0; n]);
            let (x, exp, tanh): (&[f32], &mut [f32], &mut [f32]) = (&x, &mut exp, &mut tanh);
            with_isa!(isa, exponentials(x: &[f32], exp: &mut [f32], tanh: &mut [f32]));
            assert_eq!((exp[0], exp[1], exp[2]), (1.0, 0.0, 0.0), "{isa}");
            for i in 3..n {
                let want = f64::from(x[i]).exp2();
                let error = (f64::from(exp[i]) - want).abs() / want;
                assert!(error < 1.5e-7 || (x[i] < -126.0 && exp[i] == 0.0), "{isa}: 2^{} = {}", x[i], exp[i]);
                let want = f64::from(x[i]).tanh();
                assert!((f64::from(tanh[i]) - want).abs() < 2e-7, "{isa}: tanh {} = {}", x[i], tanh[i]);
            }
        }
    }

    #[inline(always)]
    unsafe fn transposed<S: Simd>() -> Vec<f32> {
        // SAFETY: the arrays hold whole vectors.
        unsafe {
            let mut rows = [S::zero(); 16];
            for (row, vector) in rows.iter_mut().enumerate() {
                *vector = S::iota().add(S::splat(100.0 * row as f32));
            }
            S::transpose(&mut rows[..S::LANES]);
            rows[..S::LANES].iter().flat_map(|row| row.to_array()[..S::LANES].to_vec()).collect()
        }
    }

    #[test]
    fn rows_become_columns() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let all: Vec<f32> = with_isa!(isa, transposed() -> Vec<f32>);
            let lanes = if all.len() == 256 { 16 } else { 8 };
            for (at, value) in all.iter().enumerate() {
                assert_eq!(*value, (100 * (at % lanes) + at / lanes) as f32, "{isa}");
            }
        }
    }
}
