//! What the operator wants: overrides, words, version requirements, priority rules. Every value
//! remembers where it came from.
//!
//! Must not know: how configuration is read, what backends exist.

use crate::{condition::Condition, device::Device, kind::Kind, request::LayerRequest};
use serde::{Deserialize, Serialize, Serializer};
use std::{collections::BTreeMap, fmt, path::PathBuf};

/// Where a value came from.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Default, PartialOrd, Ord)]
pub enum Origin {
    /// Nobody set it.
    #[default]
    Default,
    /// A configuration file.
    File(PathBuf),
    /// An environment variable.
    Environment(String),
    /// A flag of the command line.
    Flag(String),
    /// The program itself.
    Api,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
            Self::Api => f.write_str("api"),
        }
    }
}

impl Serialize for Origin {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A value and where it came from.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Sourced<T> {
    /// The value.
    pub value: T,
    /// Where it came from.
    pub origin: Origin,
}

impl<T> Sourced<T> {
    /// A value from somewhere.
    pub fn new(value: T, origin: Origin) -> Self {
        Self { value, origin }
    }
}

/// A name that the operator gave, in capitals.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct Wanted {
    /// The name.
    pub name: String,
    /// Where it came from.
    pub origin: Origin,
}

impl Wanted {
    /// The backend of that name; `auto` in any case means none. The case of letters does not count;
    /// nothing is trimmed or mapped, and an empty name is one that no backend has.
    #[must_use]
    pub fn parse(name: &str, origin: Origin) -> Option<Self> {
        if name.eq_ignore_ascii_case("auto") {
            return None;
        }
        Some(Self { name: name.to_ascii_uppercase(), origin })
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.origin)
    }
}

/// What happens when a wanted backend is not valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnInvalidOverride {
    /// An error with all reasons.
    #[default]
    Error,
    /// Automatic choice, with a warning.
    Fallback,
}

/// An ordered list of backends that counts before the backends' own ranks.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PriorityRule {
    /// When it applies; of all rules the first that applies counts.
    pub when: Condition,
    /// Backends by name, the preferred one first.
    pub order: Vec<String>,
    /// Take no backend that is not listed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub exclusive: bool,
    /// Where it came from.
    #[serde(skip)]
    pub origin: Origin,
}

/// What the operator wants.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Policy {
    /// This backend or an error, for every kind that has no override of its own.
    pub backend: Option<Wanted>,
    /// This backend or an error, for one kind; counts before `backend`.
    pub per_kind: BTreeMap<Kind, Wanted>,
    /// What happens when an override is not valid.
    pub on_invalid_override: Sourced<OnInvalidOverride>,
    /// One of these backends or plugins, or an error; empty = any.
    pub require: Vec<Wanted>,
    /// These first, where valid; otherwise automatic, with a warning.
    pub prefer: Vec<Wanted>,
    /// Never these backends or plugins.
    pub deny: Vec<Wanted>,
    /// Versions that are taken, by backend or plugin in capitals.
    pub versions: BTreeMap<String, Sourced<semver::VersionReq>>,
    /// Priority rules.
    pub priority: Vec<PriorityRule>,
}

impl Policy {
    /// The override for a kind, if any: that of the kind, else the global one.
    #[must_use]
    pub fn wanted(&self, kind: Kind) -> Option<&Wanted> {
        self.per_kind.get(&kind).or(self.backend.as_ref())
    }

    /// The priority rule that counts.
    #[must_use]
    pub fn priority_rule(&self, request: &LayerRequest, device: &Device) -> Option<&PriorityRule> {
        self.priority.iter().find(|rule| rule.when.matches(request, device))
    }
}

/// The member of `valid` that is nearest to `found`, when one is near enough to be meant.
#[must_use]
pub fn nearest<'a>(found: &str, valid: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = found.to_ascii_lowercase();
    valid
        .into_iter()
        .map(|name| (strsim::jaro_winkler(&lower, &name.to_ascii_lowercase()), name))
        .filter(|(similarity, _)| *similarity > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0).then_with(|| b.1.cmp(a.1)))
        .map(|(_, name)| name)
}

/// `; did you mean X?`, or nothing.
pub(crate) fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map(|name| format!("; did you mean '{name}'?")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_means_none_and_case_does_not_count() {
        for none in ["auto", "AUTO", "Auto"] {
            assert_eq!(Wanted::parse(none, Origin::Api), None);
        }
        assert_eq!(Wanted::parse("", Origin::Api).map(|w| w.name).as_deref(), Some(""), "an unknown backend");
        assert_eq!(Wanted::parse("flash_attn", Origin::Api).map(|w| w.name).as_deref(), Some("FLASH_ATTN"));
        assert_eq!(Wanted::parse(" flash-attn", Origin::Api).map(|w| w.name).as_deref(), Some(" FLASH-ATTN"));
    }

    #[test]
    fn a_kinds_override_beats_the_global_one() {
        let named = |name: &str| Wanted { name: name.into(), origin: Origin::Api };
        let mut policy = Policy { backend: Some(named("A")), ..Policy::default() };
        policy.per_kind.insert(Kind::MlaAttention, named("B"));
        assert_eq!(policy.wanted(Kind::MlaAttention), Some(&named("B")));
        assert_eq!(policy.wanted(Kind::FullAttention), Some(&named("A")));
    }

    #[test]
    fn the_nearest_name_is_one_that_may_be_meant() {
        assert_eq!(nearest("CPU_ATN", ["CPU_ATTN", "CPU_MLA"]), Some("CPU_ATTN"));
        assert_eq!(nearest("zzz", ["CPU_ATTN"]), None);
    }
}
