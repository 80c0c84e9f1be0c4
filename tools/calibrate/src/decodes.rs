//! Requests that decode at the same time: the step that they shared, from when their tokens came.
//! Pure; times are microseconds since any one moment.

/// Tokens that a request needs in the window.
const TOKENS_NEEDED: usize = 9;

/// One request's tokens.
#[derive(Clone, Debug)]
pub struct Tokens {
    pub prompt_tokens: usize,
    pub times_us: Vec<u64>,
}

/// What they shared.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedStep {
    pub step_us: f64,
    /// The context of each request in the middle of the window.
    pub context_tokens: Vec<usize>,
}

/// The step of requests in the time in which all of them decoded; `None` where that was too short.
pub fn shared_step(requests: &[Tokens]) -> Option<SharedStep> {
    let start = requests.iter().map(|tokens| tokens.times_us.first().copied()).max()??;
    let end = requests.iter().map(|tokens| tokens.times_us.last().copied()).min()??;
    let (mut steps_us, mut context_tokens) = (Vec::new(), Vec::new());
    for tokens in requests {
        let times = &tokens.times_us;
        let from = times.partition_point(|&at| at < start);
        let to = times.partition_point(|&at| at <= end);
        if to < from + TOKENS_NEEDED {
            return None;
        }
        steps_us.push(interval_us(&times[from..to]));
        // The token of index i is computed behind the prompt and the i - 1 tokens before it.
        context_tokens.push(tokens.prompt_tokens + (from + to - 1) / 2);
    }
    Some(SharedStep { step_us: median(steps_us), context_tokens })
}

/// The time from one token to the next, of at least [`TOKENS_NEEDED`]: the median time that a
/// quarter of them took. A pause of the machine spoils a third of these quarters at most. Where the
/// server hands several tokens on at once, as many quarters look too short as look too long.
fn interval_us(times: &[u64]) -> f64 {
    let quarter = (times.len() - 1) / 4;
    let quarters = times.iter().zip(&times[quarter..]).map(|(from, to)| (to - from) as f64);
    median(quarters.collect()) / quarter as f64
}

/// The middle one of some numbers.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    match numbers.len() {
        0 => 0.0,
        count if count % 2 == 1 => numbers[middle],
        _ => (numbers[middle - 1] + numbers[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(prompt_tokens: usize, first_us: u64, count: u64) -> Tokens {
        Tokens { prompt_tokens, times_us: (0..count).map(|index| first_us + 1_000 * index).collect() }
    }

    #[test]
    fn the_step_is_that_of_the_time_in_which_all_decode() {
        let mut early = tokens(100, 0, 40);
        // Alone its steps were longer; the other prompt was computed in them.
        early.times_us[..10].iter_mut().enumerate().for_each(|(index, at)| *at = 500 * index as u64);
        let late = tokens(200, 15_000, 40);
        let shared = shared_step(&[early, late]).unwrap();
        assert!((shared.step_us - 1_000.0).abs() < 1e-9);
        // Tokens 15 to 39 of the one and 0 to 24 of the other.
        assert_eq!(shared.context_tokens, [127, 212]);
    }

    #[test]
    fn a_pause_does_not_change_the_step() {
        let mut paused = tokens(1, 0, 33);
        paused.times_us[20..].iter_mut().for_each(|at| *at += 50_000);
        assert_eq!(shared_step(&[paused]).unwrap().step_us, 1_000.0);
    }

    #[test]
    fn tokens_that_come_several_at_once_do_not_change_the_step() {
        let mut bursts = tokens(1, 0, 64);
        bursts.times_us.iter_mut().for_each(|at| *at = (*at).div_ceil(7_000) * 7_000);
        let step_us = shared_step(&[bursts]).unwrap().step_us;
        assert!((step_us / 1_000.0 - 1.0).abs() < 0.1, "{step_us}");
    }

    #[test]
    fn requests_that_follow_each_other_share_no_step() {
        assert_eq!(shared_step(&[tokens(1, 0, 40), tokens(1, 40_000, 40)]), None);
        assert_eq!(shared_step(&[tokens(1, 0, 5)]), None);
        assert_eq!(shared_step(&[tokens(1, 0, 0)]), None);
        assert_eq!(shared_step(&[]), None);
    }
}
