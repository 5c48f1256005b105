//! Plugins as libraries: loaded, compared with their linked-in selves by the conformance suite, heard.

use attache_conformance::suite::{self, SuiteOptions};
use attache_core::{
    LayerRequest,
    loader::{self, LoadOptions},
    plugin::linked_plugins,
    policy::{Origin, Policy, Wanted},
    registry::{Registry, Stage},
    runtime::HostServices,
};
use attache_engine::{Engine, EngineOptions, LoadedModel, Prompt, Sampling};
use attache_tests::Plugins;
use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex},
};
use tracing_subscriber::layer::SubscriberExt;

fn registry(plugins: &Plugins) -> Registry {
    Registry::builder().linked(false).directory(plugins.path(), Origin::Api).build()
}

fn wants(name: &str) -> Policy {
    Policy { backend: Wanted::parse(name, Origin::Api), ..Policy::default() }
}

#[test]
fn our_plugins_pass_the_suite_as_libraries() {
    assert_eq!(linked_plugins().count(), 0, "this program must link no plugin");
    let plugins = Plugins::new();
    plugins.add("attache-plugin-cpu");
    plugins.add("attache-plugin-mla");
    let registry = registry(&plugins);
    assert!(registry.report().iter().all(|entry| entry.stage == Stage::Found), "nothing is opened before it is needed");
    for (request, name) in [
        (LayerRequest::default(), "CPU_ATTN"),
        (LayerRequest { use_mla: true, head_size: 576, ..LayerRequest::default() }, "CPU_MLA"),
    ] {
        let resolved = registry.backend(&request, None).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(resolved.backend.name(), name);
        assert!(resolved.backend.source().ends_with(".so"), "{}", resolved.backend.source());
        let report = suite::run(&resolved.backend, HostServices::inline(), 5, &SuiteOptions::default());
        assert!(report.passed(), "{report}");
    }
}

#[test]
fn an_engine_that_links_no_plugin_generates_with_libraries() {
    let plugins = Plugins::new();
    plugins.add("attache-plugin-cpu");
    plugins.add("attache-plugin-mla");
    let registry = registry(&plugins);
    let model = LoadedModel::bundled().expect("the model");
    let mut engine = Engine::new(model, &registry, EngineOptions::default()).expect("an engine");
    let mut backends: Vec<&str> = engine.plan().iter().map(|layer| layer.backend.as_str()).collect();
    backends.sort_unstable();
    backends.dedup();
    assert_eq!(backends, ["CPU_ATTN", "CPU_MLA"]);
    let prompt = |text: &str| Prompt {
        tokens: text.bytes().map(u32::from).collect(),
        max_tokens: 24,
        sampling: Sampling::default(),
        ignore_end: true,
    };
    let prompts = vec![prompt("Once upon a time"), prompt("The little ")];
    let output = engine.generate(prompts, &mut |_| ControlFlow::Continue(())).expect("text");
    for generation in output.generations {
        assert_eq!(generation.tokens.len(), 24);
        assert!(generation.text.is_ascii(), "{:?}", generation.text);
    }
}

#[test]
fn one_file_is_opened_once_whatever_it_is_called_and_whoever_asks() {
    let plugins = Plugins::new();
    let library = plugins.add_library("attache-fixture-null");
    let link = plugins.path().join("link.so");
    std::os::unix::fs::symlink(&library, &link).expect("a link");
    let copy = plugins.path().join("copy.so");
    std::fs::copy(&library, &copy).expect("a copy");
    let opened: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = [&library, &link, &copy, &library, &link, &copy, &library, &link]
            .map(|path| scope.spawn(|| loader::open(path, None, &LoadOptions::default()).expect("it opens")))
            .into_iter()
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread")).collect()
    });
    assert!(opened.iter().all(|plugin| Arc::ptr_eq(plugin, &opened[0])));
}

#[test]
fn two_libraries_of_one_root_type_stay_apart() {
    let plugins = Plugins::new();
    plugins.add("attache-fixture-null");
    plugins.add("attache-fixture-newer");
    let registry = registry(&plugins);
    let request = LayerRequest { head_size: 64, dtype: attache_core::Dtype::F32, ..LayerRequest::default() };
    for name in ["NULL_ATTN", "NEWER"] {
        registry.set_policy(wants(name));
        let resolved = registry.backend(&request, None).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(resolved.backend.name(), name);
    }
}

/// Remembers events.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Memory {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{}={value:?} ", field.name());
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().expect("a lock").push(text.0);
    }
}

#[test]
fn a_librarys_events_reach_the_hosts_subscriber_with_their_fields() {
    let memory = Memory::default();
    let subscriber = tracing_subscriber::registry().with(memory.clone());
    tracing::subscriber::with_default(subscriber, || {
        let plugins = Plugins::new();
        plugins.add("attache-fixture-null");
        let request = LayerRequest { head_size: 64, dtype: attache_core::Dtype::F32, ..LayerRequest::default() };
        registry(&plugins).backend(&request, None).unwrap_or_else(|error| panic!("{error}"));
    });
    let events = memory.0.lock().expect("a lock").clone();
    let from_plugin = events.iter().any(|event| event.contains("made") && event.contains("threads"));
    assert!(from_plugin, "{events:#?}");
    assert!(events.iter().any(|event| event.contains("backend chosen")), "{events:#?}");
}
