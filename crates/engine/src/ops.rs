//! The small operations between a model's products: norms, rotations, gates, sums.
//!
//! Owns their arithmetic. Each output row depends on its own input row alone, so that results do not
//! depend on the batch.

use crate::pool::{Pool, Shards};

/// Rows below which sharing the work costs more than it saves.
const FEW: usize = 4096;

/// Calls `body(row, values)` for each row of `width` values of `x`, shared out over the pool.
fn rows(pool: &Pool, x: &mut [f32], width: usize, body: &(dyn Fn(usize, &mut [f32]) + Sync)) {
    let count = x.len() / width.max(1);
    if x.len() < FEW {
        x.chunks_exact_mut(width).enumerate().for_each(|(row, values)| body(row, values));
        return;
    }
    let shards = Shards::new(x);
    pool.run_ranges(count, 1, &|start, end| {
        for row in start..end {
            // SAFETY: each row is one task's alone.
            body(row, unsafe { shards.slice(row * width, width) });
        }
    });
}

/// Root-mean-square norm of each row of `x`, times `weight`.
pub(crate) fn rms_norm(pool: &Pool, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    rows(pool, out, width, &|row, out| normalise(&x[row * width..(row + 1) * width], weight, eps, out));
}

/// As [`rms_norm`], in place.
pub(crate) fn rms_norm_in_place(pool: &Pool, x: &mut [f32], weight: &[f32], eps: f32) {
    rows(pool, x, weight.len(), &|_, row| {
        let scale = rms_scale(row, eps);
        row.iter_mut().zip(weight).for_each(|(value, weight)| *value = *value * scale * weight);
    });
}

fn normalise(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = rms_scale(x, eps);
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

fn rms_scale(x: &[f32], eps: f32) -> f32 {
    let mut sums = [0.0_f64; 8];
    let (chunks, tail) = x.as_chunks::<8>();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(value * value);
        }
    }
    let total: f64 = sums.iter().sum::<f64>() + tail.iter().map(|value| f64::from(value * value)).sum::<f64>();
    let mean = (total / x.len() as f64) as f32;
    1.0 / (mean + eps).sqrt()
}

/// Adds `y` to `x`.
pub(crate) fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Multiplies each value by `factor`.
pub(crate) fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

/// The non-linearity of a gated feed-forward network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU by its tanh approximation.
    GeluTanh,
}

impl Activation {
    fn apply(self, x: f32) -> f32 {
        match self {
            Self::Silu => x / (1.0 + (-x).exp()),
            Self::GeluTanh => {
                let inner = 0.797_884_6 * x * (1.0 + 0.044_715 * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }
        }
    }
}

/// `gate = activation(gate) · up`, rows of `width`.
pub(crate) fn gate(pool: &Pool, activation: Activation, gate: &mut [f32], up: &[f32], width: usize) {
    rows(pool, gate, width, &|row, gate| {
        for (gate, up) in gate.iter_mut().zip(&up[row * width..(row + 1) * width]) {
            *gate = activation.apply(*gate) * up;
        }
    });
}

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pairing {
    /// Neighbours: (0, 1), (2, 3), …
    Interleaved,
    /// Halves: (0, n/2), (1, n/2 + 1), …
    Halves,
}

/// Rotary position embedding of the first `2 · frequencies` elements of a head.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Rope {
    pairing: Pairing,
    frequencies: Vec<f64>,
}

impl Rope {
    /// Frequencies `base^(−2i/dims) / scale`.
    pub(crate) fn new(pairing: Pairing, dims: usize, base: f64, scale: f64) -> Self {
        let frequencies = (0..dims / 2).map(|i| base.powf(-2.0 * i as f64 / dims as f64) / scale).collect();
        Self { pairing, frequencies }
    }

