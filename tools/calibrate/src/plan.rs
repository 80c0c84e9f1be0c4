//! What is measured, as far as the time and the engine's room allow: the lengths of prompts, and
//! how many requests decode behind which contexts. Pure.

use std::time::Duration;

/// Lengths at most, those that are enough, and those without which there is no fit.
pub const LENGTHS_MAX: usize = 6;
const LENGTHS_ENOUGH: usize = 4;
pub const LENGTHS_NEEDED: usize = 3;
/// Prompts of one length: at least so many, and more of short ones, which a busy machine disturbs
/// most, as far as they take no longer than this.
const REPEATS: std::ops::RangeInclusive<usize> = 3..=15;
const REPEATS_SECONDS: f64 = 2.0;
/// The shortest context that has room for lengths that differ enough.
pub const CONTEXT_NEEDED: usize = 512;
/// Decodes are measured so many times, if the time allows it.
pub const ROUNDS: usize = 3;
/// Requests of the larger batch.
pub const BATCH: usize = 16;

/// The first length: short enough to take no longer than the shortest step.
pub fn first_length(request_tokens: usize) -> usize {
    if request_tokens < 4_096 { 32 } else { 128 }
}

/// How many times a prompt is sent that takes `seconds`.
pub fn repeats(seconds: f64) -> usize {
    ((REPEATS_SECONDS / seconds) as usize).clamp(*REPEATS.start(), *REPEATS.end())
}

/// The length after `measured`, the lengths so far with the seconds that a prompt took; `None`
/// when there are enough of them, or when a longer one has no room or would take more than `left`.
pub fn next_length(measured: &[(usize, f64)], request_tokens: usize, left: Duration) -> Option<usize> {
    let &(last, seconds) = measured.last().filter(|_| measured.len() < LENGTHS_MAX)?;
    // One token of output.
    let longest = request_tokens.saturating_sub(1);
    let factors = if measured.len() < LENGTHS_ENOUGH { &[4, 2][..] } else { &[4] };
    factors.iter().find_map(|factor| {
        let length = (last * factor).min(longest);
        let growth = length as f64 / last as f64;
        // Twice the length takes at most four times as long.
        let needed_s = *REPEATS.start() as f64 * seconds * growth * growth;
        (growth >= 1.5 && needed_s <= left.as_secs_f64()).then_some(length)
    })
}

/// Requests that decode at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    pub requests: usize,
    pub context_tokens: usize,
}

/// The batches: one request and several, each behind a short context and a long one.
pub fn batches(measured: &[(usize, f64)], room: Room, output_tokens: usize, left: Duration) -> Vec<Batch> {
    let requests = BATCH.min(room.max_seqs);
    let fits = |requests: usize, context: usize, seconds: f64| {
        let tokens = context + output_tokens + steps_to_start(requests, context, room.step_tokens);
        tokens <= room.request_tokens
            && requests * tokens <= room.pool_tokens / 10 * 9
            && requests as f64 * seconds <= left.as_secs_f64() / 3.0
    };
    let mut batches = Vec::new();
    for requests in [1, requests] {
        let fitting = || measured.iter().filter(|(context, seconds)| fits(requests, *context, *seconds));
        let contexts = fitting().next().into_iter().chain(fitting().next_back());
        for &(context_tokens, _) in contexts {
            let batch = Batch { requests, context_tokens };
            if !batches.contains(&batch) {
                batches.push(batch);
            }
        }
    }
    batches
}

/// The longest prompt is sent again at the end: one that takes this many times as long, or as
/// short, says that the engine was not alone meanwhile. Two cores that others use are off by less.
const STEADY_FACTOR: f64 = 2.0;
/// What a process may wait for a processor at any time. The longest prompt of an engine takes
/// longer.
const STEADY_US: f64 = 20_000.0;

/// Whether a prompt took about as long at the end as before.
pub fn is_steady(first_us: f64, last_us: f64) -> bool {
    let is_near = (1.0 / STEADY_FACTOR..=STEADY_FACTOR).contains(&(last_us / first_us));
    is_near || (last_us - first_us).abs() < STEADY_US
}

/// What an engine has room for.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub request_tokens: usize,
    pub pool_tokens: usize,
    pub step_tokens: usize,
    pub max_seqs: usize,
}

/// Steps in which the first of some requests decode already, while prompts of others are computed.
pub fn steps_to_start(requests: usize, context_tokens: usize, step_tokens: usize) -> usize {
    (requests * context_tokens).div_ceil(step_tokens) + requests
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);
    const ROOM: Room =
        Room { request_tokens: 131_072, pool_tokens: 262_144, step_tokens: 8_192, max_seqs: 1_024 };

    /// The lengths of an engine that needs `seconds` for a prompt, of `left` seconds in all.
    fn lengths(request_tokens: usize, mut left: f64, seconds: impl Fn(usize) -> f64) -> Vec<usize> {
        let mut measured = vec![(first_length(request_tokens), seconds(first_length(request_tokens)))];
        while let Some(length) = next_length(&measured, request_tokens, Duration::from_secs_f64(left)) {
            left -= *REPEATS.start() as f64 * seconds(length);
            assert!(left >= 0.0, "{measured:?} {length}");
            measured.push((length, seconds(length)));
        }
        measured.into_iter().map(|(length, _)| length).collect()
    }

    #[test]
    fn lengths_grow_until_the_context_or_the_time_ends() {
        let h100 = |tokens: usize| 0.012 + 21.6e-6 * tokens as f64 + 0.467e-9 * (tokens as f64).powi(2);
        assert_eq!(lengths(131_072, 40.0, h100), [128, 512, 2_048, 8_192, 32_768]);
        assert_eq!(lengths(8_192, 40.0, h100), [128, 512, 2_048, 8_191]);
        assert_eq!(lengths(2_048, 40.0, h100), [32, 128, 512, 2_047]);
        let cpu = |tokens: usize| 0.02 + 2e-3 * tokens as f64;
        assert_eq!(lengths(131_072, 40.0, cpu), [128, 512, 1_024, 2_048]);
    }

    #[test]
    fn what_takes_half_or_twice_as_long_at_the_end_was_disturbed() {
        // Measured beside others on an H100, and alone.
        assert!(!is_steady(612_000.0, 227_000.0) && !is_steady(227_000.0, 612_000.0));
        assert!(is_steady(227_000.0, 240_000.0) && is_steady(200.0, 5_000.0));
    }

    #[test]
    fn batches_are_as_large_as_the_room_and_the_time() {
        let measured = [(128, 0.012), (2_048, 0.06), (8_192, 0.22), (32_768, 1.25)];
        let of = |room, left| -> Vec<(usize, usize)> {
            let batches = batches(&measured, room, 64, left);
            batches.iter().map(|batch| (batch.requests, batch.context_tokens)).collect()
        };
        assert_eq!(of(ROOM, LONG), [(1, 128), (1, 32_768), (16, 128), (16, 8_192)]);
        let small = Room { pool_tokens: 65_536, ..ROOM };
        assert_eq!(of(small, LONG), [(1, 128), (1, 32_768), (16, 128), (16, 2_048)]);
        assert_eq!(of(ROOM, Duration::from_secs(3)), [(1, 128), (1, 8_192), (16, 128), (16, 2_048)]);
        let alone = Room { max_seqs: 1, ..ROOM };
        assert_eq!(of(alone, LONG), [(1, 128), (1, 32_768)]);
    }
}
