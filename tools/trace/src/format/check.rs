//! Checks and conversions that all formats share: what a request of any trace must fulfil, and
//! times in microseconds.

use super::error::Problem;
use crate::request::TraceRequest;

/// The longest prompt or answer that is accepted, in tokens: a replayer holds one in memory.
pub const MAX_TOKENS: u32 = 1 << 24;

/// The latest time that is accepted, in seconds: later ones would lose microseconds on their way
/// through a double.
const MAX_SECONDS: f64 = 4e9;
/// The same in microseconds.
const MAX_MICROS: u64 = 4_000_000_000_000_000;

/// How one format calls the fields that are checked.
pub(super) struct FieldNames {
    pub input: &'static str,
    pub output: &'static str,
    pub blocks: &'static str,
    /// What to say where there are too many blocks for their size.
    pub other_size: &'static str,
}

/// The names in Mooncake's traces and those that follow it.
pub(super) const LENGTH_NAMES: FieldNames = FieldNames {
    input: "input_length",
    output: "output_length",
    blocks: "hash_ids",
    other_size: "; --block-tokens gives another size of blocks",
};

/// Refuses a request that nobody could replay: an empty or too long prompt, a too long answer,
/// blocks beyond the prompt.
pub(super) fn check(request: TraceRequest, names: &FieldNames) -> Result<TraceRequest, Problem> {
    if !(1..=MAX_TOKENS).contains(&request.input_tokens) {
        return Err(Problem::field(
            names.input,
            format!("{}, allowed 1 to {MAX_TOKENS}", request.input_tokens),
        ));
    }
    if request.output_tokens > MAX_TOKENS {
        return Err(Problem::field(
            names.output,
            format!("{}, allowed 0 to {MAX_TOKENS}", request.output_tokens),
        ));
    }
    let most = match request.block_tokens {
        0 => 0,
        block_tokens => request.input_tokens.div_ceil(block_tokens) as usize,
    };
    if request.blocks.len() > most {
        let (blocks, block_tokens) = (request.blocks.len(), request.block_tokens);
        return Err(Problem::field(
            names.blocks,
            format!(
                "{blocks} blocks of {block_tokens} tokens, allowed up to {most} in this prompt{}",
                names.other_size
            ),
        ));
    }
    Ok(request)
}

/// Refuses a time in microseconds that is later than any format may have.
pub(super) fn check_micros(field: &str, time_us: Option<u64>) -> Result<(), Problem> {
    match time_us {
        Some(late_us) if late_us > MAX_MICROS => {
            Err(Problem::field(field, format!("{late_us}, allowed 0 to {MAX_MICROS}")))
        }
        _ => Ok(()),
    }
}

/// A time in `unit_s` seconds as whole microseconds.
pub(super) fn micros(field: &str, value: f64, unit_s: f64) -> Result<u64, Problem> {
    let seconds = value * unit_s;
    if !(0.0..=MAX_SECONDS).contains(&seconds) {
        let most = MAX_SECONDS / unit_s;
        return Err(Problem::field(field, format!("{value}, allowed 0 to {most}")));
    }
    Ok((seconds * 1e6).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::{LENGTH_NAMES, MAX_TOKENS, check, check_micros, micros};
    use crate::request::TraceRequest;

    fn request(input_tokens: u32, block_tokens: u32, blocks: u64) -> TraceRequest {
        TraceRequest { input_tokens, block_tokens, blocks: (0..blocks).collect(), ..TraceRequest::default() }
    }

    #[test]
    fn a_request_that_cannot_be_replayed_is_refused() {
        let refused = |request| check(request, &LENGTH_NAMES).unwrap_err().to_string();
        assert_eq!(refused(request(0, 0, 0)), format!("input_length: 0, allowed 1 to {MAX_TOKENS}"));
        assert_eq!(
            refused(request(33, 16, 4)),
            "hash_ids: 4 blocks of 16 tokens, allowed up to 3 in this prompt; --block-tokens gives another size of blocks"
        );
        assert_eq!(
            refused(request(33, 0, 1)),
            "hash_ids: 1 blocks of 0 tokens, allowed up to 0 in this prompt; --block-tokens gives another size of blocks"
        );
        assert!(check(request(33, 16, 3), &LENGTH_NAMES).is_ok());
    }

    #[test]
    fn times_become_microseconds() {
        assert_eq!(micros("t", 61.114, 1.0).unwrap(), 61_114_000);
        assert_eq!(micros("timestamp", 27_482.0, 1e-3).unwrap(), 27_482_000);
        for wrong in [-0.001, f64::NAN, f64::INFINITY, 4.1e9] {
            assert!(micros("t", wrong, 1.0).is_err());
        }
        assert!(check_micros("t", Some(4_000_000_000_000_000)).is_ok() && check_micros("t", None).is_ok());
        assert!(check_micros("t", Some(u64::MAX)).is_err());
    }
}
