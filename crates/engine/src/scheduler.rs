//! Which tokens of which sequences the next step runs: continuous batching.
//!
//! Owns sequences, their order and their blocks. Must not know: models, kernels, how a token is
//! chosen. Sequences are served in the order of arrival: the oldest always gets on, because it may
//! take the blocks of the youngest, which then waits and is computed again from its tokens. So
//! nothing is lost, and no order of arrival can end in a standstill.

use crate::{
    block_manager::{BlockId, BlockManager},
    error::{EngineError, RefusedRequest},
};
use std::collections::{BTreeMap, VecDeque};

/// What a step may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Sequences that run at once.
    pub max_num_requests: usize,
    /// Tokens of all sequences together; a longer prompt is cut into chunks.
    pub max_num_tokens: usize,
    /// Tokens of one sequence, the generated ones included.
    pub max_context: usize,
}

/// A prompt and what has been generated after it.
#[derive(Debug, Clone)]
pub struct Sequence {
    /// All tokens.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Tokens when it ends at the latest.
    pub max_len: usize,
    /// Tokens whose keys and values are in the cache.
    pub computed: usize,
    /// Blocks of the cache, in order.
    pub blocks: Vec<BlockId>,
    /// Times that it lost its blocks to an older sequence.
    pub preemptions: usize,
}

/// A piece of a sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheduled {
    /// The sequence.
    pub id: usize,
    /// First token.
    pub start: usize,
    /// Tokens.
    pub count: usize,
    /// Whether the next token follows from this step.
    pub samples: bool,
}

/// The queue of sequences.
#[derive(Debug)]
pub struct Scheduler {
    options: SchedulerOptions,
    blocks: BlockManager,
    sequences: BTreeMap<usize, Sequence>,
    /// Ids without blocks, in the order of arrival.
    waiting: VecDeque<usize>,
    /// Ids with blocks, in the order of arrival.
    running: Vec<usize>,
}

impl Scheduler {
    /// A queue over the blocks of `blocks`.
    #[must_use]
    pub fn new(options: SchedulerOptions, blocks: BlockManager) -> Self {
        Self { options, blocks, sequences: BTreeMap::new(), waiting: VecDeque::new(), running: Vec::new() }
    }

    /// Adds a prompt that may grow by `max_tokens`. Ids must rise.
    ///
    /// # Errors
    /// When it could never run, even alone.
    pub fn add(&mut self, id: usize, prompt: Vec<u32>, max_tokens: usize) -> Result<(), RefusedRequest> {
        let prompt_len = prompt.len();
        if prompt_len == 0 {
            return Err(RefusedRequest::EmptyPrompt);
        }
        if prompt_len >= self.options.max_context {
            return Err(RefusedRequest::PromptTooLong { tokens: prompt_len, max_context: self.options.max_context });
        }
        let max_len = prompt_len.saturating_add(max_tokens).min(self.options.max_context);
        // The last token is never computed: nothing follows it.
        let needed = self.blocks.blocks_for((max_len - 1).max(prompt_len));
        if needed > self.blocks.num_blocks() {
            return Err(RefusedRequest::NeverFits {
                tokens: max_len,
                needed,
                available: self.blocks.num_blocks(),
                block_size: self.blocks.block_size(),
            });
        }
        let sequence =
            Sequence { tokens: prompt, prompt_len, max_len, computed: 0, blocks: Vec::new(), preemptions: 0 };
        self.sequences.insert(id, sequence);
        self.waiting.push_back(id);
        Ok(())
    }

