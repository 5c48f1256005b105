//! A backend that is the reference itself behind the ABI, and wrong ones made from it.

use attache_conformance::stored::Storage;
use attache_core::{
    descriptor::{Support, feature},
    plugin::{PluginMetadata, linked_plugins},
    runtime::{self, interface::backend_interface},
};
use attache_reference::{
    AttentionFeatures, AttentionInputs, AttentionOutput, ReferenceError, Span, attention,
    mla::{MlaDims, MlaInputs, TopK, decode_absorbed, prefill_expanded},
    quantised_cache::CacheShape,
};
use attache_sdk::prelude::*;
use std::sync::Arc;

/// Does everything right, unless its option `fault` says otherwise.
struct Reference {
    fault: Fault,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    None,
    IgnoresSoftcap,
    WindowIsOneLarger,
    ReadsBeyondTheEnd,
    DependsOnTheBatch,
    LseInBaseTwo,
    SinkIsNotInTheLse,
    WritesBeforeItChecks,
    AcceptsAnything,
    IgnoresStrides,
    ChangesEveryTime,
    PanicsOnEmptyBatches,
}

impl Fault {
    pub const ALL: [Self; 12] = [
        Self::None,
        Self::IgnoresSoftcap,
        Self::WindowIsOneLarger,
        Self::ReadsBeyondTheEnd,
        Self::DependsOnTheBatch,
        Self::LseInBaseTwo,
        Self::SinkIsNotInTheLse,
        Self::WritesBeforeItChecks,
        Self::AcceptsAnything,
        Self::IgnoresStrides,
        Self::ChangesEveryTime,
        Self::PanicsOnEmptyBatches,
    ];
}

/// What a layer keeps of its configuration.
struct ReferenceLayer {
    fault: Fault,
    config: LayerConfig<'static>,
    mla: Option<(MlaDims, Vec<f64>)>,
    storage: Storage,
    is_cross: bool,
    has_cache: bool,
}

struct Request {
    queries: std::ops::Range<usize>,
    keys: usize,
    /// Row of the first key in dense keys.
    first_key: usize,
    blocks: Vec<i32>,
    causal: bool,
    spans: Vec<Span>,
}

struct ReferencePlan {
    block_size: usize,
    requests: Vec<Request>,
}

impl ReferencePlan {
    fn new(batch: &BatchView<'_>, block_size: usize) -> Result<Self> {
        let batch = batch.on_host(block_size)?;
        let mut first_key = 0;
        let requests = (0..batch.num_requests())
            .map(|request| {
                let keys = batch.cached_len(request);
                first_key += keys;
                let start = batch.query_start(request);
                let spans = batch.prefix_spans.iter().filter(|span| span.request == request);
                Request {
                    queries: start..start + batch.query_len(request),
                    keys,
                    first_key: first_key - keys,
                    blocks: if batch.has_block_table { batch.blocks(request).to_vec() } else { Vec::new() },
                    causal: batch.is_causal(request),
                    spans: spans.map(|span| Span { start: span.start as i64, end: span.end as i64 }).collect(),
                }
            })
            .collect();
        Ok(Self { block_size, requests })
    }
}

impl Plan for ReferencePlan {
    fn update(&mut self, batch: &BatchView<'_>) -> Result<()> {
        *self = Self::new(batch, self.block_size)?;
        Ok(())
    }
}

fn invalid(error: ReferenceError) -> BackendError {
    BackendError::invalid(error.to_string())
}

/// A tensor's numbers, row-major.
fn numbers(view: &TensorView<'_>) -> Result<Vec<f64>> {
    let all: Vec<f64> = match view.dtype() {
        DataType::F32 => view.span::<f32>()?.iter().map(|x| f64::from(*x)).collect(),
        DataType::F16 => view.span::<half::f16>()?.iter().map(|x| x.to_f64()).collect(),
        DataType::BF16 => view.span::<half::bf16>()?.iter().map(|x| x.to_f64()).collect(),
        other => return Err(BackendError::unsupported(format!("{other}"))),
    };
    Ok(places(view.shape(), view.strides()).map(|place| all[place]).collect())
}

