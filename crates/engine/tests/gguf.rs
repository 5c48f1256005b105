//! GGUF files of the two architectures, small and made here: what they say is honoured or refused,
//! and no damage to a file is more than an error.

use attache_core::{
    Kind,
    plan::{EngineConfig, LayerDescription, ModelDescription},
    policy::Policy,
    registry::Registry,
};
use attache_engine::{
    Engine, EngineError, EngineOptions, FinishReason, Generation, LayerProvider, LoadedModel, ModelChoice, Prompt,
    Sampling, Weights,
};
use attache_plugin_cpu as _;
use candle_core::{
    Device, Tensor,
    quantized::{
        GgmlDType, QTensor,
        gguf_file::{self, Value},
    },
};
use proptest::prelude::*;
use std::{cell::Cell, collections::BTreeMap, error::Error, ops::ControlFlow, path::Path};
use tempfile::TempDir;

const EMBEDDING: usize = 64;
const FEED_FORWARD: usize = 128;
const LAYERS: usize = 3;

/// A file to be: metadata, and the shapes of tensors (rows first).
struct Draft {
    architecture: &'static str,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Vec<usize>>,
    matrices: GgmlDType,
}

impl Draft {
    fn new(architecture: &'static str) -> Self {
        let mut draft =
            Self { architecture, metadata: BTreeMap::new(), tensors: BTreeMap::new(), matrices: GgmlDType::Q4_1 };
        draft.metadata.insert("general.architecture".to_owned(), Value::String(architecture.to_owned()));
        for (key, value) in [
            ("block_count", LAYERS as u32),
            ("embedding_length", EMBEDDING as u32),
            ("feed_forward_length", FEED_FORWARD as u32),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("context_length", 64),
        ] {
            draft.set(key, Value::U32(value));
        }
        draft.set("attention.layer_norm_rms_epsilon", Value::F32(1e-5));
        let mut norms = vec!["attn_norm", "ffn_norm"];
        if architecture == "gemma3" {
            draft.set("attention.sliding_window", Value::U32(8));
            norms.extend(["post_attention_norm", "post_ffw_norm"]);
        }
        let bytes = (0..=255_u8).map(|byte| format!("<0x{byte:02X}>"));
        let tokens: Vec<Value> =
            ["<unk>", "<s>", "</s>"].into_iter().map(str::to_owned).chain(bytes).map(Value::String).collect();
        let vocabulary = tokens.len();
        let types = [2, 3, 3].into_iter().chain([6; 256]).map(Value::I32).collect();
        draft.metadata.extend(
            [
                ("model", Value::String("llama".to_owned())),
                ("tokens", Value::Array(tokens)),
                ("token_type", Value::Array(types)),
                ("scores", Value::Array(vec![Value::F32(0.0); vocabulary])),
                ("bos_token_id", Value::U32(1)),
                ("eos_token_id", Value::U32(2)),
            ]
            .map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)),
        );
        draft.tensors.insert("token_embd.weight".to_owned(), vec![vocabulary, EMBEDDING]);
        draft.tensors.insert("output_norm.weight".to_owned(), vec![EMBEDDING]);
        for layer in 0..LAYERS {
            draft.heads(layer, 4, 2, 16);
            for (name, shape) in [
                ("ffn_gate", vec![FEED_FORWARD, EMBEDDING]),
                ("ffn_up", vec![FEED_FORWARD, EMBEDDING]),
                ("ffn_down", vec![EMBEDDING, FEED_FORWARD]),
            ] {
                draft.tensor(layer, name, shape);
            }
            norms.iter().for_each(|name| draft.tensor(layer, name, vec![EMBEDDING]));
        }
        draft
    }

    fn set(&mut self, key: &str, value: Value) {
        self.metadata.insert(format!("{}.{key}", self.architecture), value);
    }

    fn tensor(&mut self, layer: usize, name: &str, shape: Vec<usize>) {
        self.tensors.insert(format!("blk.{layer}.{name}.weight"), shape);
    }

    /// Attention tensors for heads of `size`.
    fn heads(&mut self, layer: usize, heads: usize, kv_heads: usize, size: usize) {
        self.tensor(layer, "attn_q", vec![heads * size, EMBEDDING]);
        self.tensor(layer, "attn_k", vec![kv_heads * size, EMBEDDING]);
        self.tensor(layer, "attn_v", vec![kv_heads * size, EMBEDDING]);
        self.tensor(layer, "attn_output", vec![EMBEDDING, heads * size]);
        if self.architecture == "gemma3" {
            self.tensor(layer, "attn_q_norm", vec![size]);
            self.tensor(layer, "attn_k_norm", vec![size]);
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut seed = 1_u32;
        let mut noise = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1_u32 << 23) as f32 - 1.0
        };
        let mut tensors = Vec::new();
        for (name, shape) in &self.tensors {
            let is_matrix = shape.len() > 1;
            let values: Vec<f32> = (0..shape.iter().product())
                .map(|_| if is_matrix { noise() / 4.0 } else { 1.0 + noise() / 4.0 })
                .collect();
            let tensor = Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).expect("a tensor");
            let dtype = if is_matrix { self.matrices } else { GgmlDType::F32 };
            tensors.push((name.as_str(), QTensor::quantize(&tensor, dtype).expect("a quantised tensor")));
        }
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
        let mut file = std::io::Cursor::new(Vec::new());
        gguf_file::write(&mut file, &metadata, &tensors).expect("a written file");
        file.into_inner()
    }
}

