//! Weights in the K formats: candle's blocks of 256 and candle's dot products of one row with one
//! row, which choose their instruction set at run time.

use super::{Input, Rows};
use crate::pool::{Pool, Shards};
use candle_core::quantized::k_quants::{BlockQ8K, GgmlType, QK_K};

pub(super) struct Blocks<T> {
    blocks: Vec<T>,
    cols: usize,
}

impl<T: GgmlType<VecDotType = BlockQ8K>> Blocks<T> {
    /// Reads blocks as a file stores them.
    pub(super) fn new(data: &[u8], cols: usize) -> Self {
        let count = data.len() / size_of::<T>();
        let mut blocks: Vec<T> = Vec::with_capacity(count);
        // SAFETY: the destination has room for `count` blocks; a K block is plain data, every bit
        // pattern of which is a value.
        unsafe {
            std::ptr::copy_nonoverlapping(data.as_ptr(), blocks.as_mut_ptr().cast::<u8>(), count * size_of::<T>());
            blocks.set_len(count);
        }
        Self { blocks, cols }
    }

    fn blocks_of(&self, row: usize) -> &[T] {
        let width = self.cols / QK_K;
        &self.blocks[row * width..(row + 1) * width]
    }
}

impl<T: GgmlType<VecDotType = BlockQ8K>> Rows for Blocks<T> {
    fn row(&self, row: usize, out: &mut [f32]) {
        T::to_float(self.blocks_of(row), out);
    }

    fn dots(&self, row: usize, input: &Input<'_>, first: usize, count: usize, out: &mut [f32]) {
        let Input::K(x) = input else { unreachable!("prepared by another format") };
        let (weights, width) = (self.blocks_of(row), self.cols / QK_K);
        for (index, out) in out[..count].iter_mut().enumerate() {
            let row = first + index;
            *out = T::vec_dot(self.cols, weights, &x[row * width..(row + 1) * width]);
        }
    }

    fn prepare<'a>(&self, pool: &Pool, x: &'a [f32], rows: usize, cols: usize) -> Input<'a> {
        let width = cols / QK_K;
        let mut blocks = vec![BlockQ8K::zeros(); rows * width];
        let shards = Shards::new(&mut blocks);
        pool.run_ranges(rows, 1, &|start, end| {
            for row in start..end {
                // SAFETY: each row is one task's alone.
                let blocks = unsafe { shards.slice(row * width, width) };
                BlockQ8K::from_float(&x[row * cols..(row + 1) * cols], blocks);
            }
        });
        Input::K(blocks)
    }
}
