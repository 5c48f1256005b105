//! `attache doctor`: the machine, the configuration, and what was found where.

use super::list;
use crate::{
    arguments::{Common, List},
    exit::Outcome,
    output, setup,
};
use attache_core::{
    Device,
    config::{Config, VARIABLES},
    policy::Wanted,
};
use serde::Serialize;

/// A setting, and where it came from.
#[derive(Serialize)]
struct Setting {
    key: String,
    value: String,
    origin: String,
}

fn settings(config: &Config) -> Vec<Setting> {
    let policy = &config.policy;
    let one = |key: &str, wanted: &Wanted| Setting {
        key: key.to_owned(),
        value: wanted.name.clone(),
        origin: wanted.origin.to_string(),
    };
    let mut all: Vec<Setting> = policy.backend.iter().map(|wanted| one("backend", wanted)).collect();
    all.extend(policy.per_kind.iter().map(|(kind, wanted)| one(&format!("backend_per_kind {kind}"), wanted)));
    for (key, list) in [("require", &policy.require), ("prefer", &policy.prefer), ("deny", &policy.deny)] {
        all.extend(list.iter().map(|wanted| one(key, wanted)));
    }
    let mut add = |key: String, value: String, origin: String| all.push(Setting { key, value, origin });
    let on_invalid = &policy.on_invalid_override;
    add(
        "on_invalid_override".to_owned(),
        format!("{:?}", on_invalid.value).to_lowercase(),
        on_invalid.origin.to_string(),
    );
    let trust = &config.plugins.trust;
    add("trust".to_owned(), format!("{:?}", trust.value).to_lowercase(), trust.origin.to_string());
    for (name, requirement) in &policy.versions {
        add(format!("versions.{name}"), requirement.value.to_string(), requirement.origin.to_string());
    }
    for (index, rule) in policy.priority.iter().enumerate() {
        add(format!("priority rule {}", index + 1), rule.order.join(" > "), rule.origin.to_string());
    }
    for (plugin, options) in &config.plugins.options {
        let origin = config.file.as_ref().map(|path| format!("file {}", path.display())).unwrap_or_default();
        options.iter().for_each(|(key, value)| add(format!("plugin.{plugin}.{key}"), value.clone(), origin.clone()));
    }
    all
}

pub fn run(common: &Common) -> Outcome {
    let (config, registry) = setup::quiet_registry(common)?;
    let device = registry.device();
    let host = Device::host_cpu();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let settings = settings(&config);
    let environment: Vec<(&str, String)> = VARIABLES
        .iter()
        .filter_map(|variable| {
            Some((variable.name, std::env::var(variable.name).ok().filter(|value| !value.is_empty())?))
        })
        .collect();
    if common.json {
        let searched: Vec<_> = registry
            .searched()
            .iter()
            .map(|place| serde_json::json!({"path": place.path, "origin": place.origin, "exists": place.exists}))
            .collect();
        output::json(&serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "device": device.to_string(),
            "cpu_features": host.features,
            "threads": threads,
            "config_file": config.file,
            "settings": settings,
            "environment": environment,
            "plugins": registry.report(),
            "searched": searched,
        }))?;
        return Ok(());
    }
    output::line(format!("attache {}", env!("CARGO_PKG_VERSION")))?;
    output::line(format!("planning for {device}; {threads} threads allowed by affinity and quota"))?;
    let features: Vec<&str> = host.features.iter().map(String::as_str).collect();
    output::line(format!("CPU features: {}", features.join(" ")))?;
    match &config.file {
        Some(path) => output::line(format!("configuration file: {}", path.display()))?,
        None => output::line("configuration file: none")?,
    }
    let mut table = output::table(&["setting", "value", "from"]);
    for setting in &settings {
        table.add_row([&setting.key, &setting.value, &setting.origin]);
    }
    output::line(table)?;
    for (what, value, loser, winner) in &config.overruled {
        output::line(format!("{what} {value} ({loser}) is overruled by {winner}"))?;
    }
    for (name, value) in environment {
        output::line(format!("{name}={value}"))?;
    }
    list::run(common, &List { all: true })
}
