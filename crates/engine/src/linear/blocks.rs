//! Weights in the formats with blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.
//!
//! Activations are rounded to 8 bits a block as llama.cpp does it, the products of a block are
//! exact integers, and blocks are summed in f32 in one fixed order.

use super::{Input, Rows};
use crate::pool::{Pool, Shards};
use half::f16;

/// Values of a block.
const BLOCK: usize = 32;
/// Activation rows that share the unpacking of a weight row.
const GROUP: usize = 4;

/// 32 activations in 8 bits.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Activation {
    values: [i8; BLOCK],
    /// Scale, rounded to f16 as the formats store it.
    d: f32,
    /// Scale times the sum of the values: what a weight block's minimum is multiplied with.
    sum: f32,
}

impl Activation {
    const ZERO: Self = Self { values: [0; BLOCK], d: 0.0, sum: 0.0 };

    fn quantise(x: &[f32; BLOCK]) -> Self {
        let largest = x.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        let d = largest / 127.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let mut values = [0; BLOCK];
        for (to, from) in values.iter_mut().zip(x) {
            *to = (from * inverse).round_ties_even() as i8;
        }
        let sum: i32 = values.iter().map(|value| i32::from(*value)).sum();
        let d = f16::from_f32(d).to_f32();
        Self { values, d, sum: d * sum as f32 }
    }
}

/// A weight block: value i is `d · (q[i] − OFFSET) + m`.
pub(super) trait Block: Copy + Send + Sync + 'static {
    /// Bytes in a file.
    const BYTES: usize;
    /// What is subtracted from each stored value.
    const OFFSET: f32;
    /// Whether the stored values are i8 and not u8.
    const SIGNED: bool;
    /// Reads a block as a file stores it; `bytes` holds `BYTES`.
    fn read(bytes: &[u8]) -> Self;
    /// Scale and minimum as f16 bits; a format without minimum has 0.
    fn scales(&self) -> (u16, u16);
    /// The stored values.
    fn values(&self) -> [u8; BLOCK];
    /// As `values`, in a register.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn values_avx2(&self) -> std::arch::x86_64::__m256i;
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

fn nibbles(qs: &[u8; 16]) -> [u8; BLOCK] {
    let mut values = [0; BLOCK];
    for (index, byte) in qs.iter().enumerate() {
        values[index] = byte & 15;
        values[index + 16] = byte >> 4;
    }
    values
}

fn with_fifth_bit(qs: &[u8; 16], high: u32) -> [u8; BLOCK] {
    let mut values = nibbles(qs);
    for (index, value) in values.iter_mut().enumerate() {
        *value |= ((high >> index & 1) as u8) << 4;
    }
    values
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2")]
    #[inline]
    pub(super) fn nibbles(qs: &[u8; 16]) -> __m256i {
        // SAFETY: 16 bytes are readable.
        let low = unsafe { _mm_loadu_si128(qs.as_ptr().cast()) };
        let both = _mm256_set_m128i(_mm_srli_epi16::<4>(low), low);
        _mm256_and_si256(both, _mm256_set1_epi8(15))
    }

    /// Bit i of `bits` as bit 4 of byte i.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(super) fn fifth_bits(bits: u32) -> __m256i {
        let spread = _mm256_set_epi64x(0x0303_0303_0303_0303, 0x0202_0202_0202_0202, 0x0101_0101_0101_0101, 0);
        let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits.cast_signed()), spread);
        let select = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, select), select);
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    pub(super) fn load(values: &[u8; 32]) -> __m256i {
        // SAFETY: 32 bytes are readable.
        unsafe { _mm256_loadu_si256(values.as_ptr().cast()) }
    }
}

