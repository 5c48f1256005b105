use super::*;
use crate::{
    condition::{Condition, NumberRule},
    descriptor::{BackendDescriptor, BlockSizes, RankRule, feature},
    plugin::PluginMetadata,
    policy::{Origin, Sourced},
    request::{AttentionType, Dtype},
    selector::Source,
};
use proptest::prelude::*;
use std::path::PathBuf;

fn plugin(name: &str, version: &str) -> Arc<PluginMetadata> {
    Arc::new(PluginMetadata {
        name: name.to_owned(),
        vendor: "tests".to_owned(),
        version: version.parse().unwrap(),
        sdk_version: "1.0.0".parse().unwrap(),
        abi_generation_min: 1,
        abi_generation_max: 1,
    })
}

fn plain(name: &str, rank: i32) -> BackendDescriptor {
    BackendDescriptor::builder(name)
        .platform("cpu")
        .head_sizes([64_u32, 128])
        .gqa_ratios([NumberRule::ANY])
        .dtypes([Dtype::BF16, Dtype::F32])
        .kv_cache_dtypes(["auto"])
        .block_sizes(BlockSizes::multiples_of(16))
        .layouts(["head_major"])
        .attn_types([AttentionType::Decoder])
        .rank(rank)
        .build()
}

fn candidate(descriptor: BackendDescriptor) -> Candidate {
    let name = descriptor.name.to_lowercase();
    Candidate {
        descriptor: Arc::new(descriptor),
        plugin: plugin(&name, "1.0.0"),
        source: Source::Linked,
        unavailable: vec![],
    }
}

fn wanted(name: &str) -> Wanted {
    Wanted { name: name.to_owned(), origin: Origin::Flag("--backend".to_owned()) }
}

fn cpu() -> Device {
    Device::new("cpu")
}

fn choose(request: &LayerRequest, policy: &Policy, candidates: &[Candidate]) -> Explanation {
    select(request, None, &cpu(), policy, candidates)
}

