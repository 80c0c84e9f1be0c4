//! What copies cost the thread that queues them: small pages an entry in a list each, and no call
//! of the driver's; short batches as many calls with relays as without.

use crate::common::{Fake, World, alone, pattern};
use crate::copy_stream::pages;
use forebay_cuda::CopierOptions;
use forebay_cuda::device::{DeviceMemory, Event, Stream};
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::stream_copy::{Batch, Links, Sent};

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

/// Calls of the thread that sends a batch of which an engine waits for so many bytes, in pages.
fn sent(fake: &Fake, devices: Option<Vec<u16>>, bytes: u64, page: u64) -> (u64, Links) {
    let world = fake.world(CopierOptions { devices, ..CopierOptions::default() });
    let copies = world.copier.stream_copies();
    let copy_stream = copies.copy_stream(0, Direction::HostToDevice).unwrap().unwrap();
    let (host, memory) = (world.host(bytes), world.memory(0, 2 * bytes));
    let pieces = pages(Direction::HostToDevice, host.address(), memory.address(), page, bytes);
    let batch = Batch { pieces: &pieces, after: None, is_open: true, awaited_bytes: Some(bytes), sums: None };
    let ended = Event::to_sleep_for(copy_stream.device()).unwrap();
    let before = fake.stat("calls");
    // SAFETY: the memory outlives the copies, and nobody else uses it.
    let sent = unsafe { copies.send(&copy_stream, &batch, &ended) };
    let calls = fake.stat("calls") - before;
    ended.synchronize().unwrap();
    let Ok(Sent::Queued(Ok(links))) = sent else { panic!("{sent:?}") };
    (calls, links)
}

#[test]
fn a_short_batch_is_queued_by_the_same_calls_with_relays_as_without() {
    alone("cost::a_short_batch_is_queued_by_the_same_calls_with_relays_as_without", &[], |fake| {
        for (bytes, page) in [(1 << 20, 16 << 10), (4 << 20, 64 << 10), (12 << 20, 64 << 10)] {
            let (one, all) = (sent(fake, Some(vec![0]), bytes, page), sent(fake, None, bytes, page));
            assert_eq!(one, all, "{bytes} bytes");
            assert_eq!(one.1, Links::Own, "{bytes} bytes");
        }
        let (_, links) = sent(fake, None, 32 << 20, 64 << 10);
        assert_eq!(links, Links::Several);
    });
}
