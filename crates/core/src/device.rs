//! Facts about the device a layer will run on.

use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, fmt, str::FromStr};

/// The platform's name: `cpu`, `cuda`, `rocm`, … A vendor may bring a new one.
#[derive(Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Platform(pub String);

impl Platform {
    /// The host's processor.
    #[must_use]
    pub fn cpu() -> Self {
        Self("cpu".to_owned())
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A compute capability, for instance 9.0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ComputeCapability {
    /// Before the dot.
    pub major: u32,
    /// After the dot.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Text that is not a device description.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot read '{found}' as {wanted}")]
pub struct DeviceParseError {
    /// What was found.
    pub found: String,
    /// What was expected.
    pub wanted: &'static str,
}

impl FromStr for ComputeCapability {
    type Err = DeviceParseError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || DeviceParseError { found: text.to_owned(), wanted: "a compute capability such as 9.0" };
        let (major, minor) = text.split_once('.').ok_or_else(error)?;
        Ok(Self { major: major.parse().map_err(|_| error())?, minor: minor.parse().map_err(|_| error())? })
    }
}

impl TryFrom<String> for ComputeCapability {
    type Error = DeviceParseError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ComputeCapability> for String {
    fn from(capability: ComputeCapability) -> Self {
        capability.to_string()
    }
}

/// Facts about a device: enough for every capability predicate, so that selection touches no device.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Platform name.
    pub platform: Platform,
    /// Marketing name, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Compute capability, where the platform has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<ComputeCapability>,
    /// Architecture name such as `gfx942`, where the platform has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// Features by name: instruction sets of a CPU, libraries found, driver abilities.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub features: BTreeSet<String>,
    /// Memory in bytes; 0 = not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_bytes: u64,
    /// Driver version as the driver states it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// Number of such devices.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub count: u32,
}

fn one() -> u32 {
    1
}
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(count: &u32) -> bool {
    *count == 1
}
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

impl Device {
    /// A device of a platform of which nothing else is known.
    #[must_use]
    pub fn new(platform: &str) -> Self {
        Self {
            platform: Platform(platform.to_owned()),
            name: String::new(),
            compute_capability: None,
            architecture: None,
            features: BTreeSet::new(),
            memory_bytes: 0,
            driver_version: None,
            count: 1,
        }
    }

    /// This machine's processor, with the instruction sets that the operating system enabled.
    #[must_use]
    pub fn host_cpu() -> Self {
        let mut device = Self::new("cpu");
        device.architecture = Some(std::env::consts::ARCH.to_owned());
        #[cfg(target_arch = "x86_64")]
        {
            macro_rules! detect {
                ($($feature:tt),*) => {
                    $(if std::arch::is_x86_feature_detected!($feature) {
                        device.features.insert($feature.to_owned());
                    })*
                };
            }
            detect!(
                "avx2",
                "fma",
                "f16c",
                "avx512f",
                "avx512bw",
                "avx512vl",
                "avx512dq",
                "avx512bf16",
                "avx512vnni",
                "avx512fp16"
            );
        }
        device
    }

    /// The device as text by name: how it crosses the ABI.
    #[must_use]
    pub fn to_attributes(&self) -> Vec<(String, String)> {
        let mut attributes = vec![("platform".to_owned(), self.platform.0.clone())];
        let mut add = |key: &str, value: String| attributes.push((key.to_owned(), value));
        if !self.name.is_empty() {
            add("name", self.name.clone());
        }
        if let Some(capability) = self.compute_capability {
            add("compute_capability", capability.to_string());
        }
        if let Some(architecture) = &self.architecture {
            add("architecture", architecture.clone());
        }
        if !self.features.is_empty() {
            add("features", self.features.iter().cloned().collect::<Vec<_>>().join(","));
        }
        if self.memory_bytes > 0 {
            add("memory_bytes", self.memory_bytes.to_string());
        }
        if let Some(version) = &self.driver_version {
            add("driver_version", version.clone());
        }
        if self.count != 1 {
            add("count", self.count.to_string());
        }
        attributes
    }

    /// Reads what [`Device::to_attributes`] wrote. A fact of a name that is not known here is kept
    /// as the feature `key=value`.
    ///
    /// # Errors
    /// When a value does not parse or there is no platform.
    pub fn from_attributes<'a>(
        attributes: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, DeviceParseError> {
        let mut device = Self::new("");
        for (key, value) in attributes {
            let bad = |wanted| DeviceParseError { found: value.to_owned(), wanted };
            match key {
                "platform" => device.platform = Platform(value.to_owned()),
                "name" => value.clone_into(&mut device.name),
                "compute_capability" => device.compute_capability = Some(value.parse()?),
                "architecture" => device.architecture = Some(value.to_owned()),
                "features" => device.features.extend(value.split(',').map(str::to_owned)),
                "memory_bytes" => device.memory_bytes = value.parse().map_err(|_| bad("a number of bytes"))?,
                "driver_version" => device.driver_version = Some(value.to_owned()),
                "count" => device.count = value.parse().map_err(|_| bad("a count"))?,
                other => {
                    device.features.insert(format!("{other}={value}"));
                }
            }
        }
        if device.platform.0.is_empty() {
            return Err(DeviceParseError { found: String::new(), wanted: "a platform" });
        }
        Ok(device)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.platform.0)?;
        if let Some(capability) = self.compute_capability {
            write!(f, ":{capability}")?;
        } else if let Some(architecture) = &self.architecture {
            write!(f, ":{architecture}")?;
        }
        Ok(())
    }
}
