//! Attention through the ABI, on the engine's pool, over shuffled paged caches.

use crate::{Row, median};
use attache_core::{
    BatchLimits, BatchView, Dtype, LayerConfig, LayerRequest, MlaConfig, TensorView, TensorViewMut,
    error::Result,
    registry::Registry,
    runtime::{ExecContext, Forward, HostServices, KvCache},
};
use attache_engine::pool::Pool;
use half::bf16;

/// A case of heads-wise attention: query tokens and keys of each request.
struct Heads {
    name: &'static str,
    requests: Vec<(usize, usize)>,
    num_heads: usize,
    num_kv_heads: usize,
    head_size: usize,
    window: usize,
}

fn cases() -> Vec<Heads> {
    let case = |name, requests: &[(usize, usize)], (num_heads, num_kv_heads, head_size), window| Heads {
        name,
        requests: requests.to_vec(),
        num_heads,
        num_kv_heads,
        head_size,
        window,
    };
    let llama = (32, 8, 128);
    vec![
        case("prefill_2k_llama8b", &[(2048, 2048)], llama, 0),
        case("chunk_512x8k_llama8b", &[(512, 8192)], llama, 0),
        case("decode_b8_4k_llama8b", &[(1, 4096); 8], llama, 0),
        case("decode_b1_32k_llama8b", &[(1, 32768)], llama, 0),
        case("decode_b32_1k_llama8b", &[(1, 1024); 32], llama, 0),
        case("mixed_llama8b", &[(992, 2456), (1, 1234), (98, 1145), (1, 4162), (2345, 2345)], llama, 0),
        case("prefill_2k_gemma270m_w512", &[(2048, 2048)], (4, 1, 256), 512),
        case("decode_b8_4k_gptoss_w128", &[(1, 4096); 8], (64, 8, 64), 128),
        case("decode_b8_4k_mha", &[(1, 4096); 8], (32, 32, 128), 0),
    ]
}

/// Tokens of a block.
const BLOCK_SIZE: usize = 16;

