//! A machine's facts, and a case's settings, as a device: its capability or architecture, and what is
//! installed and switched on, as features by name.

use attache_core::{Device, device::ComputeCapability};
use serde_json::Value;

/// What of a case takes part besides the request.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Facts of the model; null = no model.
    pub model: Value,
    /// Settings of attention.
    pub attention: Value,
    /// The cache format of the whole run.
    pub run_kv_cache_dtype: Option<String>,
    /// Whether there is an override.
    pub is_override: bool,
}

/// The parts of a request that versions of kernels depend on.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// Elements of a head.
    pub head_size: u32,
    /// Attention sinks.
    pub has_sink: bool,
    /// Batch-invariant results.
    pub batch_invariant: bool,
    /// Decode context parallelism.
    pub dcp: bool,
    /// The user's block size.
    pub block_size: Option<u32>,
}

fn is_true(facts: &Value, key: &str) -> bool {
    facts[key].as_bool().unwrap_or(false)
}

fn starts_with(facts: &Value, prefix: &str) -> bool {
    facts
        .as_object()
        .is_some_and(|all| all.iter().any(|(key, value)| key.starts_with(prefix) && value.as_bool().unwrap_or(false)))
}

/// The device of a case.
#[must_use]
pub fn device(facts: &Value, needs: Needs, settings: &Settings) -> Device {
    let mut device = Device::new(facts["platform"].as_str().unwrap_or_default());
    device.compute_capability = facts["compute_capability"].as_str().and_then(|text| text.parse().ok());
    device.architecture = facts["gcn_arch"].as_str().map(str::to_owned);
    let mut add = |feature: &str| {
        device.features.insert(feature.to_owned());
    };
    for (fact, feature) in [
        ("tokenspeed_mla package", "tokenspeed_mla"),
        ("b12x package", "b12x"),
        ("avx512", "avx512"),
        ("amx_tile", "amx_tile"),
    ] {
        if is_true(facts, fact) {
            add(feature);
        }
    }
    model(&settings.model, &mut add);
    if settings.is_override {
        add("override");
    }
    match settings.run_kv_cache_dtype.as_deref() {
        Some(name) if name.starts_with("turboquant") => add("run.turboquant"),
        Some(name) if name.starts_with("ultraquant") => add("run.ultraquant"),
        _ => {}
    }
    match facts["platform"].as_str() {
        Some("cuda") => cuda(facts, device.compute_capability, needs, settings, &mut add),
        Some("rocm") => rocm(facts, &mut add),
        _ => {}
    }
    device
}

fn model(model: &Value, add: &mut impl FnMut(&str)) {
    if !model.is_object() {
        return;
    }
    add("model");
    if let Some(name) = model["attn_type"].as_str() {
        add(&format!("model.attn_type={name}"));
    }
    for (key, value) in model["hf"].as_object().into_iter().flatten() {
        let Some(number) = value.as_i64() else { continue };
        add(&format!("model.{key}"));
        add(&format!("model.{key}={number}"));
        if key == "index_topk" && number % 128 == 0 {
            add("model.index_topk%128=0");
        }
    }
}

/// Which versions of the flash kernels a CUDA device has.
struct Flash {
    has: [bool; 3],
    major: u32,
}

impl Flash {
    fn new(facts: &Value, capability: ComputeCapability) -> Self {
        let major = capability.major;
        let two = is_true(facts, "FA2 extension importable") && major >= 8;
        let three = is_true(facts, "FA3 extension importable") && major == 9;
        let four = starts_with(facts, "FA4_AVAILABLE") && (9..=11).contains(&major);
        Self { has: [two, three, four], major }
    }

    fn supports(&self, version: u32) -> bool {
        (2..=4).contains(&version) && self.has[version as usize - 2]
    }

