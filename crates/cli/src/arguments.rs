//! Flags and subcommands.

use attache_core::config::Overrides;
use clap::{
    Args, Parser, Subcommand,
    builder::{NonEmptyStringValueParser, RangedU64ValueParser},
};
use std::path::PathBuf;

const EXIT_CODES: &str = "\
Exit codes:
  0  good
  1  any other failure
  2  usage: unknown flags, keys, variables or values
  3  nothing suitable, or an override that cannot be obeyed
  4  a plugin cannot be used
  5  wrong results (case run --check)

Settings come from attache.toml, then the environment (ATTACHE_…), then flags; the later one wins.";

/// More than any machine has; far more abort the process while their stacks are made.
const MAX_THREADS: u64 = 1024;

/// Picks, loads and runs attention backends.
#[derive(Parser, Debug)]
#[command(name = "attache", version, after_help = EXIT_CODES, max_term_width = 100)]
pub struct Arguments {
    #[command(flatten)]
    pub common: Common,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every subcommand.
#[derive(Args, Debug)]
#[command(next_help_heading = "Plugins and selection")]
pub struct Common {
    /// A plugin: its manifest (NAME.attache.toml) or its library
    #[arg(long, value_name = "FILE", global = true)]
    pub plugin: Vec<PathBuf>,
    /// A directory of plugins
    #[arg(long, value_name = "DIR", global = true)]
    pub plugin_path: Vec<PathBuf>,
    /// Use this backend for every layer, or fail; auto = choose
    #[arg(long, value_name = "NAME", global = true)]
    pub backend: Option<String>,
    /// Use this backend for one kind of layer, for instance mla_attention=CPU_MLA
    #[arg(long, value_name = "KIND=NAME", global = true)]
    pub backend_per_kind: Vec<String>,
    /// What an override that cannot be obeyed does: error or fallback
    #[arg(long, value_name = "WHAT", global = true)]
    pub on_invalid_override: Option<String>,
    /// One of these backends or plugins, or fail
    #[arg(long, value_name = "NAME", global = true)]
    pub require: Vec<String>,
    /// These backends or plugins first, where they are valid
    #[arg(long, value_name = "NAME", global = true)]
    pub prefer: Vec<String>,
    /// Never these backends or plugins
    #[arg(long, value_name = "NAME", global = true)]
    pub deny: Vec<String>,
    /// Configuration file, instead of ./attache.toml or the user's
    #[arg(long, value_name = "FILE", global = true)]
    pub config: Option<PathBuf>,
    /// Plan for another device: cpu, cuda:9.0, rocm:gfx942
    #[arg(long, value_name = "DEVICE", global = true)]
    pub device: Option<String>,
    /// Backends and priority lists to plan with that cannot be run; with it, --device also takes the
    /// names of the catalogue's devices
    #[arg(long, value_name = "FILE", global = true)]
    pub catalogue: Vec<PathBuf>,
    /// Print JSON and nothing else to stdout
    #[arg(long, global = true)]
    pub json: bool,
    /// Print long details of errors
    #[arg(long, short, global = true)]
    pub verbose: bool,
}

impl Common {
    /// The flags that take part in the configuration.
    pub fn overrides(&self) -> Overrides {
        Overrides {
            backend: self.backend.clone(),
            backend_per_kind: self.backend_per_kind.clone(),
            on_invalid_override: self.on_invalid_override.clone(),
            require: self.require.clone(),
            prefer: self.prefer.clone(),
            deny: self.deny.clone(),
            plugins: self.plugin.clone(),
            plugin_path: self.plugin_path.clone(),
        }
    }
}

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Generate text, after showing which backend each layer got and why
    Run(Run),
    /// Show kinds, backends, layout and block size of a model's layers
    Plan(Plan),
    /// Show how one layer's backend is chosen, with every reason
    Explain(Box<Explain>),
    /// List plugins and their backends
    List(List),
    /// Show what each backend claims, side by side
    Matrix(Matrix),
    /// Show the machine, the configuration with origins, and what was found where
    Doctor,
    /// Work with files of one attention call
    Case(Case),
}

/// Settings of an engine that take part in selection.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Engine")]
pub struct Engine {
    /// Compute dtype: f32, f16 or bf16
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<String>,
    /// Cache element format
    #[arg(long, value_name = "FORMAT")]
    pub kv_cache_dtype: Option<String>,
    /// Tokens of a cache block
    #[arg(long, value_name = "TOKENS")]
    pub block_size: Option<u32>,
    /// Results must not depend on the batch (run: on unless set to false)
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub batch_invariant: Option<bool>,
}

