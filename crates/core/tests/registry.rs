//! One registry over linked-in plugins, libraries and a catalogue: who takes part, who is opened,
//! and what a broken one does to the others.
#![expect(unexpected_cfgs, reason = "the export macro asks for a feature of the plugin's crate; here it is a test")]

mod common;

use attache_core::{
    Kind, PluginMetadata,
    policy::{Origin, Policy, Sourced, Wanted},
    registry::{Entry, Registry, RegistryBuilder, Stage},
    selector::{Candidate, SelectionError, Source},
};
use attache_sdk::prelude::{
    Backend, BackendDescriptor, BackendError, Device, Dtype, HostServices, KvCacheSpec, Layer, LayerConfig,
    LayerRequest, Options, Result,
};
use common::{Plugins, descriptor, manifest};
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// How often MOODY was made for `mode = count`.
static MADE: AtomicUsize = AtomicUsize::new(0);

/// A backend that always works.
struct Steady;
/// A backend that would come before STEADY, and fails as its option `mode` says.
struct Moody(String);
/// A backend whose descriptor makes no sense.
struct Nameless;

macro_rules! backend {
    ($name:ident, $descriptor:expr, $create:expr, $probe:expr, $validate:expr) => {
        impl Backend for $name {
            fn descriptor() -> BackendDescriptor {
                $descriptor
            }
            fn create(_host: HostServices, options: &Options) -> Result<Self> {
                let create: fn(&Options) -> Result<Self> = $create;
                create(options)
            }
            fn probe(&self) -> Result<Vec<Device>> {
                let probe: fn(&Self) -> Result<Vec<Device>> = $probe;
                probe(self)
            }
            fn validate(&self, request: &LayerRequest, _device: &Device) -> Result<Vec<String>> {
                let validate: fn(&Self, &LayerRequest) -> Result<Vec<String>> = $validate;
                validate(self, request)
            }
            fn kv_cache_spec(&self, _config: &LayerConfig<'_>) -> Result<KvCacheSpec> {
                Ok(KvCacheSpec::default())
            }
            fn create_layer(&self, _config: &LayerConfig<'_>) -> Result<Box<dyn Layer>> {
                Err(BackendError::unsupported("no layers"))
            }
        }
    };
}

backend!(Steady, descriptor("STEADY", 100), |_| Ok(Self), |_| Ok(vec![Device::host_cpu()]), |_, _| Ok(Vec::new()));
backend!(
    Moody,
    {
        let mut moody = descriptor("MOODY", 50);
        moody.options.insert("mode".to_owned(), Default::default());
        moody
    },
    |options| {
        let mode = options.get("mode").unwrap_or_default().to_owned();
        match mode.as_str() {
            "panics" => panic!("no mood for it"),
            "count" => drop(MADE.fetch_add(1, Ordering::SeqCst)),
            _ => {}
        }
        Ok(Self(mode))
    },
    |this| match this.0.as_str() {
        "blind" => Ok(vec![Device::new("abacus")]),
        "fails" => Err(BackendError::unsupported("the driver is too old")),
        _ => Ok(vec![Device::host_cpu()]),
    },
    |this, request| Ok(match (this.0.as_str(), request.num_heads) {
        ("picky", Some(3)) => vec!["three heads".to_owned(), "not today".to_owned()],
        _ => Vec::new(),
    })
);
backend!(Nameless, BackendDescriptor::builder("no capitals").build(), |_| Ok(Self), |_| Ok(Vec::new()), |_, _| Ok(
    Vec::new()
));

attache_sdk::export_backends! { name: "steady", vendor: "tests", backends: [Steady] }
attache_sdk::export_backends! { name: "moody", vendor: "tests", backends: [Moody] }
attache_sdk::export_backends! { name: "nameless", vendor: "tests", backends: [Nameless] }

fn request() -> LayerRequest {
    LayerRequest { head_size: 64, dtype: Dtype::F32, ..LayerRequest::default() }
}

fn wanted(name: &str) -> Wanted {
    Wanted::parse(name, Origin::Flag("--backend".into())).expect("a name")
}

fn override_with(name: &str) -> Policy {
    Policy { backend: Some(wanted(name)), ..Policy::default() }
}

fn files(plugins: &Plugins) -> RegistryBuilder {
    Registry::builder().linked(false).directory(plugins.path(), Origin::Api)
}

