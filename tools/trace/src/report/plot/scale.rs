//! From values to positions, and which values deserve a tick.

/// Maps a range of values onto 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// Equal differences have equal lengths. Begins at 0.
    Linear {
        /// The value at 1.
        max: f64,
    },
    /// Equal ratios have equal lengths.
    Log {
        /// The value at 0.
        min: f64,
        /// The value at 1.
        max: f64,
    },
}

impl Scale {
    /// A linear scale from 0 that holds `max`, ending on a tick, with about `ticks` steps.
    pub fn linear(max: f64, ticks: usize) -> Scale {
        let max = if max.is_finite() && max > 0.0 { max } else { 1.0 };
        let step = nice_step(max / ticks as f64);
        // Twelve digits: 0.3 / 0.1 is a little more than 3.
        Scale::Linear { max: ((max / step * 1e12).round() / 1e12).ceil() * step }
    }

    /// A logarithmic scale that holds the positive values from `min` to `max`, at least one decade.
    pub fn log(min: f64, max: f64) -> Scale {
        let ordinary = |value: f64| value.is_finite() && value > 0.0;
        let (min, max) = if ordinary(min) && ordinary(max) && min <= max { (min, max) } else { (0.1, 1.0) };
        let min = NICE.iter().rev().map(|nice| nice * decade(min)).find(|&tick| tick <= min).unwrap_or(min);
        let max = NICE
            .iter()
            .map(|nice| nice * decade(max))
            .find(|&tick| tick >= max)
            .unwrap_or(10.0 * decade(max));
        Scale::Log { min, max: max.max(10.0 * min) }
    }

    /// The position of a value, 0 to 1; values beyond the ends are at the ends.
    pub fn at(&self, value: f64) -> f64 {
        let position = match *self {
            Scale::Linear { max } => value / max,
            Scale::Log { min, max } => (value / min).ln() / (max / min).ln(),
        };
        if position.is_nan() { 0.0 } else { position.clamp(0.0, 1.0) }
    }

    pub fn value(&self, position: f64) -> f64 {
        match *self {
            Scale::Linear { max } => position * max,
            Scale::Log { min, max } => min * (max / min).powf(position),
        }
    }

    /// The values to be labelled: for a linear scale multiples of a round step, at most `ticks` and
    /// 0; for a logarithmic one 1, 2 and 5 in each decade, or 1 alone where that would be more than
    /// `ticks`.
    pub fn ticks(&self, ticks: usize) -> Vec<f64> {
        match *self {
            Scale::Linear { max } => {
                let step = nice_step(max / ticks as f64);
                (0..=(max / step * (1.0 + 1e-9)) as usize).map(|index| index as f64 * step).collect()
            }
            Scale::Log { min, max } => {
                let all = log_ticks(min, max, &NICE);
                if all.len() > ticks { log_ticks(min, max, &NICE[..1]) } else { all }
            }
        }
    }
}

/// A tick in the fewest digits: `0.01`, `5`, `200`.
pub fn plain(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Mantissas at which a tick reads well.
const NICE: [f64; 3] = [1.0, 2.0, 5.0];

/// The largest power of ten that is not above `value`.
fn decade(value: f64) -> f64 {
    10f64.powf(value.log10().floor())
}

/// The smallest of 1, 2, 5 times a power of ten that is not below `step`.
fn nice_step(step: f64) -> f64 {
    let decade = decade(step);
    NICE.iter().map(|nice| nice * decade).find(|&nice| nice >= step * (1.0 - 1e-9)).unwrap_or(10.0 * decade)
}

fn log_ticks(min: f64, max: f64, mantissas: &[f64]) -> Vec<f64> {
    let decades = (max / min).log10().ceil() as i32 + 1;
    let first = min.log10().floor() as i32;
    let within = |tick: &f64| (min * (1.0 - 1e-9)..=max * (1.0 + 1e-9)).contains(tick);
    (first..=first + decades)
        .flat_map(|exponent| mantissas.iter().map(move |nice| nice * 10f64.powi(exponent)))
        .filter(within)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(Scale::linear(23.0, 5).ticks(5), [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]);
        assert_eq!(Scale::linear(0.3, 3).ticks(3).len(), 4);
        let log = Scale::log(0.13, 30.4);
        assert_eq!(log, Scale::Log { min: 0.1, max: 50.0 });
        let labels: Vec<String> = log.ticks(12).iter().map(|tick| format!("{tick:.1}")).collect();
        assert_eq!(labels, ["0.1", "0.2", "0.5", "1.0", "2.0", "5.0", "10.0", "20.0", "50.0"]);
        assert_eq!(log.ticks(5).len(), 3);
    }

    #[test]
    fn no_values_still_have_a_scale() {
        for scale in
            [Scale::linear(0.0, 5), Scale::linear(f64::NAN, 5), Scale::log(0.0, 0.0), Scale::log(2.0, 2.0)]
        {
            assert!(scale.ticks(10).len() > 1, "{scale:?}");
        }
    }

    proptest! {
        #[test]
        fn positions_keep_the_order_and_reach_from_end_to_end(min in 1e-6f64..1e3, factor in 1.0f64..1e6, ticks in 2usize..12) {
            let max = min * factor;
            for scale in [Scale::linear(max, ticks), Scale::log(min, max)] {
                prop_assert!(scale.at(min) <= scale.at(max) && scale.at(max) <= 1.0);
                prop_assert!((scale.at(scale.value(0.25)) - 0.25).abs() < 1e-6);
                let labelled = scale.ticks(ticks);
                prop_assert!(labelled.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(labelled.iter().all(|&tick| scale.value(1.0) >= tick * (1.0 - 1e-6)));
                prop_assert!(labelled.len() <= 3 * ticks + 8);
            }
            let holds_max = Scale::linear(max, ticks).value(1.0) >= max * (1.0 - 1e-9);
            prop_assert!(holds_max);
        }
    }
}
