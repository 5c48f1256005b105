//! A case's file: safetensors with the tensors and metadata keys below.
//!
//! Owns names, shapes and defaults of the file format. Must not know how a case is run.

use super::{Case, CaseError, Mla, MlaForm, TopK};
use crate::{execute::Output, values::Values};
use attache_core::{
    AttentionType, Dtype, KvCacheDtype,
    cache::{LAYOUT_HEAD_MAJOR, LAYOUT_TOKEN_MAJOR},
};
use safetensors::{
    Dtype as FileDtype, SafeTensors,
    tensor::{TensorView, serialize},
};
use std::{collections::HashMap, path::Path};

/// The tensors that a file may hold.
pub const TENSORS: &[&str] = &[
    "q",
    "k",
    "v",
    "query_start_loc",
    "seq_lens",
    "sinks",
    "alibi_slopes",
    "k_scales",
    "v_scales",
    "prefix_spans",
    "causal_per_request",
    "topk_indices",
    "kv_b_proj",
];

/// The metadata keys that a file may hold. All values are text.
pub const METADATA_KEYS: &[&str] = &[
    "scale",
    "causal",
    "sliding_window",
    "window_right",
    "chunked_local",
    "softcap",
    "attn_type",
    "block_size",
    "layout",
    "kv_cache_dtype",
    "k_scale",
    "v_scale",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "mla_form",
    "lse",
    "seed",
];

struct Reader<'a> {
    tensors: SafeTensors<'a>,
    metadata: HashMap<String, String>,
}

