//! A library with a plugin's metadata section and no root symbol.

const JSON: [u8; LEN] = attache_sdk::private::metadata_json::<LEN>("no_root", "Attaché tests", VERSION);
const LEN: usize = attache_sdk::private::metadata_json_len("no_root", "Attaché tests", VERSION);
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The section.
#[used]
#[unsafe(link_section = ".attache")]
pub static SECTION: [u8; LEN + 12] = attache_sdk::private::metadata_section::<{ LEN + 12 }>(&JSON);
