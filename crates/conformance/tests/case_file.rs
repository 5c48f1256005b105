//! Case files: what is written reads back; what is not a case is refused with its name, never by a
//! panic.

use attache_conformance::{
    Case, CaseError, Output, Space, Values,
    case::{METADATA_KEYS, TENSORS, write_output},
};
use attache_core::{
    AttentionType, BackendDescriptor, BlockSizes, Device, Dtype, KvCacheDtype, NumberRule, Support,
    cache::{LAYOUT_HEAD_MAJOR, LAYOUT_LATENT, LAYOUT_TOKEN_MAJOR},
    descriptor::feature,
};
use proptest::prelude::*;
use safetensors::{
    Dtype as FileDtype, SafeTensors,
    tensor::{TensorView, serialize},
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::LazyLock,
};

/// Everything that a case can be.
static SPACE: LazyLock<Space> = LazyLock::new(|| {
    let descriptor = BackendDescriptor::builder("ALL")
        .platform("cpu")
        .architectures(["*"])
        .head_sizes([NumberRule::ANY])
        .head_sizes_v([NumberRule::ANY])
        .gqa_ratios([NumberRule::ANY])
        .dtypes(Dtype::ALL)
        .kv_cache_dtypes(["auto", "fp8_e4m3", "int8_per_token_head"])
        .block_sizes(BlockSizes::multiples_of(1))
        .layouts([LAYOUT_HEAD_MAJOR, LAYOUT_TOKEN_MAJOR, LAYOUT_LATENT])
        .attn_types(["decoder", "encoder", "encoder_only", "encoder_decoder"].map(AttentionType::parse))
        .mla(Support::Both)
        .sparse(Support::Both)
        .features(feature::ALL)
        .build();
    Space::new(&descriptor, &Device::host_cpu())
});

