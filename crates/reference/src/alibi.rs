//! ALiBi slopes for any number of heads.
//!
//! Owns the slope formula. Must not know how the bias is applied (`attention`).

use crate::error::ReferenceError;

/// Slopes of `num_heads` **query** heads, positive, unaffected by GQA.
///
/// A power of two n: `2^(−8(i+1)/n)` for head i. Any other count: the slopes of the largest
/// power of two m below it, then every second slope of 2m, starting with its first. Source:
/// Press 2022 and its reference code (`get_slopes`).
///
/// # Errors
/// [`ReferenceError::Zero`] for no heads, [`ReferenceError::TooLarge`] when the list cannot be
/// allocated.
pub fn slopes(num_heads: usize) -> Result<Vec<f64>, ReferenceError> {
    crate::shape::check_nonzero("num_heads", num_heads)?;
    let mut result = crate::shape::zeros("alibi_slopes", &[num_heads])?;
    // Largest power of two that is not above num_heads.
    let power = 1usize << num_heads.ilog2();
    for (head, slope) in result.iter_mut().enumerate() {
        let (count, index) =
            if head < power { (power as f64, head as f64) } else { (2.0 * power as f64, 2.0 * (head - power) as f64) };
        *slope = (-8.0 * (index + 1.0) / count).exp2();
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// b16.
    #[test]
    fn counts_that_are_not_powers_of_two() {
        let twelve = slopes(12).unwrap();
        for (i, slope) in twelve.iter().take(8).enumerate() {
            assert_eq!(*slope, 2f64.powi(-(i as i32) - 1));
        }
        for (i, slope) in twelve.iter().skip(8).enumerate() {
            let expected = 2f64.powf(-0.5 - i as f64);
            assert!((slope - expected).abs() < 1e-15, "{i}: {slope} {expected}");
        }
        assert_eq!(slopes(6).unwrap(), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
    }

    #[test]
    fn powers_of_two_and_edges() {
        assert_eq!(slopes(1).unwrap(), [2f64.powi(-8)]);
        assert_eq!(slopes(2).unwrap(), [2f64.powi(-4), 2f64.powi(-8)]);
        assert_eq!(slopes(3).unwrap(), [2f64.powi(-4), 2f64.powi(-8), 2f64.powi(-2)]);
        assert_eq!(slopes(8).unwrap()[7], 2f64.powi(-8));
        assert!(matches!(slopes(0), Err(ReferenceError::Zero { .. })));
        assert!(matches!(slopes(usize::MAX), Err(ReferenceError::TooLarge { .. })));
        for n in 1..200 {
            let s = slopes(n).unwrap();
            assert_eq!(s.len(), n);
            assert!(s.iter().all(|&x| x > 0.0 && x < 1.0));
        }
    }
}