/// Numbers that look random and are not, in −1 … 1.
fn noise(len: usize, seed: u32) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(97);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / (1_u32 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

/// Blocks of each request, scattered over the cache.
struct Paging {
    table: Vec<i32>,
    width: usize,
    num_blocks: usize,
    slots: Vec<i64>,
}

impl Paging {
    fn new(lens: &[usize]) -> Self {
        let used: Vec<usize> = lens.iter().map(|len| len.div_ceil(BLOCK_SIZE)).collect();
        let num_blocks: usize = used.iter().sum();
        let width = used.iter().copied().max().unwrap_or(0);
        // A step that shares no divisor with the number of blocks visits each block once.
        let step = (num_blocks * 5 / 8..).find(|step| gcd(*step, num_blocks) == 1).unwrap_or(1);
        let mut ids = (0..num_blocks).map(|index| index * step % num_blocks);
        let mut table = vec![-1; width * lens.len()];
        let mut slots = Vec::new();
        for (request, (len, blocks)) in lens.iter().zip(used).enumerate() {
            for block in 0..blocks {
                let id = ids.next().unwrap_or(0);
                table[request * width + block] = id as i32;
                let tokens = BLOCK_SIZE.min(len - block * BLOCK_SIZE);
                slots.extend((0..tokens).map(|token| (id * BLOCK_SIZE + token) as i64));
            }
        }
        Self { table, width, num_blocks, slots }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// One layer, ready to be called.
struct Setup<'a> {
    config: LayerConfig<'a>,
    requests: &'a [(usize, usize)],
    /// Elements of a query row and of an output row.
    sizes: (usize, usize),
    absorbed: bool,
}

impl Setup<'_> {
    /// Milliseconds of a call.
    fn time(&self, threads: usize, reps: usize) -> std::result::Result<f64, Box<dyn std::error::Error>> {
        let backend = Registry::builder().build().backend(&self.config.request, None)?.backend;
        let pool = Pool::new(threads);
        let layer = backend.create_layer(&self.config)?;
        let lens: Vec<usize> = self.requests.iter().map(|(_, keys)| *keys).collect();
        let paging = Paging::new(&lens);
        let mut cache = KvCache::allocate(&backend.kv_cache_spec(&self.config)?, paging.num_blocks)?;
        let mut context = ExecContext::new(HostServices::new(pool));
        let tokens: usize = self.requests.iter().map(|(tokens, _)| tokens).sum();
        let longest = |lens: &mut dyn Iterator<Item = usize>| lens.max().unwrap_or(0);
        context.reserve_workspace(layer.workspace_size(&BatchLimits {
            max_num_requests: self.requests.len(),
            max_num_tokens: tokens,
            max_query_len: longest(&mut self.requests.iter().map(|(tokens, _)| *tokens)),
            max_seq_len: longest(&mut lens.iter().copied()),
            parallelism: threads,
        })?);
        let keys = paging.slots.len();
        let slots = TensorView::from_slice(&paging.slots, &[keys])?;
        let (heads, size, size_v) =
            (self.config.num_kv_heads as usize, self.config.head_size as usize, self.config.head_size_v as usize);
        let k = noise(keys * heads * size, 1);
        let v = noise(keys * heads * size_v, 2);
        if self.config.mla.is_some() {
            layer.write_kv(&mut context, &TensorView::from_slice(&k, &[keys, size])?, None, &slots, &mut cache)?;
        } else {
            let k = TensorView::from_slice(&k, &[keys, heads, size])?;
            let v = TensorView::from_slice(&v, &[keys, heads, size_v])?;
            layer.write_kv(&mut context, &k, Some(&v), &slots, &mut cache)?;
        }
        let mut starts = vec![0_i32];
        starts.extend(self.requests.iter().scan(0, |sum, (tokens, _)| {
            *sum += *tokens as i32;
            Some(*sum)
        }));
        let lens: Vec<i32> = lens.iter().map(|len| *len as i32).collect();
        let table = Some((paging.table.as_slice(), paging.width));
        let batch = BatchView::from_host(&starts, &lens, table, paging.num_blocks)?;
        let num_heads = self.config.num_heads as usize;
        let q = noise(tokens * num_heads * self.sizes.0, 3);
        let mut out = vec![bf16::ZERO; tokens * num_heads * self.sizes.1];
        let mut call = || -> Result<()> {
            let plan = layer.plan(&batch)?;
            let forward = Forward {
                q: TensorView::from_slice(&q, &[tokens, num_heads, self.sizes.0])?,
                k: None,
                v: None,
                cache: Some(&cache),
                plan: &plan,
                out: TensorViewMut::from_slice(&mut out, &[tokens, num_heads, self.sizes.1])?,
                lse: None,
                topk_indices: None,
            };
            if self.absorbed {
                layer.forward_decode(&mut context, forward)
            } else {
                layer.forward(&mut context, forward)
            }
        };
        call()?;
        let time = median(reps, || call().expect("it worked before"));
        Ok(time.as_secs_f64() * 1e3)
    }
}

/// Pairs of query and key that see each other.
fn visible((tokens, keys): (usize, usize), window: usize) -> usize {
    (0..tokens)
        .map(|token| keys - tokens + token + 1)
        .map(|seen| if window == 0 { seen } else { seen.min(window) })
        .sum()
}

pub fn run(filter: &str, threads: usize, reps: usize, show: &mut dyn FnMut(Row)) {
    for case in cases().into_iter().filter(|case| case.name.contains(filter)) {
        let Heads { num_heads, num_kv_heads, head_size, window, .. } = case;
        let plain = LayerConfig::new(num_heads as u32, num_kv_heads as u32, head_size as u32, Dtype::BF16);
        let config = LayerConfig {
            request: LayerRequest { has_sliding_window: window > 0, ..plain.request.clone() },
            sliding_window: window as i64,
            block_size: BLOCK_SIZE as u32,
            ..plain
        };
        let setup = Setup { config, requests: &case.requests, sizes: (head_size, head_size), absorbed: false };
        let pairs: usize = case.requests.iter().map(|request| visible(*request, window)).sum();
        let read = |(tokens, keys): &(usize, usize)| if window == 0 { *keys } else { (*keys).min(window + tokens - 1) };
        let bytes = case.requests.iter().map(read).sum::<usize>() * num_kv_heads * head_size * 4;
        report(case.name, setup.time(threads, reps), pairs * num_heads * head_size * 4, bytes, show);
    }
    for (num_heads, batch, context) in [(16, 4, 4096), (128, 1, 4096)] {
        let name = format!("mla_decode_h{num_heads}_b{batch}_{context}");
        if !name.contains(filter) {
            continue;
        }
        let requests = vec![(1, context); batch];
        let plain = LayerConfig::new(num_heads, 1, 576, Dtype::BF16);
        let mla = MlaConfig {
            kv_lora_rank: 512,
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            v_head_dim: 128,
            kv_b_proj: None,
        };
        let config = LayerConfig {
            request: LayerRequest { use_mla: true, num_kv_heads: None, ..plain.request.clone() },
            head_size_v: 512,
            layout: "latent".to_owned(),
            block_size: BLOCK_SIZE as u32,
            mla: Some(mla),
            ..plain
        };
        let setup = Setup { config, requests: &requests, sizes: (576, 512), absorbed: true };
        let pairs = batch * context * num_heads as usize;
        report(&name, setup.time(threads, reps), pairs * (576 + 512) * 2, batch * context * 576 * 2, show);
    }
}

fn report(
    case: &str,
    time: std::result::Result<f64, Box<dyn std::error::Error>>,
    flops: usize,
    bytes: usize,
    show: &mut dyn FnMut(Row),
) {
    match time {
        Ok(ms) => show(Row {
            case: case.to_owned(),
            ms,
            gflops: Some(flops as f64 / ms / 1e6),
            kv_gbs: Some(bytes as f64 / ms / 1e6),
        }),
        Err(error) => eprintln!("{case}: {error}"),
    }
}
