//! What the export macro needs: the metadata as bytes, the root module, and the macro.

use attache_core::abi::{ABI_GENERATION_MAX, ABI_GENERATION_MIN, METADATA_MAGIC};

const SDK_VERSION: &str = env!("CARGO_PKG_VERSION");

// The text is put together at compile time, since a section of the library must hold it.
const fn parts<'a>(name: &'a str, vendor: &'a str, version: &'a str) -> [&'a str; 9] {
    const { assert!(ABI_GENERATION_MIN == 1 && ABI_GENERATION_MAX == 1, "spell the generations below anew") };
    [
        "{\"name\":\"",
        name,
        "\",\"vendor\":\"",
        vendor,
        "\",\"version\":\"",
        version,
        "\",\"sdk_version\":\"",
        SDK_VERSION,
        "\",\"abi_generation_min\":1,\"abi_generation_max\":1}",
    ]
}

/// Bytes of the JSON text.
#[must_use]
pub const fn metadata_json_len(name: &str, vendor: &str, version: &str) -> usize {
    let parts = parts(name, vendor, version);
    let mut len = 0;
    let mut i = 0;
    while i < parts.len() {
        len += parts[i].len();
        i += 1;
    }
    len
}

/// The JSON text.
///
/// # Panics
/// At compile time, when a name holds a character that JSON would have to escape.
#[must_use]
pub const fn metadata_json<const N: usize>(name: &str, vendor: &str, version: &str) -> [u8; N] {
    let parts = parts(name, vendor, version);
    let mut out = [0; N];
    let (mut at, mut i) = (0, 0);
    while i < parts.len() {
        let bytes = parts[i].as_bytes();
        let mut j = 0;
        while j < bytes.len() {
            if i % 2 == 1 {
                assert!(
                    bytes[j] >= b' ' && bytes[j] != b'"' && bytes[j] != b'\\',
                    "a plugin's name, vendor and version must not hold quotes, backslashes or control characters"
                );
            }
            out[at] = bytes[j];
            at += 1;
            j += 1;
        }
        i += 1;
    }
    out
}

/// The content of the metadata section: magic, length, JSON.
#[must_use]
pub const fn metadata_section<const N: usize>(json: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    let mut i = 0;
    while i < 8 {
        out[i] = METADATA_MAGIC[i];
        i += 1;
    }
    let len = (json.len() as u32).to_le_bytes();
    while i < 12 {
        out[i] = len[i - 8];
        i += 1;
    }
    while i < N {
        out[i] = json[i - 12];
        i += 1;
    }
    out
}

/// Builds the root module of a library.
#[must_use]
pub fn root(metadata: &'static str, interface: attache_core::abi::InterfaceGetter) -> attache_core::abi::PluginRootRef {
    use attache_core::{
        abi::{AbiStr, PluginRoot},
        private::abi_stable::prefix_type::PrefixTypeTrait,
    };
    PluginRoot {
        metadata: AbiStr::new(metadata),
        generation_min: ABI_GENERATION_MIN,
        generation_max: ABI_GENERATION_MAX,
        interface,
    }
    .leak_into_prefix()
}

/// Makes a crate a plugin. One line, at the root of the crate:
///
/// ```text
/// attache_sdk::export_backends! { name: "cpu", vendor: "Example", backends: [MyBackend] }
/// ```
///
/// Linked in, the plugin registers itself through `inventory`. Built with the crate's feature
/// `dylib` (declare `dylib = []` under `[features]`) as a `cdylib`, it exports the root symbol
/// instead. The version is the crate's own.
#[macro_export]
macro_rules! export_backends {
    (name: $name:literal, vendor: $vendor:literal, backends: [$($backend:ty),+ $(,)?] $(,)?) => {
        const _: () = {
            struct Exported;
            impl $crate::private::PluginBackends for Exported {
                const ENTRIES: &'static [$crate::private::BackendEntry] =
                    &[$($crate::private::entry::<$backend>()),+];
                const IS_LIBRARY: bool = ::core::cfg!(feature = "dylib");
            }

            $crate::export_root! { name: $name, vendor: $vendor, interface: $crate::private::interface::<Exported> }
        };
    };
}

