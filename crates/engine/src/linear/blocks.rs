//! Weights in GGUF's block formats: candle's blocks, and candle's dot products of one row with one
//! row, which choose their instruction set at run time.

use super::{Product, for_each_element};
use crate::pool::{Pool, Shards};
use candle_core::quantized::k_quants::GgmlType;

/// A matrix in blocks of one format.
pub(super) struct Blocks<T> {
    blocks: Vec<T>,
    rows: usize,
    cols: usize,
}

impl<T: GgmlType> Blocks<T> {
    /// Reads blocks as a file stores them; `None` when there are not enough for the matrix.
    pub(super) fn new(data: &[u8], rows: usize, cols: usize) -> Option<Self> {
        let count = rows.checked_mul(cols / T::BLCK_SIZE)?;
        if !cols.is_multiple_of(T::BLCK_SIZE) || data.len() != count.checked_mul(size_of::<T>())? {
            return None;
        }
        let mut blocks: Vec<T> = Vec::with_capacity(count);
        // SAFETY: the source holds `count` blocks and the destination has room for them; a block is
        // plain data, every bit pattern of which is a value.
        unsafe {
            std::ptr::copy_nonoverlapping(data.as_ptr(), blocks.as_mut_ptr().cast::<u8>(), data.len());
            blocks.set_len(count);
        }
        Some(Self { blocks, rows, cols })
    }

    fn blocks_of(&self, row: usize) -> &[T] {
        let width = self.cols / T::BLCK_SIZE;
        &self.blocks[row * width..(row + 1) * width]
    }
}

impl<T: GgmlType> Product for Blocks<T> {
    fn row(&self, row: usize, out: &mut [f32]) {
        T::to_float(self.blocks_of(row), out);
    }

    fn multiply(&self, pool: &Pool, x: &[f32], m: usize, out: &mut [f32]) {
        let (cols, width) = (self.cols, self.cols / T::VecDotType::BLCK_SIZE);
        // Activations are rounded to the format that the dot product takes, each row for itself.
        let mut rounded = vec![T::VecDotType::zeros(); m * width];
        let shards = Shards::new(&mut rounded);
        pool.run_ranges(m, 1, &|start, end| {
            for row in start..end {
                // SAFETY: each row is one task's alone.
                let blocks = unsafe { shards.slice(row * width, width) };
                T::VecDotType::from_float(&x[row * cols..(row + 1) * cols], blocks);
            }
        });
        for_each_element(pool, self.rows, m, out, &|weight_row, first, dots| {
            let weights = self.blocks_of(weight_row);
            for (index, dot) in dots.iter_mut().enumerate() {
                let row = first + index;
                *dot = T::vec_dot(cols, weights, &rounded[row * width..(row + 1) * width]);
            }
        });
    }
}
