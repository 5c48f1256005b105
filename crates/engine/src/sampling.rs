//! The next token from logits.
//!
//! Owns the choice and its randomness. A request's random numbers depend on its seed and its place
//! among the prompts alone, not on what else is in a step.

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sampling {
    /// 0 or less: the most likely token, always. Above: probabilities are taken to this temperature.
    pub temperature: f32,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Chooses tokens for one request.
#[derive(Debug, Clone)]
pub struct Sampler {
    temperature: f32,
    state: u64,
}

impl Sampler {
    /// A sampler for request `index` of a run: each request has its own random numbers.
    #[must_use]
    pub fn new(sampling: Sampling, index: u64) -> Self {
        let mut state = sampling.seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // Seeds that differ in one bit shall not begin alike.
        next(&mut state);
        Self { temperature: sampling.temperature, state }
    }

    /// The next token. Logits that are NaN are never chosen; of equal ones the first wins.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let best = argmax(logits);
        if self.temperature <= 0.0 || !self.temperature.is_finite() {
            return best as u32;
        }
        let Some(top) = logits.get(best).filter(|top| top.is_finite()) else { return best as u32 };
        let weight = |logit: f32| {
            let weight = (f64::from(logit - top) / f64::from(self.temperature)).exp();
            if weight.is_nan() { 0.0 } else { weight }
        };
        let total: f64 = logits.iter().map(|logit| weight(*logit)).sum();
        // 53 random bits: 0 … 1, 1 excluded.
        let mut rest = (next(&mut self.state) >> 11) as f64 / (1_u64 << 53) as f64 * total;
        for (token, logit) in logits.iter().enumerate() {
            let weight = weight(*logit);
            if weight > 0.0 && rest < weight {
                return token as u32;
            }
            rest -= weight;
        }
        best as u32
    }
}

/// The first of the largest logits; 0 where there is none.
#[must_use]
pub fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    let mut value = f32::NAN;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > value || (value.is_nan() && !logit.is_nan()) {
            (best, value) = (index, *logit);
        }
    }
    best
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut sampler = Sampler::new(Sampling::default(), 0);
        assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(sampler.sample(&[f32::NAN, f32::NEG_INFINITY, -5.0]), 2);
        assert_eq!(sampler.sample(&[f32::NAN, f32::NAN]), 0);
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [0.0, 1.0, 2.0, f32::NEG_INFINITY];
        for temperature in [0.5, 1.0, 2.0] {
            let mut sampler = Sampler::new(Sampling { temperature, seed: 3 }, 1);
            let mut counts = [0.0; 4];
            let draws = 20_000;
            (0..draws).for_each(|_| counts[sampler.sample(&logits) as usize] += 1.0);
            let weights: Vec<f64> =
                logits.iter().map(|logit| (f64::from(*logit) / f64::from(temperature)).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (count, weight) in counts.iter().zip(&weights) {
                let (found, expected) = (count / f64::from(draws), weight / total);
                assert!((found - expected).abs() < 0.015, "temperature {temperature}: {found} and {expected}");
            }
        }
    }

    #[test]
    fn a_seed_gives_the_same_tokens_and_requests_differ() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.3).sin()).collect();
        let draw = |seed, index| {
            let mut sampler = Sampler::new(Sampling { temperature: 1.0, seed }, index);
            (0..20).map(|_| sampler.sample(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7, 0), draw(7, 0));
        assert_ne!(draw(7, 0), draw(7, 1));
        assert_ne!(draw(7, 0), draw(8, 0));
    }
}