macro_rules! block {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, offset $offset:literal, signed $signed:literal,
     fields { $($field:ident : $type:ty = $read:expr),* },
     scales $scales:expr, values $values:expr, avx2 $avx2:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name { $($field: $type),* }

        impl Block for $name {
            const BYTES: usize = $bytes;
            const OFFSET: f32 = $offset;
            const SIGNED: bool = $signed;
            fn read(bytes: &[u8]) -> Self {
                Self { $($field: $read(bytes)),* }
            }
            #[inline(always)]
            fn scales(&self) -> (u16, u16) {
                $scales(self)
            }
            #[inline(always)]
            fn values(&self) -> [u8; BLOCK] {
                $values(self)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            #[inline]
            fn values_avx2(&self) -> std::arch::x86_64::__m256i {
                use std::arch::x86_64::*;
                let block = self;
                $avx2!(block)
            }
        }
    };
}

macro_rules! nibbles_avx2 {
    ($block:ident) => {
        _mm256_or_si256(x86::nibbles(&$block.qs), _mm256_setzero_si256())
    };
}
macro_rules! five_bits_avx2 {
    ($block:ident) => {
        _mm256_or_si256(x86::nibbles(&$block.qs), x86::fifth_bits($block.high))
    };
}
macro_rules! bytes_avx2 {
    ($block:ident) => {
        _mm256_or_si256(x86::load(&$block.qs), _mm256_setzero_si256())
    };
}

block!(
    /// 4 bits, symmetric.
    Q4_0, 18, offset 8.0, signed false,
    fields { d: u16 = |b| u16_at(b, 0), qs: [u8; 16] = |b| array_at(b, 2) },
    scales |b: &Q4_0| (b.d, 0), values |b: &Q4_0| nibbles(&b.qs), avx2 nibbles_avx2
);
block!(
    /// 4 bits with a minimum.
    Q4_1, 20, offset 0.0, signed false,
    fields { d: u16 = |b| u16_at(b, 0), m: u16 = |b| u16_at(b, 2), qs: [u8; 16] = |b| array_at(b, 4) },
    scales |b: &Q4_1| (b.d, b.m), values |b: &Q4_1| nibbles(&b.qs), avx2 nibbles_avx2
);
block!(
    /// 5 bits, symmetric.
    Q5_0, 22, offset 16.0, signed false,
    fields { d: u16 = |b| u16_at(b, 0), high: u32 = |b| u32::from_le_bytes(array_at(b, 2)), qs: [u8; 16] = |b| array_at(b, 6) },
    scales |b: &Q5_0| (b.d, 0), values |b: &Q5_0| with_fifth_bit(&b.qs, b.high), avx2 five_bits_avx2
);
block!(
    /// 5 bits with a minimum.
    Q5_1, 24, offset 0.0, signed false,
    fields { d: u16 = |b| u16_at(b, 0), m: u16 = |b| u16_at(b, 2), high: u32 = |b| u32::from_le_bytes(array_at(b, 4)), qs: [u8; 16] = |b| array_at(b, 8) },
    scales |b: &Q5_1| (b.d, b.m), values |b: &Q5_1| with_fifth_bit(&b.qs, b.high), avx2 five_bits_avx2
);
block!(
    /// 8 bits, symmetric.
    Q8_0, 34, offset 0.0, signed true,
    fields { d: u16 = |b| u16_at(b, 0), qs: [u8; 32] = |b| array_at(b, 2) },
    scales |b: &Q8_0| (b.d, 0), values |b: &Q8_0| b.qs, avx2 bytes_avx2
);

type Dots<B> = unsafe fn(&[B], &[Activation], &mut [f32]);

pub(super) struct Blocks<B> {
    blocks: Vec<B>,
    width: usize,
    dots: Dots<B>,
}

impl<B: Block> Blocks<B> {
    /// Reads blocks as a file stores them.
    pub(super) fn new(data: &[u8], cols: usize) -> Self {
        Self { blocks: data.chunks_exact(B::BYTES).map(B::read).collect(), width: cols / BLOCK, dots: fastest::<B>() }
    }

    fn blocks_of(&self, row: usize) -> &[B] {
        &self.blocks[row * self.width..(row + 1) * self.width]
    }
}

