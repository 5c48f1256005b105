//! Attention, batches and merge, by probes whose answers are known without any reference.

use attache_reference::{
    AttentionFeatures, AttentionInputs, AttentionOutput, ReferenceError, SinkShare, Span, VarlenInputs, attention,
    attention_partial, attention_varlen, merge, merge_into, merge_many, visible_value_scale,
};
use proptest::prelude::*;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const SIZE: usize = 3;

/// Numbers without pattern.
fn noise(count: usize, seed: u64) -> Vec<f64> {
    (0..count as u64).map(|i| ((i * 7919 + seed * 104_729 + 13) as f64 * 0.618).sin() * 1.7).collect()
}

struct Data {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    q_len: usize,
    seq_len: usize,
}

impl Data {
    fn new(q_len: usize, seq_len: usize, seed: u64) -> Self {
        Self {
            q: noise(q_len * HEADS * SIZE, seed),
            k: noise(seq_len * KV_HEADS * SIZE, seed + 1),
            v: noise(seq_len * KV_HEADS * SIZE, seed + 2),
            q_len,
            seq_len,
        }
    }

    /// Queries of zero and values that are their positions: each output is the mean of the
    /// visible positions.
    fn positions(q_len: usize, seq_len: usize) -> Self {
        let v = (0..seq_len).flat_map(|p| [p as f64; KV_HEADS * SIZE]).collect();
        Self { q: vec![0.0; q_len * HEADS * SIZE], v, ..Self::new(q_len, seq_len, 5) }
    }

    fn inputs<'a>(&'a self, features: AttentionFeatures<'a>) -> AttentionInputs<'a> {
        AttentionInputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            q_len: self.q_len,
            seq_len: self.seq_len,
            num_heads: HEADS,
            num_kv_heads: KV_HEADS,
            head_size: SIZE,
            head_size_v: SIZE,
            scale: 0.7,
            features,
        }
    }
}

fn near(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b || (a - b).abs() < 1e-12)
}

