use super::*;
use crate::{
    condition::{CapabilityRange, Condition},
    kv_cache_dtype::KvCacheDtype,
};

fn plain() -> BackendDescriptor {
    BackendDescriptor::builder("PLAIN")
        .platform("cpu")
        .head_sizes([NumberRule::multiples(8, 8..=256)])
        .dtypes([Dtype::BF16])
        .kv_cache_dtypes(["auto"])
        .block_sizes(BlockSizes::multiples_of(16))
        .attn_types([AttentionType::Decoder])
        .build()
}

fn reasons(descriptor: &BackendDescriptor, request: &LayerRequest, device: &Device) -> Vec<String> {
    verdict(descriptor, request, device).reasons.into_iter().map(Cow::into_owned).collect()
}

/// Asks for everything at once.
fn everything() -> LayerRequest {
    LayerRequest {
        head_size: 46,
        dtype: Dtype::F32,
        kv_cache_dtype: KvCacheDtype::parse("fp8").ok(),
        block_size: Some(24),
        use_mla: true,
        has_sink: true,
        use_sparse: true,
        use_mm_prefix: true,
        use_per_head_quant_scales: true,
        attn_type: AttentionType::Other("bogus".into()),
        num_heads: Some(6),
        has_sliding_window: true,
        use_non_causal: true,
        use_batch_invariant: true,
        use_kv_connector: true,
        use_pcp: true,
        use_dcp: true,
        use_adaptive_verification: true,
        use_rswa: true,
        head_size_v: Some(32),
        num_kv_heads: Some(2),
        has_softcap: true,
        has_alibi: true,
        chunked_local: true,
        needs_lse: true,
        state_space: None,
    }
}

#[test]
fn all_reasons_come_in_the_stated_order() -> Result<(), Box<dyn std::error::Error>> {
    let mut device = Device::new("cuda");
    device.compute_capability = Some("9.0".parse()?);
    let mut backend = plain();
    backend.refusals.push(crate::descriptor::Refusal {
        when: Condition { has_sink: Some(true), ..Condition::default() },
        reason: "no sinks on Tuesdays".into(),
        group: None,
        only_alone: false,
    });
    assert_eq!(
        reasons(&backend, &everything(), &device),
        [
            "head_size not supported",
            "dtype not supported",
            "kv_cache_dtype not supported",
            "block_size not supported",
            "partial multimodal token full attention not supported",
            "MLA not supported",
            "attention sinks not supported",
            "sparse not supported",
            "per-head quant scales not supported",
            "compute capability not supported",
            "attention type bogus not supported",
            "sliding window not supported",
            "R-SWA not supported",
            "non-causal attention not supported",
            "non-causal MLA attention with DCP not supported",
            "batch invariance not supported",
            "KV connector not supported",
            "PCP not supported",
            "DCP not supported",
            "device-cpu query lens mismatch not supported, this is needed for adaptive verification",
            "head_size_v not supported",
            "num_kv_heads not supported",
            "softcap not supported",
            "ALiBi not supported",
            "chunked-local attention not supported",
            "LSE output not supported",
            "no sinks on Tuesdays",
            "platform cuda not supported",
        ]
    );
    Ok(())
}

#[test]
fn a_backend_that_claims_nothing_is_refused_for_a_plain_request() {
    let nothing = BackendDescriptor::builder("NOTHING").platform("cpu").build();
    assert_eq!(
        reasons(&nothing, &LayerRequest::default(), &Device::new("cpu")),
        ["head_size not supported", "dtype not supported", "attention type decoder not supported"]
    );
}

#[test]
fn mismatch_of_mla_and_sparse_is_refused_either_way() {
    let mut backend = plain();
    backend.capability.mla = Support::Only;
    backend.capability.sparse = Support::Only;
    let device = Device::new("cpu");
    let request = LayerRequest::default();
    assert_eq!(reasons(&backend, &request, &device), ["non-MLA not supported", "non-sparse not supported"]);
    backend.capability.mla = Support::Both;
    backend.capability.sparse = Support::Both;
    assert!(verdict(&backend, &request, &device).is_valid());
}

#[test]
fn head_sizes_are_a_predicate() {
    let device = Device::new("cpu");
    for (head_size, valid) in [(40, true), (46, false), (72, true), (256, true), (264, false), (0, false)] {
        let request = LayerRequest { head_size, ..LayerRequest::default() };
        assert_eq!(verdict(&plain(), &request, &device).is_valid(), valid, "{head_size}");
    }
}

#[test]
fn devices_that_state_facts_need_claims() -> Result<(), Box<dyn std::error::Error>> {
    let request = LayerRequest::default();
    let mut device = Device::new("cpu");
    device.architecture = Some("x86_64".into());
    let mut backend = plain();
    assert_eq!(reasons(&backend, &request, &device), ["architecture x86_64 not supported"]);
    backend.capability.architectures = vec!["x86*".into()];
    assert!(verdict(&backend, &request, &device).is_valid());
    backend.capability.device_features.insert("avx512f".into());
    assert_eq!(reasons(&backend, &request, &device), ["device feature avx512f missing"]);
    device.features.insert("avx512f".into());
    assert!(verdict(&backend, &request, &device).is_valid());
    backend.capability.compute_capability = vec![CapabilityRange { major: Some(9), ..CapabilityRange::default() }];
    assert_eq!(reasons(&backend, &request, &device), ["compute capability not supported"]);
    device.compute_capability = Some("9.4".parse()?);
    assert!(verdict(&backend, &request, &device).is_valid());
    Ok(())
}