/// A folder with one file in it.
fn file(bytes: &[u8]) -> (TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).expect("written");
    let path = path.to_str().expect("a path in UTF-8").to_owned();
    (folder, path)
}

fn registry() -> Registry {
    Registry::builder().policy(Policy::default()).build()
}

/// What holds of the layers, or words of the error.
type Expected = Result<fn(&[LayerDescription]) -> bool, &'static [&'static str]>;
/// Architecture, what it is about, how the file is changed.
type Case = (&'static str, &'static str, fn(&mut Draft), Expected);

#[test]
fn dimensions_are_the_files_own_or_refused_with_both_sides() {
    let cases: &[Case] = &[
        ("llama", "as it is", |_| {}, Ok(|layers| layers.iter().all(|l| (l.head_size, l.num_kv_heads) == (16, 2)))),
        (
            "llama",
            "key length 0",
            |draft| draft.set("attention.key_length", Value::U32(0)),
            Err(&["llama.attention.key_length", "0", "above 0"]),
        ),
        (
            "llama",
            "a key length that the tensors contradict",
            |draft| draft.set("attention.key_length", Value::U32(32)),
            Err(&["blk.0.attn_q.weight", "[64, 64]", "key_length = 32", "[128, 64]"]),
        ),
        (
            "llama",
            "a key length that is not embedding / heads",
            |draft| {
                draft.set("attention.key_length", Value::U32(32));
                draft.set("attention.value_length", Value::U32(32));
                (0..LAYERS).for_each(|layer| draft.heads(layer, 4, 2, 32));
            },
            Ok(|layers| layers.iter().all(|l| (l.head_size, l.head_size_v) == (32, 32))),
        ),
        (
            "llama",
            "KV heads of each layer",
            |draft| {
                draft.set("attention.head_count_kv", Value::Array([2, 4, 1].map(Value::U32).to_vec()));
                draft.heads(1, 4, 4, 16);
                draft.heads(2, 4, 1, 16);
            },
            Ok(|layers| layers.iter().map(|l| l.num_kv_heads).eq([2, 4, 1])),
        ),
        (
            "llama",
            "too few KV heads in the list",
            |draft| draft.set("attention.head_count_kv", Value::Array(vec![Value::U32(2); 2])),
            Err(&["llama.attention.head_count_kv", "an array of 2 items", "an array of 3"]),
        ),
        (
            "llama",
            "KV heads that do not divide the heads",
            |draft| draft.set("attention.head_count_kv", Value::U32(3)),
            Err(&["llama.attention.head_count_kv", "3", "llama.attention.head_count = 4"]),
        ),
        (
            "llama",
            "more layers than tensors",
            |draft| draft.set("block_count", Value::U32(u32::MAX)),
            Err(&["llama.block_count", "4294967295"]),
        ),
        (
            "llama",
            "experts",
            |draft| draft.set("expert_count", Value::U32(8)),
            Err(&["llama.expert_count", "mixtures of experts"]),
        ),
        (
            "llama",
            "a bias that the engine would ignore",
            |draft| {
                draft.tensors.insert("blk.1.attn_q.bias".to_owned(), vec![64]);
            },
            Err(&["blk.1.attn_q.bias", "ignoring it would change"]),
        ),
        (
            "llama",
            "a missing tensor",
            |draft| {
                draft.tensors.remove("blk.2.ffn_up.weight");
            },
            Err(&["blk.2.ffn_up.weight", "missing"]),
        ),
        (
            "llama",
            "a vocabulary larger than its embedding",
            |draft| {
                draft.tensors.insert("token_embd.weight".to_owned(), vec![200, EMBEDDING]);
            },
            Err(&["259", "200"]),
        ),
        ("llama", "a number as text", |draft| draft.set("context_length", Value::String("64".into())), Err(&["'64'"])),
        ("mamba", "another architecture", |_| {}, Err(&["'mamba'", "llama and gemma3"])),
        (
            "gemma3",
            "a pattern as a number",
            |draft| draft.set("attention.sliding_window_pattern", Value::U32(2)),
            Ok(|layers| layers.iter().map(|l| l.sliding_window).eq([Some(8), None, Some(8)])),
        ),
        (
            "gemma3",
            "a pattern as a list",
            |draft| {
                let pattern = [false, true, true].map(Value::Bool).to_vec();
                draft.set("attention.sliding_window_pattern", Value::Array(pattern));
            },
            Ok(|layers| {
                let kinds = [Kind::FullAttention, Kind::SlidingWindow, Kind::SlidingWindow];
                layers.iter().map(|l| l.kind).eq(kinds)
            }),
        ),
        (
            "gemma3",
            "a pattern of another length",
            |draft| draft.set("attention.sliding_window_pattern", Value::Array(vec![Value::Bool(true); 4])),
            Err(&["gemma3.attention.sliding_window_pattern", "4 items", "3 truth values"]),
        ),
    ];
    for (architecture, case, change, expected) in cases {
        let mut draft = Draft::new(architecture);
        change(&mut draft);
        let (_folder, path) = file(&draft.bytes());
        match (LoadedModel::load(&path), expected) {
            (Ok(model), Ok(check)) => {
                let layers = model.decoder.description();
                assert!(check(&layers.layers), "{case}: {layers:?}");
                let described = LoadedModel::describe(&path).expect("a description");
                assert_eq!(format!("{described:?}"), format!("{layers:?}"), "{case}: metadata and weights");
            }
            (Err(error), Err(words)) => {
                let text = error.to_string();
                assert!(words.iter().all(|word| text.contains(word)), "{case}: {text}");
            }
            (found, _) => panic!("{case}: {:?}", found.map(|model| model.decoder.description())),
        }
    }
}

