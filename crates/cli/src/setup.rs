//! Configuration, logging and registry, from flags.

use crate::{
    arguments::{Common, Engine},
    exit::{self, Failure},
    output,
};
use attache_catalogue::Catalogue;
use attache_core::{
    Device, Dtype, KvCacheDtype,
    config::Config,
    device::DeviceParseError,
    plan::EngineConfig,
    policy::Origin,
    registry::{Registry, Stage},
};
use std::io::IsTerminal;
use tracing_subscriber::{EnvFilter, layer::SubscriberExt, util::SubscriberInitExt};

/// Logs to stderr what `ATTACHE_LOG` asks for; errors alone when it is not set. Colours are for
/// terminals, unless `NO_COLOR` is set.
pub fn logging() {
    let filter = std::env::var("ATTACHE_LOG").ok().filter(|filter| !filter.is_empty());
    let filter = EnvFilter::try_new(filter.as_deref().unwrap_or("error")).unwrap_or_else(|error| {
        eprintln!("warning: ATTACHE_LOG: {error}");
        EnvFilter::new("error")
    });
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colours).compact();
    tracing_subscriber::registry().with(filter).with(layer).init();
}

/// The configuration and the plugins of this call, with one warning for each plugin that is broken.
pub fn registry(common: &Common) -> Result<(Config, Registry), Failure> {
    let (config, registry) = quiet_registry(common)?;
    let broken = registry.report().into_iter().filter(|entry| matches!(entry.stage, Stage::Failed | Stage::Invalid));
    let warnings: Vec<String> =
        broken.map(|entry| exit::about(&entry.source, entry.reason.as_deref().unwrap_or_default())).collect();
    output::warnings(&warnings);
    Ok((config, registry))
}

/// As [`registry`], for commands that show broken plugins themselves.
pub fn quiet_registry(common: &Common) -> Result<(Config, Registry), Failure> {
    let config = Config::load(common.config.as_deref(), &common.overrides())?;
    let catalogues = common
        .catalogue
        .iter()
        .map(|path| Catalogue::load(path).map_err(|error| Failure::usage(error.to_string())))
        .collect::<Result<Vec<_>, _>>()?;
    let mut builder = config.registry();
    if let Some(device) = &common.device {
        let listed = catalogues.iter().find_map(|catalogue| catalogue.device(device));
        builder = builder.device(listed.map_or_else(|| device_named(device), |device| Ok(device.clone()))?);
    }
    // The operator's own rules come first.
    let mut policy = config.policy.clone();
    for catalogue in catalogues {
        policy.priority.extend(catalogue.priority);
        builder = builder.catalogue(catalogue.candidates);
    }
    builder = builder.policy(policy);
    let registry = builder.build();
    // A plugin that the user named is not skipped in silence.
    for entry in registry.report() {
        let is_named = matches!(&entry.origin, Origin::Flag(flag) if flag == "--plugin");
        if is_named && matches!(entry.stage, Stage::Failed | Stage::Invalid | Stage::Skipped) {
            let reason = entry.reason.clone().unwrap_or_default();
            return Err(Failure::plugin(&entry.source, &reason, entry.detail));
        }
    }
    Ok((config, registry))
}

fn device_named(text: &str) -> Result<Device, Failure> {
    let (platform, detail) = text.split_once(':').unwrap_or((text, ""));
    if platform == "cpu" && detail.is_empty() {
        return Ok(Device::host_cpu());
    }
    let bad = |error: DeviceParseError| {
        Failure::usage(format!("--device {text}: {error}; for instance cpu, cuda:9.0, rocm:gfx942"))
    };
    let mut facts = vec![("platform", platform)];
    if !detail.is_empty() {
        let is_number = detail.starts_with(|first: char| first.is_ascii_digit());
        facts.push((if is_number { "compute_capability" } else { "architecture" }, detail));
    }
    Device::from_attributes(facts).map_err(bad)
}

/// The dtype of that name.
pub fn dtype(text: &str) -> Result<Dtype, Failure> {
    let found = match text.to_ascii_lowercase().as_str() {
        "f32" | "float32" => Dtype::F32,
        "f16" | "float16" | "half" => Dtype::F16,
        "bf16" | "bfloat16" => Dtype::BF16,
        _ => return Err(Failure::usage(format!("--dtype '{text}'; valid: f32, f16, bf16"))),
    };
    Ok(found)
}

/// The cache format of that name.
pub fn kv_cache_dtype(text: &str) -> Result<KvCacheDtype, Failure> {
    KvCacheDtype::parse(text).map_err(Failure::usage)
}

/// The engine's settings of this call, where `default` is what holds when nothing is said.
pub fn engine_config(flags: &Engine, default: EngineConfig) -> Result<EngineConfig, Failure> {
    if flags.block_size == Some(0) {
        return Err(Failure::usage("--block-size 0; valid: any number from 1 on"));
    }
    Ok(EngineConfig {
        dtype: flags.dtype.as_deref().map(dtype).transpose()?.unwrap_or(default.dtype),
        kv_cache_dtype: flags.kv_cache_dtype.as_deref().map(kv_cache_dtype).transpose()?,
        block_size: flags.block_size,
        use_batch_invariant: flags.batch_invariant.unwrap_or(default.use_batch_invariant),
        ..default
    })
}