    /// Divides each frequency by its factor.
    pub(crate) fn with_factors(mut self, factors: &[f32]) -> Self {
        self.frequencies.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= f64::from(*factor));
        self
    }

    /// Cosines and sines for a batch's positions.
    pub(crate) fn table(&self, positions: &[u32]) -> RopeTable<'_> {
        let mut values = Vec::with_capacity(positions.len() * self.frequencies.len());
        for position in positions {
            for frequency in &self.frequencies {
                let (sin, cos) = (f64::from(*position) * frequency).sin_cos();
                values.push((cos as f32, sin as f32));
            }
        }
        RopeTable { rope: self, values }
    }
}

/// A [`Rope`] at a batch's positions: shared by the layers of a step.
pub(crate) struct RopeTable<'a> {
    rope: &'a Rope,
    values: Vec<(f32, f32)>,
}

impl RopeTable<'_> {
    /// Rotates the elements from `offset` of each head of each token of `x` `[tokens, heads, size]`.
    pub(crate) fn apply(&self, pool: &Pool, x: &mut [f32], heads: usize, size: usize, offset: usize) {
        let pairs = self.rope.frequencies.len();
        let pairing = self.rope.pairing;
        rows(pool, x, heads * size, &|token, row| {
            let table = &self.values[token * pairs..(token + 1) * pairs];
            for head in row.chunks_exact_mut(size) {
                let head = &mut head[offset..offset + 2 * pairs];
                match pairing {
                    Pairing::Interleaved => {
                        for (pair, (cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(table) {
                            let [a, b] = *pair;
                            *pair = [a * cos - b * sin, b * cos + a * sin];
                        }
                    }
                    Pairing::Halves => {
                        let (first, second) = head.split_at_mut(pairs);
                        for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(table) {
                            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                        }
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_keeps_lengths_and_depends_on_distance_alone() {
        let pool = Pool::new(1);
        for pairing in [Pairing::Interleaved, Pairing::Halves] {
            let rope = Rope::new(pairing, 8, 10_000.0, 1.0);
            let dot = |p: u32, j: u32| {
                let mut x: Vec<f32> = (0..16).map(|i| (i as f32 * 0.7).sin()).collect();
                rope.table(&[p, j]).apply(&pool, &mut x, 1, 8, 0);
                x[..8].iter().zip(&x[8..]).map(|(a, b)| a * b).sum::<f32>()
            };
            assert!((dot(5, 3) - dot(105, 103)).abs() < 1e-5, "{pairing:?}");
            assert!((dot(5, 3) - dot(5, 4)).abs() > 1e-4, "{pairing:?}");
        }
    }

    #[test]
    fn a_rotation_leaves_the_other_elements_alone() {
        let pool = Pool::new(1);
        let mut x = vec![1.0; 10];
        Rope::new(Pairing::Halves, 4, 10_000.0, 1.0).table(&[7]).apply(&pool, &mut x, 1, 10, 6);
        assert!(x[..6].iter().all(|value| *value == 1.0));
        assert!(x[6..].iter().all(|value| *value != 1.0));
    }

    #[test]
    fn norms_in_and_out_of_place_agree() {
        let pool = Pool::new(3);
        let x: Vec<f32> = (0..9000).map(|i| (i as f32 * 0.37).sin()).collect();
        let weight: Vec<f32> = (0..90).map(|i| 1.0 + i as f32 / 90.0).collect();
        let mut out = vec![f32::NAN; x.len()];
        rms_norm(&pool, &x, &weight, 1e-6, &mut out);
        let mut again = x.clone();
        rms_norm_in_place(&pool, &mut again, &weight, 1e-6);
        assert_eq!(out, again);
        let ones = vec![1.0; 90];
        rms_norm(&pool, &x, &ones, 0.0, &mut out);
        let square: f32 = out[..90].iter().map(|value| value * value).sum();
        assert!((square - 90.0).abs() < 1e-3, "{square}");
    }

    #[test]
    fn activations_have_their_known_values() {
        assert!((Activation::Silu.apply(1.0) - 0.731_058_6).abs() < 1e-6);
        assert!((Activation::GeluTanh.apply(1.0) - 0.841_192).abs() < 1e-5);
        assert_eq!(Activation::Silu.apply(-200.0), 0.0);
        assert!(Activation::GeluTanh.apply(-50.0).abs() < 1e-6);
    }
}
