//! The requests of an engine that decode, as sums: a step of all of them costs as much as a step of
//! one. It knows contexts and steps. It knows no blocks but when a new one is needed.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Requests by the slot that their engine has them in.
#[derive(Debug)]
pub struct Decoding {
    /// Steps so far.
    step: u64,
    requests: u32,
    /// Tokens before those of the next step, of all requests.
    context_tokens: u64,
    /// How many need a new block in a step, by the step's number modulo the block's tokens.
    new_blocks: Vec<u32>,
    /// By the step in which they end.
    ends: BinaryHeap<Reverse<(u64, u32)>>,
}

/// A request that decodes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Decode {
    since: u64,
    /// Tokens before its first decode.
    context_tokens: u32,
}

impl Decoding {
    pub fn new(block_tokens: u32) -> Decoding {
        let new_blocks = vec![0; block_tokens as usize];
        Decoding { step: 0, requests: 0, context_tokens: 0, new_blocks, ends: BinaryHeap::new() }
    }

    pub fn requests(&self) -> u32 {
        self.requests
    }

    pub fn context_tokens(&self) -> u64 {
        self.context_tokens
    }

    /// Blocks that the next step needs.
    pub fn new_blocks(&self) -> u64 {
        u64::from(self.new_blocks[self.phase(self.step + 1)])
    }

    /// Adds a request that has `remaining` tokens to say, behind `context_tokens`.
    pub fn add(&mut self, slot: u32, context_tokens: u32, remaining: u32) -> Decode {
        let decode = Decode { since: self.step, context_tokens };
        self.requests += 1;
        self.context_tokens += u64::from(context_tokens);
        let phase = self.phase_of(&decode);
        self.new_blocks[phase] += 1;
        self.ends.push(Reverse((self.step + u64::from(remaining), slot)));
        decode
    }

    /// Tokens that a request has decoded so far.
    pub fn decoded(&self, decode: &Decode) -> u32 {
        (self.step - decode.since) as u32
    }

    /// A request will not reach its end; to be forgotten.
    pub fn cancel(&mut self, slot: u32) {
        self.ends.retain(|&Reverse((_, other))| other != slot);
    }

    /// Everybody has decoded a token.
    pub fn advance(&mut self) {
        self.step += 1;
        self.context_tokens += u64::from(self.requests);
    }

    /// A request that ended with the last step; to be forgotten.
    pub fn next_ended(&mut self) -> Option<u32> {
        let &Reverse((end, slot)) = self.ends.peek()?;
        (end <= self.step).then(|| {
            self.ends.pop();
            slot
        })
    }

    /// Takes a request that has ended or was cancelled out of the sums.
    pub fn forget(&mut self, decode: &Decode) {
        self.requests -= 1;
        self.context_tokens -= u64::from(decode.context_tokens) + u64::from(self.decoded(decode));
        let phase = self.phase_of(decode);
        self.new_blocks[phase] -= 1;
    }

    fn phase(&self, step: u64) -> usize {
        (step % self.new_blocks.len() as u64) as usize
    }

    /// In step `since + 1` it computes the token at position `context_tokens`, and so on; a block
    /// begins where the position is a multiple of the block's tokens.
    fn phase_of(&self, decode: &Decode) -> usize {
        let block_tokens = self.new_blocks.len() as u64;
        self.phase(decode.since + 1 + block_tokens - u64::from(decode.context_tokens) % block_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_needed_where_a_position_begins_one() {
        let mut decoding = Decoding::new(4);
        decoding.advance();
        decoding.add(0, 6, 10);
        let needed: Vec<u64> = (0..8)
            .map(|_| {
                let needed = decoding.new_blocks();
                decoding.advance();
                needed
            })
            .collect();
        assert_eq!(needed, [0, 0, 1, 0, 0, 0, 1, 0], "positions 6 to 13");
    }

    #[test]
    fn sums_are_those_of_who_is_left() {
        let mut decoding = Decoding::new(4);
        let (first, second) = (decoding.add(0, 10, 2), decoding.add(1, 20, 5));
        decoding.advance();
        assert_eq!((decoding.requests(), decoding.context_tokens(), decoding.next_ended()), (2, 32, None));
        decoding.advance();
        assert_eq!(decoding.next_ended(), Some(0));
        decoding.forget(&first);
        assert_eq!((decoding.context_tokens(), decoding.decoded(&second)), (22, 2));
        decoding.cancel(1);
        decoding.forget(&second);
        assert_eq!((decoding.requests(), decoding.context_tokens(), decoding.next_ended()), (0, 0, None));
    }
}
