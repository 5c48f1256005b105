//! `CPU_ATTN` under the suite that any plugin must pass.

use attache_conformance::suite::{SuiteOptions, run};
use attache_core::{
    plugin::linked_plugins,
    runtime::{self, Backend, HostServices, interface::backend_interface},
};
use attache_plugin_cpu as _;
use std::sync::Arc;

#[test]
fn passes_the_suite() {
    let linked = linked_plugins().next().expect("linked in");
    let table = backend_interface(linked.interface).expect("an interface");
    let descriptor = runtime::descriptors(table).expect("descriptors").remove(0);
    let metadata = attache_core::private::serde_json::from_str(linked.metadata).expect("metadata");
    let backend = Backend::create(table, 0, Arc::new(descriptor), metadata, "linked in".into(), &[]).expect("made");
    let report = run(&backend, HostServices::inline(), 7, &SuiteOptions::default());
    assert!(report.passed(), "{report}");
}
