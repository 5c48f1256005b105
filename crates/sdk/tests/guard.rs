//! A plugin's table, driven as a host drives it: panics, errors and sizes at the boundary.

use attache_core::{
    BatchView,
    abi::{AbiSlice, BackendInterfaceV1, BatchV1, Extension, Status},
    device::Device as HostDevice,
    plugin::{PluginMetadata, linked_plugins},
    runtime::{
        self, ExecContext as HostContext, Forward, HostServices as EngineServices, InlinePool, KvCache, ThreadPool,
    },
};
use attache_sdk::prelude::*;
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

static DROPS: AtomicUsize = AtomicUsize::new(0);

/// Does what its option `mode` says.
struct Fixture {
    mode: String,
}

struct FixtureLayer {
    mode: String,
}

struct FixturePlan;

impl Backend for Fixture {
    fn descriptor() -> BackendDescriptor {
        BackendDescriptor::builder("FIXTURE").platform("cpu").build()
    }
    fn create(_host: HostServices, options: &Options) -> Result<Self> {
        let mode = options.get("mode").unwrap_or("good").to_owned();
        assert_ne!(mode, "panic_create", "asked to panic");
        Ok(Self { mode })
    }
    fn probe(&self) -> Result<Vec<Device>> {
        assert_ne!(self.mode, "panic_probe", "asked to panic");
        Ok(vec![Device::host_cpu()])
    }
    fn validate(&self, request: &LayerRequest, _device: &Device) -> Result<Vec<String>> {
        Ok(if request.head_size == 7 { vec!["seven is bad luck".to_owned()] } else { Vec::new() })
    }
    fn kv_cache_spec(&self, config: &LayerConfig<'_>) -> Result<KvCacheSpec> {
        let size = i64::from(config.head_size);
        Ok(KvCacheSpec {
            tensors: vec![CacheTensorSpec {
                role: TensorRole::K,
                dtype: DataType::F32,
                shape: vec![-1, i64::from(config.block_size), size],
                alignment: 64,
                bytes_per_block: 4 * u64::from(config.block_size) * size as u64,
            }],
        })
    }
    fn create_layer(&self, config: &LayerConfig<'_>) -> Result<Box<dyn Layer>> {
        assert_eq!(config.options, [("colour".to_owned(), "blue".to_owned())]);
        Ok(Box::new(FixtureLayer { mode: self.mode.clone() }))
    }
}

impl Drop for FixtureLayer {
    fn drop(&mut self) {
        DROPS.fetch_add(1, Ordering::SeqCst);
        assert_ne!(self.mode, "panic_drop", "asked to panic");
    }
}

impl Layer for FixtureLayer {
    fn workspace_size(&self, limits: &BatchLimits) -> Result<usize> {
        Ok(limits.max_num_tokens * 64)
    }
    fn plan(&self, batch: &BatchView<'_>) -> Result<Box<dyn Plan>> {
        batch.on_host(16)?;
        Ok(Box::new(FixturePlan))
    }
    fn write_kv(
        &self,
        _context: &ExecContext<'_>,
        k: &TensorView<'_>,
        v: Option<&TensorView<'_>>,
        _slot_mapping: &TensorView<'_>,
        cache: &CacheViewMut<'_>,
    ) -> Result<()> {
        assert!(v.is_none());
        let mut target = cache.take(TensorRole::K)?;
        assert!(cache.take(TensorRole::K).is_err(), "a second writer");
        assert!(cache.take(TensorRole::V).is_err());
        let source = k.as_slice::<f32>()?;
        target.span_mut::<f32>()?[..source.len()].copy_from_slice(source);
        Ok(())
    }
    fn forward(&self, context: &ExecContext<'_>, mut args: ForwardArgs<'_>) -> Result<()> {
        args.plan::<FixturePlan>()?;
        let workspace = context.take_workspace(100)?;
        assert!(workspace.len() >= 100 && workspace.as_ptr().addr().is_multiple_of(64));
        let mode = self.mode.as_str();
        let seen = Mutex::new(Vec::new());
        context.parallel_for(4, |task, _worker| {
            if mode == "panic_task" && task == 2 {
                panic!("asked to panic");
            }
            if mode == "fail_task" && task == 1 {
                return Err(BackendError::out_of_range("task 1").with("block_id", 17));
            }
            seen.lock().unwrap().push(task);
            Ok(())
        })?;
        assert_eq!(seen.lock().unwrap().len(), 4);
        assert_ne!(mode, "panic_forward", "asked to panic");
        args.out.span_mut::<f32>()?.fill(args.cache.get(TensorRole::K)?.span::<f32>()?[0]);
        Ok(())
    }
    fn copy_blocks(&self, _: &ExecContext<'_>, _: &CacheViewMut<'_>, _: &TensorView<'_>) -> Result<()> {
        Err(BackendError::unsupported("copy_blocks"))
    }
    fn swap_blocks(
        &self,
        _: &ExecContext<'_>,
        _: &CacheView<'_>,
        _: &CacheViewMut<'_>,
        _: &TensorView<'_>,
    ) -> Result<()> {
        Err(BackendError::unsupported("swap_blocks"))
    }
}