fn prompts(engine: &Engine) -> Vec<Prompt> {
    ["a", "The river runs to the sea", "0123456789"]
        .map(|text| Prompt {
            tokens: engine.tokenizer().encode(text).expect("tokens"),
            max_tokens: 12,
            sampling: Sampling::default(),
            ignore_end: true,
        })
        .to_vec()
}

fn run(engine: &mut Engine, prompts: Vec<Prompt>) -> Vec<Generation> {
    engine.generate(prompts, &mut |_| ControlFlow::Continue(())).expect("a run").generations
}

#[test]
fn prompts_get_the_same_tokens_alone_and_together_whatever_the_weights() {
    for (architecture, matrices) in
        [("llama", GgmlDType::Q4_1), ("gemma3", GgmlDType::Q8_0), ("gemma3", GgmlDType::F16)]
    {
        let (_folder, path) = file(&Draft { matrices, ..Draft::new(architecture) }.bytes());
        for weights in [Weights::Quantised, Weights::Dequantised] {
            let mut engine = Engine::load(&path, weights, &registry(), EngineOptions::default()).expect("an engine");
            let prompts = prompts(&engine);
            let together = run(&mut engine, prompts.clone());
            for (prompt, together) in prompts.into_iter().zip(together) {
                assert_eq!(run(&mut engine, vec![prompt])[0].tokens, together.tokens, "{architecture} {weights:?}");
                assert_eq!((together.tokens.len(), together.finish), (12, FinishReason::MaxTokens));
            }
        }
    }
}

#[test]
fn a_context_larger_than_any_memory_costs_nothing() {
    let mut draft = Draft::new("llama");
    draft.set("context_length", Value::U32(u32::MAX));
    let (_folder, path) = file(&draft.bytes());
    let mut engine = Engine::load(&path, Weights::Auto, &registry(), EngineOptions::default()).expect("an engine");
    let prompts = prompts(&engine);
    assert!(run(&mut engine, prompts).iter().all(|generation| generation.tokens.len() == 12));
}

