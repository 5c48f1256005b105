//! File, environment and flags, put together.

use super::{
    error::{BadValue, ConfigError},
    file::{File, option_text},
    variables::{PATHS, VARIABLES},
};
use crate::{
    kind::Kind,
    loader::LoadOptions,
    policy::{OnInvalidOverride, Origin, Policy, Sourced, Wanted, nearest},
    registry::{Registry, RegistryBuilder},
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fmt::Display,
    path::{Path, PathBuf},
};

/// What flags say; empty = not given.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// `--backend`.
    pub backend: Option<String>,
    /// `--backend-per-kind KIND=NAME`.
    pub backend_per_kind: Vec<String>,
    /// `--on-invalid-override`.
    pub on_invalid_override: Option<String>,
    /// `--require`.
    pub require: Vec<String>,
    /// `--prefer`.
    pub prefer: Vec<String>,
    /// `--deny`.
    pub deny: Vec<String>,
    /// `--plugin`.
    pub plugins: Vec<PathBuf>,
    /// `--plugin-path`.
    pub plugin_path: Vec<PathBuf>,
}

/// Which plugins may be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Trust {
    /// Those that nobody else may write to.
    #[default]
    Owned,
    /// All.
    Any,
}

/// Where plugins are, and what they are told.
#[derive(Clone, Debug, Default)]
pub struct PluginSettings {
    /// Manifests and libraries, the most wanted first.
    pub files: Vec<Sourced<PathBuf>>,
    /// Directories, the most wanted first.
    pub paths: Vec<Sourced<PathBuf>>,
    /// Which plugins may be opened.
    pub trust: Sourced<Trust>,
    /// Options by plugin.
    pub options: BTreeMap<String, Vec<(String, String)>>,
}

/// The configuration.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// What is wanted of selection.
    pub policy: Policy,
    /// Where plugins are.
    pub plugins: PluginSettings,
    /// Values that lost to another one: key, value, origin, and the origin that won.
    pub overruled: Vec<(String, String, Origin, Origin)>,
}

/// The file that is read when nobody names one.
pub const FILE_NAME: &str = "attache.toml";