fn moody(mode: &str) -> RegistryBuilder {
    Registry::builder().plugin_options("Moody", vec![("mode".to_owned(), mode.to_owned())])
}

fn entry(registry: &Registry, name: &str) -> Entry {
    registry.report().into_iter().find(|entry| entry.name.as_deref() == Some(name)).expect("listed")
}

/// Name, version and stage of every entry.
fn stages(registry: &Registry) -> Vec<(String, Stage)> {
    let name = |entry: &Entry| {
        let version = entry.version.as_ref().map(ToString::to_string).unwrap_or_default();
        format!("{} {version}", entry.name.as_deref().unwrap_or("?"))
    };
    registry.report().iter().map(|entry| (name(entry), entry.stage)).collect()
}

#[test]
fn linked_in_plugins_take_part_and_a_bad_one_is_listed() {
    let registry = Registry::builder().build();
    let names: Vec<_> = registry.candidates().iter().map(|candidate| candidate.name().to_owned()).collect();
    assert_eq!(names, ["MOODY", "STEADY"], "in a fixed order");
    let bad = entry(&registry, "nameless");
    assert_eq!((bad.stage, bad.source), (Stage::Invalid, Source::Linked));
    assert!(bad.reason.is_some_and(|reason| reason.contains("backend no capitals: the name must be")));
    assert_eq!(registry.backend(&request(), None).expect("a backend").backend.name(), "MOODY");
    assert_eq!(entry(&registry, "moody").stage, Stage::Ready);
    assert_eq!(entry(&registry, "steady").stage, Stage::Opened);
}

