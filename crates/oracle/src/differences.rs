//! Where we differ on purpose. A rule is about what a case asks for, never about which case it is.

/// An override is ignored, or replaced by another backend, without an error.
pub const SILENT_FALLBACK: &str = "silent_fallback";
/// The CPU platform validates nothing.
pub const CPU_VALIDATES_NOTHING: &str = "cpu_validates_nothing";
/// An override may name a backend of another platform.
pub const OTHER_PLATFORM: &str = "other_platform";
/// `auto` is refused in the map of overrides by kind.
pub const AUTO_BY_KIND: &str = "auto_by_kind";
/// `null` in the map of overrides by kind stands for a backend named CUSTOM.
pub const NULL_BY_KIND: &str = "null_by_kind";
/// Names whose code does not exist there either.
pub const NAMES_WITHOUT_CODE: &str = "names_without_code";
/// A type resolved before batch-invariant mode keeps working.
pub const STALE_TYPE: &str = "stale_type";

/// The rules, and why we hold to ours.
pub const RULES: &[(&str, &str)] = &[
    (SILENT_FALLBACK, "an override that cannot be obeyed is an error here, never another backend"),
    (CPU_VALIDATES_NOTHING, "what a backend does not claim is refused on every platform"),
    (OTHER_PLATFORM, "a backend of another platform cannot run; naming it is an error"),
    (AUTO_BY_KIND, "auto means no override, for one kind as for all"),
    (NULL_BY_KIND, "null is no backend's name"),
    (NAMES_WITHOUT_CODE, "a name without a backend is unknown here, and refused by name"),
    (STALE_TYPE, "an answer does not depend on what was asked before"),
];

/// Why a rule differs.
#[must_use]
pub fn why(rule: &str) -> &'static str {
    RULES.iter().find(|(name, _)| *name == rule).map_or("", |(_, why)| why)
}