impl Config {
    /// Reads the file that the flag or `ATTACHE_CONFIG` names, else `attache.toml` here, else the
    /// user's, else none; then the environment.
    ///
    /// # Errors
    /// When a named file cannot be read, or a key, variable or value is not known.
    pub fn load(named: Option<&Path>, flags: &Overrides) -> Result<Self, ConfigError> {
        let is_elevated = crate::discovery::linux::is_elevated();
        let environment: BTreeMap<String, String> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
            .filter(|(name, _)| name.starts_with("ATTACHE_"))
            .collect();
        let environment = if is_elevated { without_paths(environment) } else { environment };
        let named = named
            .map(Path::to_owned)
            .or_else(|| environment.get("ATTACHE_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from));
        let path = named.clone().or_else(|| default_files().into_iter().find(|path| path.is_file()));
        let text = match &path {
            None => None,
            Some(path) => Some(
                std::fs::read_to_string(path)
                    .map_err(|error| ConfigError::Unreadable { path: path.clone(), reason: error.to_string() })?,
            ),
        };
        let file = path.as_deref().zip(text.as_deref());
        Self::resolve(file, environment, flags)
    }

    /// Puts a file, variables and flags together; has no I/O.
    ///
    /// # Errors
    /// When a key, variable or value is not known.
    pub fn resolve(
        file: Option<(&Path, &str)>,
        environment: impl IntoIterator<Item = (String, String)>,
        flags: &Overrides,
    ) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        if let Some((path, text)) = file {
            config.read_file(path, File::parse(text, path)?)?;
        }
        config.read_environment(environment.into_iter().collect())?;
        config.read_flags(flags)?;
        for (what, value, loser, winner) in &config.overruled {
            tracing::info!(what, value, %loser, %winner, "a setting loses to another one");
        }
        Ok(config)
    }

    /// A registry builder with all of it: files, directories, policy, options; linked-in plugins and
    /// the default directories take part too.
    pub fn registry(&self) -> RegistryBuilder {
        let mut builder = Registry::builder().policy(self.policy.clone());
        for file in &self.plugins.files {
            builder = builder.file(&file.value, file.origin.clone());
        }
        for path in &self.plugins.paths {
            builder = builder.directory(&path.value, path.origin.clone());
        }
        for (plugin, options) in &self.plugins.options {
            builder = builder.plugin_options(plugin, options.clone());
        }
        let allow_writable_by_others = self.plugins.trust.value == Trust::Any;
        builder.default_directories().load_options(LoadOptions { allow_writable_by_others })
    }

    fn read_file(&mut self, path: &Path, file: File) -> Result<(), ConfigError> {
        let origin = Origin::File(path.to_owned());
        let base = path.parent().unwrap_or_else(|| Path::new(""));
        let File { selection, plugins, plugin } = file;
        if let Some(name) = selection.backend {
            self.set_backend(&name, &origin);
        }
        for (kind, name) in &selection.per_kind {
            self.set_per_kind(kind, name, &origin)?;
        }
        if let Some(value) = selection.on_invalid_override {
            self.policy.on_invalid_override = Sourced::new(value, origin.clone());
        }
        self.policy.priority = selection.priority;
        self.policy.priority.iter_mut().for_each(|rule| rule.origin = origin.clone());
        self.set_words(&plugins.require, &plugins.prefer, &plugins.deny, &origin);
        for (name, requirement) in &plugins.versions {
            self.set_version(name, requirement, &origin)?;
        }
        if let Some(trust) = plugins.trust {
            self.set_trust(&trust, &origin)?;
        }
        self.plugins.files = sourced(plugins.files.iter().map(|path| base.join(path)), &origin);
        self.plugins.paths = sourced(plugins.paths.iter().map(|path| base.join(path)), &origin);
        for (name, options) in plugin {
            let list = self.plugins.options.entry(name.to_ascii_lowercase()).or_default();
            for (key, value) in options {
                let text = option_text(&value).ok_or_else(|| {
                    let valid = "a string, a number, true or false";
                    value_error(&format!("plugin.{name}.{key}"), &origin, &value.to_string(), valid, None)
                })?;
                list.push((key, text));
            }
        }
        self.file = Some(path.to_owned());
        Ok(())
    }

    fn read_environment(&mut self, environment: BTreeMap<String, String>) -> Result<(), ConfigError> {
        let known = |name: &str| VARIABLES.iter().any(|variable| variable.name == name);
        for name in environment.keys().filter(|name| name.starts_with("ATTACHE_")) {
            if !known(name) {
                let nearest = nearest(name, VARIABLES.iter().map(|variable| variable.name)).map(str::to_owned);
                return Err(ConfigError::UnknownVariable { found: name.clone(), nearest });
            }
        }
        let get = |name: &str| environment.get(name).map(String::as_str).filter(|value| !value.is_empty());
        let origin = |name: &str| Origin::Environment(name.to_owned());
        if let Some(name) = get("ATTACHE_BACKEND") {
            self.set_backend(name, &origin("ATTACHE_BACKEND"));
        }
        for pair in list(get("ATTACHE_BACKEND_PER_KIND"), ',') {
            self.set_pair(&pair, &origin("ATTACHE_BACKEND_PER_KIND"))?;
        }
        if let Some(value) = get("ATTACHE_ON_INVALID_OVERRIDE") {
            self.set_on_invalid_override(value, &origin("ATTACHE_ON_INVALID_OVERRIDE"))?;
        }
        for (name, words) in [("ATTACHE_REQUIRE", 0), ("ATTACHE_PREFER", 1), ("ATTACHE_DENY", 2)] {
            let mut all = [Vec::new(), Vec::new(), Vec::new()];
            all[words] = list(get(name), ',');
            self.set_words(&all[0], &all[1], &all[2], &origin(name));
        }
        for pair in list(get("ATTACHE_VERSIONS"), ';') {
            let origin = origin("ATTACHE_VERSIONS");
            let Some((name, requirement)) = pair.split_once('=') else {
                return Err(value_error("ATTACHE_VERSIONS", &origin, &pair, "NAME=REQUIREMENT", None));
            };
            self.set_version(name, requirement, &origin)?;
        }
        if let Some(trust) = get("ATTACHE_TRUST") {
            self.set_trust(trust, &origin("ATTACHE_TRUST"))?;
        }
        let paths = |name| sourced(list(get(name), ':').into_iter().map(PathBuf::from), &origin(name));
        self.plugins.files.splice(0..0, paths("ATTACHE_PLUGINS"));
        self.plugins.paths.splice(0..0, paths("ATTACHE_PLUGIN_PATH"));
        Ok(())
    }

    fn read_flags(&mut self, flags: &Overrides) -> Result<(), ConfigError> {
        let origin = |name: &str| Origin::Flag(name.to_owned());
        if let Some(name) = &flags.backend {
            self.set_backend(name, &origin("--backend"));
        }
        for pair in &flags.backend_per_kind {
            self.set_pair(pair, &origin("--backend-per-kind"))?;
        }
        if let Some(value) = &flags.on_invalid_override {
            self.set_on_invalid_override(value, &origin("--on-invalid-override"))?;
        }
        self.set_words(&flags.require, &[], &[], &origin("--require"));
        self.set_words(&[], &flags.prefer, &[], &origin("--prefer"));
        self.set_words(&[], &[], &flags.deny, &origin("--deny"));
        self.plugins.files.splice(0..0, sourced(flags.plugins.iter().cloned(), &origin("--plugin")));
        self.plugins.paths.splice(0..0, sourced(flags.plugin_path.iter().cloned(), &origin("--plugin-path")));
        Ok(())
    }

    fn overrule(&mut self, what: &str, old: Option<&Wanted>, winner: &Origin) {
        if let Some(old) = old {
            self.overruled.push((what.to_owned(), old.name.clone(), old.origin.clone(), winner.clone()));
        }
    }

    fn set_backend(&mut self, name: &str, origin: &Origin) {
        let old = std::mem::replace(&mut self.policy.backend, Wanted::parse(name, origin.clone()));
        self.overrule("backend", old.as_ref(), origin);
    }

    fn set_pair(&mut self, pair: &str, origin: &Origin) -> Result<(), ConfigError> {
        let Some((kind, name)) = pair.split_once('=') else {
            return Err(value_error("backend_per_kind", origin, pair, "KIND=NAME", None));
        };
        self.set_per_kind(kind.trim(), name.trim(), origin)
    }

    fn set_per_kind(&mut self, kind: &str, name: &str, origin: &Origin) -> Result<(), ConfigError> {
        let Some(parsed) = Kind::parse(kind) else {
            let valid = Kind::ALL.map(Kind::name);
            return Err(value_error(
                "a kind of backend_per_kind",
                origin,
                kind,
                valid.join(", "),
                nearest(kind, valid),
            ));
        };
        let old = match Wanted::parse(name, origin.clone()) {
            Some(wanted) => self.policy.per_kind.insert(parsed, wanted),
            None => self.policy.per_kind.remove(&parsed),
        };
        self.overrule(&format!("backend_per_kind {kind}"), old.as_ref(), origin);
        Ok(())
    }

    fn set_on_invalid_override(&mut self, value: &str, origin: &Origin) -> Result<(), ConfigError> {
        let parsed = match value {
            "error" => OnInvalidOverride::Error,
            "fallback" => OnInvalidOverride::Fallback,
            _ => {
                let near = nearest(value, ["error", "fallback"]);
                return Err(value_error("on_invalid_override", origin, value, "error, fallback", near));
            }
        };
        self.policy.on_invalid_override = Sourced::new(parsed, origin.clone());
        Ok(())
    }

    /// A list that is given replaces the one of a weaker origin.
    fn set_words(&mut self, require: &[String], prefer: &[String], deny: &[String], origin: &Origin) {
        let wanted = |names: &[String]| -> Vec<Wanted> {
            names.iter().filter_map(|name| Wanted::parse(name, origin.clone())).collect()
        };
        let lists = [
            ("require", &mut self.policy.require, require),
            ("prefer", &mut self.policy.prefer, prefer),
            ("deny", &mut self.policy.deny, deny),
        ];
        let mut lost = Vec::new();
        for (what, list, names) in lists {
            let new = wanted(names);
            if !new.is_empty() {
                lost.extend(std::mem::replace(list, new).into_iter().map(|old| (what, old)));
            }
        }
        for (what, old) in lost {
            self.overrule(what, Some(&old), origin);
        }
    }

    fn set_version(&mut self, name: &str, requirement: &str, origin: &Origin) -> Result<(), ConfigError> {
        let parsed = semver::VersionReq::parse(requirement.trim()).map_err(|error| {
            let valid = format!("a requirement such as ^1.2 ({error})");
            value_error(&format!("versions.{name}"), origin, requirement, valid, None)
        })?;
        self.policy.versions.insert(name.trim().to_ascii_uppercase(), Sourced::new(parsed, origin.clone()));
        Ok(())
    }

    fn set_trust(&mut self, value: &str, origin: &Origin) -> Result<(), ConfigError> {
        let trust = match value {
            "owned" => Trust::Owned,
            "any" => Trust::Any,
            _ => return Err(value_error("trust", origin, value, "owned, any", nearest(value, ["owned", "any"]))),
        };
        self.plugins.trust = Sourced::new(trust, origin.clone());
        Ok(())
    }
}

fn value_error(what: &str, origin: &Origin, value: &str, valid: impl Display, near: Option<&str>) -> ConfigError {
    ConfigError::Value(Box::new(BadValue {
        what: what.to_owned(),
        origin: origin.clone(),
        value: value.to_owned(),
        valid: valid.to_string(),
        nearest: near.map(str::to_owned),
    }))
}

fn list(text: Option<&str>, separator: char) -> Vec<String> {
    text.unwrap_or_default()
        .split(separator)
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .map(str::to_owned)
        .collect()
}

fn sourced(paths: impl Iterator<Item = PathBuf>, origin: &Origin) -> Vec<Sourced<PathBuf>> {
    paths.map(|path| Sourced::new(path, origin.clone())).collect()
}

/// `attache.toml` of the working directory, then of the user's configuration directory.
fn default_files() -> Vec<PathBuf> {
    let user = std::env::var_os("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(".config")));
    let mut files = vec![PathBuf::from(FILE_NAME)];
    files.extend(user.map(|directory| directory.join("attache").join(FILE_NAME)));
    files
}

/// Whoever runs an elevated process may not lead it to files.
fn without_paths(mut environment: BTreeMap<String, String>) -> BTreeMap<String, String> {
    for name in PATHS {
        if environment.remove(name).is_some() {
            tracing::warn!(name, "ignored: the process is elevated");
        }
    }
    environment
}
