//! The memory that a unit works in: one piece a worker, cut from the engine's workspace.

use crate::{micro::TILE, softmax::State};

/// Most query rows of a unit.
pub(crate) const MAX_ROWS: usize = 128;

/// Sizes of a worker's scratch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shape {
    /// Elements from query row to query row.
    pub q_stride: usize,
    /// Elements from output row to output row; a multiple of 16.
    pub o_stride: usize,
}

impl Shape {
    pub fn new(head_size: usize, head_size_v: usize) -> Self {
        Self { q_stride: head_size.next_multiple_of(16), o_stride: head_size_v.next_multiple_of(16) }
    }

    /// f32 values of each part, in order.
    fn parts(&self) -> [usize; 8] {
        [
            MAX_ROWS * self.q_stride,
            MAX_ROWS * TILE,
            MAX_ROWS * TILE,
            self.q_stride * TILE,
            self.o_stride * TILE,
            MAX_ROWS * self.o_stride,
            MAX_ROWS * self.o_stride,
            MAX_ROWS,
        ]
    }

    /// f32 values of the whole, a multiple of 16.
    pub fn len(&self) -> usize {
        self.parts().iter().sum::<usize>().next_multiple_of(16)
    }
}

/// A worker's scratch.
pub(crate) struct Scratch<'a> {
    /// Queries, `[row][q_stride]`: f32, or pairs of bf16.
    pub q: &'a mut [f32],
    /// Scores, `[row][TILE]`.
    pub s: &'a mut [f32],
    /// Weights, `[row][TILE]`: f32, or bf16.
    pub p: &'a mut [f32],
    /// Keys of a tile.
    pub k: &'a mut [f32],
    /// Values of a tile.
    pub v: &'a mut [f32],
    /// Sums of this chunk, `[row][o_stride]`.
    pub o: &'a mut [f32],
    /// Sums of the chunks before, `[row][o_stride]`.
    pub total: &'a mut [f32],
    /// Factors, `[row]`.
    pub alpha: &'a mut [f32],
    /// States of this chunk.
    pub state: [State; MAX_ROWS],
    /// States of the chunks before.
    pub total_state: [State; MAX_ROWS],
}

impl<'a> Scratch<'a> {
    /// Cuts `memory`, which must hold [`Shape::len`] values.
    pub fn new(memory: &'a mut [f32], shape: Shape) -> Self {
        let mut rest = memory;
        let [q, s, p, k, v, o, total, alpha] = shape.parts().map(|len| {
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(len);
            rest = behind;
            part
        });
        Self { q, s, p, k, v, o, total, alpha, state: [State::EMPTY; MAX_ROWS], total_state: [State::EMPTY; MAX_ROWS] }
    }
}