    /// Whether all sequences have ended.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// A sequence that has not ended.
    #[must_use]
    pub fn sequence(&self, id: usize) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    /// The blocks.
    #[must_use]
    pub fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    /// The next step; the sequences in it have blocks for their tokens. Empty only when all have ended.
    ///
    /// # Errors
    /// Only for a fault in the bookkeeping.
    pub fn schedule(&mut self) -> Result<Vec<Scheduled>, EngineError> {
        let mut step = Vec::new();
        let mut budget = self.options.max_num_tokens;
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && budget > 0 {
            let id = self.running[index];
            let sequence = self.sequences.get_mut(&id).ok_or_else(|| lost(id))?;
            let count = (sequence.tokens.len() - sequence.computed).min(budget);
            if self.blocks.grow(&mut sequence.blocks, sequence.computed + count) {
                step.push(piece(id, sequence, count));
                budget -= count;
                index += 1;
                continue;
            }
            // The youngest gives way, be it this one itself: then it is last, and the loop ends.
            preempted = true;
            self.preempt_youngest()?;
        }
        while !preempted && budget > 0 && self.running.len() < self.options.max_num_requests {
            let Some(id) = self.waiting.front().copied() else { break };
            let sequence = self.sequences.get_mut(&id).ok_or_else(|| lost(id))?;
            // Blocks for all of its tokens, so that it does not begin what it cannot go on with.
            if !self.blocks.grow(&mut sequence.blocks, sequence.tokens.len()) {
                break;
            }
            self.waiting.pop_front();
            self.running.push(id);
            let count = (sequence.tokens.len() - sequence.computed).min(budget);
            step.push(piece(id, sequence, count));
            budget -= count;
        }
        if step.is_empty() && !self.is_empty() {
            return Err(EngineError::Internal(format!(
                "{} sequences cannot get on with {:?}",
                self.sequences.len(),
                self.blocks
            )));
        }
        Ok(step)
    }

    fn preempt_youngest(&mut self) -> Result<(), EngineError> {
        let Some(id) = self.running.pop() else { return Ok(()) };
        let sequence = self.sequences.get_mut(&id).ok_or_else(|| lost(id))?;
        self.blocks.release(&mut sequence.blocks).map_err(|error| EngineError::Internal(error.to_string()))?;
        sequence.computed = 0;
        sequence.preemptions += 1;
        self.waiting.push_front(id);
        tracing::debug!(
            sequence = id,
            tokens = sequence.tokens.len(),
            "out of blocks: the sequence waits and is computed again"
        );
        Ok(())
    }

    /// Books a piece that has been run, and the token that follows it if there is one.
    ///
    /// # Errors
    /// Only for a fault in the bookkeeping.
    pub fn advance(&mut self, piece: Scheduled, next: Option<u32>) -> Result<(), EngineError> {
        let sequence = self.sequences.get_mut(&piece.id).ok_or_else(|| lost(piece.id))?;
        sequence.computed = piece.start + piece.count;
        sequence.tokens.extend(next);
        Ok(())
    }

    /// Ends a sequence and frees its blocks.
    ///
    /// # Errors
    /// Only for a fault in the bookkeeping.
    pub fn finish(&mut self, id: usize) -> Result<Sequence, EngineError> {
        let mut sequence = self.sequences.remove(&id).ok_or_else(|| lost(id))?;
        self.blocks.release(&mut sequence.blocks).map_err(|error| EngineError::Internal(error.to_string()))?;
        self.running.retain(|other| *other != id);
        self.waiting.retain(|other| *other != id);
        Ok(sequence)
    }
}

fn piece(id: usize, sequence: &Sequence, count: usize) -> Scheduled {
    let start = sequence.computed;
    Scheduled { id, start, count, samples: start + count == sequence.tokens.len() }
}

