//! Plugins that are broken in every way that people met: one clear line each, and the rest goes on.

use attache_core::{
    Dtype, LayerConfig, LayerRequest,
    manifest::Manifest,
    policy::{Origin, Policy, Wanted},
    registry::{Registry, Stage},
};
use attache_tests::{Plugins, library};
use std::path::Path;

const GOOD: &str = "attache-fixture-null";

fn request() -> LayerRequest {
    LayerRequest {
        head_size: 64,
        dtype: Dtype::F32,
        num_heads: Some(1),
        num_kv_heads: Some(1),
        ..LayerRequest::default()
    }
}

fn wants(name: &str) -> Policy {
    Policy { backend: Wanted::parse(name, Origin::Flag("--backend".to_owned())), ..Policy::default() }
}

fn registry(plugins: &Plugins, policy: Policy) -> Registry {
    Registry::builder().linked(false).directory(plugins.path(), Origin::Api).policy(policy).build()
}

/// Breaks a plugin beside a good one: wanting it is an error of one line that says why; wanting
/// nothing gives the good one.
fn breaks(package: &str, name: &str, damage: impl Fn(&Plugins, &Path), reason: &str) {
    let plugins = Plugins::new();
    let path = plugins.add(package);
    plugins.add(GOOD);
    damage(&plugins, &path);

    let error = registry(&plugins, wants(name)).backend(&request(), None).map(|r| r.backend.name().to_owned());
    let text = error.expect_err(package).to_string();
    assert!(text.contains(reason), "{package}: {text}");
    assert_eq!(text.lines().count(), 1, "{package}: {text}");
    assert!(text.len() < 1000, "{package}: {text}");

    let others = registry(&plugins, Policy::default());
    let resolved = others.backend(&request(), None).unwrap_or_else(|error| panic!("{package}: {error}"));
    assert_eq!(resolved.backend.name(), "NULL_ATTN");
    drop(resolved.backend.create_layer(&LayerConfig::new(1, 1, 64, Dtype::F32)).expect("the good one works"));
}

/// Rewrites the manifest so that it fits the damaged file: the damage itself must be found.
fn with_right_hash(plugins: &Plugins, package: &str, path: &Path) {
    let manifest = plugins.manifest(package);
    let text = std::fs::read_to_string(&manifest).expect("a manifest");
    let mut parsed = Manifest::parse(&text, &manifest).expect("a manifest");
    parsed.sha256 = attache_tests::sha256(path);
    std::fs::write(&manifest, parsed.to_toml().expect("a manifest")).expect("written");
}

#[test]
fn files_that_are_not_the_plugin() {
    // It ranks before the good one, so that automatic choice meets it first.
    let package = "attache-fixture-newer";
    breaks(package, "NEWER", |_, path| std::fs::remove_file(path).expect("removed"), "library is missing");
    breaks(package, "NEWER", |_, path| std::fs::write(path, "just text").expect("written"), "not a");
    let cut = |path: &Path, len: usize| {
        let bytes = std::fs::read(path).expect("bytes");
        std::fs::write(path, &bytes[..len.min(bytes.len())]).expect("written");
    };
    for len in [0, 3, 64, 4096, 1 << 20] {
        breaks(package, "NEWER", |_, path| cut(path, len), ".so: ");
        let right_hash = |plugins: &Plugins, path: &Path| {
            cut(path, len);
            with_right_hash(plugins, package, path);
        };
        breaks(package, "NEWER", right_hash, ".so: ");
    }
    let another = |_: &Plugins, path: &Path| {
        std::fs::copy(library("attache-fixture-panics"), path).expect("copied");
    };
    breaks(package, "NEWER", another, "the manifest says 'newer'");
    let changed = |_: &Plugins, path: &Path| {
        let mut bytes = std::fs::read(path).expect("bytes");
        bytes.push(0);
        std::fs::write(path, bytes).expect("written");
    };
    breaks(package, "NEWER", changed, "sha256");
    let other_machine = |plugins: &Plugins, path: &Path| {
        let mut bytes = std::fs::read(path).expect("bytes");
        bytes[18..20].copy_from_slice(&183_u16.to_le_bytes());
        std::fs::write(path, bytes).expect("written");
        with_right_hash(plugins, package, path);
    };
    breaks(package, "NEWER", other_machine, "machine");
}

#[test]
fn libraries_that_are_no_plugins_or_of_another_layout() {
    let plugins = Plugins::new();
    plugins.add(GOOD);
    let no_root = plugins.add_library("attache-fixture-no-root");
    let bad_layout = plugins.add_library("attache-fixture-bad-layout");
    let registry = Registry::builder()
        .linked(false)
        .file(&no_root, Origin::Api)
        .file(&bad_layout, Origin::Api)
        .directory(plugins.path(), Origin::Api)
        .build();
    assert_eq!(registry.backend(&request(), None).expect("the good one").backend.name(), "NULL_ATTN");
    let reason = |path: &Path| {
        let report = registry.report();
        let entry = report.iter().find(|entry| entry.source.to_string() == path.display().to_string());
        let entry = entry.unwrap_or_else(|| panic!("{} is not reported: {report:#?}", path.display())).clone();
        assert_eq!(entry.stage, Stage::Failed, "{entry:?}");
        (entry.reason.unwrap_or_default(), entry.detail)
    };
    let (line, _) = reason(&no_root);
    assert!(line.contains("not a plugin: it does not export the root symbol"), "{line}");
    let (line, detail) = reason(&bad_layout);
    assert!(line.contains("another layout") && line.lines().count() == 1, "{line}");
    assert!(detail.is_some_and(|detail| detail.lines().count() > 3), "the checker's words are kept for --verbose");
}