/// A tensor as found: shape, element type and bytes.
struct Found<'a> {
    shape: Vec<usize>,
    dtype: FileDtype,
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8]) -> Result<Self, CaseError> {
        let broken = |error: safetensors::SafeTensorError| CaseError::NotSafetensors(error.to_string());
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(broken)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let tensors = SafeTensors::deserialize(bytes).map_err(broken)?;
        let mut keys: Vec<&String> = metadata.keys().collect();
        keys.sort();
        if let Some(found) = keys.into_iter().find(|key| !METADATA_KEYS.contains(&key.as_str())) {
            return Err(CaseError::UnknownKey { found: found.clone(), valid: METADATA_KEYS });
        }
        let mut names = tensors.names();
        names.sort_unstable();
        if let Some(found) = names.into_iter().find(|name| !TENSORS.contains(name)) {
            return Err(CaseError::UnknownTensor { found: found.to_owned(), valid: TENSORS });
        }
        Ok(Self { tensors, metadata })
    }

    fn optional(&self, name: &str) -> Option<Found<'a>> {
        let tensor = self.tensors.tensor(name).ok()?;
        Some(Found { shape: tensor.shape().to_vec(), dtype: tensor.dtype(), bytes: tensor.data() })
    }

    fn required(&self, name: &'static str) -> Result<Found<'a>, CaseError> {
        self.optional(name).ok_or(CaseError::MissingTensor { name })
    }

    /// A metadata value; absent and empty are the same.
    fn text(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    fn number<T: std::str::FromStr>(&self, key: &str, expected: &str) -> Result<Option<T>, CaseError> {
        let Some(text) = self.text(key) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| CaseError::metadata(key, text, expected))
    }

    fn integer(&self, key: &str, default: i64) -> Result<i64, CaseError> {
        Ok(self.number(key, "a whole number")?.unwrap_or(default))
    }

    fn size(&self, key: &str) -> Result<usize, CaseError> {
        let size: usize = self.number(key, "a whole number, 0 or more")?.unwrap_or(0);
        if size > super::MAX_SIZE {
            return Err(CaseError::metadata(key, &size.to_string(), format!("at most {}", super::MAX_SIZE)));
        }
        Ok(size)
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, CaseError> {
        match self.text(key).map(str::to_ascii_lowercase).as_deref() {
            None => Ok(default),
            Some("true" | "1") => Ok(true),
            Some("false" | "0") => Ok(false),
            Some(other) => Err(CaseError::metadata(key, other, "true or false")),
        }
    }

    /// Scales: one number in the metadata, or a tensor.
    fn scales(&self, key: &str, tensor: &str) -> Result<Vec<f32>, CaseError> {
        let from_tensor = self.numbers(tensor)?;
        match (self.number::<f32>(key, "a number")?, from_tensor.is_empty()) {
            (Some(_), false) => Err(CaseError::lengths(format!("both {key} and {tensor} are given; give one"))),
            (Some(scale), true) => Ok(vec![scale]),
            (None, _) => Ok(from_tensor),
        }
    }

    /// A list of floats of any compute dtype, as f32; absent = empty.
    fn numbers(&self, name: &str) -> Result<Vec<f32>, CaseError> {
        let Some(found) = self.optional(name) else { return Ok(Vec::new()) };
        found.expect_dims(name, 1, "one dimension")?;
        Ok(found.values(name)?.to_f64().into_iter().map(|number| number as f32).collect())
    }
}

impl Found<'_> {
    fn expect_dims(&self, name: &str, dims: usize, expected: &str) -> Result<(), CaseError> {
        if self.shape.len() == dims {
            return Ok(());
        }
        Err(CaseError::Shape { tensor: name.to_owned(), found: self.shape.clone(), expected: expected.to_owned() })
    }

    fn values(&self, name: &str) -> Result<Values, CaseError> {
        let dtype = match self.dtype {
            FileDtype::F32 => Dtype::F32,
            FileDtype::F16 => Dtype::F16,
            FileDtype::BF16 => Dtype::BF16,
            other => return Err(wrong_dtype(name, other, "F32, F16 or BF16")),
        };
        Ok(Values::from_le_bytes(dtype, self.bytes))
    }

    fn integers(&self, name: &str) -> Result<Vec<i32>, CaseError> {
        if self.dtype != FileDtype::I32 {
            return Err(wrong_dtype(name, self.dtype, "I32"));
        }
        Ok(self.bytes.chunks_exact(4).map(|c| i32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
    }
}

fn wrong_dtype(name: &str, found: FileDtype, expected: &str) -> CaseError {
    CaseError::Dtype { tensor: name.to_owned(), found: format!("{found:?}"), expected: expected.to_owned() }
}

/// The layout of a name; the names of other systems are taken too.
fn layout(text: &str) -> String {
    match text.to_ascii_lowercase().replace('-', "_").as_str() {
        "hnd" | LAYOUT_HEAD_MAJOR => LAYOUT_HEAD_MAJOR.to_owned(),
        "nhd" | LAYOUT_TOKEN_MAJOR => LAYOUT_TOKEN_MAJOR.to_owned(),
        other => other.to_owned(),
    }
}

impl Case {
    /// Reads a file's contents.
    ///
    /// # Errors
    /// For anything that is not a case; names the key or tensor, what was found, what is valid.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CaseError> {
        let reader = Reader::new(bytes)?;
        let q = reader.required("q")?;
        q.expect_dims("q", 3, "[tokens, heads, head size]")?;
        let mla = reader.mla()?;
        let k = reader.required("k")?;
        let (num_kv_heads, head_size) = match (k.shape.as_slice(), &mla) {
            ([_, heads, size], _) => (*heads, *size),
            ([_, size], Some(_)) => (1, *size),
            _ => {
                let expected = if mla.is_some() { "[tokens, row size]" } else { "[tokens, KV heads, head size]" };
                return Err(CaseError::Shape { tensor: "k".to_owned(), found: k.shape, expected: expected.to_owned() });
            }
        };
        let v = reader.optional("v");
        let head_size_v = match (&v, &mla) {
            (Some(_), Some(_)) => {
                return Err(CaseError::lengths(
                    "v is given together with kv_lora_rank: an MLA case has no v, its rows hold the values",
                ));
            }
            (None, Some(mla)) => mla.kv_lora_rank,
            (Some(v), None) => {
                v.expect_dims("v", 3, "[tokens, KV heads, value head size]")?;
                if v.shape[..2] != k.shape[..2] {
                    return Err(CaseError::Shape {
                        tensor: "v".to_owned(),
                        found: v.shape.clone(),
                        expected: format!("[{}, {}, any], as k", k.shape[0], k.shape[1]),
                    });
                }
                v.shape[2]
            }
            (None, None) => return Err(CaseError::MissingTensor { name: "v" }),
        };
        let lists = |name: &'static str| -> Result<Vec<i32>, CaseError> {
            let found = reader.required(name)?;
            found.expect_dims(name, 1, "one dimension")?;
            found.integers(name)
        };
        let scale = reader.number("scale", "a number")?;
        let scale = match (scale, &mla) {
            (Some(scale), _) => scale,
            (None, None) => (head_size.max(1) as f64).powf(-0.5),
            // It comes from the head that is not absorbed, which the rows do not show.
            (None, Some(_)) => return Err(CaseError::metadata("scale", "", "a number: an MLA case must state it")),
        };
        let attn_type = AttentionType::parse(reader.text("attn_type").unwrap_or_default());
        let case = Self {
            num_heads: q.shape[1],
            num_kv_heads,
            head_size,
            head_size_v,
            query_start_loc: lists("query_start_loc")?,
            seq_lens: lists("seq_lens")?,
            scale,
            causal: reader.flag("causal", attn_type == AttentionType::Decoder)?,
            causal_per_request: reader.flags("causal_per_request")?,
            sliding_window: reader.integer("sliding_window", 0)?,
            window_right: reader.integer("window_right", -1)?,
            chunked_local: reader.integer("chunked_local", 0)?,
            softcap: reader.number("softcap", "a number")?.unwrap_or(0.0),
            sinks: reader.numbers("sinks")?,
            alibi_slopes: reader.numbers("alibi_slopes")?,
            k_scales: reader.scales("k_scale", "k_scales")?,
            v_scales: reader.scales("v_scale", "v_scales")?,
            prefix_spans: reader.prefix_spans()?,
            topk: reader.topk()?,
            attn_type,
            block_size: reader.number("block_size", "a whole number above 0")?,
            layout: reader.text("layout").map(layout).filter(|name| name != "auto"),
            kv_cache_dtype: match reader.text("kv_cache_dtype") {
                None => None,
                Some(name) => Some(
                    KvCacheDtype::parse(name)
                        .map_err(|error| CaseError::metadata("kv_cache_dtype", name, error.to_string()))?,
                ),
            },
            mla,
            lse: reader.flag("lse", true)?,
            seed: reader.number("seed", "a whole number, 0 or more")?.unwrap_or(0),
            q: q.values("q")?,
            k: k.values("k")?,
            v: v.map(|v| v.values("v")).transpose()?,
        };
        if let AttentionType::Other(name) = &case.attn_type {
            return Err(CaseError::metadata("attn_type", name, "decoder, encoder, encoder_only or encoder_decoder"));
        }
        case.check()?;
        Ok(case)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// As [`Case::from_bytes`], and when the file cannot be read.
    pub fn load(path: &Path) -> Result<Self, CaseError> {
        let bytes = std::fs::read(path).map_err(|source| CaseError::Io { path: path.to_owned(), source })?;
        Self::from_bytes(&bytes)
    }

    /// The file's contents.
    ///
    /// # Errors
    /// When the case contradicts itself.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CaseError> {
        self.check()?;
        let mut tensors: Vec<(&str, Owned)> = Vec::new();
        let (tokens, rows) = (self.num_tokens(), self.num_kv_tokens());
        tensors.push(("q", Owned::values(&self.q, vec![tokens, self.num_heads, self.q_head_size()])));
        let k_shape =
            if self.mla.is_some() { vec![rows, self.head_size] } else { vec![rows, self.num_kv_heads, self.head_size] };
        tensors.push(("k", Owned::values(&self.k, k_shape)));
        if let Some(v) = &self.v {
            tensors.push(("v", Owned::values(v, vec![rows, self.num_kv_heads, self.head_size_v])));
        }
        let integers = |values: &[i32], shape: Vec<usize>| {
            Owned(FileDtype::I32, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
        };
        tensors.push(("query_start_loc", integers(&self.query_start_loc, vec![self.query_start_loc.len()])));
        tensors.push(("seq_lens", integers(&self.seq_lens, vec![self.seq_lens.len()])));
        let lists = [
            ("sinks", &self.sinks),
            ("alibi_slopes", &self.alibi_slopes),
            ("k_scales", &self.k_scales),
            ("v_scales", &self.v_scales),
        ];
        for (name, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            tensors.push((name, Owned::values(&Values::F32(list.clone()), vec![list.len()])));
        }
        if !self.prefix_spans.is_empty() {
            tensors
                .push(("prefix_spans", integers(self.prefix_spans.as_flattened(), vec![self.prefix_spans.len(), 3])));
        }
        if let Some(flags) = &self.causal_per_request {
            let bytes = flags.iter().map(|flag| u8::from(*flag)).collect();
            tensors.push(("causal_per_request", Owned(FileDtype::U8, vec![flags.len()], bytes)));
        }
        if let Some(topk) = &self.topk {
            tensors.push(("topk_indices", integers(&topk.indices, vec![tokens, topk.width])));
        }
        if let Some((mla, projection)) = self.mla.as_ref().and_then(|mla| Some((mla, mla.kv_b_proj.as_ref()?))) {
            let rows = self.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim);
            tensors.push(("kv_b_proj", Owned::values(projection, vec![rows, mla.kv_lora_rank])));
        }
        to_file(&tensors, self.metadata())
    }

    /// Writes a file.
    ///
    /// # Errors
    /// As [`Case::to_bytes`], and when the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), CaseError> {
        std::fs::write(path, self.to_bytes()?).map_err(|source| CaseError::Io { path: path.to_owned(), source })
    }

    fn metadata(&self) -> HashMap<String, String> {
        let mut metadata = HashMap::new();
        let mut add = |key: &str, value: String| metadata.insert(key.to_owned(), value);
        add("scale", self.scale.to_string());
        add("causal", self.causal.to_string());
        add("sliding_window", self.sliding_window.to_string());
        add("window_right", self.window_right.to_string());
        add("chunked_local", self.chunked_local.to_string());
        add("softcap", self.softcap.to_string());
        add("attn_type", self.attn_type.name().to_owned());
        add("lse", self.lse.to_string());
        add("seed", self.seed.to_string());
        if let Some(size) = self.block_size {
            add("block_size", size.to_string());
        }
        if let Some(layout) = &self.layout {
            add("layout", layout.clone());
        }
        if let Some(dtype) = self.kv_cache_dtype {
            add("kv_cache_dtype", dtype.name().to_owned());
        }
        if let Some(mla) = &self.mla {
            add("kv_lora_rank", mla.kv_lora_rank.to_string());
            add("qk_rope_head_dim", mla.qk_rope_head_dim.to_string());
            add("qk_nope_head_dim", mla.qk_nope_head_dim.to_string());
            add("v_head_dim", mla.v_head_dim.to_string());
            add("mla_form", mla.form.name().to_owned());
        }
        metadata
    }
}

