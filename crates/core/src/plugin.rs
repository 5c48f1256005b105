//! How a plugin that is linked in makes itself known, and what a plugin says of itself.

use crate::abi::InterfaceGetter;
pub use semver::Version;
use serde::{Deserialize, Serialize};

/// What a plugin says of itself: the same text in the library's metadata section, in its root
/// module and, read without opening anything, in its manifest. Written by the export macro.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PluginMetadata {
    /// The plugin's name.
    pub name: String,
    /// Who made it.
    pub vendor: String,
    /// Its version, from its `Cargo.toml`.
    pub version: semver::Version,
    /// Version of the SDK that it was built with.
    pub sdk_version: semver::Version,
    /// Oldest ABI generation that it speaks.
    pub abi_generation_min: u32,
    /// Newest ABI generation that it speaks.
    pub abi_generation_max: u32,
}

/// A plugin that is linked into the program; collected by `inventory`.
pub struct LinkedPlugin {
    /// The metadata as JSON.
    pub metadata: &'static str,
    /// Hands out interfaces, as the root module of a library does.
    pub interface: InterfaceGetter,
}

inventory::collect!(LinkedPlugin);

/// The plugins linked into this program, in no particular order.
pub fn linked_plugins() -> impl Iterator<Item = &'static LinkedPlugin> {
    inventory::iter::<LinkedPlugin>.into_iter()
}
