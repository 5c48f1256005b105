//! Matrices that activations are multiplied with.
//!
//! Owns the weights in memory and the product `x · Wᵀ` on the engine's pool. Must not know models.
//!
//! A row of a product is the same, bit for bit, whether the row is alone or among others: every
//! element is one dot product, summed in one fixed order that does not depend on the batch. So the
//! text of a prompt does not depend on which other prompts run beside it. candle's own products do
//! not promise that (its f32, Q6_K and AMX paths differ between one row and many) and run on its own
//! spinning pool, hence only its file reader, its blocks and their dot products are used.

mod blocks;
mod float;

use crate::{
    error::GgufError,
    pool::{Pool, Shards},
};
use blocks::Blocks;
use candle_core::{
    Device,
    quantized::{GgmlDType, QTensor, k_quants as candle},
};
use float::Float;

/// Rows of activations that share one pass over a weight row.
const ROW_TILE: usize = 32;
/// Weight rows that one task takes at least.
const COLUMN_GRAIN: usize = 16;

/// A matrix in one storage format.
trait Product: Send + Sync {
    /// Writes weight row `row` as f32.
    fn row(&self, row: usize, out: &mut [f32]);

    /// `out[m, rows] = x[m, cols] · Wᵀ`.
    fn multiply(&self, pool: &Pool, x: &[f32], m: usize, out: &mut [f32]);
}

/// Runs `dots(weight row, first activation row, products)` over all elements of `out[m, rows]`.
fn for_each_element(
    pool: &Pool,
    rows: usize,
    m: usize,
    out: &mut [f32],
    dots: &(dyn Fn(usize, usize, &mut [f32]) + Sync),
) {
    let shards = Shards::new(out);
    pool.run_ranges(rows, COLUMN_GRAIN, &|start, end| {
        let mut buffer = [0.0; ROW_TILE];
        for first in (0..m).step_by(ROW_TILE) {
            let buffer = &mut buffer[..ROW_TILE.min(m - first)];
            for row in start..end {
                dots(row, first, buffer);
                for (offset, value) in buffer.iter().enumerate() {
                    // SAFETY: each weight row is one task's alone, so each element has one writer.
                    unsafe { shards.write((first + offset) * rows + row, *value) };
                }
            }
        }
    });
}

/// A matrix `[rows, cols]` that maps `cols` inputs to `rows` outputs.
pub struct Linear {
    rows: usize,
    cols: usize,
    format: &'static str,
    weights: Box<dyn Product>,
}

impl std::fmt::Debug for Linear {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Linear([{}, {}] {})", self.rows, self.cols, self.format)
    }
}

impl Linear {
    /// A matrix of f32 values, row after row.
    ///
    /// # Panics
    /// When there are not `rows · cols` values.
    #[must_use]
    pub fn from_f32(values: Vec<f32>, rows: usize, cols: usize) -> Self {
        assert_eq!(values.len(), rows * cols, "a matrix of {rows} x {cols}");
        Self { rows, cols, format: "F32", weights: Box::new(Float::new(values, cols)) }
    }

    /// A matrix from a GGUF file: in f32, or in the file's own format.
    ///
    /// # Errors
    /// For a tensor that is no matrix and for formats that hold no weights.
    pub fn from_gguf(name: &str, tensor: &QTensor, keep_format: bool) -> Result<Self, GgufError> {
        let fail = |reason: String| GgufError::Tensor { name: name.to_owned(), reason };
        let (rows, cols) = tensor.shape().dims2().map_err(|error| fail(error.to_string()))?;
        let data = tensor.data().map_err(|error| fail(error.to_string()))?;
        macro_rules! in_blocks {
            ($($dtype:ident $block:ident $name:literal),* $(,)?) => {
                match tensor.dtype() {
                    $(GgmlDType::$dtype if keep_format && takes_width(GgmlDType::$dtype, cols) => {
                        let blocks = Blocks::<candle::$block>::new(&data, rows, cols)
                            .ok_or_else(|| fail(format!("{} bytes are not a {rows} x {cols} matrix", data.len())))?;
                        ($name, Box::new(blocks) as Box<dyn Product>)
                    })*
                    GgmlDType::Q8_1 | GgmlDType::Q8K => {
                        return Err(fail(format!("format {:?} is for activations, not for weights", tensor.dtype())));
                    }
                    _ => {
                        let values = tensor.dequantize(&Device::Cpu).and_then(|all| all.flatten_all()?.to_vec1());
                        ("F32", Box::new(Float::new(values.map_err(|error| fail(error.to_string()))?, cols)) as _)
                    }
                }
            };
        }
        let (format, weights) = in_blocks!(
            Q4_0 BlockQ4_0 "Q4_0", Q4_1 BlockQ4_1 "Q4_1", Q5_0 BlockQ5_0 "Q5_0", Q5_1 BlockQ5_1 "Q5_1",
            Q8_0 BlockQ8_0 "Q8_0", Q2K BlockQ2K "Q2_K", Q3K BlockQ3K "Q3_K", Q4K BlockQ4K "Q4_K",
            Q5K BlockQ5K "Q5_K", Q6K BlockQ6K "Q6_K",
        );
        Ok(Self { rows, cols, format, weights })
    }

