//! Our commands, lists and queues against somebody else's controller, QEMU's. What that controller
//! lets pass although the specification forbids it is tested with our own.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use forebay_ring::nvme::{
    Command, DataPointer, Descriptor, Format, Limits, ListPage, Outcome, Prp, Segment, Split, Status, prp,
    sgl,
};
use qemu_nvme::{Area, Drive, Error, GuestMemory, Place, Queue, Settings, round_trip};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::thread;
use std::time::Duration;

const PAGE: u64 = 4096;
const BLOCK: u64 = 512;

/// A drive, or none where this machine cannot have QEMU.
fn drive_with(settings: Settings) -> Option<Drive> {
    match Drive::start(&settings) {
        Ok(drive) => Some(drive),
        Err(why @ Error::Missing(_)) => {
            testkit::skipped(why);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn drive() -> Option<Drive> {
    drive_with(Settings::default())
}

/// Bytes that tell which block they are of.
fn bytes_of(block: u64) -> [u8; BLOCK as usize] {
    std::array::from_fn(|at| (block * 31 + at as u64 / 7) as u8)
}

/// The data pointer of memory in one piece.
fn contiguous(address: u64, bytes: u64) -> DataPointer {
    DataPointer::Sgl(sgl::encode(&[Segment { address, bytes }], false, &mut []).unwrap().0)
}

/// One command, to its end.
fn ended(queue: &mut Queue<()>, command: &Command) -> Outcome {
    queue.submit(command, ()).unwrap();
    queue.ring();
    queue.wait().outcome
}

/// Writes blocks one by one, each with bytes of its own.
fn write_blocks(drive: &mut Drive, queue: &mut Queue<()>, blocks: u64) {
    let data = drive.take(blocks * BLOCK);
    for block in 0..blocks {
        drive.memory().write(data + block * BLOCK, &bytes_of(block));
    }
    let command = Drive::write(0, blocks as u32, contiguous(data, blocks * BLOCK));
    assert_eq!(ended(queue, &command), Outcome::Done(0));
}

/// Memory from `address` on holds these blocks, in order.
fn assert_blocks(memory: &GuestMemory, address: u64, first: u64, blocks: u64) {
    let mut found = vec![0; (blocks * BLOCK) as usize];
    memory.read(address, &mut found);
    for (block, bytes) in (first..).zip(found.chunks(BLOCK as usize)) {
        assert!(bytes == bytes_of(block), "block {block}");
    }
}

#[test]
fn what_one_shape_wrote_another_reads_and_nothing_around_it_changes() {
    let Some(mut drive) = drive() else { return };
    let mut queue = drive.add_queue(64);
    let blocks = drive.namespace.blocks;
    let place = Place::new(&mut drive, 0..blocks);
    let formats = [Format::Prp, Format::Sgl];
    for case in 0..1_000 {
        let (write, read) = (formats[case & 1], formats[case >> 1 & 1]);
        let mut rng = StdRng::seed_from_u64(case as u64);
        let outcome = round_trip(&mut queue, &mut rng, &place, [write, read]);
        assert_eq!(outcome, Ok(()), "case {case}");
    }
}

#[test]
fn each_command_ends_once_with_its_own_data_through_a_hundred_wraps() {
    const ENTRIES: u16 = 16;
    const COMMANDS: u64 = 100 * ENTRIES as u64 + 7;
    const BLOCKS: u64 = 64;
    let Some(mut drive) = drive() else { return };
    let mut writes = drive.add_queue(ENTRIES);
    write_blocks(&mut drive, &mut writes, BLOCKS);
    let mut queue = drive.add_queue::<u64>(ENTRIES);
    let data = drive.take(COMMANDS * BLOCK);

    let (mut sent, mut seen) = (0, vec![0; COMMANDS as usize]);
    while seen.contains(&0) {
        while sent < COMMANDS && queue.outstanding() < u32::from(ENTRIES) - 1 {
            let pointer = contiguous(data + sent * BLOCK, BLOCK);
            // The last slots may still be taken: the controller has not told that it has read them.
            if queue.submit(&Drive::read(sent % BLOCKS, 1, pointer), sent).is_err() {
                break;
            }
            sent += 1;
        }
        queue.ring();
        let read = queue.wait();
        assert_eq!(read.outcome, Outcome::Done(0));
        seen[read.purpose as usize] += 1;
        assert_blocks(drive.memory(), data + read.purpose * BLOCK, read.purpose % BLOCKS, 1);
    }
    assert!(seen.iter().all(|&times| times == 1), "{seen:?}");
    assert_eq!(queue.poll(), None);
    assert_eq!(queue.outstanding(), 0);
}

/// Reads with whole pages of data, a list of so many entries, and data in descending pages.
fn read_by_a_list(drive: &Drive, queue: &mut Queue<()>, pages: u64, area: Area) {
    let segments: Vec<Segment> =
        (0..pages).rev().map(|page| Segment { address: area.data + page * PAGE, bytes: PAGE }).collect();
    let mut bytes = vec![[0; PAGE as usize]; 3];
    let lists = bytes.iter_mut().zip((area.lists..).step_by(PAGE as usize));
    let mut lists: Vec<_> =
        lists.map(|(bytes, address)| ListPage { address, bytes: &mut bytes[..] }).collect();
    let (pointer, used) = prp::encode(&segments, PAGE, &mut lists).unwrap();
    for (bytes, address) in bytes.iter().take(used).zip((area.lists..).step_by(PAGE as usize)) {
        drive.memory().write(address, bytes);
    }
    drive.memory().fill(area.data, (pages * PAGE) as usize, 0);
    let blocks = pages * PAGE / BLOCK;
    let command = Drive::read(0, blocks as u32, DataPointer::Prp(pointer));
    assert_eq!(ended(queue, &command), Outcome::Done(0), "{pages} pages");
    for (page, segment) in segments.iter().enumerate() {
        let per_page = PAGE / BLOCK;
        assert_blocks(drive.memory(), segment.address, page as u64 * per_page, per_page);
    }
}

#[test]
fn lists_around_a_full_page_of_entries_are_followed() {
    // 4 MiB a command: more entries than a page of a list has.
    let Some(mut drive) = drive_with(Settings { mdts: 10, ..Settings::default() }) else { return };
    let mut queue = drive.add_queue(8);
    let longest = 516 * PAGE;
    write_blocks(&mut drive, &mut queue, longest / BLOCK);
    let area = Area { data: drive.take(longest), lists: drive.take(3 * PAGE) };
    // One page more than entries: the first one stands in the command.
    for pages in [1, 2, 3, 4, 511, 512, 513, 514, 515, 516] {
        read_by_a_list(&drive, &mut queue, pages, area);
    }
}

#[test]
fn a_transfer_beyond_mdts_arrives_whole_in_pieces() {
    const BYTES: u64 = 3 << 20;
    let Some(mut drive) = drive() else { return };
    let mut queue = drive.add_queue(8);
    write_blocks_in_pieces(&mut drive, &mut queue, BYTES / BLOCK);
    let data = drive.take(BYTES);
    let limits = limits(&drive);
    assert_eq!(limits.max_bytes, 512 << 10, "MDTS 7");

    let whole = [Segment { address: data, bytes: BYTES }];
    let mut split = Split::new(&whole, 0, limits).unwrap();
    let (mut memory, mut pieces) = (Vec::new(), 0);
    while let Some(piece) = split.next_piece(&mut memory).unwrap() {
        let (pointer, _) = sgl::encode(&memory, false, &mut []).unwrap();
        let command = Drive::read(piece.first_block, piece.blocks, DataPointer::Sgl(pointer));
        assert_eq!(ended(&mut queue, &command), Outcome::Done(0));
        pieces += 1;
    }
    assert_eq!(pieces, 6);
    assert_blocks(drive.memory(), data, 0, BYTES / BLOCK);
}

fn limits(drive: &Drive) -> Limits {
    Limits {
        format: Format::Sgl,
        page_bytes: PAGE,
        max_bytes: drive.controller.max_transfer_bytes,
        max_descriptors: 256,
        block_bytes: drive.namespace.block_bytes,
        namespace_blocks: drive.namespace.blocks,
    }
}

fn write_blocks_in_pieces(drive: &mut Drive, queue: &mut Queue<()>, blocks: u64) {
    let data = drive.take(blocks * BLOCK);
    let most = drive.controller.max_transfer_bytes / BLOCK;
    for first in (0..blocks).step_by(most as usize) {
        let here = most.min(blocks - first);
        for block in first..first + here {
            drive.memory().write(data + block * BLOCK, &bytes_of(block));
        }
        let command = Drive::write(first, here as u32, contiguous(data + first * BLOCK, here * BLOCK));
        assert_eq!(ended(queue, &command), Outcome::Done(0));
    }
}

/// A status as the specification's tables have it: type and code. All of them say not to retry.
fn refused(code_type: u8, code: u8) -> Outcome {
    Outcome::Failed(Status { code_type, code, retry_delay: 0, more: false, do_not_retry: true })
}

#[test]
fn a_command_that_the_specification_forbids_ends_with_its_status() {
    let Some(mut drive) = drive() else { return };
    let mut queue = drive.add_queue(8);
    let (data, list) = (drive.take(2 << 20), drive.take(PAGE));
    let last = drive.namespace.blocks;
    let block = |pointer| Drive::read(0, 8, pointer);
    let segment = |kind, bytes| DataPointer::Sgl(Descriptor { kind, address: list, bytes });

    // A list whose first entry is not the beginning of a page.
    drive.memory().write(list, &(data + PAGE + 4).to_le_bytes());
    drive.memory().write(list + 8, &(data + 2 * PAGE).to_le_bytes());
    let offset = Drive::read(0, 24, DataPointer::Prp(Prp { prp1: data, prp2: list }));
    assert_eq!(ended(&mut queue, &offset), refused(0, 0x13), "PRP Offset Invalid");

    let long = Drive::read(0, 2048, contiguous(data, 1 << 20));
    assert_eq!(ended(&mut queue, &long), refused(0, 0x02), "beyond MDTS: Invalid Field in Command");

    let short = block(contiguous(data, 7 * BLOCK));
    assert_eq!(ended(&mut queue, &short), refused(0, 0x0f), "Data SGL Length Invalid");

    // The specification also has a code of its own for this, 11h, which QEMU does not use.
    queue.submit_changed(&block(contiguous(data, PAGE)), (), |entry| entry[39] = 0xf0).unwrap();
    queue.ring();
    let outcome = queue.wait().outcome;
    assert_eq!(outcome, refused(0, 0x0d), "an unknown type: Invalid SGL Segment Descriptor");

    let (low, high) = Descriptor { kind: sgl::Kind::Segment, address: data, bytes: 16 }.halves();
    drive.memory().write(list, &low.to_le_bytes());
    drive.memory().write(list + 8, &high.to_le_bytes());
    let nested = block(segment(sgl::Kind::LastSegment, 16));
    assert_eq!(ended(&mut queue, &nested), refused(0, 0x0d), "a segment in a last segment");

    let beyond = Drive::read(last - 7, 8, contiguous(data, PAGE));
    assert_eq!(ended(&mut queue, &beyond), refused(0, 0x80), "LBA Out of Range");
    let at_the_end = Drive::read(last - 8, 8, contiguous(data, PAGE));
    assert_eq!(ended(&mut queue, &at_the_end), Outcome::Done(0));
}

/// One round of a reset under I/O; says how many commands were under way.
fn reset_under_io(drive: &mut Drive, queue: &mut Queue<u64>, commands: u64, data: u64) -> usize {
    const BYTES: u64 = 512 << 10;
    let all = (commands * BYTES) as usize;
    for command in 0..commands {
        let pointer = contiguous(data + command * BYTES, BYTES);
        queue.submit(&Drive::read(command * 1024, 1024, pointer), command).unwrap();
    }
    drive.memory().fill(data, all, 0xa5);
    queue.ring();
    // Once the first one has ended, others are under way.
    let mut ends = vec![queue.wait()];
    drive.disable();
    ends.extend(std::iter::from_fn(|| queue.poll()));
    let done = ends.len();
    ends.extend(queue.reset());

    let image = drive.memory().copy(data, all);
    thread::sleep(Duration::from_millis(200));
    assert!(image == drive.memory().copy(data, all), "memory changes after the reset");
    assert_eq!(queue.poll(), None);
    let mut ended: Vec<u64> = ends.iter().map(|end| end.purpose).collect();
    ended.sort_unstable();
    assert!(ended.iter().copied().eq(0..commands), "{ended:?}");
    assert!(ends[done..].iter().all(|end| end.outcome == Outcome::Reset));
    ends.len() - done
}

#[test]
fn after_a_reset_under_io_memory_is_quiet_and_each_command_has_ended_once() {
    const COMMANDS: u64 = 20;
    const ROUNDS: u32 = 3;
    // All of a round's commands together take more than half a second.
    let slow = Settings { bytes_per_second: Some(16 << 20), ..Settings::default() };
    let Some(mut drive) = drive_with(slow) else { return };
    let mut queue = drive.add_queue::<u64>(64);
    let data = drive.take(COMMANDS * (512 << 10));
    let mut under_way = 0;
    // On a busy machine all of a round's commands may have ended before the reset even so.
    for _ in 0..20 {
        under_way += u32::from(reset_under_io(&mut drive, &mut queue, COMMANDS, data) > 0);
        drive.enable();
        drive.create(&queue);
        if under_way == ROUNDS {
            break;
        }
    }
    assert_eq!(under_way, ROUNDS, "rounds with commands under way");
    // The queues begin anew, and work.
    queue.submit(&Drive::read(0, 8, contiguous(data, PAGE)), 0).unwrap();
    queue.ring();
    assert_eq!(queue.wait().outcome, Outcome::Done(0));
}

#[test]
fn four_queues_at_once_do_not_see_each_others_data() {
    const QUEUES: u64 = 4;
    let Some(mut drive) = drive() else { return };
    let blocks = drive.namespace.blocks / QUEUES;
    let workers: Vec<_> = (0..QUEUES)
        .map(|worker| {
            let mut queue = drive.add_queue(8);
            let place = Place::new(&mut drive, worker * blocks..(worker + 1) * blocks);
            thread::spawn(move || {
                let mut rng = StdRng::seed_from_u64(worker);
                for _ in 0..50 {
                    let outcome = round_trip(&mut queue, &mut rng, &place, [Format::Prp, Format::Sgl]);
                    assert_eq!(outcome, Ok(()), "queue {worker}");
                }
            })
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
}
