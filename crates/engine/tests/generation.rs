//! The bundled model on the linked-in backends: golden logits, batches, preemption, streaming.

use attache_core::{policy::Policy, registry::Registry};
use attache_engine::{Engine, EngineOptions, FinishReason, Generation, LoadedModel, Prompt, RefusedRequest, Sampling};
use attache_plugin_cpu as _;
use attache_plugin_mla as _;
use safetensors::SafeTensors;
use std::ops::ControlFlow;

const GOLDEN: &[u8] = include_bytes!("../../../models/tiny-hybrid/golden.safetensors");

/// Logits agree with PyTorch's f32 to this: sums of some hundred products in another order, eight
/// layers deep, on logits of up to about 20.
const LOGIT_TOLERANCE: f32 = 2e-3;

fn engine(options: EngineOptions) -> Engine {
    let registry = Registry::builder().policy(Policy::default()).build();
    Engine::new(LoadedModel::bundled().expect("the model"), &registry, options).expect("an engine")
}

fn prompt(text: &str, max_tokens: usize) -> Prompt {
    let tokens = text.bytes().map(u32::from).collect();
    Prompt { tokens, max_tokens, sampling: Sampling::default(), ignore_end: true }
}

fn run(engine: &mut Engine, prompts: Vec<Prompt>) -> Vec<Generation> {
    engine.generate(prompts, &mut |_| ControlFlow::Continue(())).expect("a run").generations
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn integers(golden: &SafeTensors<'_>, name: &str) -> Vec<u32> {
    let tensor = golden.tensor(name).expect(name);
    let count: usize = tensor.shape().iter().product();
    let width = tensor.data().len() / count.max(1);
    let value = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |all, byte| all << 8 | u64::from(*byte)) as u32;
    tensor.data().chunks_exact(width).map(value).collect()
}

#[test]
fn logits_and_text_are_those_of_pytorch() {
    let golden = SafeTensors::deserialize(GOLDEN).expect("golden values");
    let mut engine = engine(EngineOptions { max_num_tokens: 24, ..EngineOptions::default() });
    let kinds: Vec<&str> = engine.plan().iter().map(|layer| layer.kind.name()).collect();
    assert_eq!(kinds[..4], ["sliding_window", "mla_attention", "full_attention", "sliding_window_mla"]);
    assert_eq!((engine.plan()[0].backend.as_str(), engine.plan()[1].backend.as_str()), ("CPU_ATTN", "CPU_MLA"));
    for index in 0..3 {
        let tokens = integers(&golden, &format!("prompt_{index}"));
        let expected = f32s(golden.tensor(&format!("logits_{index}")).expect("logits").data());
        let found = engine.logits(&tokens).expect("logits");
        assert_eq!(found.len(), expected.len(), "prompt {index}");
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        eprintln!("prompt {index}: {} logits, largest difference {worst:.1e}", found.len());
        assert!(worst < LOGIT_TOLERANCE, "prompt {index}: logits differ by {worst}");

        let greedy = integers(&golden, &format!("greedy_{index}"));
        let margins = f32s(golden.tensor(&format!("margin_{index}")).expect("margins").data());
        let text = Prompt { tokens, max_tokens: greedy.len(), sampling: Sampling::default(), ignore_end: true };
        let found = run(&mut engine, vec![text]).remove(0).tokens;
        let sure = margins.iter().position(|margin| *margin < 2.0 * LOGIT_TOLERANCE).unwrap_or(greedy.len());
        assert!(sure > 10, "the golden text is decided too narrowly to say anything");
        assert_eq!(found[..sure], greedy[..sure], "prompt {index}");
    }
}

/// Short and long prompts, none like the other.
fn many_prompts(count: usize) -> Vec<Prompt> {
    let text = "Once upon a time there was a small fox who lived near the river and liked to look at the moon. ";
    (0..count)
        .map(|index| {
            let len = 3 + (index * 37) % 90;
            let start = (index * 11) % (text.len() - len.min(text.len() - 1));
            let prompt_text = format!("{index} {}", &text[start..(start + len).min(text.len())]);
            prompt(&prompt_text, 4 + index * 7 % 29)
        })
        .collect()
}

