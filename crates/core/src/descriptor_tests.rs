use super::*;

fn sample() -> BackendDescriptor {
    BackendDescriptor::builder("CPU_ATTN")
        .summary("Attention on the processor")
        .platform("cpu")
        .architectures(["*"])
        .head_sizes([32, 64])
        .head_sizes([NumberRule::multiples(8, 72..=512)])
        .head_sizes_v([NumberRule::ANY])
        .gqa_ratios([NumberRule::ANY])
        .dtypes(Dtype::ALL)
        .kv_cache_dtypes(["auto", "bfloat16"])
        .registers_kv_cache_dtype("vendor_fp7")
        .block_sizes(BlockSizes { multiples_of: vec![1], exact: vec![], max: Some(4096) })
        .layouts(["head_major", "token_major"])
        .attn_types([AttentionType::Decoder, AttentionType::EncoderOnly])
        .features([feature::SINK, feature::SLIDING_WINDOW])
        .override_with(CapabilityOverride {
            when: Condition { device_features: vec!["avx512f".into()], ..Condition::default() },
            kv_cache_dtypes: Some(vec!["auto".into(), "fp8_e4m3".into()]),
            ..CapabilityOverride::default()
        })
        .refuse(
            Condition { has_sink: Some(true), has_softcap: Some(true), ..Condition::default() },
            "sinks with a soft-cap not supported",
        )
        .rank(10)
        .rank_when(Condition { use_batch_invariant: Some(true), ..Condition::default() }, 20)
        .option(
            "tile",
            OptionSpec { option_type: OptionType::Integer, description: "rows".into(), ..Default::default() },
        )
        .build()
}

#[test]
fn json_round_trip() -> Result<(), Box<dyn std::error::Error>> {
    let text = serde_json::to_string(&sample())?;
    assert_eq!(serde_json::from_str::<BackendDescriptor>(&text)?, sample());
    Ok(())
}

#[cfg(feature = "host")]
#[test]
fn toml_round_trip() -> Result<(), Box<dyn std::error::Error>> {
    let text = toml::to_string(&sample())?;
    assert_eq!(toml::from_str::<BackendDescriptor>(&text)?, sample(), "{text}");
    Ok(())
}

#[test]
fn unknown_fields_are_errors() {
    let text = r#"{"name": "X", "platforms": ["cpu"], "capability": {"head_size": [64]}}"#;
    let error = serde_json::from_str::<BackendDescriptor>(text).unwrap_err();
    assert!(error.to_string().contains("head_size"), "{error}");
}

#[test]
fn what_contradicts_itself_is_told() {
    assert_eq!(sample().check(), Ok(()));
    let problem = |change: fn(&mut BackendDescriptor)| {
        let mut descriptor = sample();
        change(&mut descriptor);
        descriptor.check().expect_err("must be refused").to_string()
    };
    assert!(problem(|d| d.name = "cpu attn".into()).contains("the name must be of"));
    assert!(problem(|d| d.name = "AUTO".into()).contains("AUTO"));
    assert!(problem(|d| d.platforms.clear()).contains("platform"));
    let unknown = problem(|d| d.capability.kv_cache_dtypes.push("fp99".into()));
    assert!(unknown.contains("fp99") && unknown.contains("fp8_e4m3"), "{unknown}");
    assert!(
        problem(|d| {
            d.capability.features.insert("sinks".into());
        })
        .contains("sliding_window")
    );
    assert!(problem(|d| d.refusals[0].reason.clear()).contains("empty reason"));
}

#[test]
fn block_sizes_that_are_not_claimed_are_not_taken() {
    assert!(!BlockSizes::default().contains(16));
    assert!(BlockSizes::multiples_of(16).contains(544));
    assert!(!BlockSizes::multiples_of(16).contains(24));
    assert!(!BlockSizes::multiples_of(0).contains(16) && !BlockSizes::multiples_of(16).contains(0));
    assert!(BlockSizes::exact([16]).contains(16) && !BlockSizes::exact([16]).contains(32));
    let bounded = BlockSizes { max: Some(32), ..BlockSizes::multiples_of(16) };
    assert!(bounded.contains(32) && !bounded.contains(256));
}
