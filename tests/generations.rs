//! Releases that meet: an older plugin in a newer host, a newer plugin in an older host. A second
//! generation of the backend interface, with a real new ability, proves the way back.

use attache_core::{
    BatchView, Dtype, LayerConfig, LayerRequest, TensorView, TensorViewMut,
    abi::{AbiSlice, BACKEND_INTERFACE_ID, InterfaceGetter, Status},
    loader::{self, LoadOptions},
    policy::Origin,
    registry::Registry,
    runtime::{
        ExecContext, Forward, HostServices, KvCache,
        interface::{InterfaceError, backend_interface, interface},
    },
};
use attache_fixture_newer::{BackendInterfaceV2, merge};
use attache_tests::{Plugins, library};

fn getter(package: &str) -> InterfaceGetter {
    let plugin = loader::open(&library(package), None, &LoadOptions { allow_writable_by_others: true });
    plugin.unwrap_or_else(|error| panic!("{error}")).interface()
}

/// A host of a later release: asks for the second generation and falls back to the first.
enum LaterHost {
    Second(&'static BackendInterfaceV2),
    First,
}

impl LaterHost {
    fn open(get: InterfaceGetter) -> Self {
        // SAFETY: the getter is of a library that stays loaded, and the table begins with its size.
        match unsafe { interface::<BackendInterfaceV2>(get, BACKEND_INTERFACE_ID, 2) } {
            Ok(table) => Self::Second(table),
            Err(InterfaceError::Absent { generation: 2, .. }) => {
                backend_interface(get).expect("every plugin speaks the first generation");
                Self::First
            }
            Err(other) => panic!("{other}"),
        }
    }

    /// The new ability, or what a host does without it.
    fn merge(&self, a: &mut [f32], a_lse: &mut f32, b: &[f32], b_lse: f32) {
        match self {
            Self::Second(table) => {
                // SAFETY: both rows have one length and live for the call.
                let status = unsafe { (table.merge)(a.as_mut_ptr(), a_lse, AbiSlice::new(b), b_lse) };
                assert_eq!(status, Status::OK);
            }
            Self::First => merge(a, a_lse, b, b_lse),
        }
    }
}

#[test]
fn a_later_host_uses_the_second_generation_and_falls_back_to_the_first() {
    let (newer, older) =
        (LaterHost::open(getter("attache-fixture-newer")), LaterHost::open(getter("attache-fixture-null")));
    assert!(matches!(newer, LaterHost::Second(_)), "the newer plugin speaks it");
    assert!(matches!(older, LaterHost::First), "the older plugin does not");
    for host in [newer, older] {
        let (mut row, mut lse) = ([1.0, 2.0], 0.0);
        host.merge(&mut row, &mut lse, &[3.0, 6.0], 0.0);
        assert_eq!(row, [2.0, 4.0]);
        assert!((lse - 2_f32.ln()).abs() < 1e-6);
        host.merge(&mut row, &mut lse, &[9.0, 9.0], f32::NEG_INFINITY);
        assert_eq!(row, [2.0, 4.0], "an empty part changes nothing");
    }
}

#[test]
fn this_host_runs_the_newer_plugin_by_the_first_generation() {
    let plugins = Plugins::new();
    plugins.add("attache-fixture-newer");
    let registry = Registry::builder().linked(false).directory(plugins.path(), Origin::Api).build();
    let request = LayerRequest { head_size: 8, dtype: Dtype::F32, ..LayerRequest::default() };
    let backend = registry.backend(&request, None).unwrap_or_else(|error| panic!("{error}")).backend;
    let config = LayerConfig::new(1, 1, 8, Dtype::F32);
    let layer = backend.create_layer(&config).expect("a layer");
    let cache = KvCache::allocate(&backend.kv_cache_spec(&config).expect("a spec"), 1).expect("a cache");
    let (starts, lens, table) = ([0, 1], [1], [0]);
    let plan =
        layer.plan(&BatchView::from_host(&starts, &lens, Some((&table, 1)), 1).expect("a batch")).expect("a plan");
    let (q, mut out) = ([1.0_f32; 8], [f32::NAN; 8]);
    let forward = Forward {
        q: TensorView::from_slice(&q, &[1, 1, 8]).expect("a tensor"),
        k: None,
        v: None,
        cache: Some(&cache),
        plan: &plan,
        out: TensorViewMut::from_slice(&mut out, &[1, 1, 8]).expect("a tensor"),
        lse: None,
        topk_indices: None,
    };
    layer.forward(&mut ExecContext::new(HostServices::inline()), forward).expect("it runs");
    assert_eq!(out, [0.0; 8]);
}

#[test]
fn unknown_interfaces_and_wrong_layouts_are_told_apart() {
    let get = getter("attache-fixture-newer");
    // SAFETY: as above.
    let unknown = unsafe { interface::<BackendInterfaceV2>(get, "attache.nothing", 1) };
    assert!(matches!(unknown, Err(InterfaceError::Absent { .. })));
    // SAFETY: as above; the table is asked for as another type, which the layout check must refuse.
    let wrong = unsafe { interface::<BackendInterfaceV2>(get, BACKEND_INTERFACE_ID, 1) };
    assert!(matches!(wrong, Err(InterfaceError::Layout { .. })), "{:?}", wrong.err());
}
