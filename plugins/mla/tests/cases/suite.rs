//! `CPU_MLA` under the suite that any plugin must pass, and its options.

use crate::common::{TINY, backend, case};
use attache_conformance::{
    MlaForm,
    pool::three_threads,
    suite::{SuiteOptions, run},
};
use attache_core::{Dtype, LayerConfig};

#[test]
fn passes_the_suite_in_every_form() {
    for path in ["auto", "absorbed", "expanded"] {
        let options =
            SuiteOptions { max_cases: if path == "auto" { usize::MAX } else { 60 }, ..SuiteOptions::default() };
        let report = run(&backend(&[("path", path)]).unwrap(), three_threads(), 11, &options);
        eprintln!("{path}: {report}");
        assert!(report.passed(), "{path}: {report}");
    }
}

#[test]
fn options_are_checked_and_a_layer_can_replace_them() {
    for (name, value) in [
        ("isa", "sse9"),
        ("path", "fast"),
        ("workspace_tokens", "0"),
        ("workspace_tokens", "-1"),
        ("workspace_tokens", "many"),
        ("colour", "blue"),
    ] {
        let error = backend(&[(name, value)]).unwrap_err();
        assert!(error.message.contains(name), "{error}");
        let case = case(TINY, Dtype::F32, MlaForm::Auto, &[(1, 1)], 1);
        let config = case.layer_config("latent", 16).unwrap();
        let config = LayerConfig { options: vec![(name.to_owned(), value.to_owned())], ..config };
        let error = backend(&[]).unwrap().create_layer(&config).unwrap_err();
        assert!(error.message.contains(name), "{error}");
    }
    let declared = backend(&[]).unwrap();
    for (name, spec) in &declared.descriptor().options {
        let default = spec.default.as_deref().unwrap_or_default();
        assert!(backend(&[(name, default)]).is_ok(), "the default of {name} is taken");
    }
}