fn places(shape: &[i64], strides: &[i64]) -> impl Iterator<Item = usize> {
    let (shape, strides) = (shape.to_vec(), strides.to_vec());
    (0..shape.iter().product::<i64>()).map(move |mut index| {
        let mut place = 0;
        for (size, stride) in shape.iter().zip(&strides).rev() {
            place += index % size * stride;
            index /= size;
        }
        place as usize
    })
}

fn write(view: &mut TensorViewMut<'_>, numbers: &[f64]) -> Result<()> {
    let shared = view.as_view();
    let places: Vec<usize> = places(shared.shape(), shared.strides()).collect();
    match shared.dtype() {
        DataType::F32 => {
            let span = view.span_mut::<f32>()?;
            places.iter().zip(numbers).for_each(|(place, x)| span[*place] = *x as f32);
        }
        DataType::F16 => {
            let span = view.span_mut::<half::f16>()?;
            places.iter().zip(numbers).for_each(|(place, x)| span[*place] = half::f16::from_f64(*x));
        }
        DataType::BF16 => {
            let span = view.span_mut::<half::bf16>()?;
            places.iter().zip(numbers).for_each(|(place, x)| span[*place] = half::bf16::from_f64(*x));
        }
        other => return Err(BackendError::unsupported(format!("{other}"))),
    }
    Ok(())
}

fn expect(view: &TensorView<'_>, name: &str, dtype: DataType, shape: &[usize]) -> Result<()> {
    if view.dtype() != dtype {
        return Err(BackendError::invalid(format!("{name} is {}, not {dtype}", view.dtype())));
    }
    let shape: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
    view.expect_shape(name, &shape)
}

impl Backend for Reference {
    fn descriptor() -> BackendDescriptor {
        BackendDescriptor::builder("REFERENCE")
            .platform("cpu")
            .architectures(["*"])
            .head_sizes([1..=640])
            .head_sizes_v([1..=512])
            .gqa_ratios([1..=8])
            .dtypes(Dtype::ALL)
            .kv_cache_dtypes(["auto", "float32", "bfloat16", "fp8_e4m3", "int8_per_token_head"])
            .block_sizes(attache_core::BlockSizes::multiples_of(1))
            .layouts([LAYOUT_HEAD_MAJOR, LAYOUT_TOKEN_MAJOR, LAYOUT_LATENT])
            .attn_types(["decoder", "encoder", "encoder_only", "encoder_decoder"].map(AttentionType::parse))
            .mla(Support::Both)
            .sparse(Support::Both)
            .features([
                feature::SINK,
                feature::SLIDING_WINDOW,
                feature::SOFTCAP,
                feature::ALIBI,
                feature::LSE,
                feature::MM_PREFIX,
                feature::PER_HEAD_QUANT_SCALES,
                feature::NON_CAUSAL,
                feature::BATCH_INVARIANCE,
                feature::CHUNKED_LOCAL,
            ])
            .build()
    }
    fn create(_host: HostServices, options: &Options) -> Result<Self> {
        let name = options.get("fault").unwrap_or("None");
        let fault = Fault::ALL.into_iter().find(|fault| format!("{fault:?}") == name);
        Ok(Self { fault: fault.ok_or_else(|| BackendError::invalid(name))? })
    }
    fn probe(&self) -> Result<Vec<Device>> {
        Ok(vec![Device::host_cpu()])
    }
    fn validate(&self, _request: &LayerRequest, _device: &Device) -> Result<Vec<String>> {
        Ok(Vec::new())
    }
    fn kv_cache_spec(&self, config: &LayerConfig<'_>) -> Result<KvCacheSpec> {
        let (heads, block) = (i64::from(config.num_kv_heads), i64::from(config.block_size));
        let tensor = |role, size: u32| {
            let size = i64::from(size);
            let shape = match config.layout.as_str() {
                LAYOUT_HEAD_MAJOR => vec![-1, heads, block, size],
                _ => vec![-1, block, heads, size],
            };
            CacheTensorSpec {
                role,
                dtype: DataType::F32,
                shape,
                alignment: 64,
                bytes_per_block: (4 * heads * block * size) as u64,
            }
        };
        let mut tensors = vec![tensor(TensorRole::K, config.head_size)];
        if config.mla.is_none() {
            tensors.push(tensor(TensorRole::V, config.head_size_v));
        }
        Ok(KvCacheSpec { tensors })
    }
    fn create_layer(&self, config: &LayerConfig<'_>) -> Result<Box<dyn Layer>> {
        let capability = Self::descriptor().capability;
        let storage = Storage::of(Some(config.kv_cache_dtype), config.dtype);
        let request = &config.request;
        let refused = !capability.attn_types.contains(&config.attn_type)
            || !capability.layouts.contains(&config.layout)
            || !(1..=640).contains(&config.head_size)
            || !(1..=512).contains(&config.head_size_v)
            || config.num_heads / config.num_kv_heads > 8
            || !capability.kv_cache_dtypes.iter().any(|name| name == config.kv_cache_dtype.name())
            || request.use_rswa
            || request.use_dcp
            || request.use_pcp;
        if refused && self.fault != Fault::AcceptsAnything {
            return Err(BackendError::unsupported("not claimed"));
        }
        let mla = match &config.mla {
            None => None,
            Some(mla) => {
                let dims = MlaDims {
                    num_heads: config.num_heads as usize,
                    kv_lora_rank: mla.kv_lora_rank as usize,
                    qk_rope_head_dim: mla.qk_rope_head_dim as usize,
                    qk_nope_head_dim: mla.qk_nope_head_dim as usize,
                    v_head_dim: mla.v_head_dim as usize,
                };
                Some((dims, mla.kv_b_proj.as_ref().map(numbers).transpose()?.unwrap_or_default()))
            }
        };
        Ok(Box::new(ReferenceLayer {
            fault: self.fault,
            mla,
            storage: storage.unwrap_or(Storage::Plain(attache_reference::Format::F32)),
            is_cross: config.attn_type == AttentionType::EncoderDecoder,
            has_cache: !matches!(config.attn_type, AttentionType::Encoder | AttentionType::EncoderOnly),
            config: LayerConfig {
                request: config.request.clone(),
                name: config.name.clone(),
                layout: config.layout.clone(),
                attn_type: config.attn_type.clone(),
                sinks: config.sinks.clone(),
                alibi_slopes: config.alibi_slopes.clone(),
                k_scales: config.k_scales.clone(),
                v_scales: config.v_scales.clone(),
                options: Vec::new(),
                mla: None,
                ..*config
            },
        }))
    }
}