#[test]
fn overrides_replace_parts_and_the_last_counts() {
    let mut backend = plain();
    let fp8 = |names: &[&str], when: Condition| CapabilityOverride {
        when,
        kv_cache_dtypes: Some(names.iter().map(|n| (*n).to_owned()).collect()),
        ..CapabilityOverride::default()
    };
    let avx512 = Condition { device_features: vec!["avx512f".into()], ..Condition::default() };
    backend.overrides.push(fp8(&["auto", "fp8"], avx512));
    let mut part = fp8(&["auto"], Condition { use_batch_invariant: Some(true), ..Condition::default() });
    part.add_features.insert(feature::BATCH_INVARIANCE.to_owned());
    backend.overrides.push(part);
    let mut request = LayerRequest { kv_cache_dtype: KvCacheDtype::parse("fp8").ok(), ..LayerRequest::default() };
    let mut device = Device::new("cpu");
    assert_eq!(reasons(&backend, &request, &device), ["kv_cache_dtype not supported"]);
    device.features.insert("avx512f".into());
    assert!(verdict(&backend, &request, &device).is_valid());
    request.use_batch_invariant = true;
    assert_eq!(reasons(&backend, &request, &device), ["kv_cache_dtype not supported"]);
}

#[test]
fn a_format_that_is_not_stated_passes_unless_one_is_required() {
    let device = Device::new("cpu");
    let mut backend = plain();
    assert!(verdict(&backend, &LayerRequest::default(), &device).is_valid());
    backend.capability.kv_cache_dtype_required = true;
    assert_eq!(reasons(&backend, &LayerRequest::default(), &device), ["kv_cache_dtype not supported"]);
}

#[test]
fn heads_per_kv_head_need_a_claim() {
    let device = Device::new("cpu");
    let ask = |heads, kv_heads, use_mla| LayerRequest {
        num_heads: heads,
        num_kv_heads: kv_heads,
        use_mla,
        ..LayerRequest::default()
    };
    let mut backend = plain();
    backend.capability.mla = Support::Both;
    let valid = |backend: &BackendDescriptor, request: LayerRequest| verdict(backend, &request, &device).is_valid();
    assert!(valid(&backend, ask(Some(8), Some(8), false)) && !valid(&backend, ask(Some(8), Some(2), false)));
    assert!(valid(&backend, ask(Some(8), Some(1), true)));
    assert!(!valid(&backend, ask(None, Some(2), false)) && !valid(&backend, ask(Some(8), Some(0), false)));
    backend.capability.gqa_ratios = Some(vec![NumberRule::ANY]);
    assert!(valid(&backend, ask(Some(15), Some(5), false)) && !valid(&backend, ask(Some(8), Some(3), false)));
    assert!(valid(&backend, ask(None, Some(2), false)));
}

#[test]
fn one_reason_per_group() {
    let mut backend = plain();
    for (reason, group) in [("first", Some("g")), ("second", Some("g")), ("third", None)] {
        backend.refusals.push(crate::descriptor::Refusal {
            when: Condition::default(),
            reason: reason.into(),
            group: group.map(str::to_owned),
            only_alone: false,
        });
    }
    assert_eq!(reasons(&backend, &LayerRequest::default(), &Device::new("cpu")), ["first", "third"]);
}

#[test]
fn a_state_space_layer_is_asked_for_by_type() -> Result<(), Box<dyn std::error::Error>> {
    let scan = BackendDescriptor::builder("SCAN")
        .platform("cpu")
        .dtypes([Dtype::F32])
        .state_space([StateSpaceType::Mamba2])
        .build();
    let device = Device::new("cpu");
    let request = |sort| LayerRequest { dtype: Dtype::F32, state_space: Some(sort), ..LayerRequest::default() };
    let mamba2 = request(StateSpaceType::Mamba2);
    assert_eq!(mamba2.kind(), crate::Kind::Mamba);
    assert!(verdict(&scan, &mamba2, &device).is_valid());
    assert_eq!(reasons(&scan, &request(StateSpaceType::Gdn), &device), ["state-space type gdn not supported"]);
    assert_eq!(reasons(&plain(), &mamba2, &device)[0], "state-space type mamba2 not supported");
    let invariant = LayerRequest { use_batch_invariant: true, dtype: Dtype::F16, ..mamba2 };
    assert_eq!(reasons(&scan, &invariant, &device), ["dtype not supported", "batch invariance not supported"]);
    let attention = LayerRequest { dtype: Dtype::F32, ..LayerRequest::default() };
    assert!(!verdict(&scan, &attention, &device).is_valid(), "it claims no attention");
    Ok(())
}

#[test]
fn reasons_are_filled_in_and_may_stand_alone_only() -> Result<(), Box<dyn std::error::Error>> {
    let mut device = Device::new("cuda");
    device.compute_capability = Some("9.0".parse()?);
    device.features.insert("driver=550".into());
    let mut backend = plain();
    backend.platforms = vec!["cuda".into()];
    backend.capability.compute_capability = vec![crate::condition::CapabilityRange::default()];
    backend.refusals.push(crate::descriptor::Refusal {
        when: Condition::default(),
        reason: "{kv_cache_dtype} on {major}.{minor}, driver {fact:driver|?}, library {fact:lib|none}, {other}".into(),
        group: None,
        only_alone: true,
    });
    let request = LayerRequest { kv_cache_dtype: Some(KvCacheDtype::AUTO), ..LayerRequest::default() };
    let found = reasons(&backend, &request, &device);
    assert_eq!(found, ["auto on 9.0, driver 550, library none, {other}"]);
    let found = reasons(&backend, &LayerRequest { has_sink: true, ..request }, &device);
    assert_eq!(found, ["attention sinks not supported"]);
    Ok(())
}
