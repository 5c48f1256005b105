//! Which instruction sets there are, and which one is taken.

use std::{fmt, str::FromStr, sync::OnceLock};

/// The environment variable that forces an instruction set.
pub const ISA_VARIABLE: &str = "ATTACHE_CPU_ISA";

/// An instruction set that kernels exist for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Isa {
    /// Plain Rust, on every machine.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL; with BF16 also its dot products.
    Avx512,
    /// AVX-512 with BF16, and matrix tiles of bf16 (AMX).
    Amx,
}

/// An instruction set that cannot be taken.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IsaError {
    /// There is no such name.
    #[error("unknown instruction set '{found}'; valid: amx, avx512, avx2, portable")]
    Unknown {
        /// What was found.
        found: String,
    },
    /// This machine does not have it.
    #[error("this machine has no {asked}; the best that it has is {best}")]
    Missing {
        /// What was asked for.
        asked: Isa,
        /// What there is.
        best: Isa,
    },
}

impl Isa {
    /// All of them, the best first.
    pub const ALL: [Self; 4] = [Self::Amx, Self::Avx512, Self::Avx2, Self::Portable];

    /// The name in options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }

    /// Whether this machine and its operating system have it.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Amx => {
                Self::Avx512.is_available() && is_x86_feature_detected!("avx512bf16") && crate::amx::is_available()
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Whether it has dot products of bf16 here.
    #[must_use]
    pub fn has_bf16_dot(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self >= Self::Avx512 && self.is_available() && is_x86_feature_detected!("avx512bf16");
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// The best one here.
    #[must_use]
    pub fn best() -> Self {
        Self::ALL.into_iter().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    /// The one of that name, if this machine has it.
    ///
    /// # Errors
    /// For an unknown name, and for one that this machine does not have.
    pub fn named(name: &str) -> Result<Self, IsaError> {
        let isa: Self = name.parse()?;
        if isa.is_available() { Ok(isa) } else { Err(IsaError::Missing { asked: isa, best: Self::best() }) }
    }

    /// The one that `ATTACHE_CPU_ISA` forces, else the best one; read once.
    ///
    /// # Errors
    /// As [`Isa::named`].
    pub fn chosen() -> Result<Self, IsaError> {
        static CHOSEN: OnceLock<Result<Isa, IsaError>> = OnceLock::new();
        let choose = || match std::env::var(ISA_VARIABLE) {
            Ok(name) if !name.is_empty() => Self::named(&name),
            _ => Ok(Self::best()),
        };
        CHOSEN.get_or_init(choose).clone()
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = IsaError;
    fn from_str(name: &str) -> Result<Self, IsaError> {
        let found = || IsaError::Unknown { found: name.to_owned() };
        Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_unknown_ones_are_told() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
        assert_eq!(Isa::named("portable"), Ok(Isa::Portable));
        let error = Isa::named("AVX512").unwrap_err().to_string();
        assert_eq!(error, "unknown instruction set 'AVX512'; valid: amx, avx512, avx2, portable");
        assert!(Isa::best().is_available());
    }
}
