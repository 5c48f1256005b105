//! Blocks of the paged KV cache: who owns which.
//!
//! Owns reference counts and the free list. Must not know: what a block holds, which layers there
//! are (all layers use the same ids), who asks.

use std::fmt;

/// A block's id: its index in every layer's cache.
pub type BlockId = u32;

/// A use of blocks that breaks the bookkeeping: a fault of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// No such block.
    #[error("block {id} does not exist; there are {num_blocks}")]
    OutOfRange {
        /// The id.
        id: BlockId,
        /// Blocks.
        num_blocks: usize,
    },
    /// Nobody owns the block.
    #[error("block {id} is free: it cannot be shared or given back")]
    Free {
        /// The id.
        id: BlockId,
    },
}

/// The blocks of a cache.
pub struct BlockManager {
    /// Owners of each block; 0 = free.
    references: Vec<u32>,
    /// Free blocks; the last is taken first.
    free: Vec<BlockId>,
    block_size: usize,
}

impl BlockManager {
    /// `num_blocks` free blocks of `block_size` tokens.
    ///
    /// # Panics
    /// When `block_size` is 0 or an id does not fit in 31 bits (block tables hold i32).
    #[must_use]
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        assert!(block_size > 0, "blocks hold tokens");
        let count = u32::try_from(num_blocks).ok().filter(|count| *count <= i32::MAX as u32);
        let count = count.unwrap_or_else(|| panic!("{num_blocks} blocks: ids must fit in 31 bits"));
        Self { references: vec![0; num_blocks], free: (0..count).rev().collect(), block_size }
    }

    /// Tokens of a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// All blocks.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.references.len()
    }

    /// Blocks that nobody owns.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks for `tokens` tokens.
    #[must_use]
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Grows `table` until it holds `tokens` tokens. Takes all that is missing, or nothing: `false`.
    #[must_use]
    pub fn grow(&mut self, table: &mut Vec<BlockId>, tokens: usize) -> bool {
        let missing = self.blocks_for(tokens).saturating_sub(table.len());
        if missing > self.free.len() {
            return false;
        }
        for id in self.free.split_off(self.free.len() - missing).into_iter().rev() {
            self.references[id as usize] = 1;
            table.push(id);
        }
        true
    }

    /// Makes the caller one more owner of `blocks`, for a prefix in common. All or none.
    ///
    /// # Errors
    /// When a block does not exist or is free.
    pub fn share(&mut self, blocks: &[BlockId]) -> Result<Vec<BlockId>, BlockError> {
        for id in blocks {
            self.check(*id)?;
        }
        blocks.iter().for_each(|id| self.references[*id as usize] += 1);
        Ok(blocks.to_vec())
    }

    /// Gives blocks back and empties the table. A block that others own stays theirs.
    ///
    /// # Errors
    /// When a block does not exist or is given back more often than it was taken; then nothing changed.
    pub fn release(&mut self, table: &mut Vec<BlockId>) -> Result<(), BlockError> {
        for (index, id) in table.iter().enumerate() {
            self.check(*id)?;
            let given_back = table[..=index].iter().filter(|other| *other == id).count();
            if given_back > self.references[*id as usize] as usize {
                return Err(BlockError::Free { id: *id });
            }
        }
        // The end of a sequence is given back first, so that its beginning is taken again last.
        for id in table.drain(..).rev() {
            let owners = &mut self.references[id as usize];
            *owners -= 1;
            if *owners == 0 {
                self.free.push(id);
            }
        }
        Ok(())
    }

    fn check(&self, id: BlockId) -> Result<(), BlockError> {
        match self.references.get(id as usize) {
            None => Err(BlockError::OutOfRange { id, num_blocks: self.references.len() }),
            Some(0) => Err(BlockError::Free { id }),
            Some(_) => Ok(()),
        }
    }
}

impl fmt::Debug for BlockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockManager({} of {} blocks of {} free)", self.num_free(), self.num_blocks(), self.block_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Grow { owner: usize, tokens: usize },
        Share { from: usize, to: usize, blocks: usize },
        Release { owner: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0..6_usize, 0..90_usize).prop_map(|(owner, tokens)| Step::Grow { owner, tokens }),
            1 => (0..6_usize, 0..6_usize, 0..8_usize).prop_map(|(from, to, blocks)| Step::Share { from, to, blocks }),
            2 => (0..6_usize).prop_map(|owner| Step::Release { owner }),
        ]
    }

    proptest! {
        #[test]
        fn blocks_have_the_owners_they_were_given(steps in proptest::collection::vec(step(), 0..80)) {
            let mut manager = BlockManager::new(20, 8);
            let mut tables: Vec<Vec<BlockId>> = vec![Vec::new(); 6];
            for step in steps {
                match step {
                    Step::Grow { owner, tokens } => {
                        let before = tables[owner].clone();
                        let free = manager.num_free();
                        let grown = manager.grow(&mut tables[owner], tokens);
                        prop_assert_eq!(&tables[owner][..before.len()], &before[..], "a table only grows");
                        if grown {
                            prop_assert!(tables[owner].len() >= manager.blocks_for(tokens));
                            for id in &tables[owner][before.len()..] {
                                prop_assert_eq!(tables.iter().flatten().filter(|other| *other == id).count(), 1, "two owners");
                            }
                        } else {
                            prop_assert_eq!(manager.num_free(), free, "all or nothing");
                            prop_assert_eq!(&tables[owner], &before);
                        }
                    }
                    Step::Share { from, to, blocks } => {
                        // A table holds a block once: only an empty one takes over a prefix.
                        if tables[to].is_empty() && from != to {
                            let prefix = &tables[from][..blocks.min(tables[from].len())];
                            tables[to] = manager.share(prefix).expect("owned blocks");
                        }
                    }
                    Step::Release { owner } => {
                        manager.release(&mut tables[owner]).expect("owned blocks");
                        prop_assert!(tables[owner].is_empty());
                    }
                }
                let mut owned: Vec<BlockId> = tables.iter().flatten().copied().collect();
                owned.sort_unstable();
                owned.dedup();
                prop_assert_eq!(owned.len() + manager.num_free(), 20, "no block is lost");
            }
            for table in &mut tables {
                manager.release(table).expect("owned blocks");
            }
            prop_assert_eq!(manager.num_free(), 20, "all blocks return");
        }
    }

    #[test]
    fn giving_back_twice_is_refused_and_changes_nothing() {
        let mut manager = BlockManager::new(4, 16);
        let mut table = Vec::new();
        assert!(manager.grow(&mut table, 33));
        let mut copy = table.clone();
        manager.release(&mut table).unwrap();
        assert_eq!(manager.release(&mut copy), Err(BlockError::Free { id: copy[0] }));
        assert_eq!(manager.num_free(), 4);
        assert_eq!(manager.release(&mut vec![9]), Err(BlockError::OutOfRange { id: 9, num_blocks: 4 }));
        assert!(manager.grow(&mut table, 16));
        let id = table[0];
        assert_eq!(manager.release(&mut vec![id, id]), Err(BlockError::Free { id }));
        assert_eq!(manager.num_free(), 3);
    }

    #[test]
    fn a_shared_block_outlives_its_first_owner() {
        let mut manager = BlockManager::new(2, 4);
        let mut first = Vec::new();
        assert!(manager.grow(&mut first, 4));
        let mut second = manager.share(&first).unwrap();
        manager.release(&mut first).unwrap();
        assert_eq!(manager.num_free(), 1);
        manager.release(&mut second).unwrap();
        assert_eq!(manager.num_free(), 2);
    }
}