#[derive(Args, Debug)]
pub struct Run {
    /// A GGUF file, a folder of the bundled form, or tiny-hybrid
    #[arg(long, value_name = "FILE", default_value = "tiny-hybrid", value_parser = NonEmptyStringValueParser::new())]
    pub model: String,
    /// A prompt; several are one batch
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,
    /// Most tokens to generate for a prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub max_tokens: usize,
    /// 0 = the most likely token, always
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    /// Seed of the random numbers
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
    /// Threads; 0 = as many as this process may use
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = RangedU64ValueParser::<usize>::new().range(..=MAX_THREADS))]
    pub threads: usize,
    /// Tokens that the cache holds in all
    #[arg(long, value_name = "TOKENS")]
    pub cache_tokens: Option<usize>,
    /// Tokens that are computed at once; longer prompts are cut
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub max_batch_tokens: usize,
    /// How a GGUF file's matrices are kept: auto, quantised (small) or dequantised (exact)
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = ["auto", "quantised", "dequantised"])]
    pub weights: String,
    /// Go on after a token that ends the text
    #[arg(long)]
    pub ignore_end: bool,
    #[command(flatten)]
    pub engine: Engine,
}

#[derive(Args, Debug)]
pub struct Plan {
    /// A config.json, a GGUF file, a folder of the bundled form, or tiny-hybrid
    #[arg(value_name = "MODEL", value_parser = NonEmptyStringValueParser::new())]
    pub model: String,
    /// What would have to change for a backend to serve each layer: backend=NAME
    #[arg(long, value_name = "backend=NAME")]
    pub what_if: Option<String>,
    #[command(flatten)]
    pub engine: Engine,
}

/// Every field of a layer's request.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "The layer")]
pub struct Explain {
    /// Elements of a query or key head; MLA: kv_lora_rank + qk_rope_head_dim
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub head_size: u32,
    /// Compute dtype: f32, f16 or bf16
    #[arg(long, value_name = "DTYPE", default_value = "bf16")]
    pub dtype: String,
    /// Cache element format
    #[arg(long, value_name = "FORMAT")]
    pub kv_cache_dtype: Option<String>,
    /// Tokens of a cache block, when the user fixed it
    #[arg(long, value_name = "TOKENS")]
    pub block_size: Option<u32>,
    /// Multi-head latent attention
    #[arg(long)]
    pub use_mla: bool,
    /// Attention sinks
    #[arg(long)]
    pub has_sink: bool,
    /// Sparse attention
    #[arg(long)]
    pub use_sparse: bool,
    /// Bidirectional attention inside multimodal spans
    #[arg(long)]
    pub use_mm_prefix: bool,
    /// One KV scale per head
    #[arg(long)]
    pub use_per_head_quant_scales: bool,
    /// decoder, encoder, encoder_only or encoder_decoder
    #[arg(long, value_name = "TYPE", default_value = "decoder")]
    pub attn_type: String,
    /// Query heads
    #[arg(long, value_name = "N")]
    pub num_heads: Option<u32>,
    /// A sliding window
    #[arg(long)]
    pub has_sliding_window: bool,
    /// Decoder attention without the causal mask
    #[arg(long)]
    pub use_non_causal: bool,
    /// Results must not depend on the batch
    #[arg(long)]
    pub use_batch_invariant: bool,
    /// A connector moves the cache between machines
    #[arg(long)]
    pub use_kv_connector: bool,
    /// Prefill context parallelism
    #[arg(long)]
    pub use_pcp: bool,
    /// Decode context parallelism
    #[arg(long)]
    pub use_dcp: bool,
    /// Speculative decoding verifies an adaptive number of tokens
    #[arg(long)]
    pub use_adaptive_verification: bool,
    /// Relaxed sliding-window attention
    #[arg(long)]
    pub use_rswa: bool,
    /// Elements of a value head, where they differ
    #[arg(long, value_name = "N")]
    pub head_size_v: Option<u32>,
    /// KV heads
    #[arg(long, value_name = "N")]
    pub num_kv_heads: Option<u32>,
    /// A soft-cap on logits
    #[arg(long)]
    pub has_softcap: bool,
    /// ALiBi position bias
    #[arg(long)]
    pub has_alibi: bool,
    /// Chunked-local attention
    #[arg(long)]
    pub chunked_local: bool,
    /// The log-sum-exp of each row
    #[arg(long)]
    pub needs_lse: bool,
    /// A state-space layer instead of attention: mamba1, mamba2, short_conv, linear or gdn
    #[arg(long, value_name = "TYPE")]
    pub state_space: Option<String>,
    /// The layer's kind, where it states it itself
    #[arg(long, value_name = "KIND")]
    pub kind: Option<String>,
}

#[derive(Args, Debug)]
pub struct List {
    /// Also what is shadowed, skipped, refused or broken, and where was searched
    #[arg(long)]
    pub all: bool,
}

#[derive(Args, Debug)]
pub struct Matrix {
    /// How it is printed
    #[arg(long, value_enum, default_value_t = MatrixFormat::Terminal)]
    pub format: MatrixFormat,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
pub enum MatrixFormat {
    Terminal,
    Markdown,
    Html,
}

#[derive(Args, Debug)]
pub struct Case {
    #[command(subcommand)]
    pub command: CaseCommand,
}

#[derive(Subcommand, Debug)]
pub enum CaseCommand {
    /// Run one attention call from a file over a shuffled paged cache
    Run(CaseRun),
}

#[derive(Args, Debug)]
pub struct CaseRun {
    /// The case: a safetensors file, see docs/cases.md
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Where `out` and `lse` are written
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Compare with the reference too
    #[arg(long)]
    pub check: bool,
}