#[test]
fn a_broken_library_is_one_line_and_the_others_go_on() {
    let plugins = Plugins::new();
    // A header without the rest: what a truncated copy is.
    plugins.add(&manifest("cut", "1.0.0", "CUT"));
    plugins.write("libtext-1.0.0.so", "not a library");
    plugins.add_manifest(&manifest("text", "1.0.0", "TEXT"));
    plugins.add_manifest(&manifest("gone", "1.0.0", "GONE"));
    plugins.write("bad.attache.toml", "name = 3");
    let registry = Registry::builder().directory(plugins.path(), Origin::Api).build();
    let first = registry.generation();
    assert_eq!(registry.select(&request(), None).expect("a selection").name(), "CUT", "nothing was opened yet");
    assert_eq!(entry(&registry, "cut").stage, Stage::Found);

    let resolved = registry.backend(&request(), None).expect("another one");
    assert_eq!(resolved.backend.name(), "MOODY");
    let explanation = resolved.selection.explanation().to_string();
    assert!(explanation.contains("CUT was chosen first and cannot be used") && explanation.contains("truncated"));
    assert!(registry.generation() > first, "what was chosen before is not chosen again");
    assert_eq!(registry.select(&request(), None).expect("a selection").name(), "MOODY");
    let stages = ["cut", "text", "gone"].map(|name| entry(&registry, name).stage);
    assert_eq!(stages, [Stage::Failed, Stage::Invalid, Stage::Invalid]);

    for (name, cause) in [("CUT", "truncated"), ("text", "starts with 'not '"), ("Gone", "is missing")] {
        registry.set_policy(override_with(name));
        let error = registry.backend(&request(), None).expect_err("no fallback").to_string();
        let path = plugins.path().join(format!("lib{}-1.0.0.so", name.to_lowercase()));
        assert!(error.contains(path.to_str().expect("UTF-8")) && error.contains(cause), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
    registry.set_policy(override_with("NOPE"));
    let error = registry.backend(&request(), None).expect_err("unknown").to_string();
    for part in ["CUT, GONE, MOODY, STEADY, TEXT", "searched: ", "bad.attache.toml: line 1, column 8: invalid type"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn the_first_of_a_name_and_version_wins_and_the_others_are_listed() {
    let (one, two) = (Plugins::new(), Plugins::new());
    one.add(&manifest("a", "1.0.0", "A"));
    let mut other = manifest("A", "1.0.0", "A");
    other.sha256 = "f".repeat(64);
    let named = two.add(&other);
    two.add(&manifest("a", "1.2.0", "A"));
    let registry = files(&one).directory(two.path(), Origin::Environment("ATTACHE_PLUGIN_PATH".into())).build();
    let expected = [("a 1.0.0", Stage::Found), ("A 1.0.0", Stage::Shadowed), ("a 1.2.0", Stage::Found)];
    assert_eq!(stages(&registry), expected.map(|(name, stage)| (name.to_owned(), stage)));
    let shadowed = &registry.report()[1];
    let first = one.path().join("liba-1.0.0.so");
    assert!(shadowed.reason.as_ref().is_some_and(|reason| reason.contains(first.to_str().expect("UTF-8"))));
    assert_eq!(shadowed.origin.to_string(), "environment ATTACHE_PLUGIN_PATH");
    assert_eq!(registry.candidates().len(), 2);
    let selection = registry.select(&request(), None).expect("a selection");
    assert_eq!(selection.chosen().plugin.version.to_string(), "1.2.0", "the newest");

    // What is named itself comes before directories; when the first goes, the next takes its place.
    let registry = files(&one).file(&named, Origin::Flag("--plugin".into())).build();
    assert_eq!(stages(&registry)[1].1, Stage::Shadowed);
    assert_eq!(registry.remove("a"), 2);
    assert!(registry.candidates().is_empty());
    assert_eq!(registry.select(&request(), None).expect_err("nothing left"), SelectionError::NoBackends);
    registry.register(one.path().join("a-1.0.0.attache.toml"), Origin::Api);
    assert_eq!(registry.select(&request(), None).expect("back again").name(), "A");
}

#[test]
fn a_broken_plugin_keeps_its_place_until_it_is_removed() {
    let plugins = Plugins::new();
    let named = plugins.add(&manifest("steady", env!("CARGO_PKG_VERSION"), "STEADY"));
    let registry = Registry::builder().file(&named, Origin::Api).policy(override_with("steady")).build();
    for _ in 0..2 {
        let error = registry.backend(&request(), None).expect_err("the linked-in one was not asked for");
        assert!(error.to_string().contains("truncated"), "{error}");
    }
    let of_steady: Vec<_> = stages(&registry).into_iter().filter(|(name, _)| name.starts_with("steady")).collect();
    assert_eq!(of_steady.iter().map(|(_, stage)| *stage).collect::<Vec<_>>(), [Stage::Failed, Stage::Shadowed]);

    // A library for another machine takes no place: directories may be shared between machines.
    let (foreign, mine) = (Plugins::new(), Plugins::new());
    let sample = manifest("a", "1.0.0", "A");
    let mut header = common::header();
    header[18] ^= 0x55;
    foreign.write(&sample.library, header);
    foreign.add_manifest(&sample);
    mine.add(&sample);
    let registry = files(&foreign).directory(mine.path(), Origin::Api).build();
    assert_eq!(stages(&registry).iter().map(|(_, stage)| *stage).collect::<Vec<_>>(), [Stage::Skipped, Stage::Found]);
    let selection = registry.select(&request(), None).expect("the one for this machine");
    assert_eq!(selection.chosen().source, Source::File(mine.path().join(&sample.library)));
}

#[test]
fn one_file_under_two_names_is_one_plugin() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let plugins = Plugins::new();
    let original = manifest("a", "1.0.0", "A");
    plugins.add(&original);
    let mut link = manifest("b", "1.0.0", "B");
    std::os::unix::fs::symlink(plugins.path().join(&original.library), plugins.path().join(&link.library))?;
    plugins.add_manifest(&link);
    link = manifest("c", "1.0.0", "C");
    link.sha256.clone_from(&original.sha256);
    plugins.add(&link);
    let registry = files(&plugins).build();
    let reasons: Vec<_> = registry.report().into_iter().map(|entry| (entry.stage, entry.reason)).collect();
    assert_eq!(reasons[0], (Stage::Found, None));
    for (found, expected) in reasons[1..].iter().zip(["the same file as", "a copy of"]) {
        assert_eq!(found.0, Stage::Shadowed);
        assert!(found.1.as_ref().is_some_and(|reason| reason.starts_with(expected)), "{found:?}");
    }
    assert_eq!(registry.candidates().len(), 1);
    Ok(())
}

/// Opening a library of these tests fails and would be seen in the report.
#[test]
fn what_is_refused_by_version_policy_or_selection_is_never_opened() {
    let plugins = Plugins::new();
    plugins.add(&manifest("denied", "1.0.0", "DENIED"));
    plugins.add(&manifest("old", "0.9.0", "OLD"));
    plugins.add(&manifest("last", "1.0.0", "LAST"));
    let mut newer = manifest("newer", "1.0.0", "NEWER");
    (newer.abi_generation_min, newer.abi_generation_max) = (2, 3);
    plugins.add(&newer);
    let mut sdk = manifest("sdk", "1.0.0", "SDK");
    sdk.sdk_version = "2.0.0".parse().expect("a version");
    plugins.add(&sdk);
    let version = "^1.0".parse().expect("a requirement");
    let policy = Policy {
        deny: vec![wanted("denied")],
        versions: [("OLD".to_owned(), Sourced::new(version, Origin::Api))].into(),
        prefer: vec![wanted("steady")],
        ..Policy::default()
    };
    let registry = Registry::builder().directory(plugins.path(), Origin::Api).policy(policy).build();
    assert_eq!(registry.backend(&request(), None).expect("a backend").backend.name(), "STEADY");
    let found = |name| {
        let entry = entry(&registry, name);
        (entry.stage, entry.reason.unwrap_or_default())
    };
    assert_eq!(found("denied"), (Stage::Policy, "denied by the operator: DENIED (flag --backend)".to_owned()));
    assert_eq!(found("old").0, Stage::Policy);
    assert_eq!(found("last"), (Stage::Found, String::new()));
    let (stage, reason) = found("newer");
    assert!(stage == Stage::Invalid && reason.contains("speaks ABI generations 2 to 3, this host 1; update the host"));
    let (stage, reason) = found("sdk");
    assert!(stage == Stage::Invalid && reason.contains("built with SDK 2.0.0, this host takes 1.x"), "{reason}");
    for name in ["NEWER", "SDK", "DENIED", "OLD"] {
        registry.set_policy(Policy { backend: Some(wanted(name)), ..Policy::clone(&registry.policy()) });
        assert!(registry.backend(&request(), None).is_err(), "{name}");
        assert_ne!(entry(&registry, &name.to_lowercase()).stage, Stage::Failed, "{name} was opened");
    }
}

#[test]
fn answers_are_kept_for_one_generation() {
    let registry = Registry::builder().build();
    let first = registry.select(&request(), None).expect("a selection");
    assert!(Arc::ptr_eq(&first, &registry.select(&request(), None).expect("the same")));
    let other = registry.select(&request(), Some(Kind::SinkFullAttention)).expect("another kind");
    assert!(!Arc::ptr_eq(&first, &other));
    assert_eq!(registry.set_policy(override_with("steady")), 2);
    assert_eq!(registry.select(&request(), None).expect("the override").name(), "STEADY");
    registry.set_policy(override_with("moody"));
    assert_eq!(registry.select(&request(), None).expect("the other override").name(), "MOODY");
    let refused = LayerRequest { head_size: 65, ..request() };
    let error = registry.select(&refused, None).expect_err("refused");
    assert_eq!(registry.select(&refused, None).expect_err("refused again"), error);
    assert_eq!(registry.explain(&refused, None).error, Some(error));
}

#[test]
fn a_backend_that_says_no_is_passed_over_and_its_words_are_kept() {
    let registry = moody("picky").build();
    let three = LayerRequest { num_heads: Some(3), ..request() };
    let resolved = registry.backend(&three, None).expect("the next one");
    assert_eq!(resolved.backend.name(), "STEADY");
    let refused = &resolved.selection.explanation().candidates[1];
    assert_eq!((refused.name(), &refused.reasons[..]), ("MOODY", &["three heads".into(), "not today".into()][..]));
    assert_eq!(registry.select(&three, None).expect("the same answer").name(), "STEADY");
    assert_eq!(registry.backend(&request(), None).expect("other layers").backend.name(), "MOODY");
    registry.set_policy(override_with("moody"));
    let error = registry.backend(&three, None).expect_err("an override is not replaced");
    assert!(error.to_string().contains("three heads, not today"), "{error}");
    let named = registry.backend_named("steady", &three, None).expect("settled elsewhere");
    assert_eq!(named.backend.name(), "STEADY");
    assert!(
        registry.backend_named("moody", &three, None).is_err() && registry.backend_named("x", &three, None).is_err()
    );
    assert_eq!(registry.backend(&request(), None).expect("other layers").backend.name(), "MOODY");
}

#[test]
fn a_backend_that_fails_is_set_aside_with_its_reason() {
    for (mode, expected) in [
        ("panics", "it cannot be created: panic in the plugin: panicked: no mood for it"),
        ("fails", "its probe failed: unsupported: the driver is too old"),
        ("blind", "its probe finds no cpu device (found: abacus)"),
    ] {
        let registry = moody(mode).build();
        let resolved = registry.backend(&request(), None).expect("the next one");
        assert_eq!(resolved.backend.name(), "STEADY", "{mode}");
        let refused = &resolved.selection.explanation().candidates[1];
        assert_eq!(refused.reasons, [expected], "{mode}");
        registry.set_policy(override_with("moody"));
        assert!(registry.backend(&request(), None).expect_err("no fallback").to_string().contains(expected), "{mode}");
    }
}

#[test]
fn options_that_no_backend_takes_refuse_the_plugin() {
    let registry = Registry::builder().plugin_options("steady", vec![("mode".to_owned(), String::new())]).build();
    registry.set_policy(override_with("steady"));
    let error = registry.select(&request(), None).expect_err("refused").to_string();
    assert!(error.contains("the plugin has no option 'mode'; valid: none"), "{error}");
}

#[test]
fn of_many_callers_at_once_one_makes_the_backend() {
    let registry = moody("count").build();
    let resolved: Vec<_> = std::thread::scope(|scope| {
        let call = || registry.backend(&request(), None).expect("a backend").backend;
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(call)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(resolved.iter().all(|backend| Arc::ptr_eq(backend, &resolved[0])));
    assert_eq!(MADE.load(Ordering::SeqCst), 1);
}

#[test]
fn the_first_plugin_keeps_a_backend_s_name() {
    let plugins = Plugins::new();
    plugins.add(&manifest("thief", "9.0.0", "STEADY"));
    let registry = Registry::builder().directory(plugins.path(), Origin::Api).policy(override_with("steady")).build();
    let selection = registry.select(&request(), None).expect("the linked-in one");
    assert_eq!(selection.chosen().source, Source::Linked);
    let refused = &selection.explanation().candidates[1];
    assert_eq!(refused.reasons, ["the name STEADY belongs to plugin 'steady' from linked in, which comes first"]);
}

#[test]
fn what_the_operator_denies_keeps_no_name_from_others() {
    let plugins = Plugins::new();
    plugins.add(&manifest("one", "1.0.0", "X"));
    plugins.add(&manifest("two", "1.0.0", "X"));
    let registry = files(&plugins).build();
    let chosen = || registry.select(&request(), None).expect("a selection").chosen().plugin.name.clone();
    assert_eq!(chosen(), "one");
    registry.set_policy(Policy { deny: vec![wanted("one")], ..Policy::default() });
    assert_eq!(chosen(), "two");
}

#[test]
fn a_catalogue_is_selected_from_and_never_run() {
    let metadata: PluginMetadata = manifest("catalogue", "1.0.0", "PAPER").metadata();
    let candidate = Candidate {
        descriptor: Arc::new(descriptor("PAPER", -10)),
        plugin: Arc::new(metadata),
        source: Source::Catalogue(Path::new("list.toml").into()),
        unavailable: Vec::new(),
    };
    let torn = Candidate {
        descriptor: Arc::new(descriptor("TORN", -20)),
        unavailable: vec!["torn".into()],
        ..candidate.clone()
    };
    let registry = Registry::builder().catalogue(vec![candidate, torn]).build();
    let torn = registry.candidates().into_iter().find(|candidate| candidate.name() == "TORN").expect("listed");
    assert_eq!(torn.unavailable, ["torn"]);
    assert_eq!(registry.select(&request(), None).expect("a selection").name(), "PAPER");
    let resolved = registry.backend(&request(), None).expect("one that runs");
    assert_eq!(resolved.backend.name(), "MOODY");
    assert!(resolved.selection.explanation().warnings[0].contains("it has no kernels"));
}

#[test]
fn without_plugins_the_error_says_where_was_searched() {
    let plugins = Plugins::new();
    let error = files(&plugins).build().backend(&request(), None).expect_err("nothing there");
    assert_eq!(*error.error, SelectionError::NoBackends);
    assert!(error.hints.contains(plugins.path().to_str().expect("UTF-8")), "{error}");
}
