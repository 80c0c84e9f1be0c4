//! Quantiles of measured values, and summaries that are made of them.

use serde::Serialize;

/// The median and the tail of some values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Quantiles {
    pub count: usize,
    /// Half of the values are at or below; `None` without values.
    pub p50: Option<f64>,
    /// Nine in ten are at or below.
    pub p90: Option<f64>,
    /// Ninety-nine in a hundred are at or below.
    pub p99: Option<f64>,
}

impl Quantiles {
    /// The quantiles of `values`, in any order.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Quantiles {
        let sorted = sorted(values);
        let at = |share| quantile(&sorted, share);
        Quantiles { count: sorted.len(), p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }
}

/// A summary of at least one value. Quantiles are interpolated linearly between the two closest
/// values, as NumPy does by default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ValueSummary {
    pub count: usize,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl ValueSummary {
    /// The summary of `values`, or `None` when there are none. Single precision holds all token
    /// counts that readers let through.
    pub(crate) fn of(mut values: Vec<f32>) -> Option<ValueSummary> {
        values.sort_by(f32::total_cmp);
        let max = f64::from(*values.last()?);
        let mean = values.iter().copied().map(f64::from).sum::<f64>() / values.len() as f64;
        let at = |share| quantile(&values, share);
        Some(ValueSummary { count: values.len(), mean, p50: at(0.5)?, p90: at(0.9)?, p99: at(0.99)?, max })
    }
}

/// The finite values, in order.
pub(crate) fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// The value below which a `share` (0 to 1) of the sorted values lies, with linear interpolation
/// between neighbours: definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages"
/// (1996), which NumPy also uses.
pub fn quantile<T: Copy + Into<f64>>(sorted: &[T], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let position = share.clamp(0.0, 1.0) * last as f64;
    let below = position.floor() as usize;
    let (low, high): (f64, f64) = (sorted[below].into(), sorted[(below + 1).min(last)].into());
    Some(low + (high - low) * (position - below as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantiles_of_known_values_are_those_of_numpy() {
        // numpy.percentile([1, 2, 4, 8, 16], [50, 90, 99]) = [4, 12.8, 15.68]
        let quantiles = Quantiles::of([16.0, 1.0, 8.0, 2.0, 4.0]);
        assert_eq!(quantiles.count, 5);
        let values = [quantiles.p50, quantiles.p90, quantiles.p99].map(Option::unwrap);
        for (value, expected) in values.into_iter().zip([4.0, 12.8, 15.68]) {
            assert!((value - expected).abs() < 1e-12, "{value} {expected}");
        }
    }

    #[test]
    fn no_values_have_no_quantiles_and_one_value_has_one() {
        assert_eq!(Quantiles::of([]), Quantiles::default());
        assert_eq!(Quantiles::of([f64::NAN]), Quantiles::default());
        let one = Quantiles::of([3.0]);
        assert_eq!((one.p50, one.p99), (Some(3.0), Some(3.0)));
    }

    #[test]
    fn a_summary_interpolates_its_quantiles() {
        assert!(ValueSummary::of(Vec::new()).is_none());
        let summary = ValueSummary::of(vec![4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((summary.count, summary.mean, summary.p50, summary.max), (4, 2.5, 2.5, 4.0));
        assert!((summary.p90 - 3.7).abs() < 1e-6, "{summary:?}");
    }

    proptest! {
        #[test]
        fn quantiles_are_in_order_within_the_values_and_split_them(
            values in prop::collection::vec(-1e6f64..1e6, 1..200),
            share in 0.0f64..=1.0,
        ) {
            let sorted = sorted(values.clone());
            let value = quantile(&sorted, share).unwrap();
            prop_assert!(sorted[0] <= value && value <= sorted[sorted.len() - 1]);
            let below = values.iter().filter(|&&other| other < value).count();
            let at_or_below = values.iter().filter(|&&other| other <= value).count();
            let position = share * (values.len() - 1) as f64;
            prop_assert!(below as f64 <= position + 1.0 && at_or_below as f64 >= position.floor());
            let quantiles = Quantiles::of(values);
            prop_assert!(quantiles.p50 <= quantiles.p90 && quantiles.p90 <= quantiles.p99);
        }
    }
}
