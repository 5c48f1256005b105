//! The engine: prompts in, tokens out.
//!
//! Owns the loop of schedule → model → sample → stream, and the clock. Must not know: kernels, which
//! backend runs what (see [`LayerProvider`]), how a prompt is laid out for a chat.

use crate::{
    block_manager::BlockManager,
    error::{EngineError, RefusedRequest, Result},
    gguf::Weights,
    layers::{LayerPlan, LayerProvider, Layers, ModelChoice, StepAttention, StepBatch},
    model::LoadedModel,
    pool::Pool,
    sampling::{Sampler, Sampling},
    scheduler::{Scheduled, Scheduler, SchedulerOptions},
    tokenizer::{DecodeStream, Tokenizer},
};
use attache_core::{BatchLimits, Dtype, plan::EngineConfig, runtime::HostServices};
use std::{
    collections::BTreeMap,
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

/// Memory of the caches where nobody says how much: 128 MiB.
const CACHE_BYTES: u64 = 128 << 20;

/// How an engine runs.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Threads of the pool; 0 = as many as the affinity mask and the CPU quota allow.
    pub threads: usize,
    /// What takes part in selection: compute dtype (f32 by default), cache format, block size, flags.
    pub config: EngineConfig,
    /// Blocks of the cache; absent = from `cache_tokens`.
    pub num_blocks: Option<usize>,
    /// Tokens that the cache holds in all; absent = what 128 MiB hold.
    pub cache_tokens: Option<usize>,
    /// Prompts that run at once.
    pub max_num_requests: usize,
    /// Tokens of a step; longer prompts are cut into chunks.
    pub max_num_tokens: usize,
    /// Most tokens of a sequence; absent = what the model can.
    pub max_context: Option<usize>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: 0,
            config: EngineConfig { dtype: Dtype::F32, use_batch_invariant: true, ..EngineConfig::default() },
            num_blocks: None,
            cache_tokens: None,
            max_num_requests: 64,
            max_num_tokens: 512,
            max_context: None,
        }
    }
}

impl EngineOptions {
    fn check(&self) -> Result<()> {
        for (name, value) in [
            ("max_num_requests", Some(self.max_num_requests)),
            ("max_num_tokens", Some(self.max_num_tokens)),
            ("num_blocks", self.num_blocks),
            ("cache_tokens", self.cache_tokens),
            ("max_context", self.max_context),
            ("block_size", self.config.block_size.map(|size| size as usize)),
        ] {
            // Batches cross the ABI as i32.
            if let Some(value) = value.filter(|value| !(1..=i32::MAX as usize).contains(value)) {
                return Err(EngineError::Option {
                    name,
                    found: value.to_string(),
                    expected: format!("1 to {}", i32::MAX),
                });
            }
        }
        Ok(())
    }
}

/// A prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// Its tokens, see [`Tokenizer::encode`].
    pub tokens: Vec<u32>,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How they are chosen.
    pub sampling: Sampling,
    /// Go on after a token that ends a text.
    pub ignore_end: bool,
}

/// Why a generation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model ended its text.
    EndOfText,
    /// `max_tokens` were generated.
    MaxTokens,
    /// The context is full.
    MaxContext,
    /// The caller stopped it.
    Cancelled,
    /// It was not run.
    Refused(RefusedRequest),
}

/// What was generated for a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// The prompt's tokens.
    pub prompt_tokens: Vec<u32>,
    /// New tokens, without the one that ended the text.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Why it ended.
    pub finish: FinishReason,
    /// Times that it had to wait for blocks and was computed again.
    pub preemptions: usize,
}

/// A new token.
#[derive(Debug, Clone, Copy)]
pub struct Event<'a> {
    /// Index of the prompt.
    pub prompt: usize,
    /// The token; absent for text that was held back at the end.
    pub token: Option<u32>,
    /// The text that it completes; may be empty inside a character.
    pub text: &'a str,
}