/// As [`export_backends!`], for a plugin that hands out its interfaces itself: `interface` is an
/// [`InterfaceGetter`](attache_core::abi::InterfaceGetter).
#[macro_export]
macro_rules! export_root {
    (name: $name:literal, vendor: $vendor:literal, interface: $interface:expr $(,)?) => {
        const _: () = {
            const VERSION: &str = ::core::env!("CARGO_PKG_VERSION");
            const LEN: usize = $crate::private::metadata_json_len($name, $vendor, VERSION);
            static JSON: [u8; LEN] = $crate::private::metadata_json::<LEN>($name, $vendor, VERSION);
            static METADATA: &str = match ::core::str::from_utf8(&JSON) {
                Ok(text) => text,
                Err(_) => ::core::panic!("the metadata is not UTF-8"),
            };

            #[cfg(not(feature = "dylib"))]
            $crate::private::inventory::submit! {
                $crate::private::LinkedPlugin { metadata: METADATA, interface: $interface }
            }

            #[cfg(feature = "dylib")]
            const SECTION_LEN: usize = LEN + 12;
            #[cfg(feature = "dylib")]
            #[used]
            #[unsafe(link_section = ".attache")]
            static SECTION: [u8; SECTION_LEN] = $crate::private::metadata_section::<SECTION_LEN>(&JSON);

            #[cfg(feature = "dylib")]
            fn make_root() -> $crate::private::PluginRootRef {
                $crate::private::root(METADATA, $interface)
            }

            #[cfg(feature = "dylib")]
            extern "C" fn load_root() -> $crate::private::abi_stable::library::RootModuleResult {
                $crate::private::abi_stable::library::__call_root_module_loader(make_root)
            }

            // The symbol that `abi_stable` looks for; its name is checked by a test of the SDK.
            #[cfg(feature = "dylib")]
            #[unsafe(export_name = "_1as_0lib_1header_0root_bmodule_bloader")]
            static ROOT: $crate::private::abi_stable::library::LibHeader =
                // SAFETY: `load_root` gives a `PluginRootRef`, erased.
                unsafe {
                    $crate::private::abi_stable::library::LibHeader::from_constructor::<$crate::private::PluginRootRef>(
                        load_root,
                        $crate::private::abi_stable::library::CheckTypeLayout::Yes,
                    )
                };
        };
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_json_and_its_section_is_framed() {
        const LEN: usize = metadata_json_len("cpu", "Example", "1.2.3");
        const JSON: [u8; LEN] = metadata_json::<LEN>("cpu", "Example", "1.2.3");
        let parsed: attache_core::PluginMetadata =
            attache_core::private::serde_json::from_slice(&JSON).expect("valid JSON");
        assert_eq!((parsed.name.as_str(), parsed.vendor.as_str()), ("cpu", "Example"));
        assert_eq!(parsed.version.to_string(), "1.2.3");
        assert_eq!(parsed.sdk_version.to_string(), SDK_VERSION);
        assert_eq!((parsed.abi_generation_min, parsed.abi_generation_max), (ABI_GENERATION_MIN, ABI_GENERATION_MAX));
        let section = metadata_section::<{ LEN + 12 }>(&JSON);
        assert_eq!(&section[..8], METADATA_MAGIC);
        assert_eq!(&section[12..], &JSON);
    }

    #[test]
    fn the_root_symbol_has_the_name_that_hosts_look_for() {
        assert_eq!(
            attache_core::private::abi_stable::library::ROOT_MODULE_LOADER_NAME,
            "_1as_0lib_1header_0root_bmodule_bloader"
        );
    }
}