fn fastest<B: Block>() -> Dots<B> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
        if is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vl") {
            return dots_vnni::<B>;
        }
        return dots_avx2::<B>;
    }
    dots_portable::<B>
}

impl<B: Block> Rows for Blocks<B> {
    fn row(&self, row: usize, out: &mut [f32]) {
        for (block, out) in self.blocks_of(row).iter().zip(out.as_chunks_mut::<BLOCK>().0) {
            let (d, m) = block.scales();
            let (d, m) = (f16::from_bits(d).to_f32(), f16::from_bits(m).to_f32());
            for (to, value) in out.iter_mut().zip(block.values()) {
                let value = if B::SIGNED { f32::from(value.cast_signed()) } else { f32::from(value) };
                *to = d * (value - B::OFFSET) + m;
            }
        }
    }

    fn dots(&self, row: usize, input: &Input<'_>, first: usize, count: usize, out: &mut [f32]) {
        let Input::Blocks(x) = input else { unreachable!("prepared by another format") };
        let x = &x[first * self.width..(first + count) * self.width];
        // SAFETY: `fastest` chose a function that this CPU can run.
        unsafe { (self.dots)(self.blocks_of(row), x, out) };
    }

    fn prepare<'a>(&self, pool: &Pool, x: &'a [f32], rows: usize, cols: usize) -> Input<'a> {
        let width = cols / BLOCK;
        let mut blocks = vec![Activation::ZERO; rows * width];
        let shards = Shards::new(&mut blocks);
        pool.run_ranges(rows, 1, &|start, end| {
            for row in start..end {
                // SAFETY: each row is one task's alone.
                let blocks = unsafe { shards.slice(row * width, width) };
                for (block, x) in blocks.iter_mut().zip(x[row * cols..(row + 1) * cols].as_chunks::<BLOCK>().0) {
                    *block = Activation::quantise(x);
                }
            }
        });
        Input::Blocks(blocks)
    }
}

fn dots_portable<B: Block>(weights: &[B], x: &[Activation], out: &mut [f32]) {
    let width = weights.len();
    for (row, out) in out.iter_mut().enumerate() {
        let mut total = 0.0;
        for (block, x) in weights.iter().zip(&x[row * width..]) {
            let (d, m) = block.scales();
            let (d, m) = (f16::from_bits(d).to_f32(), f16::from_bits(m).to_f32());
            let mut sum = 0;
            for (weight, x) in block.values().iter().zip(&x.values) {
                let weight = if B::SIGNED { i32::from(weight.cast_signed()) } else { i32::from(*weight) };
                sum += weight * i32::from(*x);
            }
            total += d * x.d * sum as f32 + (m - B::OFFSET * d) * x.sum;
        }
        *out = total;
    }
}

/// The vector forms differ only in how 32 products are summed: `$dot` gives eight partial sums.
#[cfg(target_arch = "x86_64")]
macro_rules! vector_dots {
    ($dots:ident, $group:ident, $features:literal, $dot:ident) => {
        #[target_feature(enable = $features)]
        fn $dots<B: Block>(weights: &[B], x: &[Activation], out: &mut [f32]) {
            let width = weights.len();
            let mut row = 0;
            while row + GROUP <= out.len() {
                let results = $group::<B, GROUP>(weights, &x[row * width..(row + GROUP) * width]);
                out[row..row + GROUP].copy_from_slice(&results);
                row += GROUP;
            }
            while row < out.len() {
                out[row] = $group::<B, 1>(weights, &x[row * width..(row + 1) * width])[0];
                row += 1;
            }
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn $group<B: Block, const R: usize>(weights: &[B], x: &[Activation]) -> [f32; R] {
            use std::arch::x86_64::*;
            let width = weights.len();
            let mut sums = [_mm256_setzero_ps(); R];
            let mut minima = [0.0_f32; R];
            for (index, block) in weights.iter().enumerate() {
                let (d, m) = block.scales();
                let scales = _mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(d) | i32::from(m) << 16));
                let d = _mm_cvtss_f32(scales);
                let m = _mm_cvtss_f32(_mm_shuffle_ps::<1>(scales, scales)) - B::OFFSET * d;
                let values = block.values_avx2();
                for r in 0..R {
                    let x = &x[r * width + index];
                    // SAFETY: 32 bytes are readable.
                    let bytes = unsafe { _mm256_loadu_si256(x.values.as_ptr().cast()) };
                    let products = if B::SIGNED {
                        $dot(_mm256_abs_epi8(values), _mm256_sign_epi8(bytes, values))
                    } else {
                        $dot(values, bytes)
                    };
                    sums[r] = _mm256_fmadd_ps(_mm256_set1_ps(d * x.d), _mm256_cvtepi32_ps(products), sums[r]);
                    minima[r] += m * x.sum;
                }
            }
            let mut results = [0.0; R];
            for r in 0..R {
                let four = _mm_add_ps(_mm256_castps256_ps128(sums[r]), _mm256_extractf128_ps::<1>(sums[r]));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                let one = _mm_add_ss(two, _mm_movehdup_ps(two));
                results[r] = _mm_cvtss_f32(one) + minima[r];
            }
            results
        }
    };
}