#[test]
fn two_hundred_prompts_with_too_few_blocks_get_the_tokens_that_they_get_alone() {
    let mut small = EngineOptions { num_blocks: Some(120), max_num_tokens: 160, ..EngineOptions::default() };
    small.config.block_size = Some(4);
    let mut together = engine(small);
    let mut alone = engine(EngineOptions::default());
    let prompts = many_prompts(200);
    let output = together.generate(prompts.clone(), &mut |_| ControlFlow::Continue(())).expect("a run");
    let preempted = output.generations.iter().filter(|generation| generation.preemptions > 0).count();
    eprintln!("{} preemptions of {preempted} prompts", output.stats.preemptions);
    assert!(preempted > 20, "there were blocks enough for all but {preempted}: the test says little");
    for (index, (found, prompt)) in output.generations.iter().zip(prompts).enumerate() {
        let expected = run(&mut alone, vec![prompt]).remove(0);
        assert_eq!(found.finish, FinishReason::MaxTokens, "prompt {index}");
        assert_eq!(found.tokens, expected.tokens, "prompt {index}");
    }
}

#[test]
fn pieces_of_a_prompt_and_threads_change_nothing() {
    let text = "The old man walked to the harbour every morning, because he wanted to see the boats come in.";
    let mut whole = engine(EngineOptions { threads: 1, ..EngineOptions::default() });
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    let expected = whole.logits(&tokens).expect("logits");
    for (max_num_tokens, threads) in [(1, 2), (7, 2), (16, 1), (33, 3)] {
        let mut other = engine(EngineOptions { max_num_tokens, threads, ..EngineOptions::default() });
        let found = other.logits(&tokens).expect("logits");
        let equal = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(equal, "in pieces of {max_num_tokens} on {threads} threads");
    }
}

#[test]
fn what_never_fits_is_refused_and_the_rest_goes_on() {
    let mut engine = engine(EngineOptions { num_blocks: Some(4), ..EngineOptions::default() });
    let long = prompt(&"x".repeat(200), 4);
    let unknown = Prompt { tokens: vec![65, 70_000], ..prompt("", 4) };
    let found = run(&mut engine, vec![prompt("A small ", 4), long, prompt("", 4), unknown, prompt("The ", 0)]);
    assert_eq!(found[0].finish, FinishReason::MaxTokens);
    for index in [1, 2, 3] {
        let FinishReason::Refused(reason) = &found[index].finish else { panic!("{:?}", found[index]) };
        assert!(!reason.to_string().is_empty());
    }
    assert!(matches!(found[3].finish, FinishReason::Refused(RefusedRequest::UnknownToken { token: 70_000, .. })));
    assert_eq!((found[4].tokens.len(), &found[4].finish), (0, &FinishReason::MaxTokens));
}

#[test]
fn the_stream_is_the_text_and_can_be_stopped() {
    let mut engine = engine(EngineOptions::default());
    let mut streamed = [String::new(), String::new()];
    let prompts = vec![prompt("Once upon a time", 40), prompt("In the morning", 40)];
    let output = engine
        .generate(prompts, &mut |event| {
            streamed[event.prompt].push_str(event.text);
            if event.prompt == 1 && streamed[1].len() >= 10 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })
        .expect("a run");
    assert_eq!(output.generations[0].text, streamed[0]);
    assert_eq!(output.generations[1].text, streamed[1]);
    assert_eq!(output.generations[1].finish, FinishReason::Cancelled);
    assert_eq!(output.generations[0].tokens.len(), 40);
}

#[test]
fn a_seed_gives_the_same_text_and_another_seed_another_one() {
    let mut engine = engine(EngineOptions::default());
    let mut sampled = |seed| {
        let sampling = Sampling { temperature: 1.0, seed };
        run(&mut engine, vec![Prompt { sampling, ..prompt("The ", 60) }]).remove(0).text
    };
    let first = sampled(1);
    assert_eq!(first, sampled(1));
    assert_ne!(first, sampled(2));
}
