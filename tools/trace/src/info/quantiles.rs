//! A summary of many values: their mean, quantiles and maximum.

use crate::quantile::quantile;
use serde::Serialize;

/// A summary of values. Quantiles are interpolated linearly between the two closest values, as
/// NumPy does by default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Quantiles {
    pub count: usize,
    pub mean: f64,
    pub p50: f64,
    /// The value that 90 % do not exceed.
    pub p90: f64,
    /// The value that 99 % do not exceed.
    pub p99: f64,
    pub max: f64,
}

/// Values to be summarised. Single precision holds all token counts that readers let through.
#[derive(Default)]
pub(super) struct Values(Vec<f32>);

impl Values {
    pub(super) fn add(&mut self, value: f64) {
        self.0.push(value as f32);
    }

    /// Their summary, or `None` when there are none.
    pub(super) fn quantiles(mut self) -> Option<Quantiles> {
        self.0.sort_by(f32::total_cmp);
        let max = f64::from(*self.0.last()?);
        let mean = self.0.iter().copied().map(f64::from).sum::<f64>() / self.0.len() as f64;
        let at = |share| quantile(&self.0, share);
        Some(Quantiles { count: self.0.len(), mean, p50: at(0.5)?, p90: at(0.9)?, p99: at(0.99)?, max })
    }
}

#[cfg(test)]
mod tests {
    use super::Values;

    #[test]
    fn quantiles_are_interpolated() {
        let mut values = Values::default();
        assert!(Values::default().quantiles().is_none());
        [4.0, 1.0, 3.0, 2.0].into_iter().for_each(|value| values.add(value));
        let summary = values.quantiles().unwrap();
        assert_eq!((summary.count, summary.mean, summary.p50, summary.max), (4, 2.5, 2.5, 4.0));
        assert!((summary.p90 - 3.7).abs() < 1e-6, "{summary:?}");
    }
}
