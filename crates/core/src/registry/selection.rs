//! A selection that succeeded.

use crate::selector::{CandidateVerdict, Explanation};

/// A selection that succeeded, with everything that led to it.
#[derive(Clone, Debug)]
pub struct Selection {
    explanation: Explanation,
    chosen: usize,
}

impl Selection {
    /// Splits explanations into those that chose and those that did not.
    pub(super) fn new(explanation: Explanation) -> Result<Self, Box<Explanation>> {
        match explanation.chosen.filter(|chosen| *chosen < explanation.candidates.len()) {
            Some(chosen) => Ok(Self { explanation, chosen }),
            None => Err(Box::new(explanation)),
        }
    }

    /// The chosen candidate.
    #[must_use]
    pub fn chosen(&self) -> &CandidateVerdict {
        &self.explanation.candidates[self.chosen]
    }

    /// The chosen backend's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.chosen().name()
    }

    /// Everything that led to it.
    #[must_use]
    pub fn explanation(&self) -> &Explanation {
        &self.explanation
    }
}