/// How fast a run was. Steps that hold both kinds of tokens are shared out by their numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stats {
    /// Tokens of prompts (and of sequences that were computed again).
    pub prefill_tokens: usize,
    /// Tokens that were computed one at a time.
    pub decode_tokens: usize,
    /// Time for the former.
    pub prefill_time: Duration,
    /// Time for the latter.
    pub decode_time: Duration,
    /// Steps.
    pub steps: usize,
    /// Times that a sequence lost its blocks to an older one.
    pub preemptions: usize,
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

impl Stats {
    /// Prompt tokens a second.
    #[must_use]
    pub fn prefill_tokens_per_s(&self) -> f64 {
        rate(self.prefill_tokens, self.prefill_time)
    }

    /// Generated tokens a second, of all prompts together.
    #[must_use]
    pub fn decode_tokens_per_s(&self) -> f64 {
        rate(self.decode_tokens, self.decode_time)
    }

    fn book(&mut self, prefill: usize, decode: usize, time: Duration) {
        let share = time.mul_f64(prefill as f64 / (prefill + decode).max(1) as f64);
        self.prefill_time += share;
        self.decode_time += time.saturating_sub(share);
        self.prefill_tokens += prefill;
        self.decode_tokens += decode;
        self.steps += 1;
    }
}

/// The result of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOutput {
    /// One for each prompt, in their order.
    pub generations: Vec<Generation>,
    /// How fast it was.
    pub stats: Stats,
}

/// A model on its backends.
pub struct Engine {
    model: LoadedModel,
    pool: Arc<Pool>,
    layers: Layers,
    options: EngineOptions,
    max_context: usize,
}

struct Request {
    prompt: Prompt,
    sampler: Sampler,
    stream: DecodeStream,
    text: String,
}

impl Engine {
    /// Puts a model's layers on the backends that `provider` gives.
    ///
    /// # Errors
    /// For options that make no sense, layers without a backend, and backends that refuse.
    pub fn new(model: LoadedModel, provider: &dyn LayerProvider, options: EngineOptions) -> Result<Self> {
        options.check()?;
        let choice =
            provider.backends(&model.decoder.description(), &options.config).map_err(EngineError::NoBackend)?;
        Self::on(choice, model, options)
    }

    /// Finds the backends of a model's layers first, and then reads its weights: what no backend can
    /// serve is refused at once. `model` and `weights` as for [`LoadedModel::load_as`].
    ///
    /// # Errors
    /// As [`Engine::new`] and [`LoadedModel::load`].
    pub fn load(model: &str, weights: Weights, provider: &dyn LayerProvider, options: EngineOptions) -> Result<Self> {
        options.check()?;
        let description = LoadedModel::describe(model)?;
        let choice = provider.backends(&description, &options.config).map_err(EngineError::NoBackend)?;
        Self::on(choice, LoadedModel::load_as(model, weights)?, options)
    }

    fn on(choice: ModelChoice, model: LoadedModel, options: EngineOptions) -> Result<Self> {
        let model_context = model.decoder.max_context();
        let max_context = options.max_context.map_or(model_context, |asked| asked.min(model_context));
        let pool = Pool::new(options.threads);
        let limits = BatchLimits {
            max_num_requests: options.max_num_requests,
            max_num_tokens: options.max_num_tokens,
            max_query_len: options.max_num_tokens.min(max_context),
            max_seq_len: max_context,
            parallelism: pool.threads(),
        };
        let num_blocks = |bytes: u64, block_size: usize| {
            let all = max_context.div_ceil(block_size).saturating_mul(options.max_num_requests);
            let wanted = match (options.num_blocks, options.cache_tokens) {
                (Some(blocks), _) => return Ok(blocks),
                (None, Some(tokens)) => tokens.div_ceil(block_size),
                (None, None) => (CACHE_BYTES / bytes.max(1)) as usize,
            };
            Ok(wanted.min(all).clamp(1, i32::MAX as usize))
        };
        let layers = Layers::create(
            choice,
            model.decoder.attention_layers(),
            &options.config,
            HostServices::new(pool.clone()),
            &limits,
            num_blocks,
        )?;
        tracing::info!(
            model = model.name,
            threads = pool.threads(),
            num_blocks = layers.num_blocks(),
            block_size = layers.block_size(),
            cache_bytes = layers.cache_bytes(),
            max_context,
            "engine ready"
        );
        Ok(Self { model, pool, layers, options, max_context })
    }