#[test]
fn cases_are_seeded_and_read_back_equal() {
    let cases: Vec<Case> = SPACE.cases(3).take(80).collect();
    assert!(SPACE.cases(3).take(80).eq(cases.iter().cloned()), "a seed means the same cases");
    assert!(SPACE.cases(4).take(80).ne(cases.iter().cloned()));
    for case in &cases {
        assert_eq!(&Case::from_bytes(&case.to_bytes().unwrap()).unwrap(), case);
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("case.safetensors");
    cases[0].save(&path).unwrap();
    assert_eq!(Case::load(&path).unwrap(), cases[0]);
    assert!(matches!(Case::load(&directory.path().join("none")), Err(CaseError::Io { .. })));
}

#[test]
fn requests_can_be_cut_out() {
    for case in SPACE.cases(5).take(80) {
        for request in 0..case.num_requests() {
            let alone = case.alone(request).expect("a request");
            alone.check().unwrap();
            assert_eq!(alone.num_tokens(), case.query_range(request).len());
        }
        assert!(case.alone(case.num_requests()).is_none());
    }
}

#[test]
fn every_value_of_the_claims_is_met_and_nothing_else() {
    let cases: Vec<Case> = SPACE.cases(3).collect();
    type Holds = dyn Fn(&Case) -> bool;
    let met: [(&str, &Holds); 12] = [
        ("bf16 with a window", &|case| case.dtype() == Dtype::BF16 && case.sliding_window > 0),
        ("softcap with sinks", &|case| case.softcap > 0.0 && !case.sinks.is_empty()),
        ("fp8 with a scale for each head", &|case| case.k_scales.len() > 1),
        ("cross attention", &|case| case.attn_type == AttentionType::EncoderDecoder),
        ("no request", &|case| case.num_requests() == 0),
        ("a request of no tokens", &|case| case.query_start_loc.windows(2).any(|pair| pair[0] == pair[1])),
        ("a long sequence", &|case| case.seq_lens.iter().any(|len| *len > 700)),
        ("more queries than keys", &|case| {
            (0..case.num_requests()).any(|r| case.query_range(r).len() > case.kv_range(r).len())
        }),
        ("other value heads", &|case| case.mla.is_none() && case.head_size_v != case.head_size),
        ("sparse", &|case| case.topk.is_some()),
        ("prefix spans in a chunk", &|case| !case.prefix_spans.is_empty() && case.chunked_local > 0),
        ("one flag for each request", &|case| case.causal_per_request.is_some()),
    ];
    for (what, holds) in met {
        assert!(cases.iter().any(holds), "{what} is in none of {} cases", cases.len());
    }
    let narrow = BackendDescriptor::builder("NARROW")
        .platform("cpu")
        .architectures(["*"])
        .head_sizes([64])
        .dtypes([Dtype::F32])
        .kv_cache_dtypes(["auto", "nvfp4"])
        .block_sizes(BlockSizes::exact([16]))
        .layouts([LAYOUT_HEAD_MAJOR])
        .attn_types([AttentionType::Decoder])
        .build();
    let space = Space::new(&narrow, &Device::host_cpu());
    assert_eq!(space.unchecked(), ["kv_cache_dtype nvfp4"]);
    for case in space.cases(1) {
        assert!(space.claims(&case.request()));
        assert!(case.causal && !case.lse && case.num_heads == case.num_kv_heads && case.head_size == 64);
        assert!(case.kv_cache_dtype.is_none_or(|dtype| dtype == KvCacheDtype::AUTO));
    }
    let elsewhere = BackendDescriptor { platforms: vec!["mars".to_owned()], ..narrow };
    let space = Space::new(&elsewhere, &Device::host_cpu());
    assert!(space.cases(1).next().is_none());
    assert!(space.plain(1).unwrap_err().contains("platform cpu not supported"));
}

#[test]
fn outputs_are_written_with_their_shapes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.safetensors");
    let output = Output {
        out: Values::from_f64(Dtype::BF16, (0..12).map(f64::from)),
        lse: Some(vec![0.5, f32::NEG_INFINITY, 1.0, 2.0]),
        num_heads: 2,
        head_size: 3,
        layout: "token_major".to_owned(),
        block_size: 16,
    };
    write_output(&path, &output).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let out = file.tensor("out").unwrap();
    assert_eq!(
        (out.shape(), out.dtype(), out.data()),
        (&[2, 2, 3][..], FileDtype::BF16, &output.out.to_le_bytes()[..])
    );
    let lse = file.tensor("lse").unwrap();
    assert_eq!((lse.shape(), lse.dtype()), (&[2, 2][..], FileDtype::F32));
    write_output(&path, &Output { lse: None, ..output.clone() }).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(SafeTensors::deserialize(&bytes).unwrap().names(), ["out"]);
    assert!(matches!(write_output(directory.path(), &output), Err(CaseError::Io { .. })));
}

/// A file in the making: tensors and metadata by name.
#[derive(Clone)]
struct File {
    tensors: BTreeMap<String, (FileDtype, Vec<usize>, Vec<u8>)>,
    metadata: HashMap<String, String>,
}