fn chosen(explanation: &Explanation) -> &str {
    explanation.result().map(|c| c.name()).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_first_valid_one_by_rank_is_taken_and_the_rest_is_explained() {
    let mut sinks = plain("SINKS", 5);
    sinks.capability.features.insert(feature::SINK.to_owned());
    let all = [candidate(plain("SLOW", 9)), candidate(sinks), candidate(plain("FAST", 1))];
    let request = LayerRequest::default();
    let explanation = choose(&request, &Policy::default(), &all);
    assert_eq!(chosen(&explanation), "FAST");
    assert_eq!(explanation.candidates.iter().map(|c| c.rank).collect::<Vec<_>>(), [Some(1), Some(2), Some(3)]);
    let explanation = choose(&LayerRequest { has_sink: true, ..request }, &Policy::default(), &all);
    assert_eq!(chosen(&explanation), "SINKS");
    assert_eq!(explanation.why, "the only valid backend");
    assert_eq!(explanation.candidates[1].reasons, ["attention sinks not supported"]);
    let json = serde_json::to_value(&explanation).unwrap();
    assert_eq!(json["chosen"], "SINKS");
    assert_eq!(json["wanted"], serde_json::Value::Null);
    assert_eq!(json["candidates"][1]["valid"], false);
    let text = explanation.to_string();
    assert!(text.starts_with("SINKS for full_attention on cpu: the only valid backend"), "{text}");
    assert!(text.contains("FAST   attention sinks not supported"), "{text}");
}

#[test]
fn an_override_is_obeyed_or_an_error() {
    let all = [candidate(plain("FAST", 1)), candidate(plain("SLOW", 9))];
    let mut policy = Policy { backend: Some(wanted("SLOW")), ..Policy::default() };
    let request = LayerRequest::default();
    assert_eq!(chosen(&choose(&request, &policy, &all)), "SLOW");

    let sinks = LayerRequest { has_sink: true, head_size: 40, ..request.clone() };
    let explanation = choose(&sinks, &policy, &all);
    let error = explanation.result().unwrap_err().to_string();
    for part in ["SLOW", "--backend", "head_size not supported, attention sinks not supported", "full_attention"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(explanation.candidates.len(), 1, "a wanted backend is validated alone");

    policy.on_invalid_override = Sourced::new(OnInvalidOverride::Fallback, Origin::Api);
    let mut able = plain("ABLE", 50);
    able.capability.features.insert(feature::SINK.to_owned());
    able.capability.head_sizes = vec![NumberRule::ANY];
    let all = [all[0].clone(), all[1].clone(), candidate(able)];
    let explanation = choose(&sinks, &policy, &all);
    assert_eq!(chosen(&explanation), "ABLE");
    assert!(explanation.warnings[0].contains("SLOW"), "{:?}", explanation.warnings);

    policy.backend = Some(wanted("FSAT"));
    let error = choose(&request, &policy, &all).result().unwrap_err().to_string();
    assert!(error.contains("valid: ABLE, FAST, SLOW; did you mean 'FAST'?"), "{error}");
}

#[test]
fn a_kinds_override_counts_before_the_global_one() {
    let all = [candidate(plain("A", 1)), candidate(plain("B", 2))];
    let mut policy = Policy { backend: Some(wanted("A")), ..Policy::default() };
    policy.per_kind.insert(Kind::FullAttention, wanted("B"));
    policy.per_kind.insert(Kind::MlaAttention, wanted("NOPE"));
    assert_eq!(chosen(&choose(&LayerRequest::default(), &policy, &all)), "B");
    let stated = select(&LayerRequest::default(), Some(Kind::SinkFullAttention), &cpu(), &policy, &all);
    assert_eq!(chosen(&stated), "A");
}

#[test]
fn nothing_suitable_lists_every_reason_and_the_change_that_would_help() {
    let mut only_64 = plain("ONLY_64", 1);
    only_64.capability.block_sizes = BlockSizes::exact([64]);
    let all = [candidate(only_64), candidate(plain("OTHER", 2))];
    let request = LayerRequest { block_size: Some(24), has_sink: false, ..LayerRequest::default() };
    let error = choose(&request, &Policy::default(), &all).result().unwrap_err().to_string();
    assert!(error.contains("ONLY_64: block_size not supported (block_size 64 would admit ONLY_64)"), "{error}");
    assert!(error.contains("OTHER: block_size not supported (block_size 16 would admit OTHER)"), "{error}");
    let error = choose(&LayerRequest { head_size: 0, ..request }, &Policy::default(), &all).result().unwrap_err();
    assert_eq!(error.to_string(), "head_size is 0; valid: any number from 1 on");
    assert_eq!(choose(&LayerRequest::default(), &Policy::default(), &[]).error, Some(SelectionError::NoBackends));
}

#[test]
fn a_fixed_block_size_that_costs_a_better_backend_is_told() {
    let mut only_64 = plain("BETTER", 1);
    only_64.capability.block_sizes = BlockSizes::exact([64]);
    let all = [candidate(only_64), candidate(plain("OTHER", 2))];
    let request = LayerRequest { block_size: Some(16), ..LayerRequest::default() };
    let explanation = choose(&request, &Policy::default(), &all);
    assert_eq!(chosen(&explanation), "OTHER");
    assert_eq!(explanation.warnings, ["block_size 16 keeps BETTER out, which would be preferred to OTHER"]);
    let also = LayerRequest { has_sink: true, ..request };
    assert!(
        choose(&also, &Policy::default(), &all).warnings.is_empty(),
        "two reasons: it was not for block_size alone"
    );
}

#[test]
fn the_operators_words_are_told_apart() {
    let all = [candidate(plain("A", 1)), candidate(plain("B", 2)), candidate(plain("C", 3))];
    let request = LayerRequest::default();
    let policy = Policy { prefer: vec![wanted("C")], ..Policy::default() };
    assert_eq!(chosen(&choose(&request, &policy, &all)), "C");
    let policy = Policy { prefer: vec![wanted("NOPE"), wanted("B")], ..Policy::default() };
    let explanation = choose(&request, &policy, &all);
    assert_eq!(chosen(&explanation), "B");
    assert!(explanation.warnings[0].contains("NOPE"), "{:?}", explanation.warnings);
    let policy = Policy { deny: vec![wanted("a")], ..Policy::default() };
    assert_eq!(chosen(&choose(&request, &policy, &all)), "B");
    let policy = Policy { require: vec![wanted("C")], ..Policy::default() };
    assert_eq!(chosen(&choose(&request, &policy, &all)), "C");
    let policy = Policy { require: vec![wanted("C")], deny: vec![wanted("C")], ..Policy::default() };
    assert!(choose(&request, &policy, &all).result().is_err());
    let rule = PriorityRule { order: vec!["C".into(), "B".into()], ..PriorityRule::default() };
    let policy = Policy { priority: vec![rule.clone()], ..Policy::default() };
    let explanation = choose(&request, &policy, &all);
    let names: Vec<&str> = explanation.candidates.iter().map(CandidateVerdict::name).collect();
    assert_eq!(names, ["C", "B", "A"]);
    let policy = Policy {
        priority: vec![PriorityRule { exclusive: true, ..rule }],
        deny: vec![wanted("C"), wanted("B")],
        ..Policy::default()
    };
    assert!(choose(&request, &policy, &all).result().is_err(), "an exclusive list lets no other in");
}

#[test]
fn the_newest_version_that_is_allowed_is_taken() {
    let version = |text: &str, rank| Candidate {
        plugin: plugin("a", text),
        source: Source::File(PathBuf::from(text)),
        ..candidate(plain("A", rank))
    };
    let all = [version("1.2.0", 1), version("2.0.0", 7), version("1.9.0", 3)];
    let request = LayerRequest::default();
    let explanation = choose(&request, &Policy::default(), &all);
    assert_eq!(explanation.result().unwrap().plugin.version.to_string(), "2.0.0");
    assert_eq!(explanation.candidates.iter().filter(|c| c.is_valid()).count(), 1);
    let mut policy = Policy::default();
    policy.versions.insert("A".into(), Sourced::new("^1.2".parse().unwrap(), Origin::Api));
    let explanation = choose(&request, &policy, &all);
    assert_eq!(explanation.result().unwrap().plugin.version.to_string(), "1.9.0");
}

#[test]
fn another_platforms_backend_and_a_broken_one_are_never_taken() {
    let mut cuda = plain("CUDA", 0);
    cuda.platforms = vec!["cuda".into()];
    let broken = Candidate { unavailable: vec!["it is broken".into()], ..candidate(plain("BROKEN", 1)) };
    let all = [candidate(cuda), broken, candidate(plain("GOOD", 2))];
    let explanation = choose(&LayerRequest::default(), &Policy::default(), &all);
    assert_eq!(chosen(&explanation), "GOOD");
    let reasons: Vec<_> = explanation.candidates[1..].iter().flat_map(|c| c.reasons.clone()).collect();
    assert_eq!(reasons, ["platform cpu not supported", "it is broken"]);
    let policy = Policy { backend: Some(wanted("CUDA")), ..Policy::default() };
    assert!(choose(&LayerRequest::default(), &policy, &all).result().is_err());
}

fn any_descriptor(index: usize) -> impl Strategy<Value = BackendDescriptor> {
    let features = prop::sample::subsequence(vec![feature::SINK, feature::SLIDING_WINDOW, feature::SOFTCAP], 0..=3);
    (features, prop::sample::subsequence(vec![64_u32, 80, 128], 0..=3), 0_i32..4, 0_i32..4, any::<bool>()).prop_map(
        move |(features, sizes, rank, other, is_cpu)| {
            let mut descriptor = plain(&format!("B{index}"), rank);
            descriptor.capability.features = features.into_iter().map(str::to_owned).collect();
            descriptor.capability.head_sizes = sizes.into_iter().map(NumberRule::from).collect();
            let when = Condition { has_sink: Some(true), ..Condition::default() };
            descriptor.rank.rules.push(RankRule { when, rank: other });
            descriptor.platforms = vec![if is_cpu { "cpu" } else { "cuda" }.to_owned()];
            descriptor
        },
    )
}

fn any_request() -> impl Strategy<Value = LayerRequest> {
    (
        prop::sample::select(vec![64_u32, 80, 128]),
        any::<[bool; 3]>(),
        prop::option::of(prop::sample::select(vec![16_u32, 24])),
    )
        .prop_map(|(head_size, [has_sink, has_sliding_window, has_softcap], block_size)| LayerRequest {
            head_size,
            has_sink,
            has_sliding_window,
            has_softcap,
            block_size,
            ..LayerRequest::default()
        })
}

fn any_candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let one = (0_usize..5, prop::sample::select(vec!["1.0.0", "1.1.0", "2.0.0"]))
        .prop_flat_map(|(index, version)| (any_descriptor(index), Just(version)));
    prop::collection::vec(one, 1..8).prop_map(|all| {
        let mut list: Vec<Candidate> = all
            .into_iter()
            .map(|(descriptor, version)| Candidate { plugin: plugin("p", version), ..candidate(descriptor) })
            .collect();
        // The registry never hands out one name in one version twice.
        list.sort_by(|a, b| (a.name(), &a.plugin.version).cmp(&(b.name(), &b.plugin.version)));
        list.dedup_by(|a, b| (a.name(), &a.plugin.version) == (b.name(), &b.plugin.version));
        list
    })
}

type Summary = (Option<String>, Vec<(String, String, Vec<Reason>)>, Vec<String>);

fn summary(explanation: &Explanation) -> Summary {
    let one = |c: &CandidateVerdict| (c.name().to_owned(), c.plugin.version.to_string(), c.reasons.clone());
    let all = explanation.candidates.iter().map(one).collect();
    (explanation.chosen.map(|at| explanation.candidates[at].name().to_owned()), all, explanation.warnings.clone())
}

proptest! {
    #[test]
    fn the_order_of_candidates_does_not_count(
        request in any_request(),
        (all, shuffled) in any_candidates().prop_flat_map(|all| (Just(all.clone()), Just(all).prop_shuffle())),
    ) {
        let policy = Policy { prefer: vec![wanted("B3")], ..Policy::default() };
        prop_assert_eq!(summary(&choose(&request, &policy, &all)), summary(&choose(&request, &policy, &shuffled)));
    }

    #[test]
    fn overrides_are_obeyed_or_errors_and_more_backends_never_hurt(
        request in any_request(), all in any_candidates(), name in prop::sample::select(vec!["B0", "B1", "B4"]),
        extra in any_descriptor(9),
    ) {
        let policy = Policy { backend: Some(wanted(name)), ..Policy::default() };
        if let Ok(found) = choose(&request, &policy, &all).result() {
            prop_assert_eq!(found.name(), name);
        }
        let before = choose(&request, &Policy::default(), &all);
        let more: Vec<Candidate> = all.iter().cloned().chain([candidate(extra)]).collect();
        let after = choose(&request, &Policy::default(), &more);
        prop_assert!(before.chosen.is_none() || after.chosen.is_some());
        let extra_refused = after.candidates.iter().any(|c| c.name() == "B9" && !c.is_valid());
        if extra_refused {
            prop_assert_eq!(summary(&before).0, summary(&after).0);
        }
    }

    #[test]
    fn refusals_have_reasons_and_a_what_if_change_admits(request in any_request(), all in any_candidates()) {
        let explanation = choose(&request, &Policy::default(), &all);
        for candidate in &explanation.candidates {
            prop_assert_eq!(candidate.rank.is_some(), candidate.reasons.is_empty());
            if let Some((changes, changed)) =
                smallest_changes(&candidate.descriptor, &request, &cpu(), Scope::Model, 4)
            {
                prop_assert!(!changes.is_empty());
                prop_assert!(verdict(&candidate.descriptor, &changed, &cpu()).is_valid());
            }
        }
    }
}
