//! What queueing a chain of small pages costs the processor. No test: `cargo test --release -p forebay-cuda --test paths -- --ignored
//! --nocapture` prints the figures. The stream is held, so that the fake driver takes calls and does nothing else meanwhile.

use crate::common::{FIGURE, World, alone, pattern};
use forebay_cuda::CopierOptions;
use forebay_cuda::device::{DeviceMemory, Stream};
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BYTES: u64 = 64 << 20;
const ROUNDS: usize = 9;

#[test]
#[ignore = "it measures, and asserts no figure"]
fn what_a_page_costs_the_processor() {
    alone("cost::what_a_page_costs_the_processor", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let (host, memory) = (world.host(BYTES), world.memory(0, 2 * BYTES));
        host.fill(&pattern(1, BYTES));
        for direction in Direction::BOTH {
            let cost = |page| {
                let mut samples: Vec<_> =
                    (0..ROUNDS).map(|_| queued(&world, direction, host.address(), &memory, page)).collect();
                samples.sort();
                // Whatever else the machine does only adds to it.
                samples[0]
            };
            let (few, many) = (cost(64 << 10), cost(4 << 10));
            let pages = (BYTES >> 12) - (BYTES >> 16);
            let page_ns = (many.as_nanos() as f64 - few.as_nanos() as f64) / pages as f64;
            println!(
                "{FIGURE} {direction:?}: {page_ns:.1} ns a page; {few:?} for 1024 pages, {many:?} for 16384"
            );
        }
        world.end();
    });
}

/// How long it takes to queue a chain over all pages, every other one of the GPU's memory, backwards.
fn queued(world: &World, direction: Direction, host: u64, memory: &DeviceMemory, page: u64) -> Duration {
    let count = BYTES / page;
    let piece = |nth: u64| {
        let (near, far) = (host + nth * page, memory.address() + (count - 1 - nth) * 2 * page);
        match direction {
            Direction::HostToDevice => Piece { from: near, to: far, bytes: page },
            Direction::DeviceToHost => Piece { from: far, to: near, bytes: page },
        }
    };
    let pieces: Vec<Piece> = (0..count).map(piece).collect();
    let stream = Stream::new(memory.device()).unwrap();
    let _current = memory.device().enter().unwrap();
    let held = world.fake.hold(&Arc::clone(memory.device()), stream.handle());
    let start = Instant::now();
    // SAFETY: all memory outlives the stream's work.
    unsafe { world.copier.chains().copy(&pieces, stream.handle()).unwrap() };
    let took = start.elapsed();
    held.release();
    stream.synchronize().unwrap();
    took
}
