//! Element types of tensors, and their DLPack codes.

use crate::abi::DlDataType;
use std::fmt;

/// The element type of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DataType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned byte (also two packed 4-bit values).
    U8,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// OCP FP8 E4M3 (finite, one NaN a sign).
    F8E4M3,
    /// OCP FP8 E5M2.
    F8E5M2,
    /// FP8 E4M3 of AMD's CDNA3 (no negative zero).
    F8E4M3Fnuz,
    /// FP8 E5M2 of AMD's CDNA3.
    F8E5M2Fnuz,
}

impl DataType {
    const TABLE: [(Self, u8, u8, &'static str); 11] = [
        (Self::F32, 2, 32, "f32"),
        (Self::F16, 2, 16, "f16"),
        (Self::BF16, 4, 16, "bf16"),
        (Self::I8, 0, 8, "i8"),
        (Self::U8, 1, 8, "u8"),
        (Self::I32, 0, 32, "i32"),
        (Self::I64, 0, 64, "i64"),
        (Self::F8E4M3, 10, 8, "f8e4m3"),
        (Self::F8E5M2, 12, 8, "f8e5m2"),
        (Self::F8E4M3Fnuz, 11, 8, "f8e4m3fnuz"),
        (Self::F8E5M2Fnuz, 13, 8, "f8e5m2fnuz"),
    ];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::I64 => 8,
            _ => 1,
        }
    }

    /// DLPack's code.
    #[must_use]
    pub const fn to_dl(self) -> DlDataType {
        let mut i = 0;
        while i < Self::TABLE.len() {
            let (dtype, code, bits, _) = Self::TABLE[i];
            if dtype as u8 == self as u8 {
                return DlDataType { code, bits, lanes: 1 };
            }
            i += 1;
        }
        // Every variant is in the table (tested).
        DlDataType { code: u8::MAX, bits: 0, lanes: 1 }
    }

    /// The type of a DLPack code; `None` for one that Attaché does not use.
    #[must_use]
    pub fn from_dl(dl: DlDataType) -> Option<Self> {
        // The three common ones first: this runs on every tensor of every call.
        match (dl.code, dl.bits, dl.lanes) {
            (4, 16, 1) => Some(Self::BF16),
            (2, 32, 1) => Some(Self::F32),
            (2, 16, 1) => Some(Self::F16),
            (_, _, 1) => Self::TABLE.iter().find(|t| t.1 == dl.code && t.2 == dl.bits).map(|t| t.0),
            _ => None,
        }
    }

    /// Short name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::TABLE.iter().find(|t| t.0 == self).map_or("?", |t| t.3)
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_survives_dlpack() {
        for (dtype, ..) in DataType::TABLE {
            assert_eq!(DataType::from_dl(dtype.to_dl()), Some(dtype));
            assert_eq!(usize::from(dtype.to_dl().bits), dtype.size() * 8);
        }
    }

    #[test]
    fn unknown_codes_are_refused_not_transmuted() {
        for code in [3, 5, 6, 200, 255] {
            assert_eq!(DataType::from_dl(DlDataType { code, bits: 16, lanes: 1 }), None);
        }
        assert_eq!(DataType::from_dl(DlDataType { code: 2, bits: 32, lanes: 4 }), None);
    }
}