impl Plan for FixturePlan {
    fn update(&mut self, batch: &BatchView<'_>) -> Result<()> {
        batch.on_host(16).map(drop)
    }
}

attache_sdk::export_backends! { name: "fixture", vendor: "Attaché", backends: [Fixture] }

fn table() -> &'static BackendInterfaceV1 {
    let linked: Vec<_> = linked_plugins().collect();
    assert_eq!(linked.len(), 1, "the plugin registered itself");
    let metadata: PluginMetadata = serde_json(linked[0].metadata);
    assert_eq!(metadata.name, "fixture");
    runtime::interface::backend_interface(linked[0].interface).expect("the interface")
}

fn serde_json(text: &str) -> PluginMetadata {
    attache_core::private::serde_json::from_str(text).expect("metadata")
}

fn create(mode: &str) -> Result<Arc<runtime::Backend>> {
    let linked = linked_plugins().next().expect("linked in");
    let descriptor = runtime::descriptors(table())?.remove(0);
    let options = [("mode".to_owned(), mode.to_owned())];
    runtime::Backend::create(
        table(),
        0,
        Arc::new(descriptor),
        serde_json(linked.metadata),
        "linked in".into(),
        &options,
    )
}

fn config() -> LayerConfig<'static> {
    LayerConfig { options: vec![("colour".to_owned(), "blue".to_owned())], ..LayerConfig::new(2, 1, 8, Dtype::F32) }
}

/// Writes, plans and runs one call; gives the output.
fn run(mode: &str) -> Result<Vec<f32>> {
    let backend = create(mode)?;
    let layer = backend.create_layer(&config())?;
    let mut cache = KvCache::allocate(&backend.kv_cache_spec(&config())?, 2).expect("a cache");
    let mut context = HostContext::new(EngineServices::new(Arc::new(InlinePool)));
    context.reserve_workspace(layer.workspace_size(&BatchLimits {
        max_num_requests: 1,
        max_num_tokens: 2,
        max_query_len: 2,
        max_seq_len: 2,
        parallelism: 1,
    })?);
    let rows = [3_f32; 16];
    let slots = [0_i64, 1];
    let slots = TensorView::from_slice(&slots, &[2])?;
    layer.write_kv(&mut context, &TensorView::from_slice(&rows, &[2, 1, 8])?, None, &slots, &mut cache)?;
    let (starts, lens, table) = ([0, 2], [2], [0]);
    let plan = layer.plan(&BatchView::from_host(&starts, &lens, Some((&table, 1)), 2)?)?;
    let q = [0_f32; 32];
    let mut out = vec![0_f32; 32];
    layer.forward(
        &mut context,
        Forward {
            q: TensorView::from_slice(&q, &[2, 2, 8])?,
            k: None,
            v: None,
            cache: Some(&cache),
            plan: &plan,
            out: TensorViewMut::from_slice(&mut out, &[2, 2, 8])?,
            lse: None,
            topk_indices: None,
        },
    )?;
    Ok(out)
}

#[test]
fn a_call_goes_through_the_table_and_back() {
    assert_eq!(run("good"), Ok(vec![3.0; 32]));
    let backend = create("good").unwrap();
    assert_eq!(backend.probe().unwrap(), [HostDevice::host_cpu()]);
    let unlucky = LayerRequest { head_size: 7, ..LayerRequest::default() };
    assert_eq!(backend.validate(&unlucky, &HostDevice::host_cpu()).unwrap(), ["seven is bad luck"]);
}

#[test]
fn panics_become_errors_everywhere_and_the_host_goes_on() {
    for mode in ["panic_create", "panic_task", "panic_forward"] {
        let error = run(mode).unwrap_err();
        assert_eq!(error.code, ErrorCode::Panic, "{mode}: {error}");
        assert!(error.message.contains("asked to panic"), "{mode}: {error}");
    }
    let backend = create("panic_probe").unwrap();
    assert_eq!(backend.probe().unwrap_err().code, ErrorCode::Panic);
    let before = DROPS.load(Ordering::SeqCst);
    drop(create("panic_drop").unwrap().create_layer(&config()).unwrap());
    assert!(DROPS.load(Ordering::SeqCst) > before, "the layer was dropped, and its panic stayed inside");
    assert_eq!(run("good"), Ok(vec![3.0; 32]));
}

#[test]
fn a_task_s_error_arrives_with_its_details() {
    let error = run("fail_task").unwrap_err();
    assert_eq!(error.code, ErrorCode::OutOfRange);
    assert_eq!(error.attributes, [("block_id".to_owned(), "17".to_owned())]);
}