/// Which rows a call gives: absorbed, expanded, or one of a layer that is not MLA.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Plain,
    Absorbed,
    Expanded,
}

impl ReferenceLayer {
    /// Where element 0 of a head of a token lies.
    fn place(&self, slot: usize, head: usize, size: usize) -> usize {
        let (heads, block) = (self.config.num_kv_heads as usize, self.config.block_size as usize);
        let (id, offset) = (slot / block, slot % block);
        match self.config.layout.as_str() {
            LAYOUT_HEAD_MAJOR => ((id * heads + head) * block + offset) * size,
            _ => (slot * heads + head) * size,
        }
    }

    /// Keys or values of a request, `[keys, num_kv_heads, size]`.
    fn gather(&self, plan: &ReferencePlan, request: &Request, tensor: &[f32], size: usize, keys: usize) -> Vec<f64> {
        let mut rows = Vec::with_capacity(keys * size);
        for position in 0..keys {
            let slot =
                request.blocks[position / plan.block_size] as usize * plan.block_size + position % plan.block_size;
            for head in 0..self.config.num_kv_heads as usize {
                let place = self.place(slot, head, size);
                rows.extend(tensor[place..place + size].iter().map(|number| f64::from(*number)));
            }
        }
        rows
    }

    fn attend(
        &self,
        args: &ForwardArgs<'_>,
        plan: &ReferencePlan,
        request: &Request,
        q: &[f64],
        form: Form,
    ) -> Result<AttentionOutput> {
        let config = &self.config;
        let (size, size_v) = (config.head_size as usize, config.head_size_v as usize);
        let heads = config.num_kv_heads as usize;
        let widen = |list: &[f32]| list.iter().map(|number| f64::from(*number)).collect::<Vec<f64>>();
        let (sinks, slopes) = (widen(&config.sinks), widen(&config.alibi_slopes));
        let window =
            config.sliding_window + i64::from(self.fault == Fault::WindowIsOneLarger && config.sliding_window > 0);
        let one_sided = config.window_right >= 0;
        let features = AttentionFeatures {
            causal: request.causal && !self.is_cross,
            sliding_window: if one_sided { 0 } else { window },
            window_left: (one_sided && window > 0).then(|| window as u64 - 1),
            window_right: one_sided.then_some(config.window_right as u64),
            chunked_local: config.chunked_local,
            softcap: if self.fault == Fault::IgnoresSoftcap { 0.0 } else { config.softcap },
            alibi_slopes: (!slopes.is_empty()).then_some(&slopes),
            sinks: (!sinks.is_empty()).then_some(&sinks),
            prefix_spans: &request.spans,
        };
        // A kernel that multiplies what lies behind the last token by zero.
        let padded = match self.fault {
            Fault::ReadsBeyondTheEnd => request.keys.next_multiple_of(plan.block_size),
            _ => request.keys,
        };
        let read = |role, size| -> Result<Vec<f64>> {
            Ok(self.gather(plan, request, args.cache.get(role)?.span::<f32>()?, size, padded))
        };
        let (mut k, mut v) = match (&args.k, &args.v, self.has_cache) {
            (Some(k), Some(v), false) => {
                let rows = |row: usize| request.first_key * row..(request.first_key + request.keys) * row;
                (numbers(k)?[rows(heads * size)].to_vec(), numbers(v)?[rows(heads * size_v)].to_vec())
            }
            (_, _, false) => return Err(BackendError::invalid("k and v are missing")),
            _ if form == Form::Plain => (read(TensorRole::K, size)?, read(TensorRole::V, size_v)?),
            _ => (read(TensorRole::K, size)?, Vec::new()),
        };
        let poison = k.iter().skip(request.keys * heads * size).map(|number| 0.0 * number).sum::<f64>();
        k.truncate(request.keys * heads * size);
        v.truncate(request.keys * heads * size_v);
        let (q_len, seq_len) = (request.queries.len(), request.keys);
        let topk = match &args.topk_indices {
            Some(view) => {
                let width = view.dim(1);
                let indices = view.as_slice::<i32>()?;
                Some(TopK { indices: &indices[request.queries.start * width..request.queries.end * width], width })
            }
            None => None,
        };
        let mut output = match (&self.mla, form) {
            (Some((dims, projection)), _) => {
                let inputs =
                    MlaInputs { q, latent: &k, q_len, seq_len, dims: *dims, scale: config.scale, features, topk };
                match form {
                    Form::Absorbed => decode_absorbed(&inputs).map_err(invalid)?,
                    _ => prefill_expanded(&inputs, projection).map_err(invalid)?,
                }
            }
            (None, _) => attention(&AttentionInputs {
                q,
                k: &k,
                v: &v,
                q_len,
                seq_len,
                num_heads: config.num_heads as usize,
                num_kv_heads: heads,
                head_size: size,
                head_size_v: size_v,
                scale: config.scale,
                features,
            })
            .map_err(invalid)?,
        };
        let factor = match self.fault {
            Fault::DependsOnTheBatch => 1.0 + 1e-6 * plan.requests.len() as f64,
            Fault::ChangesEveryTime => {
                static CALLS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
                let calls = CALLS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                1.0 + 1e-6 * (calls % 7) as f64
            }
            _ => 1.0,
        };
        output.out.iter_mut().for_each(|number| *number = *number * factor + poison);
        for (index, lse) in output.lse.iter_mut().enumerate() {
            match self.fault {
                Fault::LseInBaseTwo => *lse /= std::f64::consts::LN_2,
                Fault::SinkIsNotInTheLse if !sinks.is_empty() => {
                    *lse = (lse.exp() - sinks[index / q_len].exp()).max(0.0).ln();
                }
                _ => {}
            }
        }
        Ok(output)
    }