    /// Outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The storage format's name, as GGUF has it.
    #[must_use]
    pub fn format(&self) -> &'static str {
        self.format
    }

    /// `out[m, rows] = x[m, cols] · Wᵀ`.
    ///
    /// # Panics
    /// When a slice does not hold exactly `m` rows.
    pub fn forward(&self, pool: &Pool, x: &[f32], m: usize, out: &mut [f32]) {
        assert_eq!((x.len(), out.len()), (m * self.cols, m * self.rows), "{self:?} with {m} rows");
        if m == 0 {
            return;
        }
        self.weights.multiply(pool, x, m, out);
    }

    /// Weight row `row` as f32: how an embedding is looked up.
    ///
    /// # Panics
    /// When there is no such row or `out` does not hold `cols` values.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "row {row} of {self:?}");
        self.weights.row(row, out);
    }
}

/// Whether candle's dot product takes rows of so many elements: some want an even number of blocks.
/// What it does not take is dequantised.
fn takes_width(dtype: GgmlDType, cols: usize) -> bool {
    match dtype {
        GgmlDType::Q4_1 | GgmlDType::Q5_0 | GgmlDType::Q5_1 => cols.is_multiple_of(64),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};

    /// Deterministic values in −1 … 1.
    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1_u32 << 23) as f32 - 1.0
            })
            .collect()
    }

    const FORMATS: [GgmlDType; 13] = [
        GgmlDType::F32,
        GgmlDType::F16,
        GgmlDType::BF16,
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ];

    fn linear(dtype: GgmlDType, rows: usize, cols: usize) -> (Linear, Vec<f32>) {
        let tensor = Tensor::from_vec(noise(rows * cols, 7), (rows, cols), &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&tensor, dtype).unwrap();
        let linear = Linear::from_gguf("w", &tensor, true).unwrap();
        let dense = tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        (linear, dense)
    }

    #[test]
    fn a_row_does_not_depend_on_the_batch() {
        let (rows, cols) = (83, 512);
        for dtype in FORMATS {
            let (linear, _) = linear(dtype, rows, cols);
            for threads in [1, 3] {
                let pool = Pool::new(threads);
                let x = noise(70 * cols, 3);
                for m in [1, 2, 3, 4, 5, 31, 32, 33, 70] {
                    let mut together = vec![f32::NAN; m * rows];
                    linear.forward(&pool, &x[..m * cols], m, &mut together);
                    for row in 0..m {
                        let mut alone = vec![f32::NAN; rows];
                        linear.forward(&pool, &x[row * cols..(row + 1) * cols], 1, &mut alone);
                        let (together, alone) = (&together[row * rows..(row + 1) * rows], &alone);
                        let equal = together.iter().zip(alone).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(equal, "{dtype:?}: row {row} of {m} differs from the row alone");
                    }
                }
            }
        }
    }

    #[test]
    fn products_agree_with_the_dequantised_matrix() {
        let (rows, cols, m) = (37, 768, 5);
        let pool = Pool::new(2);
        let x = noise(m * cols, 5);
        for dtype in FORMATS {
            let (linear, dense) = linear(dtype, rows, cols);
            let mut out = vec![f32::NAN; m * rows];
            linear.forward(&pool, &x, m, &mut out);
            let mut row = vec![f32::NAN; cols];
            for n in 0..rows {
                linear.row(n, &mut row);
                let worst = row.iter().zip(&dense[n * cols..]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 1e-6, "{dtype:?}: row {n} is off by {worst}");
                for i in 0..m {
                    let exact: f64 = (0..cols).map(|k| f64::from(x[i * cols + k]) * f64::from(row[k])).sum();
                    let error = (f64::from(out[i * rows + n]) - exact).abs();
                    // Activations are rounded to 8 bits for quantised weights: 768 errors of up to
                    // 1/254 with random signs, times weights below 1.
                    let bound =
                        if matches!(dtype, GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16) { 1e-4 } else { 0.12 };
                    assert!(error < bound, "{dtype:?}: element ({i}, {n}) is off by {error}");
                }
            }
        }
    }

    #[test]
    fn formats_without_a_dot_product_are_refused() {
        let tensor = Tensor::from_vec(noise(512, 1), (2, 256), &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&tensor, GgmlDType::Q8_1).unwrap();
        let error = Linear::from_gguf("blk.0.attn_q.weight", &tensor, true).unwrap_err().to_string();
        assert!(error.contains("Q8_1") && error.contains("blk.0.attn_q.weight"), "{error}");
    }
}
