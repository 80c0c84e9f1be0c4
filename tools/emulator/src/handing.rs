//! The engine's side of hand-overs: blocks are read from other engines into a request's own, and
//! kept for others. This file is glue; which blocks is the scheduler's choice, and what is kept for
//! whom `hand_over`'s.

use crate::clock::ModelClock;
use crate::device::DeviceMemory;
use crate::hand_over::{Offers, Read, Reads, Source};
use crate::scheduler::{HandedBlocks, Request, RequestId, Scheduler};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::task::JoinHandle;

#[derive(Debug)]
pub struct Handing {
    reads: Reads,
    /// What is read, and from which of the request's blocks on.
    reading: HashMap<RequestId, (usize, JoinHandle<()>)>,
    pub offers: Arc<Offers>,
    device: DeviceMemory,
    /// Model microseconds that the KV of a token takes.
    network_us_per_token: f64,
}

impl Handing {
    pub fn new(
        reads: Reads,
        offers: Arc<Offers>,
        device: DeviceMemory,
        network_us_per_token: f64,
    ) -> Handing {
        Handing { reads, reading: HashMap::new(), offers, device, network_us_per_token }
    }

    /// Starts to read blocks of a prompt. Its end comes as a message.
    pub fn start(&mut self, read: HandedBlocks, source: Source, scheduler: &Scheduler, clock: &ModelClock) {
        let tokens = read.blocks.len() * scheduler.block_tokens();
        let network = clock.real(tokens as f64 * self.network_us_per_token);
        let task = self.reads.start(read.request, source, network);
        self.reading.insert(read.request, (read.first_block, task));
    }

    /// A read has ended. The prefiller gives all blocks of the prompt; those that were cached here
    /// are not needed.
    pub fn ended(&mut self, scheduler: &mut Scheduler, read: Read) {
        let Some((first_block, _)) = self.reading.remove(&read.request) else { return };
        let filled = match (read.bytes, scheduler.reading(read.request)) {
            (Some(bytes), Some(blocks)) => self.device.write_blocks(blocks, first_block, &bytes),
            _ => false,
        };
        scheduler.read_ended(read.request, first_block, filled);
    }

    /// Nobody waits for a request any more.
    pub fn forget(&mut self, request: RequestId) {
        if let Some((_, task)) = self.reading.remove(&request) {
            task.abort();
        }
    }

    /// Keeps the whole blocks of a prompt that has been computed.
    pub fn keep(&self, scheduler: &mut Scheduler, keys: [String; 2], request: &Request) {
        let whole = (request.prompt_tokens - 1) / scheduler.block_tokens();
        let blocks = request.blocks[..whole].to_vec();
        scheduler.keep(&blocks);
        self.offers.keep(keys, blocks);
    }
}