    fn run(&self, mut args: ForwardArgs<'_>, form: Form) -> Result<()> {
        let plan = args.plan::<ReferencePlan>()?;
        if self.fault == Fault::PanicsOnEmptyBatches {
            assert!(!plan.requests.is_empty(), "no requests");
        }
        let tokens = plan.requests.last().map_or(0, |request| request.queries.end);
        let heads = self.config.num_heads as usize;
        let (q_size, out_size) = match (&self.mla, form) {
            (Some((dims, projection)), Form::Expanded) if !projection.is_empty() => {
                (dims.qk_head_dim(), dims.v_head_dim)
            }
            (Some((dims, _)), Form::Absorbed) => (dims.latent_size(), dims.kv_lora_rank),
            (None, Form::Plain) => (self.config.head_size as usize, self.config.head_size_v as usize),
            _ => return Err(BackendError::unsupported("this form")),
        };
        let dtype = self.config.dtype.data_type();
        expect(&args.q, "q", dtype, &[tokens, heads, q_size])?;
        expect(&args.out.as_view(), "out", dtype, &[tokens, heads, out_size])?;
        if let Some(lse) = &args.lse {
            expect(&lse.as_view(), "lse", DataType::F32, &[heads, tokens])?;
        }
        if self.has_cache {
            args.cache.get(TensorRole::K)?;
        }
        let q = if self.fault == Fault::IgnoresStrides {
            let compact = [(heads * q_size) as i64, q_size as i64, 1];
            let all = numbers(&args.q)?;
            let span = args.q.span::<f32>().map(<[f32]>::to_vec);
            match span {
                Ok(span) => places(args.q.shape(), &compact).map(|place| f64::from(span[place])).collect(),
                Err(_) => all,
            }
        } else {
            numbers(&args.q)?
        };
        let (mut out, mut lse) = (vec![0.0; tokens * heads * out_size], vec![0.0; heads * tokens]);
        for request in &plan.requests {
            let rows = request.queries.clone();
            let row = heads * q_size;
            let one = self.attend(&args, plan, request, &q[rows.start * row..rows.end * row], form)?;
            let row = heads * out_size;
            out[rows.start * row..rows.end * row].copy_from_slice(&one.out);
            for head in 0..heads {
                let from = &one.lse[head * rows.len()..(head + 1) * rows.len()];
                lse[head * tokens + rows.start..head * tokens + rows.end].copy_from_slice(from);
            }
        }
        write(&mut args.out, &out)?;
        args.lse.as_mut().map_or(Ok(()), |view| write(view, &lse))
    }