/// A provider that has nothing to give, and says whether it was asked.
#[derive(Default)]
struct Nothing(Cell<usize>);

impl LayerProvider for Nothing {
    fn backends(
        &self,
        model: &ModelDescription,
        _engine: &EngineConfig,
    ) -> Result<ModelChoice, Box<dyn Error + Send + Sync>> {
        self.0.set(model.layers.len());
        Err("no backend takes blocks of 7 tokens".into())
    }
}

#[test]
fn what_no_backend_serves_is_refused_before_weights_are_read() {
    let whole = Draft::new("gemma3").bytes();
    // All of the metadata, and not a single whole matrix.
    let (_folder, path) = file(&whole[..whole.len() / 4]);
    let provider = Nothing::default();
    let options = EngineOptions::default;
    let error = Engine::load(&path, Weights::Auto, &provider, options()).expect_err("no backend");
    assert!(matches!(error, EngineError::NoBackend(_)) && error.to_string().contains("blocks of 7"), "{error}");
    assert_eq!(provider.0.get(), LAYERS);
    let error = Engine::load(&path, Weights::Auto, &registry(), options()).expect_err("a cut file").to_string();
    assert!(error.contains("truncated"), "{error}");
    let bad = EngineOptions { num_blocks: Some(0), ..options() };
    let error = Engine::load("no such file", Weights::Auto, &registry(), bad).expect_err("an option").to_string();
    assert!(error.contains("num_blocks = 0"), "{error}");
}

#[test]
fn a_cut_file_is_an_error_wherever_it_ends() {
    let whole = Draft::new("llama").bytes();
    let (_folder, path) = file(&whole);
    assert!(LoadedModel::load(&path).is_ok());
    for len in (0..whole.len() - 32).step_by(whole.len() / 97) {
        std::fs::write(&path, &whole[..len]).expect("written");
        let error = LoadedModel::load(&path).expect_err("a cut file");
        assert!(matches!(error, EngineError::Gguf { .. }), "{len} bytes: {error}");
    }
}

/// Where the dimensions of a tensor stand in a file.
fn dimensions_at(bytes: &[u8], tensor: &str) -> usize {
    let name = bytes.windows(tensor.len()).rposition(|window| window == tensor.as_bytes()).expect("the tensor");
    name + tensor.len() + 4
}

#[test]
fn numbers_that_no_file_can_mean_are_errors() {
    let mut bytes = Draft::new("llama").bytes();
    let at = dimensions_at(&bytes, "blk.0.ffn_up.weight");
    bytes[at..at + 16].copy_from_slice(&[0xff; 16]);
    let (_folder, path) = file(&bytes);
    let error = LoadedModel::load(&path).expect_err("2^128 values").to_string();
    assert!(error.contains("blk.0.ffn_up.weight"), "{error}");

    let mut draft = Draft::new("llama");
    draft.metadata.insert("general.alignment".to_owned(), Value::U32(0));
    std::fs::write(&path, draft.bytes()).expect("written");
    let error = LoadedModel::load(&path).expect_err("an alignment of 0").to_string();
    assert!(error.contains("alignment"), "{error}");

    let folder = Path::new(&path).parent().expect("a folder").join("inner");
    std::fs::create_dir(&folder).expect("a folder");
    let error = LoadedModel::load(folder.to_str().expect("a path")).expect_err("an empty folder").to_string();
    assert!(error.contains("config.json"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn damage_to_the_header_is_never_a_crash(
        damage in proptest::collection::vec((0.0..1.0_f64, any::<u8>()), 1..4), architecture in 0..2_usize,
    ) {
        let mut bytes = Draft::new(["llama", "gemma3"][architecture]).bytes();
        let header = dimensions_at(&bytes, "token_embd.weight") + 28;
        for (place, value) in damage {
            bytes[(place * header as f64) as usize] = value;
        }
        let (_folder, path) = file(&bytes);
        // What is left of it may still be a model; then it must run.
        if let Ok(mut engine) = Engine::load(&path, Weights::Auto, &registry(), EngineOptions::default()) {
            let prompt = Prompt { tokens: vec![1, 70, 80], max_tokens: 2, sampling: Sampling::default(), ignore_end: true };
            prop_assert_eq!(run(&mut engine, vec![prompt]).len(), 1);
        }
    }
}
