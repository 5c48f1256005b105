//! `CPU_ATTN` against the reference, on every instruction set of this machine.

use attache_conformance::{Case, check, execute, generate::Space};
use attache_core::{
    plugin::linked_plugins,
    runtime::{self, Backend, HostServices, interface::backend_interface},
};
use attache_plugin_cpu as _;
use std::sync::Arc;

fn backend(isa: &str) -> Result<Arc<Backend>, String> {
    let linked = linked_plugins().next().expect("linked in");
    let table = backend_interface(linked.interface).expect("an interface");
    let descriptor = runtime::descriptors(table).expect("descriptors").remove(0);
    let metadata = attache_core::private::serde_json::from_str(linked.metadata).expect("metadata");
    let options = [("isa".to_owned(), isa.to_owned())];
    Backend::create(table, 0, Arc::new(descriptor), metadata, "linked in".into(), &options).map_err(|e| e.to_string())
}

fn describe(case: &Case) -> String {
    let Case { num_heads, num_kv_heads, head_size, head_size_v, sliding_window, softcap, causal, .. } = case;
    format!(
        "{} {num_heads}/{num_kv_heads} x {head_size}/{head_size_v}, window {sliding_window}, cap {softcap}, causal {causal}, {:?} {:?} {:?} kv {:?} {:?} {:?}",
        case.dtype(),
        case.attn_type,
        case.block_size,
        case.layout,
        case.kv_cache_dtype,
        case.query_start_loc,
        case.seq_lens
    )
}

fn run(isa: &str) {
    let backend = match backend(isa) {
        Ok(backend) => backend,
        Err(reason) => {
            // Only a machine without the instruction set may go without the test.
            assert!(attache_cpu_kernels_isa_missing(isa), "{isa}: {reason}");
            eprintln!("skipped: this machine has no {isa}");
            return;
        }
    };
    let space = Space::new(backend.descriptor(), &attache_core::Device::host_cpu());
    let cases: Vec<Case> = space.cases(17).collect();
    for case in &cases {
        let output =
            execute(&backend, HostServices::inline(), case).unwrap_or_else(|e| panic!("{e}: {}", describe(case)));
        if let Err(error) = check(case, &output) {
            panic!("{isa}: {error}\n{}", describe(case));
        }
    }
    eprintln!("{isa}: {} cases", cases.len());
}

fn attache_cpu_kernels_isa_missing(isa: &str) -> bool {
    if isa == "amx" {
        // The kernel's list: it leaves out what it does not save for processes.
        let listed = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        return listed.split_whitespace().all(|flag| flag != "amx_bf16");
    }
    attache_core::Device::host_cpu().features.iter().all(|feature| !feature.starts_with(isa))
}

#[test]
fn amx() {
    run("amx");
}

#[test]
fn avx512() {
    run("avx512");
}

#[test]
fn avx2() {
    run("avx2");
}

#[test]
fn portable() {
    run("portable");
}
