//! `attache run`: the plan, then text, then how fast it was.

use super::plan::ranges;
use crate::{
    arguments::{Common, Run},
    exit::{Code, Failure, Outcome},
    output, setup,
};
use attache_core::LayerRequest;
use attache_engine::{Engine, EngineOptions, FinishReason, GenerateOutput, LayerPlan, Prompt, Sampling, Weights};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::{io, ops::ControlFlow, time::Duration};

/// What is asked when nobody asks anything.
const DEFAULT_PROMPTS: [&str; 2] = ["Once upon a time", "In the morning the old sailor"];

#[derive(Serialize)]
struct PlanGroup<'a> {
    layers: Vec<usize>,
    kind: &'static str,
    backend: &'a str,
    source: &'a str,
    why: &'a str,
    layout: &'a str,
    block_size: u32,
    request: &'a LayerRequest,
}

#[derive(Serialize)]
struct OutputText<'a> {
    prompt: &'a str,
    prompt_tokens: &'a [u32],
    tokens: &'a [u32],
    text: &'a str,
    finish: String,
}

#[derive(Serialize)]
struct Stats {
    prefill_tokens_per_s: f64,
    decode_tokens_per_s: f64,
    prefill_tokens: usize,
    decode_tokens: usize,
    threads: usize,
    preemptions: usize,
}

#[derive(Serialize)]
struct Report<'a> {
    plan: &'a [PlanGroup<'a>],
    outputs: Vec<OutputText<'a>>,
    stats: Stats,
}

/// Layers that run alike, in the order of their first one.
fn groups(plan: &[LayerPlan]) -> Vec<PlanGroup<'_>> {
    let mut groups: Vec<PlanGroup<'_>> = Vec::new();
    for layer in plan {
        let same = |group: &&mut PlanGroup<'_>| {
            group.kind == layer.kind.name() && group.backend == layer.backend && *group.request == layer.request
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.layers.push(layer.index),
            None => groups.push(PlanGroup {
                layers: vec![layer.index],
                kind: layer.kind.name(),
                backend: &layer.backend,
                source: &layer.source,
                why: &layer.why,
                layout: &layer.layout,
                block_size: layer.block_size,
                request: &layer.request,
            }),
        }
    }
    groups
}

