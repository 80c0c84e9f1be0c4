//! What samples say: medians, the best of several candidates, and the sizes from which on one way
//! is better than another. Pure.

/// Candidates this close to the best one are as good: machines do not repeat themselves better than
/// that.
const AS_GOOD: f64 = 1.005;
/// A way that is not the usual one has to be this much faster.
const BETTER: f64 = 0.99;

/// Seconds that a copy of one size took, by each of two ways.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
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

/// The best of candidates that are steps of a scale, given the seconds of each at several sizes,
/// which count alike. Of steps that are as good as the best, the middle one: its neighbours are
/// good too.
pub fn best_step(seconds: &[Vec<f64>]) -> usize {
    let slowness = slowness(seconds);
    let best = slowness.iter().copied().fold(f64::INFINITY, f64::min);
    let good: Vec<usize> = (0..slowness.len()).filter(|step| slowness[*step] <= best * AS_GOOD).collect();
    good.get(good.len() / 2).copied().unwrap_or(0)
}

/// The best of candidates of different kinds. The first is the usual one; another has to be clearly
/// better.
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

/// The smallest size from which on the other way takes at most `part` of the time. Sizes ascend.
pub fn pays_from(pairs: &[Pair], part: f64) -> Option<u64> {
    let pays = |pair: &&Pair| pair.other_s <= pair.usual_s * part;
    pairs.iter().rev().take_while(pays).last().map(|pair| pair.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
    fn another_way_pays_where_it_does_at_every_larger_size_too() {
        let pays = |bytes| pair(bytes, 1.0, 0.9);
        let does_not = |bytes| pair(bytes, 1.0, 0.995);
        assert_eq!(pays_from(&[pays(1), does_not(2), pays(3), pays(4)], 0.99), Some(3));
        assert_eq!(pays_from(&[pays(1), pays(2)], 0.99), Some(1));
        assert_eq!(pays_from(&[pays(1), does_not(2)], 0.99), None);
        assert_eq!(pays_from(&[pays(1), pays(2)], 0.8), None, "not by as much");
    }

    proptest! {
        #[test]
        fn whatever_was_measured_it_pays_from_a_size_that_was_tried(
            seconds in prop::collection::vec((0.0..1.0_f64, 0.0..1.0_f64), 1..6),
        ) {
            let pairs: Vec<Pair> =
                seconds.iter().zip(1..).map(|((usual, other), nth)| pair(nth, *usual, *other)).collect();
            let found = pays_from(&pairs, 0.95);
            prop_assert_eq!(found.is_some(), pairs.last().is_some_and(|last| last.other_s <= last.usual_s * 0.95));
            prop_assert!(found.is_none_or(|bytes| pairs.iter().any(|pair| pair.bytes == bytes)));
        }
    }
}