/// Writes what a backend made of a case: the tensors `out` `[tokens, num_heads, head size]` in the
/// compute dtype and, where it was asked for, `lse` `[num_heads, tokens]` in f32; `layout` and
/// `block_size` of the cache as metadata.
///
/// # Errors
/// When the file cannot be written.
pub fn write_output(path: &Path, output: &Output) -> Result<(), CaseError> {
    let tokens = output.num_tokens();
    let mut tensors = vec![("out", Owned::values(&output.out, vec![tokens, output.num_heads, output.head_size]))];
    if let Some(lse) = &output.lse {
        tensors.push(("lse", Owned::values(&Values::F32(lse.clone()), vec![output.num_heads, tokens])));
    }
    let metadata = [("layout", output.layout.clone()), ("block_size", output.block_size.to_string())];
    let bytes = to_file(&tensors, metadata.map(|(key, value)| (key.to_owned(), value)).into())?;
    std::fs::write(path, bytes).map_err(|source| CaseError::Io { path: path.to_owned(), source })
}

fn to_file(tensors: &[(&str, Owned)], metadata: HashMap<String, String>) -> Result<Vec<u8>, CaseError> {
    let broken = |error: safetensors::SafeTensorError| CaseError::NotSafetensors(error.to_string());
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, Owned(dtype, shape, bytes))| Ok((*name, TensorView::new(*dtype, shape.clone(), bytes)?)))
        .collect::<Result<_, _>>()
        .map_err(broken)?;
    serialize(views, Some(metadata)).map_err(broken)
}