fn lost(id: usize) -> EngineError {
    EngineError::Internal(format!("sequence {id} is queued and does not exist"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scheduler(num_blocks: usize, block_size: usize, max_num_requests: usize, max_num_tokens: usize) -> Scheduler {
        let options = SchedulerOptions { max_num_requests, max_num_tokens, max_context: 200 };
        Scheduler::new(options, BlockManager::new(num_blocks, block_size))
    }

    /// A "model" whose next token depends on all tokens before: a wrong token shows at the end.
    fn next(tokens: &[u32]) -> u32 {
        tokens.iter().fold(17_u32, |state, token| state.wrapping_mul(31).wrapping_add(*token)) % 1000
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn every_sequence_ends_with_the_tokens_it_has_alone(
            prompts in proptest::collection::vec((1..60_usize, 0..40_usize), 1..20),
            num_blocks in 13..40_usize,
            block_size in 8..17_usize,
            max_num_requests in 1..9_usize,
            max_num_tokens in 1..70_usize,
        ) {
            let mut scheduler = scheduler(num_blocks, block_size, max_num_requests, max_num_tokens);
            let mut expected = BTreeMap::new();
            for (id, (len, max_tokens)) in prompts.iter().enumerate() {
                let prompt: Vec<u32> = (0..*len as u32).map(|i| i * 7 + id as u32).collect();
                scheduler.add(id, prompt.clone(), *max_tokens).expect("100 tokens fit in 13 blocks of 8");
                let mut tokens = prompt;
                for _ in 0..*max_tokens {
                    let token = next(&tokens);
                    tokens.push(token);
                }
                expected.insert(id, tokens);
            }
            // The blocks' slots: what a kernel would find in them. Nobody clears a block.
            let mut slots = vec![u32::MAX; num_blocks * block_size];
            let mut steps = 0;
            while !scheduler.is_empty() {
                let step = scheduler.schedule().expect("a step");
                steps += 1;
                prop_assert!(steps < 20_000, "standstill");
                prop_assert!(step.iter().map(|piece| piece.count).sum::<usize>() <= max_num_tokens);
                prop_assert!(step.len() <= max_num_requests);
                let mut owned: Vec<BlockId> = Vec::new();
                for piece in &step {
                    let sequence = scheduler.sequence(piece.id).expect("in the step");
                    prop_assert!(piece.count > 0);
                    prop_assert!(sequence.blocks.len() * block_size >= piece.start + piece.count);
                    owned.extend(&sequence.blocks);
                    let slot = |position: usize| {
                        sequence.blocks[position / block_size] as usize * block_size + position % block_size
                    };
                    let end = piece.start + piece.count;
                    (piece.start..end).for_each(|position| slots[slot(position)] = sequence.tokens[position]);
                    let seen: Vec<u32> = (0..end).map(|position| slots[slot(position)]).collect();
                    prop_assert_eq!(&seen, &sequence.tokens[..end], "each token is in its own slot");
                }
                let count = owned.len();
                owned.sort_unstable();
                owned.dedup();
                prop_assert_eq!(owned.len(), count, "two sequences own a block");
                for piece in step {
                    let sequence = scheduler.sequence(piece.id).expect("in the step");
                    let more = sequence.tokens.len() < sequence.max_len;
                    let token = (piece.samples && more).then(|| next(&sequence.tokens));
                    scheduler.advance(piece, token).expect("booked");
                    let sequence = scheduler.sequence(piece.id).expect("in the step");
                    if piece.samples && sequence.tokens.len() == sequence.max_len {
                        let ended = scheduler.finish(piece.id).expect("ended");
                        prop_assert_eq!(&ended.tokens, &expected[&piece.id]);
                    }
                }
            }
            prop_assert_eq!(scheduler.blocks().num_free(), num_blocks, "all blocks return");
        }
    }

    #[test]
    fn what_never_fits_is_refused_with_both_numbers() {
        let mut scheduler = scheduler(4, 16, 8, 64);
        let error = scheduler.add(0, vec![1; 30], 60).unwrap_err();
        assert_eq!(error, RefusedRequest::NeverFits { tokens: 90, needed: 6, available: 4, block_size: 16 });
        assert!(scheduler.add(1, vec![1; 30], 35).is_ok(), "64 tokens are computed");
        assert_eq!(scheduler.add(2, Vec::new(), 3), Err(RefusedRequest::EmptyPrompt));
        let error = scheduler.add(3, vec![1; 200], 1).unwrap_err();
        assert_eq!(error, RefusedRequest::PromptTooLong { tokens: 200, max_context: 200 });
    }

    #[test]
    fn a_long_prompt_is_cut_into_chunks() {
        let mut scheduler = scheduler(20, 16, 8, 64);
        scheduler.add(0, vec![5; 150], 2).unwrap();
        let mut counts = Vec::new();
        for _ in 0..3 {
            let step = scheduler.schedule().unwrap();
            counts.push((step[0].count, step[0].samples));
            scheduler.advance(step[0], None).unwrap();
        }
        assert_eq!(counts, [(64, false), (64, false), (22, true)]);
    }

    #[test]
    fn the_youngest_gives_way_and_keeps_its_tokens() {
        let mut scheduler = scheduler(4, 4, 8, 64);
        scheduler.add(0, vec![1; 7], 8).unwrap();
        scheduler.add(1, vec![2; 7], 8).unwrap();
        let mut preempted = false;
        for _ in 0..3 {
            let step = scheduler.schedule().unwrap();
            preempted |= step.len() == 1;
            for piece in step {
                scheduler.advance(piece, piece.samples.then_some(9)).unwrap();
            }
        }
        assert!(preempted);
        let young = scheduler.sequence(1).unwrap();
        assert_eq!((young.computed, young.blocks.len(), young.preemptions), (0, 0, 1));
        assert_eq!(young.tokens, [2, 2, 2, 2, 2, 2, 2, 9, 9]);
        assert_eq!(scheduler.sequence(0).unwrap().preemptions, 0);
    }
}
