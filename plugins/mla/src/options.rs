//! The options of the plugin and of a layer: their names, values and defaults.
//!
//! Must not know what the kernels do with them.

use attache_cpu_kernels::Isa;
use attache_cpu_plugin::{isa, isa_option};
use attache_sdk::{
    core::descriptor::{DescriptorBuilder, OptionSpec, OptionType},
    prelude::*,
};

/// Tokens that are held projected at a time, when nothing else is set: with DeepSeek's sizes (320
/// elements of K and V a token and head) 2.6 MB in bf16.
const DEFAULT_WORKSPACE_TOKENS: usize = 4096;
/// The most tokens that may be held projected.
const MAX_WORKSPACE_TOKENS: usize = 1 << 24;

/// In which form `forward` computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    /// The cheaper one, request by request.
    Auto,
    /// Queries and outputs go through the latent space; the cache is read as it is.
    Absorbed,
    /// Keys and values of every head are made from the latent rows.
    Expanded,
}

const PATHS: [(&str, Path); 3] = [("auto", Path::Auto), ("absorbed", Path::Absorbed), ("expanded", Path::Expanded)];

/// The plugin's settings; a layer's own options replace them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Instruction set.
    pub isa: Isa,
    /// Form of `forward`.
    pub path: Path,
    /// Tokens, those of each head counted, that are held projected at a time: keys and values of the
    /// expanded form, queries and outputs of the absorbed one. At least 1.
    pub workspace_tokens: usize,
}

impl Settings {
    /// What holds when no option is set.
    ///
    /// # Errors
    /// When the environment asks for an instruction set that the machine lacks.
    pub fn new() -> Result<Self> {
        Ok(Self { isa: isa("auto")?, path: Path::Auto, workspace_tokens: DEFAULT_WORKSPACE_TOKENS })
    }

    /// These settings with options replaced.
    ///
    /// # Errors
    /// For an unknown option, or a value that it does not take.
    pub fn with<'a>(mut self, options: impl Iterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        for (name, value) in options {
            let bad = |valid: &str| BackendError::invalid(format!("option {name} = '{value}'; valid: {valid}"));
            match name {
                "isa" => self.isa = isa(value)?,
                "path" => {
                    let found = PATHS.iter().find(|(name, _)| *name == value);
                    self.path =
                        found.map(|(_, path)| *path).ok_or_else(|| bad(&PATHS.map(|(name, _)| name).join(", ")))?;
                }
                "workspace_tokens" => {
                    let tokens = value.parse().ok().filter(|tokens| (1..=MAX_WORKSPACE_TOKENS).contains(tokens));
                    self.workspace_tokens = tokens.ok_or_else(|| bad(&format!("1 … {MAX_WORKSPACE_TOKENS}")))?;
                }
                _ => {
                    return Err(BackendError::invalid(format!(
                        "unknown option '{name}' of CPU_MLA; valid: isa, path, workspace_tokens"
                    )));
                }
            }
        }
        Ok(self)
    }
}

/// States the options in a descriptor.
pub fn declare(builder: DescriptorBuilder) -> DescriptorBuilder {
    let path = OptionSpec {
        option_type: OptionType::String,
        description: "form in which forward computes".to_owned(),
        default: Some("auto".to_owned()),
        choices: PATHS.map(|(name, _)| name.to_owned()).to_vec(),
    };
    let workspace_tokens = OptionSpec {
        option_type: OptionType::Integer,
        description: "tokens, those of each head counted, that are held projected at a time".to_owned(),
        default: Some(DEFAULT_WORKSPACE_TOKENS.to_string()),
        choices: Vec::new(),
    };
    builder.option("isa", isa_option()).option("path", path).option("workspace_tokens", workspace_tokens)
}