impl File {
    /// Two requests of one and two new tokens, two heads of four elements.
    fn good() -> Self {
        let mut file = Self { tensors: BTreeMap::new(), metadata: HashMap::new() };
        file.floats("q", &[3, 2, 4]);
        file.floats("k", &[7, 1, 4]);
        file.floats("v", &[7, 1, 4]);
        file.integers("query_start_loc", &[4], &[0, 1, 1, 3]);
        file.integers("seq_lens", &[3], &[3, 0, 4]);
        file
    }
    fn latent() -> Self {
        let mut file = Self::good();
        file.tensors.remove("v");
        file.floats("k", &[7, 4]);
        for (key, value) in [("scale", "0.5"), ("kv_lora_rank", "3"), ("qk_rope_head_dim", "1")] {
            file.set(key, value);
        }
        file
    }
    fn floats(&mut self, name: &str, shape: &[usize]) {
        let count: usize = shape.iter().product();
        let bytes = (0..count).flat_map(|index| (index as f32 * 0.25).to_le_bytes()).collect();
        self.tensors.insert(name.to_owned(), (FileDtype::F32, shape.to_vec(), bytes));
    }
    fn integers(&mut self, name: &str, shape: &[usize], values: &[i32]) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensors.insert(name.to_owned(), (FileDtype::I32, shape.to_vec(), bytes));
    }
    fn set(&mut self, key: &str, value: &str) {
        self.metadata.insert(key.to_owned(), value.to_owned());
    }
    fn bytes(&self) -> Vec<u8> {
        let views: Vec<(&str, TensorView<'_>)> = self
            .tensors
            .iter()
            .map(|(name, (dtype, shape, bytes))| {
                (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor"))
            })
            .collect();
        serialize(views, Some(self.metadata.clone())).expect("a file")
    }
    fn read(&self) -> Result<Case, CaseError> {
        Case::from_bytes(&self.bytes())
    }
}

#[test]
fn absent_keys_have_their_documented_defaults() {
    let case = File::good().read().unwrap();
    assert_eq!((case.scale, case.causal, case.lse, case.seed), (0.5, true, true, 0));
    assert_eq!((case.sliding_window, case.window_right, case.chunked_local, case.softcap), (0, -1, 0, 0.0));
    assert_eq!((case.block_size, &case.layout, case.kv_cache_dtype), (None, &None, None));
    let mut file = File::good();
    for (key, value) in
        [("layout", "HND"), ("causal", "0"), ("k_scale", "0.5"), ("kv_cache_dtype", "fp8"), ("softcap", "-1")]
    {
        file.set(key, value);
    }
    let case = file.read().unwrap();
    assert_eq!((case.layout.as_deref(), case.causal, &case.k_scales[..]), (Some(LAYOUT_HEAD_MAJOR), false, &[0.5][..]));
    let mut file = File::good();
    file.set("attn_type", "encoder_decoder");
    assert!(!file.read().unwrap().causal, "cross attention has no positions");
    assert_eq!(File::latent().read().unwrap().mla.expect("MLA").kv_lora_rank, 3);
}

/// A change to a good file, and what the error must name.
type Hostile = (&'static str, Box<dyn Fn(&mut File)>);

fn hostile() -> Vec<Hostile> {
    fn set(key: &'static str, value: &'static str) -> Hostile {
        (key, Box::new(move |file: &mut File| file.set(key, value)))
    }
    fn change(names: &'static str, function: impl Fn(&mut File) + 'static) -> Hostile {
        (names, Box::new(function))
    }
    let mut all = vec![
        set("scael", "1"),
        set("scale", "one"),
        set("scale", "NaN"),
        set("scale", "inf"),
        set("softcap", "-inf"),
        set("causal", "maybe"),
        set("sliding_window", "1.5"),
        set("sliding_window", "99999999999999999999"),
        set("block_size", "0"),
        set("block_size", "-4"),
        set("block_size", "4294967295"),
        set("kv_cache_dtype", "fp9"),
        set("attn_type", "sideways"),
        set("k_scale", "0"),
        set("k_scale", "nan"),
        set("seed", "-1"),
        set("mla_form", "absorbed"),
        set("v_head_dim", "3"),
        change("extra", |file| file.floats("extra", &[1])),
        change("seq_lens", |file| file.integers("seq_lens", &[3], &[3, -1, 4])),
        change("v", |file| file.floats("v", &[6, 1, 4])),
        change("k", |file| file.integers("seq_lens", &[3], &[i32::MAX, i32::MAX, i32::MAX])),
        change("query_start_loc", |file| file.integers("query_start_loc", &[3], &[0, 1, 3])),
        change("query_start_loc", |file| file.integers("query_start_loc", &[4], &[0, 2, 1, 3])),
        change("query_start_loc", |file| file.integers("query_start_loc", &[4], &[-1, 1, 1, 3])),
        change("query_start_loc", |file| file.integers("query_start_loc", &[2, 2], &[0, 1, 1, 3])),
        change("query_start_loc", |file| file.integers("query_start_loc", &[0], &[])),
        change("seq_lens", |file| file.floats("seq_lens", &[3])),
        change("q", |file| file.floats("q", &[3, 8])),
        change("q", |file| file.integers("query_start_loc", &[4], &[0, 1, 1, i32::MAX])),
        change("q", |file| file.floats("q", &[3, 0, 4])),
        change("heads", |file| {
            file.floats("q", &[3, 3, 4]);
            file.floats("k", &[7, 2, 4]);
            file.floats("v", &[7, 2, 4]);
        }),
        change("q", |file| file.floats("q", &[0, 1 << 40, 1 << 20])),
        change("sinks", |file| file.floats("sinks", &[3])),
        change("alibi_slopes", |file| file.integers("alibi_slopes", &[2], &[1, 2])),
        change("k_scales", |file| file.floats("k_scales", &[3])),
        change("prefix", |file| file.integers("prefix_spans", &[1, 3], &[3, 0, 1])),
        change("prefix", |file| file.integers("prefix_spans", &[1, 3], &[0, 2, 1])),
        change("prefix_spans", |file| file.integers("prefix_spans", &[3], &[0, 0, 1])),
        change("causal_per_request", |file| file.integers("causal_per_request", &[3], &[1, 0, 1])),
        change("topk_indices", |file| file.integers("topk_indices", &[3, 1], &[0, 0, 4])),
        change("topk_indices", |file| file.integers("topk_indices", &[0, 1 << 62], &[])),
        change("kv_lora_rank", |file| file.set("kv_lora_rank", "4")),
    ];
    for name in ["q", "k", "v", "query_start_loc", "seq_lens"] {
        all.push(change(name, move |file| {
            file.tensors.remove(name);
        }));
    }
    // Cross attention has no positions.
    for (key, value) in [("causal", "true"), ("sliding_window", "3")] {
        all.push(change("cross", move |file| {
            file.set("attn_type", "encoder_decoder");
            file.set(key, value);
        }));
    }
    all
}

#[test]
fn what_is_not_a_case_is_refused_by_name() {
    for (index, (names, change)) in hostile().into_iter().enumerate() {
        let mut file = File::good();
        change(&mut file);
        let error = file.read().expect_err(names).to_string();
        assert!(error.contains(names), "{index}: '{error}' does not name {names}");
    }
    // NaN in a list is no number to compare with.
    let mut file = File::good();
    file.tensors.insert("sinks".to_owned(), (FileDtype::F32, vec![2], [f32::NAN.to_le_bytes(); 2].concat()));
    assert!(file.read().unwrap_err().to_string().contains("NaN"));
    let mut file = File::good();
    file.set("unknown", "1");
    let error = file.read().unwrap_err().to_string();
    assert!(METADATA_KEYS.iter().all(|key| error.contains(key)), "{error}");
    for (key, value) in
        [("kv_lora_rank", "18446744073709551615"), ("kv_lora_rank", "5"), ("scale", ""), ("mla_form", "expanded")]
    {
        let mut file = File::latent();
        file.set(key, value);
        file.read().expect_err(key);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any shapes and values: a case or an error, never a panic; what reads is whole.
    #[test]
    fn any_file_is_a_case_or_an_error(
        shapes in prop::collection::vec(prop::collection::vec(0_usize..6, 0..4), TENSORS.len()),
        kinds in prop::collection::vec(0_usize..4, TENSORS.len()),
        present in prop::collection::vec(any::<bool>(), TENSORS.len()),
        keys in prop::collection::vec((0..METADATA_KEYS.len(), "-?[0-9]{1,20}|true|nan|inf|auto|absorbed|"), 0..6),
        numbers in prop::collection::vec(any::<i32>(), 0..8),
    ) {
        let mut file = File::good();
        for (at, name) in TENSORS.iter().enumerate().filter(|(at, _)| present[*at]) {
            let count: usize = shapes[at].iter().product();
            let values: Vec<i32> = numbers.iter().copied().cycle().take(count).collect();
            match kinds[at] {
                0 => file.floats(name, &shapes[at]),
                _ if values.len() == count => file.integers(name, &shapes[at], &values),
                _ => {}
            }
        }
        for (key, value) in &keys {
            file.set(METADATA_KEYS[*key], value);
        }
        if let Ok(case) = file.read() {
            prop_assert!(case.check().is_ok() && case.to_bytes().is_ok());
        }
    }

    /// Any bytes.
    #[test]
    fn broken_bytes_are_an_error(cut in 0_usize..600, flips in prop::collection::vec((0_usize..600, any::<u8>()), 0..6)) {
        let mut bytes = File::good().bytes();
        for (at, byte) in flips {
            if let Some(target) = bytes.get_mut(at) {
                *target = byte;
            }
        }
        bytes.truncate(cut);
        if let Ok(case) = Case::from_bytes(&bytes) {
            prop_assert!(case.check().is_ok());
        }
    }
}
