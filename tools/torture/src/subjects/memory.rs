//! Memory as the user of a store has it: values are copied from where the store says that they lie,
//! and a bit there may have changed meanwhile. With `mover` regions it is the only place that
//! touches pointers.

use forebay_transfer::{Memory, Span};

/// The bytes of a span; nothing, if that is not registered memory.
pub fn copy(memory: &Memory, span: &Span) -> Option<Vec<u8>> {
    let (start, len) = memory.host(span)?;
    // SAFETY: the span was resolved from registered memory, which stays for as long as the caller
    // holds what it was told of it by; whoever writes it meanwhile does harm that checksums show.
    Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) }.to_vec())
}

/// Changes bits of the byte at `at` of the spans, one after another.
pub fn flip(memory: &Memory, spans: &[Span], mut at: usize, bits: u8) {
    for (start, len) in spans.iter().filter_map(|span| memory.target(span)) {
        if at < len {
            // SAFETY: as above, and inside of the span.
            unsafe { *start.as_ptr().add(at) ^= bits };
            return;
        }
        at -= len;
    }
}
