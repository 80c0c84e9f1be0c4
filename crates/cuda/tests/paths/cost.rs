//! What small pages cost the processor: an entry in a list each, and no call of the driver's.

use crate::common::{Fake, World, alone, pattern};
use forebay_cuda::CopierOptions;
use forebay_cuda::device::{DeviceMemory, Stream};
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;

const BYTES: u64 = 64 << 20;
/// All that a stream copy queues.
const CALLS: [&str; 5] =
    ["cuMemcpyAsync", "cuMemcpyBatchAsync", "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"];

fn calls(fake: &Fake) -> u64 {
    CALLS.iter().map(|call| fake.stat(call)).sum()
}

#[test]
fn smaller_pages_cost_no_more_calls_of_the_driver() {
    alone("cost::smaller_pages_cost_no_more_calls_of_the_driver", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let (host, memory) = (world.host(BYTES), world.memory(0, 2 * BYTES));
        host.fill(&pattern(1, BYTES));
        for direction in Direction::BOTH {
            let [many, few, batched] = [4 << 10, 32 << 10, 64 << 10]
                .map(|page| queued(&world, direction, host.address(), &memory, page));
            assert!(many <= few + few / 8, "{direction:?}: {few} for 2048 pages, {many} for 16384");
            assert!(batched < few, "{direction:?}: {batched} in a batch, {few} by kernels");
        }
        drop((host, memory));
        world.end();
    });
}

/// The calls of a stream copy over all pages, every other one of the GPU's memory, backwards.
fn queued(world: &World, direction: Direction, host: u64, memory: &DeviceMemory, page: u64) -> u64 {
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
    let before = calls(world.fake);
    // SAFETY: all memory outlives the stream's work.
    unsafe { world.copier.stream_copies().copy(&pieces, stream.handle()).unwrap() };
    let queued = calls(world.fake) - before;
    stream.synchronize().unwrap();
    queued
}
