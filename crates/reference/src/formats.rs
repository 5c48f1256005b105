//! Storage formats: what a stored bit pattern means, and which pattern a value becomes.
//!
//! Owns decode and encode of every number format that q, k, v, out and caches are
//! stored in, derived from the bit fields by definition. Must not know scales
//! (that is `quantised_cache`), tensors' meaning, or any kernel's conversion code.

use crate::error::ReferenceError;
use crate::shape::check_len;

/// A number format of at most 32 bits.
///
/// Sources: IEEE 754-2019 (f32, f16); bfloat16 = the upper half of f32; OCP "8-bit
/// Floating Point Specification" 1.0 (E4M3, E5M2); the FNUZ forms of Noune et al. 2022
/// (one more in the bias, no −0, no infinity, NaN = 0x80); two's complement (int8, int4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// OCP E4M3 ("FN"): max 448, no infinity, NaN = 0x7f and 0xff.
    Fp8E4m3,
    /// OCP E5M2: max 57344, infinity 0x7c, NaN 0x7d..=0x7f.
    Fp8E5m2,
    /// E4M3 FNUZ: max 240, NaN = 0x80 only, no −0.
    Fp8E4m3Fnuz,
    /// E5M2 FNUZ: max 57344, NaN = 0x80 only, no −0.
    Fp8E5m2Fnuz,
    /// Two's complement, −128..=127.
    Int8,
    /// Two's complement in the low nibble of the pattern, −8..=7.
    Int4,
}

/// Which patterns of a float format are not finite numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Specials {
    /// Exponent all ones: infinity (mantissa 0) or NaN.
    Ieee,
    /// Only "all ones" is NaN; no infinity.
    Fn,
    /// Only "sign alone" (−0) is NaN; no infinity.
    Fnuz,
}

/// The bit fields of a float format, from the top: sign, exponent, mantissa.
#[derive(Clone, Copy)]
struct Layout {
    exponent_bits: u32,
    mantissa_bits: u32,
    bias: i32,
    specials: Specials,
    /// What a finite value beyond the range and an infinity become: the largest
    /// finite number (true) or infinity (false).
    saturates: bool,
}

impl Layout {
    fn sign_bit(self) -> u32 {
        1 << (self.exponent_bits + self.mantissa_bits)
    }

    fn exponent_ones(self) -> u32 {
        (1 << self.exponent_bits) - 1
    }

    fn mantissa_ones(self) -> u32 {
        (1 << self.mantissa_bits) - 1
    }

    /// Magnitude bits of the largest finite number.
    fn max_magnitude(self) -> u32 {
        let all = self.sign_bit() - 1;
        match self.specials {
            Specials::Ieee => all - self.mantissa_ones() - 1,
            Specials::Fn => all - 1,
            Specials::Fnuz => all,
        }
    }

    fn nan(self) -> u32 {
        let exponent = self.exponent_ones() << self.mantissa_bits;
        match self.specials {
            // The quiet NaN: the mantissa's top bit.
            Specials::Ieee => exponent | (1 << (self.mantissa_bits - 1)),
            Specials::Fn => self.sign_bit() - 1,
            Specials::Fnuz => self.sign_bit(),
        }
    }

    fn decode(self, bits: u32) -> f64 {
        let sign = if bits & self.sign_bit() != 0 { -1.0 } else { 1.0 };
        let magnitude = bits & (self.sign_bit() - 1);
        let exponent = magnitude >> self.mantissa_bits;
        let mantissa = magnitude & self.mantissa_ones();
        match self.specials {
            Specials::Ieee if exponent == self.exponent_ones() => {
                return if mantissa == 0 { sign * f64::INFINITY } else { f64::NAN };
            }
            Specials::Fn if magnitude == self.sign_bit() - 1 => return f64::NAN,
            Specials::Fnuz if bits & (2 * self.sign_bit() - 1) == self.sign_bit() => {
                return f64::NAN;
            }
            _ => {}
        }
        // Subnormal: mantissa · 2^(1 − bias − M); normal: (2^M + mantissa) · 2^(e − bias − M).
        let (significand, e) =
            if exponent == 0 { (mantissa, 1) } else { ((1 << self.mantissa_bits) + mantissa, exponent as i32) };
        sign * f64::from(significand) * power_of_two(e - self.bias - self.mantissa_bits as i32)
    }

