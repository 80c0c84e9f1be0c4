//! Turns: candidates take turns, and the median of each counts.

use super::choose::median;
use std::time::Instant;

/// Has `count` candidates take turns, `rounds` times or until the time is up, but once at least.
/// The first round warms up and counts only where it is the only one.
pub fn in_turn<E>(
    count: usize,
    rounds: usize,
    until: Instant,
    mut run: impl FnMut(usize) -> Result<f64, E>,
) -> Result<Vec<f64>, E> {
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); count];
    for round in 0..=rounds {
        if round == 1 && Instant::now() < until {
            samples.iter_mut().for_each(Vec::clear);
        } else if round > 0 && Instant::now() >= until {
            break;
        }
        for (candidate, samples) in samples.iter_mut().enumerate() {
            samples.push(run(candidate)?);
        }
    }
    Ok(samples.into_iter().map(median).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::time::Duration;

    #[test]
    fn candidates_take_turns_and_the_first_round_only_warms_up() {
        let mut calls = Vec::new();
        let medians = in_turn(2, 3, Instant::now() + Duration::from_secs(600), |candidate| {
            calls.push(candidate);
            Ok::<f64, Infallible>(if calls.len() <= 2 { 99.0 } else { candidate as f64 })
        });
        assert_eq!(medians, Ok(vec![0.0, 1.0]));
        assert_eq!(calls, [0, 1, 0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn when_time_is_up_every_candidate_has_had_one_turn() {
        let mut calls = 0;
        let medians = in_turn(3, 7, Instant::now(), |candidate| {
            calls += 1;
            Ok::<f64, Infallible>(candidate as f64)
        });
        assert_eq!((medians, calls), (Ok(vec![0.0, 1.0, 2.0]), 3));
    }

    #[test]
    fn a_failure_ends_it() {
        assert_eq!(in_turn(3, 7, Instant::now(), Err::<f64, usize>), Err(0));
    }
}