    /// What runs each layer, and why.
    #[must_use]
    pub fn plan(&self) -> &[LayerPlan] {
        self.layers.plan()
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &LoadedModel {
        &self.model
    }

    /// The model's tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.model.tokenizer
    }

    /// Tokens of a block and blocks of the cache.
    #[must_use]
    pub fn cache_shape(&self) -> (usize, usize) {
        (self.layers.block_size(), self.layers.num_blocks())
    }

    /// Bytes of the caches of all layers.
    #[must_use]
    pub fn cache_bytes(&self) -> u64 {
        self.layers.cache_bytes()
    }

    /// Threads of the pool.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Most tokens of a sequence.
    #[must_use]
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// Runs prompts together. `on_event` sees each token as it is chosen and may stop its prompt.
    /// A prompt that cannot be run is refused; the others go on.
    ///
    /// # Errors
    /// When a backend fails: names it and why it had been chosen.
    pub fn generate(
        &mut self,
        prompts: Vec<Prompt>,
        on_event: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<GenerateOutput> {
        let mut generations: BTreeMap<usize, Generation> = BTreeMap::new();
        let mut requests: BTreeMap<usize, Request> = BTreeMap::new();
        let mut scheduler = self.scheduler();
        for (index, prompt) in prompts.into_iter().enumerate() {
            let mut ended = |finish| {
                let generation = Generation {
                    prompt_tokens: prompt.tokens.clone(),
                    tokens: Vec::new(),
                    text: String::new(),
                    finish,
                    preemptions: 0,
                };
                generations.insert(index, generation);
            };
            if let Err(refused) = self.check_tokens(&prompt.tokens) {
                ended(FinishReason::Refused(refused));
            } else if prompt.max_tokens == 0 {
                ended(FinishReason::MaxTokens);
            } else if let Err(refused) = scheduler.add(index, prompt.tokens.clone(), prompt.max_tokens) {
                ended(FinishReason::Refused(refused));
            } else {
                let sampler = Sampler::new(prompt.sampling, index as u64);
                requests
                    .insert(index, Request { prompt, sampler, stream: DecodeStream::default(), text: String::new() });
            }
        }
        let mut stats = Stats::default();
        while !scheduler.is_empty() {
            let start = Instant::now();
            let step = scheduler.schedule()?;
            let logits = self.step(&scheduler, &step, LogitsOf::SampledTokens)?;
            let mut logits = logits.chunks_exact(self.model.decoder.vocab_size());
            let (mut prefill, mut decode) = (0, 0);
            for piece in step {
                let sequence = scheduler.sequence(piece.id).ok_or_else(|| internal("a step without its sequence"))?;
                match piece.start >= sequence.prompt_len && piece.count == 1 {
                    true => decode += 1,
                    false => prefill += piece.count,
                }
                let (len, max_len, prompt_len) = (sequence.tokens.len(), sequence.max_len, sequence.prompt_len);
                if !piece.samples {
                    scheduler.advance(piece, None)?;
                    continue;
                }
                let request = requests.get_mut(&piece.id).ok_or_else(|| internal("a sequence without its prompt"))?;
                let row = logits.next().ok_or_else(|| internal("a sample without its logits"))?;
                let token = request.sampler.sample(row);
                let mut finish = None;
                if self.model.tokenizer.end_tokens().contains(&token) && !request.prompt.ignore_end {
                    finish = Some(FinishReason::EndOfText);
                    scheduler.advance(piece, None)?;
                } else {
                    scheduler.advance(piece, Some(token))?;
                    let text = request.stream.push(self.model.tokenizer.piece(token));
                    request.text.push_str(&text);
                    let event = Event { prompt: piece.id, token: Some(token), text: &text };
                    if on_event(event).is_break() {
                        finish = Some(FinishReason::Cancelled);
                    } else if len + 1 == max_len {
                        let all = len + 1 - prompt_len == request.prompt.max_tokens;
                        finish = Some(if all { FinishReason::MaxTokens } else { FinishReason::MaxContext });
                    }
                }
                let Some(finish) = finish else { continue };
                let sequence = scheduler.finish(piece.id)?;
                let mut request = requests.remove(&piece.id).ok_or_else(|| internal("a sequence ended twice"))?;
                let rest = request.stream.finish();
                if !rest.is_empty() {
                    request.text.push_str(&rest);
                    // It has ended: there is nothing left to stop.
                    let _ = on_event(Event { prompt: piece.id, token: None, text: &rest });
                }
                stats.preemptions += sequence.preemptions;
                let generation = Generation {
                    prompt_tokens: request.prompt.tokens,
                    tokens: sequence.tokens[prompt_len..].to_vec(),
                    text: request.text,
                    finish,
                    preemptions: sequence.preemptions,
                };
                generations.insert(piece.id, generation);
            }
            stats.book(prefill, decode, start.elapsed());
        }
        Ok(GenerateOutput { generations: generations.into_values().collect(), stats })
    }

    /// The logits `[tokens, vocab_size]` after each token: how a text is scored.
    ///
    /// # Errors
    /// When a backend fails or the tokens do not fit in the cache.
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let refused = |refused: RefusedRequest| EngineError::Model {
            model: self.model.name.clone(),
            reason: refused.to_string(),
        };
        self.check_tokens(tokens).map_err(refused)?;
        let mut scheduler = self.scheduler();
        scheduler.add(0, tokens.to_vec(), 0).map_err(refused)?;
        let mut all = Vec::with_capacity(tokens.len() * self.model.decoder.vocab_size());
        loop {
            let step = scheduler.schedule()?;
            let Some(piece) = step.first().copied() else { return Err(internal("a step without a piece")) };
            all.extend(self.step(&scheduler, &step, LogitsOf::EveryToken)?);
            if piece.samples {
                return Ok(all);
            }
            scheduler.advance(piece, None)?;
        }
    }