    fn move_blocks(&self, source: &CacheView<'_>, target: &CacheViewMut<'_>, pairs: &TensorView<'_>) -> Result<()> {
        for role in target.roles().collect::<Vec<_>>() {
            let from = source.get(role)?;
            let rows: Vec<f32> = from.as_slice::<f32>()?.to_vec();
            copy(&rows, from.dim(0), &mut target.take(role)?, pairs)?;
        }
        Ok(())
    }
}

/// Copies blocks of `source`, which has `count` of them.
fn copy(source: &[f32], count: usize, target: &mut TensorViewMut<'_>, pairs: &TensorView<'_>) -> Result<()> {
    pairs.expect_shape("pairs", &[-1, 2])?;
    let ids = pairs.as_slice::<i64>()?;
    let target_count = target.as_view().dim(0);
    let valid = |id: i64, count: usize| usize::try_from(id).is_ok_and(|id| id < count);
    if !ids.chunks_exact(2).all(|pair| valid(pair[0], count) && valid(pair[1], target_count)) {
        return Err(BackendError::out_of_range("a block"));
    }
    let block = source.len() / count.max(1);
    let target = target.span_mut::<f32>()?;
    for pair in ids.chunks_exact(2) {
        let (from, to) = (pair[0] as usize * block, pair[1] as usize * block);
        target[to..to + block].copy_from_slice(&source[from..from + block]);
    }
    Ok(())
}