fn loading(name: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(format!("loading {name}"));
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

pub fn run(common: &Common, flags: &Run) -> Outcome {
    if !flags.temperature.is_finite() || flags.temperature < 0.0 {
        return Err(Failure::usage(format!("--temperature {}; valid: 0 or more", flags.temperature)));
    }
    let defaults = EngineOptions::default();
    let options = EngineOptions {
        threads: flags.threads,
        config: setup::engine_config(&flags.engine, defaults.config.clone())?,
        cache_tokens: flags.cache_tokens,
        max_num_tokens: flags.max_batch_tokens,
        ..defaults
    };
    let (_, registry) = setup::registry(common)?;
    let bar = loading(&flags.model);
    let weights = match flags.weights.as_str() {
        "quantised" => Weights::Quantised,
        "dequantised" => Weights::Dequantised,
        _ => Weights::Auto,
    };
    let engine = Engine::load(&flags.model, weights, &registry, options);
    bar.finish_and_clear();
    let mut engine = engine?;

    let texts: Vec<String> = match flags.prompt.as_slice() {
        [] => DEFAULT_PROMPTS.map(str::to_owned).to_vec(),
        prompts => prompts.to_vec(),
    };
    let prompts: Vec<Prompt> = texts
        .iter()
        .map(|text| {
            Ok(Prompt {
                tokens: engine.tokenizer().encode(text)?,
                max_tokens: flags.max_tokens,
                sampling: Sampling { temperature: flags.temperature, seed: flags.seed },
                ignore_end: flags.ignore_end,
            })
        })
        .collect::<Result<_, Failure>>()?;
    let plan = engine.plan().to_vec();
    let plan = groups(&plan);
    let output = if common.json {
        engine.generate(prompts, &mut |_| ControlFlow::Continue(()))?
    } else {
        print_plan(&engine, &plan)?;
        stream(&mut engine, &texts, prompts)?
    };
    let stats = Stats {
        prefill_tokens_per_s: output.stats.prefill_tokens_per_s(),
        decode_tokens_per_s: output.stats.decode_tokens_per_s(),
        prefill_tokens: output.stats.prefill_tokens,
        decode_tokens: output.stats.decode_tokens,
        threads: engine.threads(),
        preemptions: output.stats.preemptions,
    };
    if common.json {
        let outputs = texts
            .iter()
            .zip(&output.generations)
            .map(|(prompt, generation)| OutputText {
                prompt,
                prompt_tokens: &generation.prompt_tokens,
                tokens: &generation.tokens,
                text: &generation.text,
                finish: finish(&generation.finish),
            })
            .collect();
        output::json(&Report { plan: &plan, outputs, stats })?;
    } else {
        output::line(format!(
            "prefill {:.1} tokens/s, decode {:.1} tokens/s, {} threads",
            stats.prefill_tokens_per_s, stats.decode_tokens_per_s, stats.threads
        ))?;
    }
    refused(&output)
}

/// Prompts that were not run are an error, once the others are done.
fn refused(output: &GenerateOutput) -> Outcome {
    let reasons: Vec<String> = output
        .generations
        .iter()
        .enumerate()
        .filter_map(|(index, generation)| match &generation.finish {
            FinishReason::Refused(reason) => Some(format!("prompt {}: {reason}", index + 1)),
            _ => None,
        })
        .collect();
    if reasons.is_empty() { Ok(()) } else { Err(Failure::new(Code::Other, reasons.join("; "))) }
}

fn finish(reason: &FinishReason) -> String {
    match reason {
        FinishReason::EndOfText => "end_of_text".to_owned(),
        FinishReason::MaxTokens => "max_tokens".to_owned(),
        FinishReason::MaxContext => "max_context".to_owned(),
        FinishReason::Cancelled => "cancelled".to_owned(),
        FinishReason::Refused(reason) => format!("refused: {reason}"),
        other => format!("{other:?}"),
    }
}

fn print_plan(engine: &Engine, plan: &[PlanGroup<'_>]) -> Outcome {
    let (block_size, num_blocks) = engine.cache_shape();
    output::line(format!(
        "{}: {} layers, {num_blocks} blocks of {block_size} tokens ({:.1} MiB), context {}",
        engine.model().name,
        engine.plan().len(),
        engine.cache_bytes() as f64 / f64::from(1 << 20),
        engine.max_context()
    ))?;
    let mut table = output::table(&["layers", "kind", "backend", "source", "layout", "why"]);
    for group in plan {
        table.add_row([
            ranges(&group.layers),
            group.kind.to_owned(),
            group.backend.to_owned(),
            group.source.to_owned(),
            group.layout.to_owned(),
            group.why.to_owned(),
        ]);
    }
    output::line(table)?;
    Ok(())
}

/// One prompt is streamed as it is; of several the first unfinished one is streamed, and the others
/// follow with what they have by then.
fn stream(engine: &mut Engine, texts: &[String], prompts: Vec<Prompt>) -> Result<GenerateOutput, Failure> {
    let mut shown =
        Shown { texts, pending: vec![String::new(); texts.len()], ended: vec![false; texts.len()], current: 0 };
    let mut failed: Option<io::Error> = None;
    let limits: Vec<usize> = prompts.iter().map(|prompt| prompt.max_tokens).collect();
    let mut counts = vec![0; texts.len()];
    shown.begin()?;
    let output = engine.generate(prompts, &mut |event| {
        counts[event.prompt] += usize::from(event.token.is_some());
        shown.ended[event.prompt] |= counts[event.prompt] >= limits[event.prompt];
        match shown.add(event.prompt, event.text) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed.get_or_insert(error);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    shown.finish()?;
    Ok(output)
}

struct Shown<'a> {
    texts: &'a [String],
    /// What is not printed yet.
    pending: Vec<String>,
    ended: Vec<bool>,
    current: usize,
}

impl Shown<'_> {
    fn begin(&self) -> io::Result<()> {
        let Some(text) = self.texts.get(self.current) else { return Ok(()) };
        if self.texts.len() > 1 {
            output::line(format!("\n[{}/{}]", self.current + 1, self.texts.len()))?;
        } else {
            output::line("")?;
        }
        output::now(text)
    }

    fn add(&mut self, prompt: usize, text: &str) -> io::Result<()> {
        self.pending[prompt].push_str(text);
        loop {
            let Some(pending) = self.pending.get_mut(self.current) else { return Ok(()) };
            output::now(&std::mem::take(pending))?;
            if !self.ended[self.current] {
                return Ok(());
            }
            self.next()?;
        }
    }

    fn next(&mut self) -> io::Result<()> {
        output::line("")?;
        self.current += 1;
        self.begin()
    }

    /// Prints what is left.
    fn finish(&mut self) -> io::Result<()> {
        while self.current < self.texts.len() {
            output::now(&std::mem::take(&mut self.pending[self.current]))?;
            self.next()?;
        }
        output::line("")
    }
}
