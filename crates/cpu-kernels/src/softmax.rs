//! One row's online softmax over a tile of scores.
//!
//! Order: scale, soft-cap, ALiBi, mask, softmax; logits are kept times log₂ e, so that the
//! exponential is one of base 2. The running maximum starts at −∞, and a row that has seen nothing
//! stays there.

use crate::{micro::TILE, simd::Simd};
use std::{f32::consts::LOG2_E, ops::Range};

/// What becomes of a raw score.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Logits {
    /// Softmax scale times log₂ e; with a soft-cap: the scale over the cap.
    factor: f32,
    /// Soft-cap times log₂ e; 0 = off.
    cap: f32,
}

impl Logits {
    pub fn new(scale: f64, softcap: f64) -> Self {
        if softcap > 0.0 {
            Self { factor: (scale / softcap) as f32, cap: softcap as f32 * LOG2_E }
        } else {
            Self { factor: (scale * std::f64::consts::LOG2_E) as f32, cap: 0.0 }
        }
    }
}

/// A query row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// Keys that it sees, as positions.
    pub seen: (usize, usize),
    /// Its own position.
    pub position: i64,
    /// ALiBi slope of its head; 0 = off.
    pub slope: f32,
}

/// Running maximum (times log₂ e) and sum of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct State {
    pub max: f32,
    pub sum: f32,
}

impl State {
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// How weights are kept for the product with V.
pub(crate) trait Weights {
    type V: Simd;

    /// Keeps the weights of vector `c` of a row, and gives them as they were kept.
    ///
    /// # Safety
    /// As [`Simd`]; `p` must have room for a row.
    unsafe fn keep(p: *mut f32, c: usize, weights: Self::V) -> Self::V;
}

/// Turns a row of scores into weights and carries the state on; gives the factor for what was
/// summed up before.
///
/// # Safety
/// As [`Simd`]; `s` holds a row of scores, `p` has room for a row of weights.
#[inline(always)]
pub(crate) unsafe fn row<W: Weights>(
    s: *mut f32,
    p: *mut f32,
    tile: usize,
    row: &Row,
    logits: Logits,
    state: &mut State,
) -> f32 {
    let inside = |position: usize| position.saturating_sub(tile).min(TILE);
    let seen: Range<usize> = inside(row.seen.0)..inside(row.seen.1);
    let lanes = W::V::LANES;
    // SAFETY: the caller vouches for both rows, which are whole vectors.
    unsafe {
        let nothing = W::V::splat(f32::NEG_INFINITY);
        let mut max = nothing;
        for c in 0..TILE / lanes {
            let at = s.add(c * lanes);
            let index = W::V::iota().add(W::V::splat((c * lanes) as f32));
            let mut x = W::V::load(at).mul(W::V::splat(logits.factor));
            if logits.cap > 0.0 {
                x = x.tanh().mul(W::V::splat(logits.cap));
            }
            if row.slope != 0.0 {
                let distance = W::V::splat((row.position - tile as i64) as f32).sub(index).abs();
                x = distance.mul_add(W::V::splat(-row.slope * LOG2_E), x);
            }
            if seen != (0..TILE) {
                x = index.select_less(W::V::splat(seen.start as f32), nothing, x);
                x = index.select_less(W::V::splat(seen.end as f32), x, nothing);
            }
            x.store(at);
            max = max.max(x);
        }
        let new_max = state.max.max(max.horizontal_max());
        if new_max == f32::NEG_INFINITY {
            for c in 0..TILE / lanes {
                W::keep(p, c, W::V::zero());
            }
            return 1.0;
        }
        let alpha = W::V::splat(state.max - new_max).exp2().to_array()[0];
        let mut sum = W::V::zero();
        for c in 0..TILE / lanes {
            let weights = W::V::load(s.add(c * lanes)).sub(W::V::splat(new_max)).exp2();
            sum = sum.add(W::keep(p, c, weights));
        }
        *state = State { max: new_max, sum: state.sum * alpha + sum.horizontal_sum() };
        alpha
    }
}

/// Merges a later part into an earlier one, row by row: `a` becomes both. An empty part changes
/// nothing, bit for bit.
pub(crate) fn merge(a: &mut State, a_out: &mut [f32], b: State, b_out: &[f32]) {
    if b.max == f32::NEG_INFINITY {
        return;
    }
    if a.max == f32::NEG_INFINITY {
        *a = b;
        a_out.copy_from_slice(b_out);
        return;
    }
    let max = a.max.max(b.max);
    let (wa, wb) = ((a.max - max).exp2(), (b.max - max).exp2());
    for (a, b) in a_out.iter_mut().zip(b_out) {
        *a = *a * wa + b * wb;
    }
    *a = State { max, sum: a.sum * wa + b.sum * wb };
}

/// Turns sums into an output row, in place, and gives its LSE (natural logarithm). A sink adds to the
/// denominator once.
pub(crate) fn finish(state: State, out: &mut [f32], sink: Option<f32>) -> f32 {
    if state.max == f32::NEG_INFINITY {
        out.fill(0.0);
        return sink.unwrap_or(f32::NEG_INFINITY);
    }
    let (mut max, mut sum, mut factor) = (state.max, state.sum, 1.0);
    if let Some(sink) = sink {
        let sink = sink * LOG2_E;
        max = state.max.max(sink);
        factor = (state.max - max).exp2();
        sum = state.sum * factor + (sink - max).exp2();
    }
    let factor = factor / sum;
    // Adding 0 makes −0 into 0: the sign of nothing must not depend on which tiles were met.
    out.iter_mut().for_each(|value| *value = *value * factor + 0.0);
    (max + sum.log2()) * std::f32::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_states_change_nothing_and_sinks_count_once() {
        let (one, out) = (State { max: 3.0, sum: 2.0 }, [1.0, -0.0]);
        let (mut a, mut a_out) = (one, out);
        merge(&mut a, &mut a_out, State::EMPTY, &[f32::NAN; 2]);
        assert_eq!((a.max, a.sum, a_out), (3.0, 2.0, out));
        let (mut a, mut a_out) = (State::EMPTY, [f32::NAN; 2]);
        merge(&mut a, &mut a_out, one, &out);
        assert_eq!((a.max, a.sum, a_out), (3.0, 2.0, out));
        let mut rows = [f32::NAN; 2];
        assert_eq!(finish(State::EMPTY, &mut rows, None), f32::NEG_INFINITY);
        assert_eq!((finish(State::EMPTY, &mut rows, Some(2.5)), rows), (2.5, [0.0; 2]));
        // Four keys of logit 0 with values of 1, and a sink of 0.
        let mut rows = [4.0];
        let lse = finish(State { max: 0.0, sum: 4.0 }, &mut rows, Some(0.0));
        assert!((rows[0] - 0.8).abs() < 1e-7 && (lse - 5_f32.ln()).abs() < 1e-6);
    }
}
