//! A GPU makes a slot visible: its stream copies a chunk into the arena, sums up what it copied and
//! publishes the request, with no thread of the host in between. The kernels are the fake driver's.

use crate::rig::*;
use crate::ring::{Raw, bytes_of, request};
use cuda_testkit::alone;
use forebay_cuda::checksum::{Checksums, Range, Width};
use forebay_cuda::commits::{Commit, Commits};
use forebay_cuda::device::{Device, DeviceMemory, Stream};
use forebay_cuda::driver::abi::Address;
use forebay_cuda::pinned::Pin;
use forebay_ring::{Op, Status};
use forebay_store::{ChunkShape, TenantId};
use forebay_transfer::Backing;
use std::ptr::NonNull;
use std::sync::Arc;

const ENV: [(&str, &str); 1] = [("FAKE_CUDA_GPUS", "1")];
const WIDTH: Width = Width { blocks: 4, threads: 256 };
/// Layers are summed up in such parts, as those of an engine lie in pages.
const PAGE_BYTES: u64 = 4096;

#[test]
fn a_slot_that_a_gpu_commits_is_visible_with_the_checksums_of_what_it_copied() {
    const NAME: &str = "ring_gpu::a_slot_that_a_gpu_commits_is_visible_with_the_checksums_of_what_it_copied";
    alone(NAME, &ENV, |fake| {
        let site = Site::new();
        let node = site.node();
        let mut raw = Raw::connect(&site);
        let device = Device::open(fake.driver, 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        // SAFETY: both are mapped until the pins are gone.
        let _pins = unsafe {
            let (arena, words) = (raw.arena.as_ptr(), raw.memory.words());
            let start = NonNull::new(arena).unwrap();
            let ring = NonNull::from(words).cast();
            let arena = Pin::new(&device, start, raw.arena.len() as u64).unwrap();
            (arena, Pin::new(&device, ring, size_of_val(words) as u64).unwrap())
        };
        let of_gpu = in_gpu_memory(&device, &stream, &truth(0));
        let (slot, offset_bytes) = raw.reserve(0, ChunkShape::new([LAYER_BYTES; LAYERS]).unwrap());

        let armed = raw.arm(request(Op::Commit, slot, LAYERS as u16));
        raw.wake();
        let word = |at: usize| (&raw const raw.memory.words()[at]) as Address;
        let commit = Commit {
            contexts: word(raw.layout().context(armed.slot, 0)),
            word: word(armed.word),
            value: armed.value,
            layers: 1..1 + LAYERS,
        };
        // In front of the layers another extent, whose sum is none of theirs.
        let layers = (0..LAYERS as u64).map(|layer| pages(of_gpu.address() + layer * LAYER_BYTES));
        let extents: Vec<Vec<Range>> =
            [vec![Range { at: of_gpu.address(), bytes: 16 }]].into_iter().chain(layers).collect();
        let checksums = Checksums::load(&device).unwrap();
        let sums = Arc::new(checksums.list(&extents).unwrap());
        let commits = Commits::load(&device).unwrap().list(&sums, &[commit]).unwrap();
        let to = raw.arena.as_ptr() as Address + offset_bytes;
        let current = device.enter().unwrap();
        // SAFETY: the slot is this client's, and everything lives until the stream is done.
        unsafe {
            stream.copy(of_gpu.address(), to, CHUNK_BYTES).unwrap();
            sums.queue(&stream, WIDTH).unwrap();
            commits.queue(&stream).unwrap();
        }
        drop(current);

        let reaped = raw.reap();
        assert_eq!(reaped.completion.status, Status::Done);
        assert_eq!(reaped.completion.contexts_done, LAYERS as u32);
        let found = node.store().read_guard_by_id(TenantId(0), &id(0)).unwrap();
        assert!(found.check());
        assert!(bytes_of(&raw.arena, found.offset_bytes(), CHUNK_BYTES) == truth(0));
        stream.synchronize().unwrap();
    });
}

/// The ranges of a layer: pages, and what is left of one.
fn pages(layer: Address) -> Vec<Range> {
    let page = |at: u64| Range { at: layer + at, bytes: PAGE_BYTES.min(LAYER_BYTES - at) };
    (0..LAYER_BYTES).step_by(PAGE_BYTES as usize).map(page).collect()
}

fn in_gpu_memory(device: &Arc<Device>, stream: &Stream, bytes: &[u8]) -> DeviceMemory {
    let memory = DeviceMemory::new(device, bytes.len() as u64).unwrap();
    let _current = device.enter().unwrap();
    // SAFETY: both ranges are as long, and used by nothing else.
    unsafe { stream.copy(bytes.as_ptr() as Address, memory.address(), bytes.len() as u64).unwrap() };
    stream.synchronize().unwrap();
    memory
}