#[test]
fn a_pool_that_panics_is_an_error_too() {
    struct Broken;
    impl ThreadPool for Broken {
        fn parallelism(&self) -> usize {
            panic!("the pool is broken")
        }
        fn parallel_for(&self, _tasks: usize, _body: &(dyn Fn(usize, usize) + Sync)) {
            panic!("the pool is broken")
        }
    }
    let backend = create("good").unwrap();
    let layer = backend.create_layer(&config()).unwrap();
    let mut context = HostContext::new(EngineServices::new(Arc::new(Broken)));
    context.reserve_workspace(256);
    let cache = KvCache::allocate(&backend.kv_cache_spec(&config()).unwrap(), 1).unwrap();
    let (starts, lens) = ([0], []);
    let plan = layer.plan(&BatchView::from_host(&starts, &lens, None, 0).unwrap()).unwrap();
    let mut out = [];
    let error = layer
        .forward(
            &mut context,
            Forward {
                q: TensorView::from_slice::<f32>(&[], &[0, 2, 8]).unwrap(),
                k: None,
                v: None,
                cache: Some(&cache),
                plan: &plan,
                out: TensorViewMut::from_slice::<f32>(&mut out, &[0, 2, 8]).unwrap(),
                lse: None,
                topk_indices: None,
            },
        )
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::Internal, "{error}");
}

#[test]
fn plans_of_another_backend_are_refused() {
    let (one, two) = (create("good").unwrap(), create("good").unwrap());
    let (starts, lens) = ([0], []);
    let plan =
        one.create_layer(&config()).unwrap().plan(&BatchView::from_host(&starts, &lens, None, 0).unwrap()).unwrap();
    let layer = two.create_layer(&config()).unwrap();
    let mut out = [];
    let forward = Forward {
        q: TensorView::from_slice::<f32>(&[], &[0, 2, 8]).unwrap(),
        k: None,
        v: None,
        cache: None,
        plan: &plan,
        out: TensorViewMut::from_slice::<f32>(&mut out, &[0, 2, 8]).unwrap(),
        lse: None,
        topk_indices: None,
    };
    let error = layer.forward(&mut HostContext::new(EngineServices::inline()), forward).unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
}

#[test]
fn sizes_and_required_additions_are_checked_by_the_plugin() {
    let table = table();
    let mut handle = std::ptr::null_mut();
    let backend = create("good").unwrap();
    let layer = backend.create_layer(&config()).unwrap();
    drop(layer);
    // SAFETY: null handles and structs of wrong size must be refused before anything is read.
    unsafe {
        let null = std::ptr::null_mut();
        assert_eq!((table.destroy)(null, std::ptr::null()), Status::OK);
        assert_eq!((table.probe)(null, std::ptr::null(), std::ptr::null()), Status::INVALID_ARGUMENT);
        assert_eq!((table.plan)(null, std::ptr::null(), &raw mut handle, std::ptr::null()), Status::INVALID_ARGUMENT);
        assert_eq!(
            (table.create)(9, std::ptr::null(), AbiSlice::EMPTY, &raw mut handle, std::ptr::null()),
            Status::OUT_OF_RANGE
        );
        assert_eq!(
            (table.create)(0, std::ptr::null(), AbiSlice::EMPTY, &raw mut handle, std::ptr::null()),
            Status::INVALID_ARGUMENT
        );
    }
    assert!(handle.is_null());
    // An addition that must not be ignored refuses the call.
    let link = Extension {
        size: size_of::<Extension>(),
        id: attache_core::abi::AbiStr::new("attache.future/1"),
        required: 1,
        next: std::ptr::null(),
    };
    let batch = BatchV1 { size: size_of::<BatchV1>(), extensions: &raw const link, ..empty_batch() };
    let small = BatchV1 { size: 8, ..empty_batch() };
    for (batch, expected) in [(batch, Status::UNSUPPORTED), (small, Status::INVALID_ARGUMENT)] {
        // SAFETY: a live plan handle would be needed to go further; size and additions come first.
        let mut plan: Box<Box<dyn Plan>> = Box::new(Box::new(FixturePlan));
        // SAFETY: the plan is the plugin's own, the batch lives for the call.
        let status = unsafe { (table.update_plan)((&raw mut *plan).cast(), &raw const batch, std::ptr::null()) };
        assert_eq!(status, expected);
    }
}

fn empty_batch() -> BatchV1 {
    BatchV1 {
        size: size_of::<BatchV1>(),
        extensions: std::ptr::null(),
        num_requests: 0,
        num_blocks: 0,
        max_query_len: 0,
        max_seq_len: 0,
        query_start_loc: std::ptr::null(),
        seq_lens: std::ptr::null(),
        block_table: std::ptr::null(),
        causal: 1,
        causal_per_request: std::ptr::null(),
        prefix_spans: std::ptr::null(),
        encoder_seq_lens: std::ptr::null(),
        dcp_world_size: 0,
        dcp_rank: 0,
        dcp_local_seq_lens: std::ptr::null(),
    }
}
