use super::*;
use crate::{
    condition::{Condition, NumberRule},
    descriptor::{BlockSizes, CapabilityOverride, OptionSpec, feature},
    request::{AttentionType, Dtype},
};
use proptest::prelude::*;

fn manifest() -> Manifest {
    let full = BackendDescriptor::builder("FULL")
        .summary("uses every part")
        .platform("cpu")
        .head_sizes([NumberRule::multiples(8, 72..=512), NumberRule::Exact(64)])
        .head_sizes_v([NumberRule::ANY])
        .gqa_ratios([NumberRule::at_most(8)])
        .dtypes(Dtype::ALL)
        .kv_cache_dtypes(["auto"])
        .registers_kv_cache_dtype("manifest_test_fp5")
        .block_sizes(BlockSizes { multiples_of: vec![16], exact: vec![1], max: Some(256) })
        .layouts(["head_major"])
        .attn_types([AttentionType::Decoder])
        .features([feature::SINK])
        .device_features(["avx2"])
        .override_with(CapabilityOverride {
            when: Condition { kv_cache_dtypes: vec!["fp8*".into()], ..Condition::default() },
            block_sizes: Some(BlockSizes::exact([64])),
            ..CapabilityOverride::default()
        })
        .refuse(Condition { has_sink: Some(true), ..Condition::default() }, "not with \"sinks\"")
        .rank_when(Condition { use_batch_invariant: Some(true), ..Condition::default() }, -3)
        .option("tile", OptionSpec { description: "rows".into(), ..OptionSpec::default() })
        .build();
    Manifest {
        name: "sample".into(),
        vendor: "Müller & Söhne".into(),
        version: semver::Version::new(1, 2, 3),
        sdk_version: semver::Version::new(1, 0, 0),
        abi_generation_min: 1,
        abi_generation_max: 2,
        library: "libsample.so".into(),
        sha256: "0123456789abcdef".repeat(4),
        backends: vec![full, BackendDescriptor::builder("EMPTY").platform("cpu").build()],
    }
}

#[test]
fn what_is_written_is_read_back() -> Result<(), ManifestError> {
    let text = manifest().to_toml()?;
    assert_eq!(Manifest::parse(&text, Path::new("x"))?, manifest());
    assert_eq!(manifest().library_path(Path::new("/a/b.attache.toml")), Path::new("/a/libsample.so"));
    Ok(())
}

#[test]
fn a_value_that_cannot_be_meant_is_named() {
    type Change = fn(&mut Manifest);
    let cases: [(&str, Change); 12] = [
        ("name = 'a b'", |m| m.name = "a b".into()),
        ("name = 'a\\0'", |m| m.name = "a\0".into()),
        ("vendor = ''", |m| m.vendor.clear()),
        ("version = '0.0.0'", |m| m.version = semver::Version::new(0, 0, 0)),
        ("abi_generation_min = 0", |m| m.abi_generation_min = 0),
        ("abi_generation_max = 1", |m| (m.abi_generation_min, m.abi_generation_max) = (2, 1)),
        ("library = '../evil.so'", |m| m.library = "../evil.so".into()),
        ("library = '/lib/evil.so'", |m| m.library = "/lib/evil.so".into()),
        ("sha256 = '12'", |m| m.sha256 = "12".into()),
        ("no backend", |m| m.backends.clear()),
        ("FULL: the name stands twice", |m| m.backends = vec![m.backends[0].clone(); 2]),
        ("unknown feature 'magic'", |m| {
            m.backends[1].capability.features.insert("magic".into());
        }),
    ];
    for (expected, change) in cases {
        let mut changed = manifest();
        change(&mut changed);
        let text = changed.to_toml().expect("TOML");
        let error = Manifest::parse(&text, Path::new("/p/x.attache.toml")).expect_err(expected).to_string();
        assert!(error.starts_with("/p/x.attache.toml: ") && error.contains(expected), "{error}");
    }
}

#[test]
fn syntax_errors_say_where_and_why() {
    let text = manifest().to_toml().expect("TOML").replace("vendor", "vendour");
    let error = Manifest::parse(&text, Path::new("x.attache.toml")).expect_err("an unknown key");
    assert!(matches!(&error, ManifestError::Syntax { line: 2, column: 1, .. }), "{error:?}");
    assert!(error.to_string().contains("unknown field `vendour`"), "{error}");
}

proptest! {
    #[test]
    fn no_text_is_a_panic(text in "\\PC{0,200}") {
        prop_assert!(Manifest::parse(&text, Path::new("x")).is_err());
    }
}
