//! Merge of partial attention states (split-KV, cascade, context parallel).
//!
//! Owns the algebra of (out, LSE) pairs and the meaning of "empty" (LSE = −∞). Must not know
//! how the parts were computed, nor which of them counted a sink.

use crate::attention::AttentionOutput;
use crate::error::ReferenceError;

/// Factor from a base-2 LSE to the natural one: `lse = lse2 · ln 2`.
pub const BASE2_TO_NATURAL: f64 = std::f64::consts::LN_2;

/// Merges two states over disjoint keys of the same queries. See [`merge_many`].
///
/// # Errors
/// As [`merge_many`].
pub fn merge(first: &AttentionOutput, second: &AttentionOutput) -> Result<AttentionOutput, ReferenceError> {
    merge_many(&[first, second])
}

/// Merges `other` into `state`, in place. Bit-equal to [`merge`].
///
/// # Errors
/// As [`merge_many`]; `state` is unchanged then.
pub fn merge_into(state: &mut AttentionOutput, other: &AttentionOutput) -> Result<(), ReferenceError> {
    *state = merge_many(&[state, other])?;
    Ok(())
}

/// Merges any number of states over disjoint keys of the same queries.
///
/// Per row, over the parts with LSE `l_s > −∞`, `m = max l_s`:
///
/// ```text
/// out = Σ_s exp(l_s − m) · out_s / Σ_s exp(l_s − m)
/// lse = m + ln Σ_s exp(l_s − m)
/// ```
///
/// A part with LSE −∞ is empty: its output is not read, whatever it holds. With one non-empty
/// part the row is that part's, **bit for bit**; with none it is zeros and −∞. A sink may have
/// been counted by one part only. Source: Dao 2022/2023 (FlashAttention, FlashDecoding).
///
/// # Errors
/// [`ReferenceError::NoStates`] for an empty list; [`ReferenceError::StateShape`] when shapes
/// differ; [`ReferenceError::Length`] when a state's vectors do not fit its own shape;
/// [`ReferenceError::Value`] for an LSE that is NaN or +∞.
pub fn merge_many(states: &[&AttentionOutput]) -> Result<AttentionOutput, ReferenceError> {
    let first = states.first().ok_or(ReferenceError::NoStates)?;
    for state in states {
        check(first, state)?;
    }
    let (q_len, heads, size) = (first.q_len, first.num_heads, first.head_size_v);
    let mut result = AttentionOutput::empty(q_len, heads, size)?;
    for i in 0..q_len {
        for h in 0..heads {
            let at = h * q_len + i;
            let row = (i * heads + h) * size..(i * heads + h + 1) * size;
            let parts: Vec<&&AttentionOutput> = states.iter().filter(|s| s.lse[at] != f64::NEG_INFINITY).collect();
            match parts.as_slice() {
                [] => {}
                [only] => {
                    result.out[row.clone()].copy_from_slice(&only.out[row]);
                    result.lse[at] = only.lse[at];
                }
                _ => {
                    let max = parts.iter().map(|s| s.lse[at]).fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = parts.iter().map(|s| (s.lse[at] - max).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    for d in row {
                        let sum: f64 = parts.iter().zip(&weights).map(|(s, w)| w * s.out[d]).sum();
                        result.out[d] = sum / total;
                    }
                    result.lse[at] = max + total.ln();
                }
            }
        }
    }
    Ok(result)
}

fn check(first: &AttentionOutput, state: &AttentionOutput) -> Result<(), ReferenceError> {
    let shape = |s: &AttentionOutput| [s.q_len, s.num_heads, s.head_size_v];
    if shape(first) != shape(state) {
        return Err(ReferenceError::StateShape { first: shape(first), other: shape(state) });
    }
    crate::shape::check_len("out", &shape(state), state.out.len())?;
    crate::shape::check_len("lse", &[state.num_heads, state.q_len], state.lse.len())?;
    match state.lse.iter().position(|l| l.is_nan() || *l == f64::INFINITY) {
        None => Ok(()),
        Some(index) => Err(ReferenceError::Value {
            name: "lse",
            index,
            value: state.lse[index],
            rule: "an LSE is finite, or -inf for an empty row",
        }),
    }
}