#[test]
fn queries_of_zero_give_the_mean_of_what_is_visible() {
    let spans = [Span { start: 1, end: 9 }];
    let causal = AttentionFeatures::causal();
    let all = AttentionFeatures::bidirectional();
    // Query 2 of 4 over 10 keys stands at position 8.
    let table: [(AttentionFeatures<'_>, f64); 8] = [
        (causal, 4.0),
        (all, 4.5),
        (AttentionFeatures { sliding_window: 3, ..causal }, 7.0),
        (AttentionFeatures { sliding_window: 2, ..all }, 8.0),
        (AttentionFeatures { window_left: Some(4), window_right: Some(0), ..all }, 6.0),
        (AttentionFeatures { chunked_local: 4, ..causal }, 8.0),
        (AttentionFeatures { sliding_window: 1, prefix_spans: &spans, ..causal }, 4.5),
        (AttentionFeatures { softcap: 5.0, ..causal }, 4.0),
    ];
    let data = Data::positions(4, 10);
    for (features, mean) in table {
        let output = attention(&data.inputs(features)).unwrap();
        for head in 0..HEADS {
            assert!(near(output.row(2, head).unwrap(), &[mean; SIZE]), "{features:?}: {:?}", output.row(2, head));
        }
    }
    let count = attention(&data.inputs(causal)).unwrap().row_lse(3, 0).unwrap().exp();
    assert!((count - 10.0).abs() < 1e-12, "the LSE counts the keys: {count}");
}

#[test]
fn values_of_one_give_one_and_each_query_head_reads_its_kv_head() {
    let mut data = Data::new(5, 9, 3);
    data.v.fill(1.0);
    let output = attention(&data.inputs(AttentionFeatures { softcap: 2.0, ..AttentionFeatures::causal() })).unwrap();
    assert!(output.out.iter().all(|x| (x - 1.0).abs() < 1e-15));
    // The value is its KV head.
    for (index, value) in data.v.iter_mut().enumerate() {
        *value = (index / SIZE % KV_HEADS) as f64;
    }
    let output = attention(&data.inputs(AttentionFeatures::causal())).unwrap();
    for (head, expected) in [0.0, 0.0, 1.0, 1.0].into_iter().enumerate() {
        assert!(near(output.row(4, head).unwrap(), &[expected; SIZE]));
    }
}

#[test]
fn softcap_alibi_and_sinks_follow_their_formulas() {
    // Two keys, logits a and b from the scale alone.
    let data = Data {
        q: [[1.0, 0.0, 0.0]; HEADS].concat(),
        k: [[3.0, 0.0, 0.0], [3.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]].concat(),
        v: [[1.0; KV_HEADS * SIZE], [0.0; KV_HEADS * SIZE]].concat(),
        q_len: 1,
        seq_len: 2,
    };
    let weight = |a: f64, b: f64, sink: f64| a.exp() / (a.exp() + b.exp() + sink.exp());
    let (a, b) = (2.1, -0.7);
    let cap = |x: f64| 1.5 * (x / 1.5).tanh();
    let (slopes, sinks) = ([0.25, 0.5, 1.0, 2.0], [0.5, f64::NEG_INFINITY, 40.0, 0.0]);
    let causal = AttentionFeatures::causal();
    let none = f64::NEG_INFINITY;
    let table: [(AttentionFeatures<'_>, [f64; HEADS]); 4] = [
        (causal, [weight(a, b, none); HEADS]),
        (AttentionFeatures { softcap: 1.5, ..causal }, [weight(cap(a), cap(b), none); HEADS]),
        (
            AttentionFeatures { alibi_slopes: Some(&slopes), softcap: 1.5, ..causal },
            slopes.map(|slope| weight(cap(a) - slope, cap(b), none)),
        ),
        (AttentionFeatures { sinks: Some(&sinks), ..causal }, sinks.map(|sink| weight(a, b, sink))),
    ];
    for (features, expected) in table {
        let output = attention(&data.inputs(features)).unwrap();
        for (head, expected) in expected.into_iter().enumerate() {
            assert!(near(output.row(0, head).unwrap(), &[expected; SIZE]), "{features:?} {head}");
        }
    }
    let output = attention(&data.inputs(AttentionFeatures { sinks: Some(&sinks), ..causal })).unwrap();
    let expected = (a.exp() + b.exp() + 0.5_f64.exp()).ln();
    assert!((output.row_lse(0, 0).unwrap() - expected).abs() < 1e-12, "the LSE holds the sink");
}

#[test]
fn rows_without_keys_are_zeros_and_masked_numbers_are_never_read() {
    let sinks = [1.25; HEADS];
    // More queries than keys: the first stands before the first key.
    let mut data = Data::new(3, 2, 8);
    for (features, lse) in [
        (AttentionFeatures::causal(), f64::NEG_INFINITY),
        (AttentionFeatures { sinks: Some(&sinks), ..AttentionFeatures::causal() }, 1.25),
    ] {
        let output = attention(&data.inputs(features)).unwrap();
        assert_eq!(output.row(0, 1).unwrap(), [0.0; SIZE]);
        assert_eq!(output.row_lse(0, 1), Some(lse));
    }
    let before = attention(&data.inputs(AttentionFeatures::causal())).unwrap();
    data.k[KV_HEADS * SIZE..].fill(f64::NAN);
    data.v[KV_HEADS * SIZE..].fill(f64::INFINITY);
    let after = attention(&data.inputs(AttentionFeatures::causal())).unwrap();
    assert_eq!(before.row(1, 0), after.row(1, 0), "query 1 sees key 0 alone");
    assert!(after.row(2, 0).unwrap()[0].is_nan(), "query 2 sees the rest");
    assert!(visible_value_scale(&data.inputs(AttentionFeatures::causal())).unwrap().is_infinite());
    let narrow = AttentionFeatures { chunked_local: 1, ..AttentionFeatures::bidirectional() };
    let first = Data { q_len: 1, seq_len: 1, q: data.q[..12].into(), k: data.k[..6].into(), v: data.v[..6].into() };
    assert!(visible_value_scale(&first.inputs(narrow)).unwrap() < 2.0);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let data = Data::new(2, 3, 1);
    let good = data.inputs(AttentionFeatures::causal());
    let (short, nan, plus) = ([1.0; 3], [f64::NAN; HEADS], [f64::INFINITY; HEADS]);
    let with = |features| AttentionInputs { features, ..good };
    let causal = AttentionFeatures::causal();
    let bad = [
        AttentionInputs { q: &data.q[1..], ..good },
        AttentionInputs { seq_len: 4, ..good },
        AttentionInputs { num_kv_heads: 3, ..good },
        AttentionInputs { head_size: 0, ..good },
        AttentionInputs { scale: f64::NAN, ..good },
        with(AttentionFeatures { softcap: f64::INFINITY, ..causal }),
        with(AttentionFeatures { sinks: Some(&short), ..causal }),
        with(AttentionFeatures { sinks: Some(&nan), ..causal }),
        with(AttentionFeatures { sinks: Some(&plus), ..causal }),
        with(AttentionFeatures { alibi_slopes: Some(&plus), ..causal }),
        with(AttentionFeatures { sliding_window: 2, window_left: Some(1), ..causal }),
    ];
    for (index, inputs) in bad.iter().enumerate() {
        assert!(attention(inputs).is_err(), "{index}");
    }
    assert!(attention_partial(&good, 1..4, SinkShare::Counted).is_err());
    assert!(matches!(merge_many(&[]), Err(ReferenceError::NoStates)));
    let mut state = attention(&good).unwrap();
    state.lse[0] = f64::NAN;
    assert!(merge(&state, &state).is_err());
    let other = attention(&Data::new(1, 3, 1).inputs(causal)).unwrap();
    assert!(matches!(merge(&other, &attention(&good).unwrap()), Err(ReferenceError::StateShape { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// However the keys are cut, the merged parts are the whole; an empty part changes no bit.
    #[test]
    fn parts_merge_to_the_whole(q_len in 1_usize..6, seq_len in 1_usize..20, cut in 0_usize..20, window in 0_i64..8, seed in 0_u64..1000) {
        let sinks = noise(HEADS, seed);
        let features =
            AttentionFeatures { sliding_window: window, sinks: Some(&sinks), softcap: 3.0, ..AttentionFeatures::causal() };
        let data = Data::new(q_len, seq_len, seed);
        let inputs = data.inputs(features);
        let cut = cut.min(seq_len);
        let whole = attention(&inputs).unwrap();
        let first = attention_partial(&inputs, 0..cut, SinkShare::LeftOut).unwrap();
        let second = attention_partial(&inputs, cut..seq_len, SinkShare::Counted).unwrap();
        let merged = merge(&first, &second).unwrap();
        prop_assert!(near(&merged.out, &whole.out) && near(&merged.lse, &whole.lse));
        let mut empty = AttentionOutput::empty(q_len, HEADS, SIZE).unwrap();
        empty.out.fill(f64::NAN);
        prop_assert_eq!(&merge(&empty, &whole).unwrap(), &whole);
        let mut state = whole.clone();
        merge_into(&mut state, &empty).unwrap();
        prop_assert_eq!(state, whole);
    }

    /// A batch is its requests, bit for bit.
    #[test]
    fn a_batch_is_its_requests(lens in prop::collection::vec((0_usize..5, 0_usize..9), 0..5), seed in 0_u64..1000) {
        let data: Vec<Data> = lens.iter().zip(seed..).map(|((q, kv), seed)| Data::new(*q, *kv, seed)).collect();
        let join = |part: fn(&Data) -> &Vec<f64>| data.iter().flat_map(part).copied().collect::<Vec<f64>>();
        let mut query_start_loc = vec![0];
        for (q_len, _) in &lens {
            query_start_loc.push(query_start_loc[query_start_loc.len() - 1] + *q_len as i32);
        }
        let causal: Vec<bool> = (0..lens.len()).map(|request| request % 2 == 0).collect();
        let (q, k, v) = (join(|d| &d.q), join(|d| &d.k), join(|d| &d.v));
        let seq_lens: Vec<i32> = lens.iter().map(|(_, kv)| *kv as i32).collect();
        let inputs = VarlenInputs {
            q: &q,
            k: &k,
            v: &v,
            query_start_loc: &query_start_loc,
            seq_lens: &seq_lens,
            num_heads: HEADS,
            num_kv_heads: KV_HEADS,
            head_size: SIZE,
            head_size_v: SIZE,
            scale: 0.7,
            features: AttentionFeatures::causal(),
            causal_per_request: Some(&causal),
            prefix_spans_per_request: None,
        };
        let batch = attention_varlen(&inputs).unwrap();
        for (request, data) in data.iter().enumerate() {
            let alone = attention(&data.inputs(AttentionFeatures { causal: causal[request], ..AttentionFeatures::causal() })).unwrap();
            for i in 0..data.q_len {
                let token = query_start_loc[request] as usize + i;
                prop_assert_eq!(batch.row(token, 3), alone.row(i, 3));
                prop_assert_eq!(batch.row_lse(token, 3), alone.row_lse(i, 3));
            }
        }
        for bad in [&[1][..], &[0, -1], &[0, 2, 1]] {
            let bad = VarlenInputs { query_start_loc: bad, ..inputs };
            prop_assert!(attention_varlen(&bad).is_err());
        }
    }
}
