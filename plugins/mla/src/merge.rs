//! Partial results of one head's query rows, merged chunk by chunk.
//!
//! Owns the arithmetic of merging normalised outputs by their log-sum-exp. An LSE of −∞ means "saw
//! nothing" and changes nothing, bit for bit.

/// Results of rows so far.
pub struct Merged<'a> {
    /// `[rows][size]`, normalised.
    pub out: &'a mut [f32],
    /// `[rows]`, natural logarithm.
    pub lse: &'a mut [f32],
    size: usize,
}

impl<'a> Merged<'a> {
    /// Rows that have seen nothing; `out` is `[rows][size]`.
    pub fn new(out: &'a mut [f32], lse: &'a mut [f32], size: usize) -> Self {
        out.fill(0.0);
        lse.fill(f32::NEG_INFINITY);
        Self { out, lse, size }
    }

    /// Adds what a row saw in a further chunk.
    pub fn add(&mut self, row: usize, out: &[f32], lse: f32) {
        if lse == f32::NEG_INFINITY {
            return;
        }
        let to = &mut self.out[row * self.size..][..self.size];
        let before = self.lse[row];
        if before == f32::NEG_INFINITY {
            to.copy_from_slice(out);
            self.lse[row] = lse;
            return;
        }
        let after = log_sum_exp(before, lse);
        let (old, new) = ((before - after).exp(), (lse - after).exp());
        to.iter_mut().zip(out).for_each(|(to, out)| *to = *to * old + out * new);
        self.lse[row] = after;
    }

    /// Lets a sink into the denominator of a row.
    pub fn sink(&mut self, row: usize, sink: f32) {
        let before = self.lse[row];
        let after = log_sum_exp(before, sink);
        self.lse[row] = after;
        if before != f32::NEG_INFINITY {
            let factor = (before - after).exp();
            self.out[row * self.size..][..self.size].iter_mut().for_each(|out| *out *= factor);
        }
    }
}

/// `ln(exp(a) + exp(b))`.
fn log_sum_exp(a: f32, b: f32) -> f32 {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    if low == f32::NEG_INFINITY || high == f32::INFINITY { high } else { high + (low - high).exp().ln_1p() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: f32 = f32::NEG_INFINITY;

    /// The state of one row of one value, after the given parts.
    fn merged(parts: &[(f32, f32)], sink: Option<f32>) -> (f32, f32) {
        let (mut out, mut lse) = ([f32::NAN], [f32::NAN]);
        let mut merged = Merged::new(&mut out, &mut lse, 1);
        parts.iter().for_each(|(out, lse)| merged.add(0, &[*out], *lse));
        if let Some(sink) = sink {
            merged.sink(0, sink);
        }
        (out[0], lse[0])
    }

    #[test]
    fn nothing_changes_nothing() {
        let part = (0.3, -7.25);
        assert_eq!(merged(&[], None), (0.0, NOTHING));
        assert_eq!(merged(&[(9.0, NOTHING), (9.0, NOTHING)], None), (0.0, NOTHING));
        for parts in [vec![part], vec![(9.0, NOTHING), part], vec![part, (9.0, NOTHING)]] {
            assert_eq!(merged(&parts, None), part);
        }
        assert_eq!(merged(&[part], Some(NOTHING)), part);
    }

    #[test]
    fn parts_and_sinks_weigh_as_much_as_their_denominators() {
        let (out, lse) = merged(&[(1.0, 3_f32.ln()), (0.0, 1_f32.ln())], None);
        assert!((out - 0.75).abs() < 1e-6 && (lse - 4_f32.ln()).abs() < 1e-6);
        let (out, lse) = merged(&[(1.0, 3_f32.ln()), (1.0, 1_f32.ln())], Some(0.0));
        assert!((out - 0.8).abs() < 1e-6 && (lse - 5_f32.ln()).abs() < 1e-6);
        assert_eq!(merged(&[], Some(2.0)), (0.0, 2.0), "nothing but the sink");
        assert_eq!(merged(&[(1.0, 0.0)], Some(f32::INFINITY)), (0.0, f32::INFINITY));
        let (out, lse) = merged(&[(1.0, -1e5), (0.0, -1e5)], None);
        assert!((out - 0.5).abs() < 1e-2 && (lse + 1e5).abs() < 1.0, "{out} {lse}");
    }
}
