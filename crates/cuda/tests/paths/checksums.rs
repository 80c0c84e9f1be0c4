//! Sums that a GPU makes behind a copy stream's batches: they are of what arrived, in the order in
//! which it was listed, whatever the ranges are and over whichever path they came.

use crate::common::{Fake, alone, pattern};
use crate::copy_stream::{copy_stream, pages, send_batch};
use forebay_cuda::CopierOptions;
use forebay_cuda::checksum::{BEHIND_COPIES, Checksums, Range};
use forebay_cuda::device::Stream;
use forebay_cuda::links::Direction;
use forebay_cuda::stream_copy::Batch;

const MIB: u64 = 1 << 20;

#[test]
fn the_sums_of_a_batch_are_of_what_arrived_over_all_paths() {
    alone("checksums::the_sums_of_a_batch_are_of_what_arrived_over_all_paths", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let to_gpu = copy_stream(&world, Direction::HostToDevice);
        let checksums = Checksums::load(to_gpu.device()).unwrap();
        let (bytes, over_relays) = (24 * MIB, fake.stat("bytes.h2d.1"));
        for page in [16 << 10, 512 << 10] {
            let (source, memory) = (world.host(bytes), world.memory(0, 2 * bytes));
            source.fill(&pattern(page, bytes));
            let pieces = pages(Direction::HostToDevice, source.address(), memory.address(), page, bytes);
            let ranges: Vec<_> = pieces.iter().map(|piece| Range { at: piece.to, bytes: page }).collect();
            let extents: Vec<_> = ranges.chunks(8).map(<[Range]>::to_vec).collect();
            let list = checksums.list(&extents).unwrap();
            let batch =
                Batch { pieces: &pieces, after: None, is_open: true, awaited_bytes: None, sums: Some(&list) };
            send_batch(&world, &to_gpu, &batch).synchronize().unwrap();
            let right = pattern(page, bytes);
            let right: Vec<u32> = right.chunks(8 * page as usize).map(crc32c::crc32c).collect();
            assert!(list.sums() == right, "pages of {page} bytes");
        }
        assert!(fake.stat("bytes.h2d.1") > over_relays, "no relay had a part in it");
        drop((to_gpu, checksums));
        world.end();
    });
}

fn any_ranges(fake: &Fake) {
    let world = fake.world(CopierOptions::default());
    let (stream, bytes) = (Stream::new(world.device(0)).unwrap(), 3 * MIB);
    let checksums = Checksums::load(world.device(0)).unwrap();
    let (host, memory, right) = (world.host(bytes), world.memory(0, bytes), pattern(5, bytes));
    host.fill(&right);
    let current = world.device(0).enter().unwrap();
    // SAFETY: both outlive the copy.
    unsafe { stream.copy(host.address(), memory.address(), bytes).unwrap() };
    stream.synchronize().unwrap();
    // Some lie in the host's memory.
    let extents: [&[(bool, u64, u64)]; 5] = [
        &[(true, 0, bytes)],
        &[(true, 1000, 16), (true, 16, 40_000), (false, 512, 4096)],
        &[(true, 3, 1), (false, 77, 20_001), (true, 5, 99_999)],
        &[],
        &[(true, 64, 0), (true, 32, 48)],
    ];
    let range = |&(on_gpu, at, bytes): &(bool, u64, u64)| Range {
        at: at + if on_gpu { memory.address() } else { host.address() },
        bytes,
    };
    let list: Vec<Vec<Range>> = extents.iter().map(|extent| extent.iter().map(range).collect()).collect();
    let joined = |extent: &&[(bool, u64, u64)]| {
        let bytes = extent.iter().map(|(_, at, len)| &right[*at as usize..(at + len) as usize]);
        crc32c::crc32c(&bytes.collect::<Vec<_>>().concat())
    };
    let right_sums: Vec<u32> = extents.iter().map(joined).collect();
    let allocations = fake.stat("cuMemHostAlloc");
    for _ in 0..20 {
        let list = checksums.list(&list).unwrap();
        assert_ne!(list.sums(), right_sums, "nothing was summed up yet");
        // SAFETY: nobody writes the memory, and the list lives until the stream has passed.
        unsafe { list.queue(&stream, BEHIND_COPIES).unwrap() };
        stream.synchronize().unwrap();
        assert_eq!(list.sums(), right_sums);
    }
    assert_eq!(fake.stat("cuMemHostAlloc"), allocations, "memory of lists is used again");
    assert!(checksums.list(&[vec![Range { at: 0, bytes: 1 << 40 }]]).is_err(), "that is beyond the limit");
    drop((current, stream, checksums));
    world.end();
}

#[test]
fn sums_are_those_of_the_bytes_in_the_order_of_any_ranges() {
    alone("checksums::sums_are_those_of_the_bytes_in_the_order_of_any_ranges", &[], any_ranges);
}
