//! Weights in f32.

use super::{Product, for_each_element};
use crate::pool::Pool;

/// Accumulators of a dot product: one vector register or two.
const LANES: usize = 16;
/// Activation rows that share the loads of a weight row.
const GROUP: usize = 4;

type Dots = unsafe fn(&[f32], &[f32], &mut [f32]);

pub(super) struct Float {
    values: Vec<f32>,
    cols: usize,
    dots: Dots,
}

impl Float {
    pub(super) fn new(values: Vec<f32>, cols: usize) -> Self {
        Self { values, cols, dots: fastest() }
    }
}

fn fastest() -> Dots {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            return dots_avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return dots_avx2;
        }
    }
    dots_portable
}

impl Product for Float {
    fn row(&self, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&self.values[row * self.cols..(row + 1) * self.cols]);
    }

    fn multiply(&self, pool: &Pool, x: &[f32], m: usize, out: &mut [f32]) {
        let cols = self.cols;
        for_each_element(pool, self.values.len() / cols, m, out, &|row, first, dots| {
            let weights = &self.values[row * cols..(row + 1) * cols];
            // SAFETY: `fastest` chose a function that this CPU can run.
            unsafe { (self.dots)(weights, &x[first * cols..(first + dots.len()) * cols], dots) };
        });
    }
}

/// All rows of `x` times `weights`. Each row is summed in the same order in a group and alone.
#[inline(always)]
fn dots<const FMA: bool>(weights: &[f32], x: &[f32], out: &mut [f32]) {
    let cols = weights.len();
    let mut row = 0;
    while row + GROUP <= out.len() {
        let results = group::<FMA, GROUP>(weights, &x[row * cols..(row + GROUP) * cols]);
        out[row..row + GROUP].copy_from_slice(&results);
        row += GROUP;
    }
    while row < out.len() {
        out[row] = group::<FMA, 1>(weights, &x[row * cols..(row + 1) * cols])[0];
        row += 1;
    }
}

#[inline(always)]
fn group<const FMA: bool, const R: usize>(weights: &[f32], x: &[f32]) -> [f32; R] {
    let cols = weights.len();
    let mut sums = [[0.0_f32; LANES]; R];
    let step = |sum: &mut f32, w: f32, x: f32| {
        *sum = if FMA { w.mul_add(x, *sum) } else { w * x + *sum };
    };
    let (chunks, tail) = weights.as_chunks::<LANES>();
    for (index, w) in chunks.iter().enumerate() {
        for (r, sums) in sums.iter_mut().enumerate() {
            let x = &x[r * cols + index * LANES..][..LANES];
            for lane in 0..LANES {
                step(&mut sums[lane], w[lane], x[lane]);
            }
        }
    }
    let start = chunks.len() * LANES;
    for (r, sums) in sums.iter_mut().enumerate() {
        for (lane, w) in tail.iter().enumerate() {
            step(&mut sums[lane], *w, x[r * cols + start + lane]);
        }
    }
    sums.map(|mut sums| {
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                sums[lane] += sums[lane + width];
            }
            width /= 2;
        }
        sums[0]
    })
}

fn dots_portable(weights: &[f32], x: &[f32], out: &mut [f32]) {
    dots::<false>(weights, x, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn dots_avx2(weights: &[f32], x: &[f32], out: &mut [f32]) {
    dots::<true>(weights, x, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn dots_avx512(weights: &[f32], x: &[f32], out: &mut [f32]) {
    dots::<true>(weights, x, out);
}
