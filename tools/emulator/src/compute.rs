//! What the emulated GPU computes in a step: KV bytes of new tokens, and tokens that follow from KV
//! bytes. This file knows the device and the truth.

use crate::device::DeviceMemory;
use crate::scheduler::{Request, RequestId, Scheduler, Share, Step};
use crate::truth::{BlockKeys, BlockSums, ContextDigest, KvTruth};
use std::collections::HashMap;
use std::ops::Range;

/// The emulated GPU.
#[derive(Debug)]
pub struct Compute {
    truth: KvTruth,
    device: DeviceMemory,
    vocab: u32,
    /// What has been read of each running request's context.
    contexts: HashMap<RequestId, ContextDigest>,
    keys: BlockKeys,
    sums: BlockSums,
    extent: Vec<u8>,
}

impl Compute {
    /// A GPU that keeps its KV in `device`.
    pub fn new(truth: KvTruth, device: DeviceMemory, vocab: u32) -> Compute {
        let extent = vec![0; truth.shape().extent_bytes()];
        Compute {
            truth,
            device,
            vocab,
            contexts: HashMap::new(),
            keys: BlockKeys::default(),
            sums: BlockSums::default(),
            extent,
        }
    }

    /// Computes a step: writes the KV of its tokens and gives the tokens that follow, one for each
    /// share that samples.
    pub fn run(&mut self, scheduler: &Scheduler, step: &Step) -> Vec<u32> {
        step.preempted.iter().for_each(|request| self.forget(*request));
        let mut sampled = Vec::new();
        for share in &step.shares {
            let Some(request) = scheduler.request(share.request) else { continue };
            self.write(request, share.start..share.start + share.tokens);
            if share.samples {
                sampled.push(self.sample(request, share));
            }
        }
        sampled
    }

    /// Forgets what was read for a request that finished, was aborted or was preempted.
    pub fn forget(&mut self, request: RequestId) {
        self.contexts.remove(&request);
    }

    /// Writes the KV of a request's tokens `positions`.
    fn write(&mut self, request: &Request, positions: Range<usize>) {
        let shape = self.truth.shape();
        for (block, tokens) in blocks_of(&positions, shape.block_tokens()) {
            let first = block * shape.block_tokens();
            let parent = match block.checked_sub(1) {
                Some(parent) => request.block_names[parent],
                None => self.truth.hasher().root(),
            };
            self.truth.set_keys(&mut self.keys, parent, &request.tokens[first..first + tokens.end]);
            for layer in 0..shape.layers() {
                self.truth.fill(layer, &self.keys, tokens.clone(), &mut self.extent);
                self.device.write(layer, request.blocks[block], &tokens, &self.extent);
            }
        }
    }

    /// The token that follows a request's context. The KV of the whole context is read when its
    /// prefill completes, and again for the last token; in between each step reads the KV of the
    /// token that it computed.
    fn sample(&mut self, request: &Request, share: &Share) -> u32 {
        let end = request.tokens.len();
        let known = self.contexts.get(&share.request).copied();
        let is_last = request.output_tokens() + 1 >= request.max_tokens;
        let digest = match known {
            Some(digest) if digest.tokens() == share.start && !is_last => digest,
            _ => ContextDigest::EMPTY,
        };
        let digest = self.read(request, digest, end);
        self.contexts.insert(share.request, digest);
        digest.next_token(self.vocab)
    }

    /// Reads on from where `digest` ends up to position `end`.
    fn read(&mut self, request: &Request, mut digest: ContextDigest, end: usize) -> ContextDigest {
        let shape = self.truth.shape();
        for (block, tokens) in blocks_of(&(digest.tokens()..end), shape.block_tokens()) {
            self.sums.reset(tokens.len());
            for layer in 0..shape.layers() {
                self.device.read(layer, request.blocks[block], &mut self.extent);
                self.truth.read(layer, tokens.clone(), &self.extent, &mut self.sums);
            }
            self.sums.as_slice().iter().for_each(|sum| digest.absorb(*sum));
        }
        digest
    }
}

/// The blocks that hold the tokens `positions`, each with those of its tokens that are meant.
fn blocks_of(positions: &Range<usize>, block_tokens: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let positions = positions.clone();
    (positions.start / block_tokens..positions.end.div_ceil(block_tokens)).map(move |block| {
        let first = block * block_tokens;
        let start = positions.start.max(first) - first;
        let end = positions.end.min(first + block_tokens) - first;
        (block, start..end)
    })
}

#[cfg(test)]
mod tests {
    use super::{Compute, DeviceMemory, KvTruth, blocks_of};
    use crate::scheduler::{BlockId, Scheduler, SchedulerConfig};
    use crate::truth::{KvShape, Oracle};
    use forebay_kv::NamespaceKey;

    /// Answers a prompt; before the token number `flip_at`, a bit of the prompt's KV is flipped.
    fn answer(prompt: &[u32], tokens: usize, flip_at: Option<usize>) -> (Vec<u32>, Vec<u32>) {
        let namespace = NamespaceKey::from_bytes([5; 32]);
        let truth = KvTruth::new(&namespace, KvShape::new(3, 4, 4).unwrap());
        let oracle = Oracle::new(truth.clone(), 1_000, 100);
        let device = DeviceMemory::new(truth.shape(), 16);
        let mut compute = Compute::new(truth, device.clone(), 1_000);
        let mut scheduler = Scheduler::new(SchedulerConfig {
            namespace,
            pool_blocks: 16,
            block_tokens: 4,
            max_batched_tokens: 8,
            max_seqs: 4,
            max_queued: 4,
            max_model_tokens: 64,
            chunk_tokens: None,
            max_store_blocks: 0,
        });
        scheduler.submit(prompt.to_vec(), tokens).unwrap();
        let mut output = Vec::new();
        while output.len() < tokens {
            if flip_at == Some(output.len()) {
                let mut extent = [0; 16];
                device.read(1, BlockId(0), &mut extent);
                extent[3] ^= 16;
                device.write(1, BlockId(0), &(0..4), &extent);
            }
            let step = scheduler.schedule(&mut |_| 0);
            let sampled = compute.run(&scheduler, &step);
            scheduler.complete(&step, &sampled);
            output.extend(sampled);
        }
        (output, oracle.predict(prompt, tokens))
    }

    #[test]
    fn tokens_follow_from_the_bytes_in_the_device() {
        let prompt: Vec<u32> = (0..21).collect();
        let (output, right) = answer(&prompt, 12, None);
        assert_eq!(output, right);
    }

    #[test]
    fn a_byte_that_changes_while_a_request_decodes_shows_in_its_last_token() {
        let prompt: Vec<u32> = (0..21).collect();
        let (output, right) = answer(&prompt, 12, Some(5));
        assert_eq!(output[..11], right[..11], "what was read before it changed was right");
        assert_ne!(output[11], right[11]);
    }

    #[test]
    fn positions_fall_into_blocks_in_order_and_without_gaps() {
        let all: Vec<_> = blocks_of(&(3..21), 8).collect();
        assert_eq!(all, [(0, 3..8), (1, 0..8), (2, 0..5)]);
        assert_eq!(blocks_of(&(8..9), 8).collect::<Vec<_>>(), [(1, 0..1)]);
        assert_eq!(blocks_of(&(8..8), 8).count(), 0);
    }
}
