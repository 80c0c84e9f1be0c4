//! What samples say: medians, the best of several candidates, and the sizes from which on one way is better than another.
//! Pure. This file knows numbers; it must never know what was measured.

/// Candidates this close to the best one are as good: machines do not repeat themselves better than that.
const AS_GOOD: f64 = 1.005;
/// A way that is not the usual one has to be this much faster.
const BETTER: f64 = 0.99;

/// Seconds that a copy of one size took, by each of two ways.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    /// How much was copied.
    pub bytes: u64,
    /// By the usual way.
    pub usual_s: f64,
    /// By the other way.
    pub other_s: f64,
}

/// The middle one of samples. There is at least one.
pub fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The best of candidates that are steps of a scale, given the seconds of each at several sizes, which count alike. Of steps
/// that are as good as the best, the middle one: its neighbours are good too.
pub fn best_step(seconds: &[Vec<f64>]) -> usize {
    let slowness = slowness(seconds);
    let best = slowness.iter().copied().fold(f64::INFINITY, f64::min);
    let good: Vec<usize> = (0..slowness.len()).filter(|step| slowness[*step] <= best * AS_GOOD).collect();
    good.get(good.len() / 2).copied().unwrap_or(0)
}

/// The best of candidates of different kinds. The first is the usual one; another has to be clearly better.
pub fn best_kind(seconds: &[f64]) -> usize {
    let best = (0..seconds.len()).min_by(|one, other| seconds[*one].total_cmp(&seconds[*other])).unwrap_or(0);
    if seconds.first().is_some_and(|usual| seconds[best] <= usual * BETTER) { best } else { 0 }
}

/// How much slower than the best one each candidate is, summed over sizes.
fn slowness(seconds: &[Vec<f64>]) -> Vec<f64> {
    let sizes = seconds.first().map_or(0, Vec::len);
    let best = |size: usize| seconds.iter().map(|row| row[size]).fold(f64::INFINITY, f64::min);
    let best: Vec<f64> = (0..sizes).map(best).collect();
    seconds.iter().map(|row| row.iter().zip(&best).map(|(one, best)| one / best).sum()).collect()
}

/// The smallest size from which on the other way is clearly the faster one. Sizes ascend.
pub fn break_even(pairs: &[Pair]) -> Option<u64> {
    let pays = |pair: &&Pair| pair.other_s <= pair.usual_s * BETTER;
    pairs.iter().rev().take_while(pays).last().map(|pair| pair.bytes)
}

/// The size at which the other way becomes the faster one, at most `most`. Where it lies beyond the sizes that were tried, it
/// is where the straight line through the differences says. Sizes ascend.
pub fn crossover(pairs: &[Pair], most: u64) -> u64 {
    let ahead = |pair: &&Pair| pair.other_s <= pair.usual_s;
    if let Some(first) = pairs.iter().rev().take_while(ahead).last() {
        return first.bytes.min(most);
    }
    let (behind_s, gain_s_per_byte) = line(pairs);
    let crossing = behind_s / gain_s_per_byte;
    let tried = pairs.last().map_or(0, |pair| pair.bytes).min(most);
    if gain_s_per_byte > 0.0 && crossing < most as f64 { (crossing as u64).max(tried) } else { most }
}

/// How far the other way is behind at the start, and what it gains by each byte, by least squares.
fn line(pairs: &[Pair]) -> (f64, f64) {
    let count = pairs.len() as f64;
    let points = || pairs.iter().map(|pair| (pair.bytes as f64, pair.other_s - pair.usual_s));
    let (mean_x, mean_y) = points().fold((0.0, 0.0), |sum, (x, y)| (sum.0 + x / count, sum.1 + y / count));
    let spread: f64 = points().map(|(x, _)| (x - mean_x).powi(2)).sum();
    let slope = points().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum::<f64>() / spread;
    (mean_y - slope * mean_x, -slope)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn pair(bytes: u64, usual_s: f64, other_s: f64) -> Pair {
        Pair { bytes, usual_s, other_s }
    }

    #[test]
    fn one_sample_that_was_disturbed_does_not_count() {
        assert_eq!(median(vec![1.0, 90.0, 1.1]), 1.1);
        assert_eq!(median(vec![2.0]), 2.0);
    }

    #[test]
    fn of_steps_that_are_as_good_the_middle_one_is_taken() {
        let flat = [vec![1.2, 4.0], vec![1.001, 4.0], vec![1.0, 4.001], vec![1.0, 4.002], vec![1.1, 4.1]];
        assert_eq!(best_step(&flat), 2);
        // A size counts by its proportion, not by its seconds.
        assert_eq!(best_step(&[vec![1.0, 100.0], vec![0.8, 101.0]]), 1);
    }

    #[test]
    fn the_usual_kind_stays_unless_another_is_clearly_faster() {
        assert_eq!(best_kind(&[1.0, 0.995, 2.0]), 0);
        assert_eq!(best_kind(&[1.0, 0.995, 0.9]), 2);
        assert_eq!(best_kind(&[1.0]), 0);
    }

    #[test]
    fn break_even_is_where_every_larger_size_pays_too() {
        let pays = |bytes| pair(bytes, 1.0, 0.9);
        let does_not = |bytes| pair(bytes, 1.0, 0.995);
        assert_eq!(break_even(&[pays(1), does_not(2), pays(3), pays(4)]), Some(3));
        assert_eq!(break_even(&[pays(1), pays(2)]), Some(1));
        assert_eq!(break_even(&[pays(1), does_not(2)]), None);
    }

    #[test]
    fn a_crossover_beyond_what_was_tried_is_where_the_line_says() {
        // 40 us late, and 1 % faster than 100 GB/s: the two are level after 400 MB.
        let at = |bytes: u64| pair(bytes, bytes as f64 / 100e9, 40e-6 + bytes as f64 * 0.99 / 100e9);
        let found = crossover(&[at(64 * MIB), at(128 * MIB), at(256 * MIB)], 1 << 30);
        assert!(found.abs_diff(400_000_000) < MIB, "{found}");
        assert_eq!(crossover(&[at(64 * MIB), at(512 * MIB), at(768 * MIB)], 1 << 30), 512 * MIB);
        // Neither later nor faster, or slower in every way: never within reach.
        assert_eq!(crossover(&[pair(1, 1.0, 1.1), pair(2, 2.0, 2.1)], 1 << 30), 1 << 30);
        assert_eq!(crossover(&[pair(1, 1.0, 1.1), pair(2, 2.0, 2.3)], 1 << 30), 1 << 30);
    }

    proptest! {
        #[test]
        fn whatever_was_measured_a_crossover_is_a_size_within_bounds(
            seconds in prop::collection::vec((0.0..1.0_f64, 0.0..1.0_f64), 1..6),
        ) {
            let pairs: Vec<Pair> =
                seconds.iter().zip(1..).map(|((usual, other), nth)| pair(nth * MIB, *usual, *other)).collect();
            let found = crossover(&pairs, 4 * MIB);
            prop_assert!((MIB..=4 * MIB).contains(&found), "{found}");
        }
    }
}