    fn encode(self, value: f64) -> u32 {
        if value.is_nan() {
            return self.nan();
        }
        let magnitude = value.abs();
        let smallest_normal = 1 - self.bias;
        let bits = if magnitude == 0.0 {
            0
        } else if magnitude == f64::INFINITY {
            self.max_magnitude() + 1
        } else {
            // The distance between neighbours at this magnitude is 2^(e − M).
            let e = floor_log2(magnitude).max(smallest_normal);
            let quantum = e - self.mantissa_bits as i32;
            // Exact: a multiplication by a power of two that neither over- nor underflows
            // for any value that does not round to zero or beyond the range anyway.
            let units = (magnitude * power_of_two(-quantum)).round_ties_even();
            // `units` is at most 2^(M+1), so that a carry moves to the next exponent by
            // itself; in the subnormal range the first normal follows the last subnormal.
            let above = (e - smallest_normal) as u64;
            let bits = (above << self.mantissa_bits) + units as u64;
            bits.min(u64::from(self.max_magnitude()) + 1) as u32
        };
        let bits = if bits > self.max_magnitude() && self.saturates { self.max_magnitude() } else { bits };
        // FNUZ has no −0: that pattern is its NaN.
        if value.is_sign_negative() && !(bits == 0 && self.specials == Specials::Fnuz) {
            bits | self.sign_bit()
        } else {
            bits
        }
    }
}

/// 2^n for the n that these formats need, and 0 or infinity far beyond.
fn power_of_two(n: i32) -> f64 {
    2f64.powi(n)
}

