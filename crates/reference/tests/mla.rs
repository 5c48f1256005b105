//! Latent attention: both forms, their scale and sparse lists.

use attache_reference::{
    AttentionFeatures, AttentionOutput, ReferenceError,
    mla::{
        MlaDims, MlaInputs, TopK, absorb_query, decode_absorbed, prefill_expanded, project_output, softmax_scale,
        visible_value_scale, yarn_mscale,
    },
};

const DIMS: MlaDims =
    MlaDims { num_heads: 3, kv_lora_rank: 8, qk_rope_head_dim: 4, qk_nope_head_dim: 6, v_head_dim: 5 };
const SEQ_LEN: usize = 9;
const Q_LEN: usize = 4;

fn noise(count: usize, seed: u64) -> Vec<f64> {
    (0..count as u64).map(|i| ((i * 7919 + seed * 104_729 + 13) as f64 * 0.618).sin()).collect()
}

fn projection() -> Vec<f64> {
    noise(DIMS.num_heads * (DIMS.qk_nope_head_dim + DIMS.v_head_dim) * DIMS.kv_lora_rank, 1)
}

fn inputs<'a>(q: &'a [f64], latent: &'a [f64], features: AttentionFeatures<'a>) -> MlaInputs<'a> {
    let scale = softmax_scale(&DIMS, None).unwrap();
    MlaInputs { q, latent, q_len: Q_LEN, seq_len: SEQ_LEN, dims: DIMS, scale, features, topk: None }
}

fn near(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12)
}

#[test]
fn absorbed_and_expanded_are_the_same() {
    let projection = projection();
    let (latent, q) = (noise(SEQ_LEN * 12, 2), noise(Q_LEN * 3 * 10, 3));
    let sinks = [0.5, -1.0, 2.0];
    let absorbed_q = absorb_query(&q, Q_LEN, &DIMS, &projection).unwrap();
    let causal = AttentionFeatures::causal();
    for features in [
        causal,
        AttentionFeatures { sliding_window: 3, sinks: Some(&sinks), ..causal },
        AttentionFeatures { softcap: 0.8, ..AttentionFeatures::bidirectional() },
    ] {
        let expanded = prefill_expanded(&inputs(&q, &latent, features), &projection).unwrap();
        let absorbed = decode_absorbed(&inputs(&absorbed_q, &latent, features)).unwrap();
        let projected = project_output(&absorbed.out, Q_LEN, &DIMS, &projection).unwrap();
        assert!(near(&projected, &expanded.out) && near(&absorbed.lse, &expanded.lse), "{features:?}");
    }
}

#[test]
fn the_scale_is_of_the_head_that_is_not_absorbed() {
    let deepseek =
        MlaDims { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64, qk_nope_head_dim: 128, v_head_dim: 128 };
    let plain = 192_f64.powf(-0.5);
    for (yarn, factor) in
        [(None, 1.0), (Some((40.0, 0.707)), 1.58963), (Some((40.0, 1.0)), 1.87385), (Some((1.0, 1.0)), 1.0)]
    {
        let found = softmax_scale(&deepseek, yarn).unwrap() / plain;
        assert!((found - factor).abs() < 1e-5, "{yarn:?}: {found}");
    }
    assert_eq!(softmax_scale(&deepseek, Some((40.0, 0.0))).unwrap(), softmax_scale(&deepseek, None).unwrap());
    assert!(yarn_mscale(f64::NAN, 1.0).is_err());
}

#[test]
fn sparse_lists_narrow_what_the_mask_lets_through() {
    let (latent, q) = (noise(SEQ_LEN * 12, 2), vec![0.0; Q_LEN * 3 * 12]);
    let causal = inputs(&q, &latent, AttentionFeatures::causal());
    let run = |indices: &[i32]| -> Result<AttentionOutput, ReferenceError> {
        decode_absorbed(&MlaInputs { topk: Some(TopK { indices, width: 3 }), ..causal })
    };
    // Query 0 stands at position 5: row 8 is masked; query 1 lists nothing.
    let output = run(&[2, -1, 8, -1, -1, -1, 6, 0, 1, 3, -1, 4]).unwrap();
    assert!(near(output.row(0, 1).unwrap(), &latent[2 * 12..2 * 12 + 8]));
    assert_eq!((output.row(1, 0).unwrap(), output.row_lse(1, 0)), (&[0.0; 8][..], Some(f64::NEG_INFINITY)));
    assert!((output.row_lse(2, 2).unwrap() - 3_f64.ln()).abs() < 1e-12);
    for bad in [[9, -1, -1], [-2, -1, -1], [3, 1, 3]] {
        let list: Vec<i32> = bad.into_iter().chain([-1; 9]).collect();
        assert!(matches!(run(&list), Err(ReferenceError::Index { .. })), "{bad:?}");
    }
    assert!(run(&[0; 4]).is_err());
}

#[test]
fn the_value_scale_is_of_the_form_s_values() {
    let mut latent = vec![0.0; SEQ_LEN * 12];
    let q = noise(Q_LEN * 3 * 12, 3);
    // The rotary part is no value.
    latent[3] = -7.0;
    latent[10] = 100.0;
    let absorbed = inputs(&q, &latent, AttentionFeatures::causal());
    assert_eq!(visible_value_scale(&absorbed, None).unwrap(), 7.0);
    let mut projection = vec![0.0; DIMS.num_heads * 11 * 8];
    // Head 1: a row of keys that does not count, and one of values that does.
    projection[11 * 8 + 3] = 50.0;
    projection[(11 + 6) * 8 + 3] = 2.0;
    let q = noise(Q_LEN * 3 * 10, 3);
    let expanded = inputs(&q, &latent, AttentionFeatures::causal());
    assert_eq!(visible_value_scale(&expanded, Some(&projection)).unwrap(), 14.0);
    assert!(prefill_expanded(&expanded, &projection[1..]).is_err());
    assert!(decode_absorbed(&inputs(&q[1..], &latent, AttentionFeatures::causal())).is_err());
}