    fn scheduler(&self) -> Scheduler {
        let options = SchedulerOptions {
            max_num_requests: self.options.max_num_requests,
            max_num_tokens: self.options.max_num_tokens,
            max_context: self.max_context,
        };
        Scheduler::new(options, BlockManager::new(self.layers.num_blocks(), self.layers.block_size()))
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), RefusedRequest> {
        let vocab_size = self.model.decoder.vocab_size();
        match tokens.iter().find(|token| **token as usize >= vocab_size) {
            Some(token) => Err(RefusedRequest::UnknownToken { token: *token, vocab_size }),
            None => Ok(()),
        }
    }

    /// Runs the pieces of a step, and gives logits `[rows, vocab_size]`.
    fn step(&mut self, scheduler: &Scheduler, step: &[Scheduled], of: LogitsOf) -> Result<Vec<f32>> {
        let (mut tokens, mut positions, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        let mut pieces = Vec::with_capacity(step.len());
        for piece in step {
            let sequence = scheduler.sequence(piece.id).ok_or_else(|| internal("a step without its sequence"))?;
            let end = piece.start + piece.count;
            tokens.extend_from_slice(&sequence.tokens[piece.start..end]);
            positions.extend((piece.start..end).map(|position| position as u32));
            match of {
                LogitsOf::EveryToken => rows.extend(tokens.len() - piece.count..tokens.len()),
                LogitsOf::SampledTokens if piece.samples => rows.push(tokens.len() - 1),
                LogitsOf::SampledTokens => {}
            }
            pieces.push((piece.start, piece.count, sequence.blocks.as_slice()));
        }
        let batch = StepBatch::new(pieces.into_iter(), self.layers.block_size());
        self.layers.begin(&batch)?;
        let mut attention = StepAttention { layers: &mut self.layers, batch: &batch };
        self.model.decoder.forward(&self.pool, &tokens, &positions, &rows, &mut attention)
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("model", &self.model.name)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// Which tokens of a step need logits.
#[derive(Clone, Copy)]
enum LogitsOf {
    /// The last one of each piece that is sampled from.
    SampledTokens,
    /// All.
    EveryToken,
}

fn internal(text: &str) -> EngineError {
    EngineError::Internal(text.to_owned())
}