/// Products of u8 and i8: pairs stay below 2¹⁵ (at most 128 · 127 · 2), so nothing saturates.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
fn dot_avx2(unsigned: std::arch::x86_64::__m256i, signed: std::arch::x86_64::__m256i) -> std::arch::x86_64::__m256i {
    use std::arch::x86_64::*;
    _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned, signed), _mm256_set1_epi16(1))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512vnni,avx512vl")]
#[inline]
fn dot_vnni(unsigned: std::arch::x86_64::__m256i, signed: std::arch::x86_64::__m256i) -> std::arch::x86_64::__m256i {
    use std::arch::x86_64::*;
    _mm256_dpbusd_epi32(_mm256_setzero_si256(), unsigned, signed)
}

#[cfg(target_arch = "x86_64")]
vector_dots!(dots_avx2, group_avx2, "avx2,fma,f16c", dot_avx2);
#[cfg(target_arch = "x86_64")]
vector_dots!(dots_vnni, group_vnni, "avx2,fma,f16c,avx512vnni,avx512vl", dot_vnni);

#[cfg(test)]
mod tests {
    use super::*;

    /// The forms share the integer part exactly; only the order of the float sum differs.
    #[cfg(target_arch = "x86_64")]
    fn forms_agree<B: Block>() {
        let width = 18;
        let mut state = 99_u32;
        let mut random = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let mut bytes: Vec<u8> = (0..width * B::BYTES).map(|_| random()).collect();
        for block in bytes.chunks_exact_mut(B::BYTES) {
            // Scales of ordinary size: random bits could be NaN.
            block[1] = 0x20 | (block[1] & 0x8f);
            if matches!(B::BYTES, 20 | 24) {
                block[3] = 0x20 | (block[3] & 0x8f);
            }
        }
        let weights: Vec<B> = bytes.chunks_exact(B::BYTES).map(B::read).collect();
        let mut x = Vec::new();
        for _ in 0..7 * width {
            let values = std::array::from_fn(|_| f32::from(random()) - 127.0);
            x.push(Activation::quantise(&values));
        }
        let mut expected = [0.0; 7];
        dots_portable(&weights, &x, &mut expected);
        let mut check = |name: &str, dots: Dots<B>| {
            let mut found = [0.0; 7];
            // SAFETY: the caller checked the features.
            unsafe { dots(&weights, &x, &mut found) };
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() <= 1e-4 * (1.0 + expected.abs()), "{name}: {found} and {expected}");
            }
        };
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            check("avx2", dots_avx2::<B>);
            if is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vl") {
                check("vnni", dots_vnni::<B>);
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn vector_forms_agree_with_the_portable_one() {
        forms_agree::<Q4_0>();
        forms_agree::<Q4_1>();
        forms_agree::<Q5_0>();
        forms_agree::<Q5_1>();
        forms_agree::<Q8_0>();
    }
}
