use super::*;
use crate::{kind::Kind, policy::Origin};
use std::path::Path;

const FILE: &str = r#"
[selection]
backend = "A"
on_invalid_override = "fallback"

[selection.per_kind]
mla_attention = "M"

[[selection.priority]]
when = { platforms = ["cpu"] }
order = ["B", "A"]

[plugins]
paths = ["plugins", "/opt/plugins"]
prefer = ["P"]
versions = { A = "^1.2" }

[plugin.CPU]
isa = "avx2"
threads = 3
"#;

fn resolve(file: Option<&str>, environment: &[(&str, &str)], flags: &Overrides) -> Result<Config, ConfigError> {
    let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Config::resolve(file.map(|text| (Path::new("/etc/attache.toml"), text)), environment, flags)
}

fn message(file: Option<&str>, environment: &[(&str, &str)], flags: &Overrides) -> String {
    resolve(file, environment, flags).map(|config| format!("{config:?}")).unwrap_err().to_string()
}

#[test]
fn flags_beat_the_environment_and_the_environment_beats_the_file() {
    let none = Overrides::default();
    let config = resolve(Some(FILE), &[], &none).unwrap();
    let backend = config.policy.backend.clone().unwrap();
    assert_eq!((backend.name.as_str(), backend.origin), ("A", Origin::File("/etc/attache.toml".into())));
    assert_eq!(config.plugins.paths[0].value, Path::new("/etc/plugins"));
    assert_eq!(config.plugins.options["cpu"], [("isa".into(), "avx2".into()), ("threads".into(), "3".into())]);
    assert_eq!(config.policy.priority[0].order, ["B", "A"]);

    let environment = [
        ("ATTACHE_BACKEND", "b"),
        ("ATTACHE_PREFER", "x, y"),
        ("ATTACHE_PLUGIN_PATH", "/e1:/e2"),
        ("ATTACHE_DENY", ""),
    ];
    let config = resolve(Some(FILE), &environment, &none).unwrap();
    assert_eq!(config.policy.backend.as_ref().unwrap().to_string(), "B (environment ATTACHE_BACKEND)");
    assert_eq!(config.policy.prefer.iter().map(|w| w.name.as_str()).collect::<Vec<_>>(), ["X", "Y"]);
    assert_eq!(config.plugins.paths[1].value, Path::new("/e2"));
    assert_eq!(config.plugins.paths.len(), 4);
    let lost: Vec<&str> = config.overruled.iter().map(|(what, ..)| what.as_str()).collect();
    assert_eq!(lost, ["backend", "prefer"]);

    let flags = Overrides {
        backend: Some("auto".into()),
        backend_per_kind: vec!["sliding_window=W".into()],
        plugin_path: vec!["/flag".into()],
        ..none
    };
    let config = resolve(Some(FILE), &environment, &flags).unwrap();
    assert_eq!(config.policy.backend, None, "auto takes an override back");
    assert_eq!(config.policy.wanted(Kind::MlaAttention).unwrap().name, "M", "kinds of the file still hold");
    assert_eq!(config.policy.wanted(Kind::SlidingWindow).unwrap().name, "W");
    assert_eq!(config.plugins.paths[0].value, Path::new("/flag"));
}

#[test]
fn what_is_unknown_is_an_error_with_the_nearest_known() {
    let none = Overrides::default();
    assert_eq!(
        message(None, &[("ATTACHE_BACKND", "x")], &none),
        "unknown environment variable ATTACHE_BACKND; did you mean 'ATTACHE_BACKEND'?"
    );
    let text = message(Some("[selection]\nbackand = \"x\"\n"), &[], &none);
    assert!(text.starts_with("/etc/attache.toml: line 2: unknown field `backand`"), "{text}");
    assert!(text.ends_with("did you mean 'backend'?"), "{text}");
    let text = message(None, &[("ATTACHE_BACKEND_PER_KIND", "mla=X")], &none);
    assert!(text.contains("ATTACHE_BACKEND_PER_KIND") && text.contains("mla_attention"), "{text}");
    let flags = Overrides { backend_per_kind: vec!["full_attention".into()], ..Overrides::default() };
    assert!(message(None, &[], &flags).contains("KIND=NAME"));
    let text = message(Some("[plugins]\nversions = { A = \"nope\" }"), &[], &none);
    assert!(text.contains("versions.A") && text.contains("'nope'"), "{text}");
    assert!(message(None, &[("ATTACHE_TRUST", "all")], &none).contains("owned, any"));
    assert!(message(None, &[("ATTACHE_ON_INVALID_OVERRIDE", "eror")], &none).ends_with("did you mean 'error'?"));
    assert!(message(Some("[plugin.cpu]\nx = []"), &[], &none).contains("plugin.cpu.x"));
    assert!(message(Some("= 3"), &[], &none).contains("line 1"));
    assert!(resolve(None, &[("HOME", "/x")], &none).is_ok());
}
