//! The examples of docs/vendors.md that need more than the SDK, compiled and run.

use attache_conformance::suite::{self, SuiteOptions};
use attache_core::{
    Dtype, LayerRequest,
    manifest::{MANIFEST_SUFFIX, Manifest},
    policy::Origin,
    registry::{Registry, Stage},
    runtime::HostServices,
};
use attache_plugin_cpu as _;
use attache_tests::{Plugins, assert_shows_examples};
use std::{
    error::Error,
    path::{Path, PathBuf},
};

// example begins
fn write_manifest(library: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let manifest = Manifest::for_library(library)?;
    let path = library.with_file_name(format!("{}{MANIFEST_SUFFIX}", manifest.name));
    std::fs::write(&path, manifest.to_toml()?)?;
    Ok(path)
}
// example ends

// example begins
#[test]
fn passes_the_conformance_suite() -> Result<(), Box<dyn Error>> {
    let registry = Registry::builder().build(); // what this test links: `use my_plugin as _;`
    let request = LayerRequest { head_size: 64, dtype: Dtype::F32, ..LayerRequest::default() }; // any that you claim
    let backend = registry.backend_named("CPU_ATTN", &request, None)?.backend;
    let report = suite::run(&backend, HostServices::inline(), 1, &SuiteOptions::default());
    assert!(report.passed(), "{report}");
    Ok(())
}
// example ends

#[test]
fn a_manifest_is_written_and_the_document_shows_how() {
    let plugins = Plugins::new();
    let library = plugins.add_library("attache-fixture-null");
    let manifest = write_manifest(&library).expect("a manifest");
    let registry = Registry::builder().linked(false).file(&manifest, Origin::Api).build();
    let report = registry.report();
    assert_eq!((report[0].stage, report[0].backends.as_slice()), (Stage::Found, &["NULL_ATTN".to_owned()][..]));
    assert_shows_examples(include_str!("../docs/vendors.md"), include_str!("vendor.rs"));
}