/// A tensor to write.
struct Owned(FileDtype, Vec<usize>, Vec<u8>);

impl Owned {
    fn values(values: &Values, shape: Vec<usize>) -> Self {
        Self(file_dtype(values.dtype()), shape, values.to_le_bytes())
    }
}

fn file_dtype(dtype: Dtype) -> FileDtype {
    match dtype {
        Dtype::F32 => FileDtype::F32,
        Dtype::F16 => FileDtype::F16,
        Dtype::BF16 => FileDtype::BF16,
    }
}

impl Reader<'_> {
    fn mla(&self) -> Result<Option<Mla>, CaseError> {
        if self.text("kv_lora_rank").is_none() {
            let stray = ["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mla_form"]
                .into_iter()
                .find(|key| self.text(key).is_some());
            return match stray {
                Some(key) => Err(CaseError::lengths(format!("{key} is given without kv_lora_rank: it is for MLA"))),
                None => Ok(None),
            };
        }
        let form = match self.text("mla_form") {
            None => MlaForm::Absorbed,
            Some(name) => MlaForm::ALL
                .into_iter()
                .find(|form| form.name() == name)
                .ok_or_else(|| CaseError::metadata("mla_form", name, "absorbed, expanded or auto"))?,
        };
        let kv_b_proj = match self.optional("kv_b_proj") {
            None => None,
            Some(found) => {
                found.expect_dims("kv_b_proj", 2, "[heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]")?;
                Some(found.values("kv_b_proj")?)
            }
        };
        Ok(Some(Mla {
            kv_lora_rank: self.size("kv_lora_rank")?,
            qk_rope_head_dim: self.size("qk_rope_head_dim")?,
            qk_nope_head_dim: self.size("qk_nope_head_dim")?,
            v_head_dim: self.size("v_head_dim")?,
            kv_b_proj,
            form,
        }))
    }

    fn flags(&self, name: &str) -> Result<Option<Vec<bool>>, CaseError> {
        let Some(found) = self.optional(name) else { return Ok(None) };
        found.expect_dims(name, 1, "one dimension")?;
        if !matches!(found.dtype, FileDtype::U8 | FileDtype::BOOL) {
            return Err(wrong_dtype(name, found.dtype, "U8 or BOOL"));
        }
        Ok(Some(found.bytes.iter().map(|byte| *byte != 0).collect()))
    }

    fn prefix_spans(&self) -> Result<Vec<[i32; 3]>, CaseError> {
        let name = "prefix_spans";
        let Some(found) = self.optional(name) else { return Ok(Vec::new()) };
        if found.shape.len() != 2 || found.shape[1] != 3 {
            return Err(CaseError::Shape {
                tensor: name.to_owned(),
                found: found.shape,
                expected: "[spans, 3]: request, first position, one past the last".to_owned(),
            });
        }
        Ok(found.integers(name)?.chunks_exact(3).map(|row| [row[0], row[1], row[2]]).collect())
    }

    fn topk(&self) -> Result<Option<TopK>, CaseError> {
        let name = "topk_indices";
        let Some(found) = self.optional(name) else { return Ok(None) };
        found.expect_dims(name, 2, "[tokens, entries]")?;
        Ok(Some(TopK { width: found.shape[1], indices: found.integers(name)? }))
    }
}
