//! The configuration file: its form, and errors that name the key.

use super::error::ConfigError;
use crate::policy::{OnInvalidOverride, PriorityRule, nearest};
use serde::Deserialize;
use std::{collections::BTreeMap, path::Path};

/// `attache.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct File {
    pub selection: Selection,
    pub plugins: Plugins,
    /// Options by plugin.
    pub plugin: BTreeMap<String, BTreeMap<String, toml::Value>>,
}

/// `[selection]`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Selection {
    pub backend: Option<String>,
    pub per_kind: BTreeMap<String, String>,
    pub on_invalid_override: Option<OnInvalidOverride>,
    pub priority: Vec<PriorityRule>,
}

/// `[plugins]`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Plugins {
    pub paths: Vec<String>,
    pub files: Vec<String>,
    pub require: Vec<String>,
    pub prefer: Vec<String>,
    pub deny: Vec<String>,
    pub versions: BTreeMap<String, String>,
    pub trust: Option<String>,
}

/// Keys by table, for suggestions.
const KEYS: &[&str] = &[
    "selection",
    "plugins",
    "plugin",
    "backend",
    "per_kind",
    "on_invalid_override",
    "priority",
    "paths",
    "files",
    "require",
    "prefer",
    "deny",
    "versions",
    "trust",
    "when",
    "order",
    "exclusive",
];

impl File {
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start));
            let line = before.map(|before| before.matches('\n').count() + 1);
            let at = line.map(|line| format!("line {line}: ")).unwrap_or_default();
            let message = error.message().replace('\n', " ");
            let unknown = message.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
            let hint = unknown.and_then(|key| nearest(key, KEYS.iter().copied()));
            let hint = hint.map(|key| format!("; did you mean '{key}'?")).unwrap_or_default();
            ConfigError::File { path: path.to_owned(), reason: format!("{at}{message}{hint}") }
        })
    }
}

/// An option's value as it is handed to a plugin.
pub(super) fn option_text(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    }
}