impl Layer for ReferenceLayer {
    fn workspace_size(&self, _limits: &BatchLimits) -> Result<usize> {
        Ok(0)
    }
    fn plan(&self, batch: &BatchView<'_>) -> Result<Box<dyn Plan>> {
        Ok(Box::new(ReferencePlan::new(batch, self.config.block_size as usize)?))
    }
    fn write_kv(
        &self,
        _context: &ExecContext<'_>,
        k: &TensorView<'_>,
        v: Option<&TensorView<'_>>,
        slot_mapping: &TensorView<'_>,
        cache: &CacheViewMut<'_>,
    ) -> Result<()> {
        let config = &self.config;
        let dtype = config.dtype.data_type();
        let slots = slot_mapping.as_slice::<i64>()?;
        let (tokens, heads) = (slots.len(), config.num_kv_heads as usize);
        let (size, size_v) = (config.head_size as usize, config.head_size_v as usize);
        let mut parts = Vec::new();
        match (&self.mla, v) {
            (Some(_), None) => {
                expect(k, "k", dtype, &[tokens, size])?;
                parts.push((TensorRole::K, numbers(k)?, size, &config.k_scales));
            }
            (None, Some(v)) => {
                expect(k, "k", dtype, &[tokens, heads, size])?;
                expect(v, "v", dtype, &[tokens, heads, size_v])?;
                parts.push((TensorRole::K, numbers(k)?, size, &config.k_scales));
                parts.push((TensorRole::V, numbers(v)?, size_v, &config.v_scales));
            }
            _ => return Err(BackendError::invalid("v")),
        }
        for (role, rows, size, scales) in parts {
            let mut target = cache.take(role)?;
            let all = target.as_view().num_elements() / (heads * size);
            let target = target.span_mut::<f32>()?;
            let bad = slots.iter().position(|slot| *slot < -1 || *slot >= all as i64);
            let writable = match (bad, self.fault) {
                (Some(bad), Fault::WritesBeforeItChecks) => bad,
                (Some(_), _) => return Err(BackendError::out_of_range("a slot")),
                (None, _) => tokens,
            };
            for (token, slot) in slots.iter().enumerate().take(writable).filter(|(_, slot)| **slot >= 0) {
                let row = &rows[token * heads * size..(token + 1) * heads * size];
                let shape = CacheShape { tokens: 1, num_kv_heads: heads, head_size: size };
                let row = self.storage.read_back(row, &shape, scales).map_err(invalid)?;
                for head in 0..heads {
                    let place = self.place(*slot as usize, head, size);
                    let numbers = row[head * size..(head + 1) * size].iter().map(|number| *number as f32);
                    target[place..place + size].iter_mut().zip(numbers).for_each(|(to, number)| *to = number);
                }
            }
            if bad.is_some() {
                return Err(BackendError::out_of_range("a slot"));
            }
        }
        Ok(())
    }
    fn forward(&self, _context: &ExecContext<'_>, args: ForwardArgs<'_>) -> Result<()> {
        self.run(args, if self.mla.is_some() { Form::Expanded } else { Form::Plain })
    }
    fn forward_prefill(&self, _context: &ExecContext<'_>, args: ForwardArgs<'_>) -> Result<()> {
        self.run(args, Form::Expanded)
    }
    fn forward_decode(&self, _context: &ExecContext<'_>, args: ForwardArgs<'_>) -> Result<()> {
        self.run(args, Form::Absorbed)
    }
    fn copy_blocks(&self, _: &ExecContext<'_>, cache: &CacheViewMut<'_>, pairs: &TensorView<'_>) -> Result<()> {
        for role in cache.roles().collect::<Vec<_>>() {
            let mut tensor = cache.take(role)?;
            let (rows, count) = (tensor.as_view().as_slice::<f32>()?.to_vec(), tensor.as_view().dim(0));
            copy(&rows, count, &mut tensor, pairs)?;
        }
        Ok(())
    }
    fn swap_blocks(
        &self,
        _: &ExecContext<'_>,
        source: &CacheView<'_>,
        target: &CacheViewMut<'_>,
        pairs: &TensorView<'_>,
    ) -> Result<()> {
        self.move_blocks(source, target, pairs)
    }
}

attache_sdk::export_backends! { name: "reference", vendor: "Attaché", backends: [Reference] }

/// The backend with a fault.
pub fn backend(fault: Fault) -> Arc<runtime::Backend> {
    let plugin = linked_plugins().next().expect("linked in");
    let table = backend_interface(plugin.interface).expect("the interface");
    let metadata: PluginMetadata = attache_core::private::serde_json::from_str(plugin.metadata).expect("metadata");
    let descriptor = runtime::descriptors(table).expect("descriptors").remove(0);
    let options = [("fault".to_owned(), format!("{fault:?}"))];
    runtime::Backend::create(table, 0, Arc::new(descriptor), metadata, "linked in".to_owned(), &options).expect("made")
}