/// floor(log2 x) of a positive finite f64, from its exponent field (subnormals give −1023,
/// below every format here).
fn floor_log2(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

impl Format {
    /// Every format, in declaration order.
    pub const ALL: [Format; 9] = [
        Format::F32,
        Format::F16,
        Format::Bf16,
        Format::Fp8E4m3,
        Format::Fp8E5m2,
        Format::Fp8E4m3Fnuz,
        Format::Fp8E5m2Fnuz,
        Format::Int8,
        Format::Int4,
    ];

    /// The name used in messages and tables.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::F16 => "f16",
            Format::Bf16 => "bf16",
            Format::Fp8E4m3 => "fp8_e4m3",
            Format::Fp8E5m2 => "fp8_e5m2",
            Format::Fp8E4m3Fnuz => "fp8_e4m3fnuz",
            Format::Fp8E5m2Fnuz => "fp8_e5m2fnuz",
            Format::Int8 => "int8",
            Format::Int4 => "int4",
        }
    }

    /// Bits per element: 32, 16, 8 or 4.
    pub fn bits(self) -> u32 {
        match self {
            Format::F32 => 32,
            Format::F16 | Format::Bf16 => 16,
            Format::Int4 => 4,
            _ => 8,
        }
    }

    /// True for the four 8-bit floats.
    pub fn is_fp8(self) -> bool {
        matches!(self, Format::Fp8E4m3 | Format::Fp8E5m2 | Format::Fp8E4m3Fnuz | Format::Fp8E5m2Fnuz)
    }

    /// True for int8 and int4.
    pub fn is_integer(self) -> bool {
        matches!(self, Format::Int8 | Format::Int4)
    }

    fn layout(self) -> Option<Layout> {
        let (exponent_bits, mantissa_bits, bias, specials, saturates) = match self {
            Format::F32 => (8, 23, 127, Specials::Ieee, false),
            Format::F16 => (5, 10, 15, Specials::Ieee, false),
            Format::Bf16 => (8, 7, 127, Specials::Ieee, false),
            Format::Fp8E4m3 => (4, 3, 7, Specials::Fn, true),
            Format::Fp8E5m2 => (5, 2, 15, Specials::Ieee, true),
            Format::Fp8E4m3Fnuz => (4, 3, 8, Specials::Fnuz, true),
            Format::Fp8E5m2Fnuz => (5, 2, 16, Specials::Fnuz, true),
            Format::Int8 | Format::Int4 => return None,
        };
        Some(Layout { exponent_bits, mantissa_bits, bias, specials, saturates })
    }

    /// Largest finite value.
    pub fn max_finite(self) -> f64 {
        match self.layout() {
            Some(layout) => layout.decode(layout.max_magnitude()),
            None if self == Format::Int8 => 127.0,
            None => 7.0,
        }
    }

    /// The value of a pattern: exact, no scale. Bits above [`Format::bits`] are ignored.
    pub fn decode(self, bits: u32) -> f64 {
        match self.layout() {
            Some(layout) => layout.decode(bits),
            None => {
                // Sign extension: move the sign to bit 31 and back.
                let unused = 32 - self.bits();
                f64::from(((bits << unused) as i32) >> unused)
            }
        }
    }

    /// The pattern nearest to `value`, ties to even, in one rounding from f64.
    ///
    /// Beyond the range: f32, f16 and bf16 give infinity (IEEE); the four fp8 formats
    /// **saturate**, infinities included, to the largest finite value (E5M2 too, though it
    /// has an infinity); int8 and int4 saturate to −128..=127 and −8..=7. NaN stays NaN (the
    /// canonical quiet one) in floats and becomes 0 in integers, which have none:
    /// `quantised_cache` refuses it before.
    pub fn encode(self, value: f64) -> u32 {
        match self.layout() {
            Some(layout) => layout.encode(value),
            None => {
                let max = self.max_finite();
                let rounded = value.round_ties_even().clamp(-max - 1.0, max);
                // NaN casts to 0.
                let mask = (1u32 << self.bits()) - 1;
                (rounded as i32 as u32) & mask
            }
        }
    }

    /// `value` as it reads back after being stored: `decode(encode(value))`.
    pub fn round(self, value: f64) -> f64 {
        self.decode(self.encode(value))
    }

    /// Bytes of `count` packed elements (int4: two per byte, rounded up).
    pub fn byte_len(self, count: usize) -> usize {
        match self {
            Format::Int4 => count.div_ceil(2),
            // A slice of `count` elements existed or will; saturation only guards nonsense.
            _ => count.saturating_mul(self.bits() as usize / 8),
        }
    }

    /// Packs values: little-endian; int4 two per byte, **low nibble first**, a last odd high
    /// nibble 0.
    pub fn encode_slice(self, values: &[f64]) -> Vec<u8> {
        if self == Format::Int4 {
            return values
                .chunks(2)
                .map(|pair| {
                    let low = self.encode(pair[0]);
                    let high = pair.get(1).map_or(0, |&v| self.encode(v));
                    (low | (high << 4)) as u8
                })
                .collect();
        }
        let width = self.bits() as usize / 8;
        values.iter().flat_map(|&v| self.encode(v).to_le_bytes().into_iter().take(width)).collect()
    }

    /// Unpacks `count` values from what [`Format::encode_slice`] writes.
    ///
    /// # Errors
    /// [`ReferenceError::Length`] unless `bytes` is exactly [`Format::byte_len`] long.
    pub fn decode_slice(self, bytes: &[u8], count: usize) -> Result<Vec<f64>, ReferenceError> {
        check_len("bytes", &[self.byte_len(count)], bytes.len())?;
        if self == Format::Int4 {
            let nibble = |i: usize| u32::from(bytes[i / 2] >> (4 * (i % 2)));
            return Ok((0..count).map(|i| self.decode(nibble(i))).collect());
        }
        let width = self.bits() as usize / 8;
        Ok(bytes
            .chunks_exact(width)
            .map(|chunk| {
                let bits = chunk.iter().rev().fold(0, |acc, &b| (acc << 8) | u32::from(b));
                self.decode(bits)
            })
            .collect())
    }
}
