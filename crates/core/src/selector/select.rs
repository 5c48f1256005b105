//! The rules of selection.

use super::{
    candidate::Candidate,
    change::{Scope, smallest_changes},
    error::{EXCLUSIVE, Refused, SelectionError},
    explanation::{CandidateVerdict, Explanation},
};
use crate::{
    device::Device,
    kind::Kind,
    policy::{OnInvalidOverride, Policy, PriorityRule, Wanted},
    request::LayerRequest,
    verdict::{BLOCK_SIZE_REASON, Reason, verdict},
};
use std::sync::Arc;

/// Selects a backend, with everything that led to it. `kind` is for layers that state their kind
/// themselves; otherwise it is derived.
///
/// The answer does not depend on the order of the candidates.
#[must_use]
pub fn select(
    request: &LayerRequest,
    kind: Option<Kind>,
    device: &Device,
    policy: &Policy,
    candidates: &[Candidate],
) -> Explanation {
    let span = tracing::debug_span!("select", kind = kind.map(Kind::name), head_size = request.head_size);
    let _entered = span.enter();
    let mut explanation = Explanation {
        request: request.clone(),
        kind: None,
        device: device.clone(),
        wanted: None,
        candidates: Vec::new(),
        chosen: None,
        error: None,
        why: String::new(),
        warnings: Vec::new(),
    };
    if let Err(error) = check(request) {
        explanation.error = Some(error);
        return explanation;
    }
    let kind = kind.unwrap_or_else(|| request.kind());
    explanation.kind = Some(kind);
    explanation.wanted = policy.wanted(kind).cloned();
    let selection = Selecting { request, kind, device, policy, candidates };
    let outcome = match explanation.wanted.clone() {
        Some(wanted) => selection.wanted(&wanted, &mut explanation),
        None => selection.automatic(&mut explanation),
    };
    match outcome {
        Ok(why) => {
            explanation.chosen = Some(0);
            explanation.why = why;
        }
        Err(error) => explanation.error = Some(error),
    }
    explanation.trace();
    explanation
}

fn check(request: &LayerRequest) -> Result<(), SelectionError> {
    let zero = |field, value: Option<u32>| match value {
        Some(0) => Err(SelectionError::Request { field, value: "0".to_owned(), valid: "any number from 1 on" }),
        _ => Ok(()),
    };
    zero("head_size", Some(request.head_size))?;
    zero("head_size_v", request.head_size_v)?;
    zero("block_size", request.block_size)?;
    zero("num_heads", request.num_heads)?;
    zero("num_kv_heads", request.num_kv_heads)
}

struct Selecting<'a> {
    request: &'a LayerRequest,
    kind: Kind,
    device: &'a Device,
    policy: &'a Policy,
    candidates: &'a [Candidate],
}

/// The order of candidates; the least one wins.
type RankKey = (usize, usize, i32);