    /// The version that is taken; for a head size where one is given.
    fn resolve(&self, head_size: Option<u32>, needs: Needs, settings: &Settings) -> Option<u32> {
        let model = &settings.model;
        let asked = settings.attention["flash_attn_version"].as_u64().map(|version| version as u32);
        let mut version = asked.unwrap_or(match self.major {
            9 if self.supports(3) => 3,
            10 if self.supports(4) => 4,
            _ => 2,
        });
        if self.major >= 10 && version == 3 {
            version = if self.supports(4) { 4 } else { 2 };
        }
        let is_wide = head_size.is_some_and(|size| size > 256);
        if self.major == 9 && version == 3 && self.supports(4) && (is_wide || is_true(model, "is_diffusion")) {
            version = 4;
        }
        if needs.batch_invariant && version == 4 {
            version = 2;
        }
        if let (4, Some(size)) = (version, head_size)
            && self.major >= 10
            && size > 128
        {
            let softcap = !model["hf"]["attn_logit_softcapping"].is_null();
            let quantised = settings
                .run_kv_cache_dtype
                .as_deref()
                .is_some_and(|name| !matches!(name, "auto" | "float16" | "bfloat16"));
            let blocks = needs.block_size.is_some_and(|size| size % 128 != 0);
            let model_refuses = is_true(model, "is_mm_prefix_lm") || !model["rswa_window"].is_null();
            let refused = needs.has_sink || softcap || quantised || blocks || model_refuses || needs.dcp;
            if size != 256 || self.major > 11 || refused {
                version = 2;
            }
        }
        self.supports(version).then_some(version)
    }

    /// Whether a version reads an 8-bit cache.
    fn reads_fp8(&self, version: Option<u32>, head_size: Option<u32>) -> bool {
        match (self.major, version) {
            (9, Some(3)) | (10, Some(4)) => true,
            (9, Some(4)) => head_size.is_none_or(|size| size == 512),
            _ => false,
        }
    }
}

fn cuda(
    facts: &Value,
    capability: Option<ComputeCapability>,
    needs: Needs,
    settings: &Settings,
    add: &mut impl FnMut(&str),
) {
    let Some(capability) = capability else { return };
    let flash = Flash::new(facts, capability);
    if flash.supports(4) {
        add("fa4");
    }
    if starts_with(facts, "FA4_AVAILABLE") && starts_with(facts, "cutlass DSL") {
        add("fa4.available");
    }
    if flash.supports(3) {
        add("fa_mla");
    }
    let (plain, sized) = (flash.resolve(None, needs, settings), flash.resolve(Some(needs.head_size), needs, settings));
    if plain.is_some_and(|version| version >= 3) {
        add("fa.none>=3");
    }
    if flash.reads_fp8(plain, None) {
        add("fa.fp8");
    }
    if flash.reads_fp8(sized, Some(needs.head_size)) {
        add("fa.fp8_head");
    }
    if sized.is_some_and(|version| version >= 3) {
        add("fa.head>=3");
    }
    if sized == Some(4) {
        add("fa.head=4");
    }
    let model = &settings.model;
    let model_head = model["head_size"].as_u64().and_then(|size| u32::try_from(size).ok());
    if flash.major == 9 && model_head == Some(512) && flash.supports(4) && run_is_fp8(settings) {
        add("fa.blocks=64");
    }
    // Blocks are settled before anybody fixes their size.
    let unfixed = Needs { block_size: None, ..needs };
    if matches!(flash.major, 10 | 11)
        && model_head == Some(256)
        && flash.resolve(Some(256), unfixed, settings) == Some(4)
    {
        add("fa.blocks=128");
    }
    let is_off = settings.attention["use_trtllm_attention"].as_bool() == Some(false);
    if starts_with(facts, "has_flashinfer_cubin") && !needs.batch_invariant {
        add("trtllm.cubins");
        if !is_off {
            add("trtllm");
        }
    }
    let heads = |key: &str| model[key].as_u64().unwrap_or(1).max(1);
    let divides = heads("num_attention_heads") % heads("num_kv_heads") == 0;
    if !is_off && (model.is_null() || (divides && !needs.dcp)) {
        add("trtllm.decode");
    }
}

fn run_is_fp8(settings: &Settings) -> bool {
    matches!(settings.run_kv_cache_dtype.as_deref(), Some("fp8" | "fp8_e4m3"))
}

fn rocm(facts: &Value, add: &mut impl FnMut(&str)) {
    let architecture = facts["gcn_arch"].as_str().unwrap_or_default();
    let is_cdna3 = architecture.starts_with("gfx94") || architecture.starts_with("gfx95");
    let is_rdna4 = architecture.starts_with("gfx12");
    let (has_library, is_on) = (is_true(facts, "aiter importable"), is_true(facts, "VLLM_ROCM_USE_AITER"));
    if starts_with(facts, "aiter.mla.mla_decode_fwd has causal=") {
        add("aiter.causal");
    }
    if has_library && is_cdna3 {
        add("aiter.unified");
        if is_on {
            add("aiter.mla");
            add("aiter.mha");
        }
    }
    if has_library && is_rdna4 && is_on {
        add("aiter.unified_first");
    }
}