#[test]
fn a_missing_dependency_is_told() {
    let plugins = Plugins::new();
    let path = plugins.add_library("attache-fixture-newer");
    // The name of a library that it needs, replaced by one that does not exist.
    let mut bytes = std::fs::read(&path).expect("bytes");
    let needed = b"libc.so.6\0";
    let at = bytes.windows(needed.len()).position(|window| window == needed).expect("it needs libc");
    bytes[at..at + 9].copy_from_slice(b"libq.so.6");
    std::fs::write(&path, bytes).expect("written");
    let registry = Registry::builder().linked(false).file(&path, Origin::Api).build();
    let error = registry.backend(&request(), None).map(|r| r.backend.name().to_owned()).expect_err("it cannot load");
    let report = registry.report();
    assert!(report[0].reason.as_deref().is_some_and(|reason| reason.contains("libq.so.6")), "{error}: {report:#?}");
}

#[test]
fn what_is_refused_is_never_opened() {
    // Its static constructor would end this process.
    let plugins = Plugins::new();
    let path = plugins.path().join("aborts.so");
    std::fs::copy(library("attache-fixture-aborts-in-constructor"), &path).expect("copied");
    let null = Manifest::for_library(&plugins.add_library(GOOD)).expect("a manifest");
    let metadata = attache_core::loader::read_metadata(&path).expect("read without opening");
    let mut backend = null.backends[0].clone();
    backend.name = "ABORTS".to_owned();
    backend.rank.base = -5;
    let manifest = Manifest {
        name: metadata.name,
        vendor: metadata.vendor,
        version: metadata.version,
        library: "aborts.so".to_owned(),
        sha256: attache_tests::sha256(&path),
        backends: vec![backend],
        ..null
    };
    std::fs::write(plugins.path().join("aborts.attache.toml"), manifest.to_toml().expect("a manifest"))
        .expect("written");
    plugins.add(GOOD);

    let deny = Policy { deny: Wanted::parse("ABORTS", Origin::Api).into_iter().collect(), ..Policy::default() };
    assert_eq!(registry(&plugins, deny).backend(&request(), None).expect("the other").backend.name(), "NULL_ATTN");
    let mut versions = Policy::default();
    let requirement = attache_core::policy::Sourced::new("^9".parse().expect("a requirement"), Origin::Api);
    versions.versions.insert("ABORTS".to_owned(), requirement);
    assert_eq!(registry(&plugins, versions).backend(&request(), None).expect("the other").backend.name(), "NULL_ATTN");
    let refused = LayerRequest { head_size: 4000, ..request() };
    assert!(registry(&plugins, Policy::default()).backend(&refused, None).is_err(), "selection refuses both");
    // Selection alone prefers it, and opens nothing.
    let explained = registry(&plugins, Policy::default()).explain(&request(), None);
    assert_eq!(explained.result().expect("chosen").name(), "ABORTS");
}

#[test]
fn panics_become_errors_and_the_next_backend_is_taken() {
    for at in ["create", "probe", "validate"] {
        let plugins = Plugins::new();
        plugins.add("attache-fixture-panics");
        plugins.add(GOOD);
        let registry = |policy: Policy| {
            Registry::builder()
                .linked(false)
                .directory(plugins.path(), Origin::Api)
                .plugin_options("panics", vec![("at".to_owned(), at.to_owned())])
                .policy(policy)
                .build()
        };
        let error = registry(wants("PANICS")).backend(&request(), None).map(|_| ()).expect_err(at).to_string();
        assert!(error.contains("asked to panic"), "{at}: {error}");
        let prefer = Policy { prefer: Wanted::parse("PANICS", Origin::Api).into_iter().collect(), ..Policy::default() };
        let resolved = registry(prefer).backend(&request(), None).unwrap_or_else(|error| panic!("{at}: {error}"));
        assert_eq!(resolved.backend.name(), "NULL_ATTN", "{at}");
        let warnings = &resolved.selection.explanation().warnings;
        assert!(warnings.iter().any(|warning| warning.contains("PANICS")), "{at}: {warnings:?}");
    }
    // In drop and in calls the process lives on too.
    let plugins = Plugins::new();
    plugins.add("attache-fixture-panics");
    let registry = Registry::builder()
        .linked(false)
        .directory(plugins.path(), Origin::Api)
        .plugin_options("panics", vec![("at".to_owned(), "drop".to_owned())])
        .build();
    let backend = registry.backend(&request(), None).expect("it loads").backend;
    drop(backend.create_layer(&LayerConfig::new(1, 1, 64, Dtype::F32)).expect("a layer"));
    assert!(backend.create_layer(&LayerConfig::new(1, 1, 64, Dtype::F32)).is_ok());
}