impl Selecting<'_> {
    /// Rule 3: a wanted backend is validated alone and never silently replaced.
    fn wanted(&self, wanted: &Wanted, explanation: &mut Explanation) -> Result<String, SelectionError> {
        let is_named = |index: &usize| self.candidates[*index].name().eq_ignore_ascii_case(&wanted.name);
        let named: Vec<usize> = (0..self.candidates.len()).filter(is_named).collect();
        if named.is_empty() {
            let mut valid: Vec<String> = self.candidates.iter().map(|c| c.name().to_owned()).collect();
            valid.sort_unstable();
            valid.dedup();
            return Err(if valid.is_empty() {
                SelectionError::NoBackends
            } else {
                SelectionError::UnknownBackend { name: wanted.name.clone(), origin: wanted.origin.clone(), valid }
            });
        }
        explanation.candidates = self.ranked(&named, None);
        if explanation.candidates.first().is_some_and(CandidateVerdict::is_valid) {
            return Ok(format!("override ({})", wanted.origin));
        }
        // Of several versions the first one speaks for all.
        let reasons = explanation.candidates.first().map(|first| first.reasons.clone()).unwrap_or_default();
        if self.policy.on_invalid_override.value == OnInvalidOverride::Fallback {
            let warning = format!(
                "backend {wanted} cannot serve a layer of kind {}: {}; automatic choice instead (on_invalid_override = fallback, {})",
                self.kind,
                reasons.join(", "),
                self.policy.on_invalid_override.origin
            );
            explanation.warnings.push(warning);
            return self.automatic(explanation);
        }
        let (name, origin) = (wanted.name.clone(), wanted.origin.clone());
        Err(SelectionError::OverrideInvalid { name, origin, kind: self.kind, reasons })
    }

    /// Rules 4 to 6.
    fn automatic(&self, explanation: &mut Explanation) -> Result<String, SelectionError> {
        if self.candidates.is_empty() {
            return Err(SelectionError::NoBackends);
        }
        let rule = self.policy.priority_rule(self.request, self.device);
        let all: Vec<usize> = (0..self.candidates.len()).collect();
        explanation.candidates = self.ranked(&all, rule);
        let list = &explanation.candidates;
        let Some(first) = list.first().filter(|first| first.is_valid()) else {
            return Err(self.nothing_suitable(list));
        };
        for wanted in &self.policy.prefer {
            if self.named(first.index, wanted) {
                break;
            }
            let refused = list.iter().find(|candidate| self.named(candidate.index, wanted));
            let reasons = refused.map_or_else(|| "it does not exist".to_owned(), |found| found.reasons.join(", "));
            explanation.warnings.push(format!("preferred backend {wanted} is not taken: {reasons}"));
        }
        let taken = self.key(first.index, rule);
        let for_block_size: Vec<&str> = list
            .iter()
            .filter(|other| other.reasons == [BLOCK_SIZE_REASON] && self.key(other.index, rule) < taken)
            .map(CandidateVerdict::name)
            .collect();
        if let Some(block_size) = self.request.block_size.filter(|_| !for_block_size.is_empty()) {
            explanation.warnings.push(format!(
                "block_size {block_size} keeps {} out, which would be preferred to {}",
                for_block_size.join(", "),
                first.name()
            ));
        }
        let valid = list.iter().filter(|candidate| candidate.is_valid()).count();
        let preferred = self.policy.prefer.iter().find(|wanted| self.named(first.index, wanted));
        Ok(match (preferred, rule, valid) {
            (Some(wanted), _, _) => format!("preferred ({})", wanted.origin),
            (None, _, 1) => "the only valid backend".to_owned(),
            (None, Some(rule), _) if position(rule, first.name()) < rule.order.len() => {
                format!("first of {valid} valid backends by a priority rule ({})", rule.origin)
            }
            (None, _, _) => format!("first of {valid} valid backends by rank"),
        })
    }

    /// Verdicts in order: valid ones first, by rank.
    fn ranked(&self, indices: &[usize], rule: Option<&PriorityRule>) -> Vec<CandidateVerdict> {
        let mut list: Vec<(RankKey, CandidateVerdict)> = indices
            .iter()
            .map(|index| {
                let candidate = &self.candidates[*index];
                let verdict = CandidateVerdict {
                    index: *index,
                    descriptor: Arc::clone(&candidate.descriptor),
                    plugin: Arc::clone(&candidate.plugin),
                    source: candidate.source.clone(),
                    rank: None,
                    reasons: self.reasons(candidate, rule),
                };
                (self.key(*index, rule), verdict)
            })
            .collect();
        // One name in several versions: the newest valid one stands for all.
        list.sort_by(|(_, a), (_, b)| {
            let newest_valid = (b.is_valid(), &b.plugin.version).cmp(&(a.is_valid(), &a.plugin.version));
            let place = (&a.plugin.name, &a.source).cmp(&(&b.plugin.name, &b.source));
            a.name().cmp(b.name()).then(newest_valid).then(place)
        });
        for at in 1..list.len() {
            let (before, here) = list.split_at_mut(at);
            let (newer, older) = (&before[at - 1].1, &mut here[0].1);
            if newer.name() == older.name() && older.is_valid() {
                let taken = (newer.plugin.version.clone(), newer.source.to_string());
                older.reasons.push(format!("version {} from {} is taken instead", taken.0, taken.1).into());
            }
        }
        list.sort_by(|(a_key, a), (b_key, b)| {
            let place = (!a.is_valid(), a_key).cmp(&(!b.is_valid(), b_key));
            place.then_with(|| b.plugin.version.cmp(&a.plugin.version)).then_with(|| a.name().cmp(b.name()))
        });
        let mut verdicts: Vec<CandidateVerdict> = list.into_iter().map(|(_, verdict)| verdict).collect();
        for (at, verdict) in verdicts.iter_mut().enumerate().take_while(|(_, verdict)| verdict.is_valid()) {
            verdict.rank = Some(at + 1);
        }
        verdicts
    }

    /// Operator's preferences, operator's rule, the backend's own rank.
    fn key(&self, index: usize, rule: Option<&PriorityRule>) -> RankKey {
        let candidate = &self.candidates[index];
        let preferred = self.policy.prefer.iter().position(|wanted| self.named(index, wanted));
        let rank = &candidate.descriptor.rank;
        let own = rank.rules.iter().find(|rule| rule.when.matches(self.request, self.device));
        (
            preferred.unwrap_or(usize::MAX),
            rule.map_or(usize::MAX, |rule| position(rule, candidate.name())),
            own.map_or(rank.base, |rule| rule.rank),
        )
    }

    fn reasons(&self, candidate: &Candidate, rule: Option<&PriorityRule>) -> Vec<Reason> {
        let mut reasons = verdict(&candidate.descriptor, self.request, self.device).reasons;
        let is = |wanted: &Wanted| names(candidate, &wanted.name);
        if let Some(denied) = self.policy.deny.iter().find(|wanted| is(wanted)) {
            reasons.push(format!("denied by the operator ({})", denied.origin).into());
        }
        if !self.policy.require.is_empty() && !self.policy.require.iter().any(is) {
            let required: Vec<String> = self.policy.require.iter().map(ToString::to_string).collect();
            reasons.push(format!("the operator requires {}", required.join(" or ")).into());
        }
        for (name, required) in &self.policy.versions {
            if names(candidate, name) && !required.value.matches(&candidate.plugin.version) {
                let found = &candidate.plugin.version;
                reasons.push(format!("version {found} is not {} ({})", required.value, required.origin).into());
            }
        }
        if rule.is_some_and(|rule| rule.exclusive && position(rule, candidate.name()) == rule.order.len()) {
            reasons.push(EXCLUSIVE.into());
        }
        reasons.extend(candidate.unavailable.iter().cloned());
        reasons
    }

    fn named(&self, index: usize, wanted: &Wanted) -> bool {
        names(&self.candidates[index], &wanted.name)
    }

    fn nothing_suitable(&self, list: &[CandidateVerdict]) -> SelectionError {
        let refused = list.iter().map(|candidate| {
            // A change of the request cannot admit what something else keeps out.
            let own = verdict(&candidate.descriptor, self.request, self.device).reasons.len();
            let change = (own == candidate.reasons.len())
                .then(|| smallest_changes(&candidate.descriptor, self.request, self.device, Scope::Settings, 1))
                .flatten()
                .and_then(|(changes, _)| changes.into_iter().next());
            Refused { name: candidate.name().to_owned(), reasons: candidate.reasons.clone(), change }
        });
        SelectionError::NothingSuitable {
            kind: self.kind,
            device: Box::new(self.device.clone()),
            refused: refused.collect(),
        }
    }
}

/// Whether a name of the operator's means the candidate: its backend's name or its plugin's.
fn names(candidate: &Candidate, name: &str) -> bool {
    candidate.name().eq_ignore_ascii_case(name) || candidate.plugin.name.eq_ignore_ascii_case(name)
}

fn position(rule: &PriorityRule, name: &str) -> usize {
    rule.order.iter().position(|listed| listed.eq_ignore_ascii_case(name)).unwrap_or(rule.order.len())
}

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
