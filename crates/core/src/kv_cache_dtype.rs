//! Names of KV-cache element formats. A plugin can register a further one.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{
    fmt,
    sync::{PoisonError, RwLock},
};

/// The name of a KV-cache element format. Interned: copying, comparing and hashing are cheap.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KvCacheDtype(&'static str);

impl std::hash::Hash for KvCacheDtype {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        // Interned, so the address identifies the name.
        self.0.as_ptr().hash(state);
    }
}

/// A name that nobody registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown kv_cache_dtype '{found}'; valid: {}", valid.join(", "))]
pub struct UnknownKvCacheDtype {
    /// What was asked for.
    pub found: String,
    /// What exists.
    pub valid: Vec<&'static str>,
}

const BUILT_IN: &[&str] = &[
    "auto",
    "float32",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "nvfp4_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "octave_k3v4",
    "octave_k3v3",
    "octave_k3v3_compact",
    "ultraquant_4bit",
    "int4_per_token_head",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
    "nvfp4_4over6",
];

static REGISTERED: RwLock<Vec<&'static str>> = RwLock::new(Vec::new());

impl KvCacheDtype {
    /// The compute dtype's own format.
    pub const AUTO: Self = Self(BUILT_IN[0]);

    /// The format called `name`.
    ///
    /// # Errors
    /// When there is none; the error lists the valid names.
    pub fn parse(name: &str) -> Result<Self, UnknownKvCacheDtype> {
        if let Some(known) = BUILT_IN.iter().find(|known| **known == name) {
            return Ok(Self(known));
        }
        let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = registered.iter().find(|known| **known == name) {
            return Ok(Self(known));
        }
        drop(registered);
        Err(UnknownKvCacheDtype { found: name.to_owned(), valid: Self::names() })
    }

    /// Makes `name` known, for the life of the process, and returns it.
    pub fn register(name: &str) -> Self {
        if let Ok(known) = Self::parse(name) {
            return known;
        }
        let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been faster.
        if let Some(known) = registered.iter().find(|known| **known == name) {
            return Self(known);
        }
        let interned: &'static str = Box::leak(name.to_owned().into_boxed_str());
        registered.push(interned);
        Self(interned)
    }

    /// All known names.
    #[must_use]
    pub fn names() -> Vec<&'static str> {
        let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
        BUILT_IN.iter().copied().chain(registered.iter().copied()).collect()
    }

    /// The name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0
    }

    /// Whether the values are stored in fewer bits than 16 (everything but auto and plain floats).
    #[must_use]
    pub fn is_quantized(self) -> bool {
        !matches!(self.0, "auto" | "float16" | "bfloat16" | "float32")
    }
}

impl fmt::Debug for KvCacheDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl fmt::Display for KvCacheDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl Serialize for KvCacheDtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0)
    }
}

impl<'de> Deserialize<'de> for KvCacheDtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::parse(&name).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_list_the_valid_ones_and_registering_makes_them_known() {
        let error = KvCacheDtype::parse("fp9").unwrap_err();
        assert!(error.to_string().contains("fp8_e4m3"), "{error}");
        let registered = KvCacheDtype::register("vendor_fp6");
        assert_eq!(KvCacheDtype::parse("vendor_fp6"), Ok(registered));
        assert_eq!(KvCacheDtype::register("vendor_fp6"), registered);
    }
}
