//! The queue on a virtual disk in virtual time: reads come in bursts as engines send them, stores
//! come when they like, and both share the disk. The tests say what each timing guarantees.

use super::queue::{Dirty, Queue, WriteBackConfig, WriteBackStat, Written};
use super::windows::{IDLE_US, SETTLE_US, Timing};
use crate::admission::Policy;
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use proptest::prelude::*;
use std::collections::VecDeque;

const MB: u64 = 1_000_000;
const MS: u64 = 1_000;
const TICK_US: u64 = 100;
const CHUNK_BYTES: u64 = 4 * MB;
const QUEUE_CHUNKS: usize = 256;
const AGE_MAX_US: u64 = 4_000_000;

/// Bytes per microsecond alone, and the part of it that each side has beside the other.
#[derive(Debug, Clone, Copy)]
struct Disk {
    reads: f64,
    writes: f64,
    kept: f64,
}

/// As the virtual disks that we measured.
const DISK: Disk = Disk { reads: 2_000.0, writes: 2_000.0, kept: 0.55 };

/// When reads and stores come, each in order, of a chunk each.
#[derive(Debug, Clone, Default)]
struct Trace {
    reads_us: Vec<u64>,
    stores_us: Vec<u64>,
}

#[derive(Debug, Default)]
struct Outcome {
    read_us: Vec<u64>,
    /// From when a chunk was offered until its write began.
    waited_us: Vec<u64>,
    /// Writes that began in slack although the disk was being read.
    beside_reads: u64,
    /// Bytes being written when a read came to a disk that was not read, at most.
    held_up_by_bytes: u64,
    waiting_bytes_max: u64,
    waiting_max: usize,
    stat: WriteBackStat,
}

impl Outcome {
    fn read_percentile_us(&self, percent: usize) -> u64 {
        let mut sorted = self.read_us.clone();
        sorted.sort_unstable();
        sorted[(sorted.len() - 1) * percent / 100]
    }
}

/// One side of the disk: what it has to do, first come, first served.
#[derive(Debug)]
struct Line<T>(VecDeque<(f64, T)>);

impl<T> Line<T> {
    /// Does so many bytes, and gives what is done.
    fn advance(&mut self, mut bytes: f64) -> Vec<T> {
        let mut done = Vec::new();
        while let Some((left, _)) = self.0.front_mut() {
            if *left > bytes {
                *left -= bytes;
                break;
            }
            bytes -= *left;
            done.extend(self.0.pop_front().map(|(_, what)| what));
        }
        done
    }
}

fn config(timing: Timing) -> WriteBackConfig {
    let mut config = WriteBackConfig::new(Policy::All, 1 << 40, 1 << 40, CHUNK_BYTES);
    config.pacer.dirty_age_max_us = AGE_MAX_US;
    config.queue_chunks = QUEUE_CHUNKS;
    config.timing = timing;
    config
}

fn in_slack(queue: &Queue) -> u64 {
    let begun = queue.stat().begun;
    begun.window + begun.best_effort + begun.idle
}

/// Runs until all of the trace has ended.
fn run(config: &WriteBackConfig, disk: Disk, trace: &Trace) -> Outcome {
    let (mut queue, mut out) = (Queue::new(config), Outcome::default());
    let (mut reads, mut writes) = (Line::<u64>(VecDeque::new()), Line::<Dirty>(VecDeque::new()));
    let mut coming_reads = trace.reads_us.iter().copied().peekable();
    let mut coming_stores = trace.stores_us.iter().copied().enumerate().peekable();
    let mut offered_us = Vec::new();
    let mut now_us = 0;
    loop {
        while coming_reads.next_if(|at_us| *at_us <= now_us).is_some() {
            if reads.0.is_empty() {
                let bytes = writes.0.iter().map(|(_, dirty)| dirty.bytes).sum();
                out.held_up_by_bytes = out.held_up_by_bytes.max(bytes);
            }
            queue.read_began(now_us);
            reads.0.push_back((CHUNK_BYTES as f64, now_us));
        }
        while let Some((number, _)) = coming_stores.next_if(|(_, at_us)| *at_us <= now_us) {
            offered_us.push(now_us);
            queue.offer(now_us, dirty(number));
        }
        let before = in_slack(&queue);
        while let Some(dirty) = queue.next(now_us) {
            out.waited_us.push(now_us - offered_us[number_of(&dirty)]);
            writes.0.push_back((dirty.bytes as f64, dirty));
        }
        out.beside_reads += (in_slack(&queue) - before) * u64::from(!reads.0.is_empty());
        let stat = queue.stat();
        out.waiting_bytes_max = out.waiting_bytes_max.max(stat.waiting_bytes);
        out.waiting_max = out.waiting_max.max(stat.waiting);
        let kept = if reads.0.is_empty() || writes.0.is_empty() { 1.0 } else { disk.kept };
        let (read_bytes, write_bytes) = (disk.reads * kept, disk.writes * kept);
        now_us += TICK_US;
        for began_us in reads.advance(read_bytes * TICK_US as f64) {
            queue.read_ended(now_us, now_us - began_us, CHUNK_BYTES);
            out.read_us.push(now_us - began_us);
        }
        for dirty in writes.advance(write_bytes * TICK_US as f64) {
            queue.ended(now_us, &dirty, Written::Stored);
        }
        let all_came = coming_reads.peek().is_none() && coming_stores.peek().is_none();
        if all_came && reads.0.is_empty() && queue.is_idle() {
            out.stat = queue.stat();
            return out;
        }
    }
}

fn dirty(number: usize) -> Dirty {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&(number as u64).to_le_bytes());
    Dirty { tenant: TenantId(0), id: ChunkId::from_bytes(id), parent: None, bytes: CHUNK_BYTES }
}

fn number_of(dirty: &Dirty) -> usize {
    let mut number = [0; 8];
    number.copy_from_slice(&dirty.id.as_bytes()[..8]);
    u64::from_le_bytes(number) as usize
}

/// So many prefills, one each `every_ms`: a burst of reads, and stores at any time.
fn prefills(count: u64, every_ms: u64, reads: u64, stores: u64) -> Trace {
    let mut trace = Trace::default();
    for number in 0..count {
        let at_us = number * every_ms * MS;
        trace.reads_us.extend((0..reads).map(|_| at_us));
        // Spread over the time between bursts by a rule that no window follows.
        let spread = |store| at_us + (number * 37 + store * 61) % every_ms * MS;
        trace.stores_us.extend((0..stores).map(spread));
    }
    trace.stores_us.sort_unstable();
    trace
}

#[test]
fn in_windows_all_is_stored_and_reads_take_as_long_as_without_stores() {
    let trace = prefills(60, 100, 16, 8);
    let alone = run(&config(Timing::InWindows), DISK, &Trace { stores_us: Vec::new(), ..trace.clone() });
    let windows = run(&config(Timing::InWindows), DISK, &trace);
    let at_once = run(&config(Timing::AtOnce), DISK, &trace);
    assert_eq!((windows.stat.written, at_once.stat.written), (480, 480));
    // The first windows are not known yet: one chunk at a time then.
    assert!(windows.read_percentile_us(90) <= alone.read_percentile_us(90) + TICK_US, "{windows:?}");
    assert!(at_once.read_percentile_us(90) > windows.read_percentile_us(90) * 11 / 10, "{at_once:?}");
    assert!(windows.stat.begun.window > 400, "{:?}", windows.stat);
}

#[test]
fn writes_that_wait_for_an_idle_disk_wait_until_they_are_due_if_it_is_read_again_and_again() {
    let trace = prefills(60, 100, 4, 1);
    let idle = run(&config(Timing::WhenIdle), DISK, &trace);
    let windows = run(&config(Timing::InWindows), DISK, &trace);
    let longest = |outcome: &Outcome| outcome.waited_us.iter().copied().max();
    assert!(idle.stat.begun.due > 0 && windows.stat.begun.due == 0, "{idle:?} {windows:?}");
    assert!(longest(&windows) < longest(&idle));
}

#[test]
fn a_read_that_nobody_could_foresee_waits_for_one_chunk_at_most() {
    // Windows grow from burst to burst: each outlasts all before it, and none is idle.
    let mut trace = Trace::default();
    let mut at_us = 0;
    for number in 0..20 {
        trace.reads_us.push(at_us);
        at_us += (20 + 30 * number) * MS;
    }
    // Four at a time, right before the moments at which reads come.
    trace.stores_us = (0..400).map(|store| IDLE_US + (store / 4 * 10 + 8) * MS).collect();
    let outcome = run(&config(Timing::InWindows), DISK, &trace);
    assert!(outcome.stat.begun.best_effort > 0, "{:?}", outcome.stat);
    assert!(outcome.held_up_by_bytes <= CHUNK_BYTES, "{}", outcome.held_up_by_bytes);
}

#[test]
fn what_no_window_takes_is_begun_after_half_of_its_time() {
    // The disk is read without a pause for ten seconds.
    let reads_us = (0..5_000).map(|number| number * 2 * MS).collect();
    let trace = Trace { reads_us, stores_us: (0..50).map(|store| store * 20 * MS).collect() };
    let outcome = run(&config(Timing::InWindows), DISK, &trace);
    assert_eq!((outcome.stat.written, outcome.stat.too_old), (50, 0));
    assert!(outcome.stat.begun.due > 0);
    assert!(outcome.waited_us.iter().all(|waited| *waited <= AGE_MAX_US / 2 + 100 * MS), "{outcome:?}");
}

#[test]
fn bytes_that_wait_stay_near_the_bound_from_which_they_are_due() {
    let reads_us = (0..5_000).map(|number| number * 2 * MS).collect();
    let trace = Trace { reads_us, stores_us: (0..500).map(|store| store * 10 * MS).collect() };
    let due_bytes = 10 * CHUNK_BYTES;
    let bounded = WriteBackConfig { due_bytes, ..config(Timing::InWindows) };
    let outcome = run(&bounded, DISK, &trace);
    assert_eq!(outcome.stat.written, 500);
    assert!(outcome.waiting_bytes_max <= due_bytes + 2 * CHUNK_BYTES, "{outcome:?}");
}

#[test]
fn a_disk_that_mixes_well_is_written_at_once_when_that_is_known() {
    // It is read without a pause that is long enough, so that the first writes are due.
    let reads_us = (0..4_000).map(|number| number * 5 * MS / 2).collect();
    let trace = Trace { reads_us, stores_us: (0..60).map(|store| store * 100 * MS).collect() };
    let well = run(&config(Timing::InWindows), Disk { kept: 0.95, ..DISK }, &trace);
    assert!(well.stat.begun.due > 0 && well.stat.begun.at_once > 30, "{:?}", well.stat);
    let badly = run(&config(Timing::InWindows), DISK, &trace);
    assert_eq!(badly.stat.begun.at_once, 0, "{:?}", badly.stat);
}

fn any_trace() -> impl Strategy<Value = Trace> {
    let gaps = |most_us: u64| {
        prop::collection::vec(prop_oneof![3 => 0..SETTLE_US, 1 => 0..most_us], 0..150).prop_map(|gaps| {
            let times = gaps.into_iter().scan(0, |at_us, gap_us| {
                *at_us += gap_us;
                Some(*at_us)
            });
            times.collect()
        })
    };
    (gaps(200 * MS), gaps(60 * MS)).prop_map(|(reads_us, stores_us)| Trace { reads_us, stores_us })
}

#[test]
fn of_a_long_prompt_whose_first_chunk_comes_last_all_are_written_side_by_side() {
    const CHUNKS: usize = 2048;
    let mut config = WriteBackConfig::new(Policy::All, 1 << 20, 1 << 24, 64 << 10);
    config.pacer.lots_min = 2;
    let mut queue = Queue::new(&config);
    let chunk = |number: usize| {
        let parent = number.checked_sub(1).map(|before| dirty(before).id);
        Dirty { parent, ..dirty(number) }
    };
    for number in (1..CHUNKS).chain([0]) {
        assert!(queue.offer(0, chunk(number)));
        if number > 0 {
            assert_eq!(queue.next(0), Some(chunk(number)));
            queue.ended(0, &chunk(number), Written::Refused);
        }
    }
    let (mut begun, mut side_by_side) = (Vec::new(), 0);
    let mut writing = VecDeque::new();
    while !queue.is_idle() {
        while let Some(dirty) = queue.next(0) {
            queue.adopt(0, dirty.id);
            writing.push_back(dirty);
            begun.push(dirty);
        }
        side_by_side = side_by_side.max(writing.len());
        queue.ended(0, &writing.pop_front().unwrap(), Written::Stored);
    }
    assert_eq!(begun, (0..CHUNKS).map(chunk).collect::<Vec<_>>(), "parents come first");
    assert!(side_by_side > 1 && !queue.has_losses());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any trace and any disk: every chunk is written or counted, none is begun too late, no more
    /// wait than the queue takes, and nothing is begun in slack while the disk is read.
    #[test]
    fn whatever_comes_nothing_is_lost_uncounted_begun_too_late_or_in_the_way_of_a_read(
        trace in any_trace(),
        timing in prop_oneof![Just(Timing::AtOnce), Just(Timing::InWindows), Just(Timing::WhenIdle)],
        disk in (200.0..4_000.0, 200.0..4_000.0, 0.3..1.0),
        queue_chunks in 1usize..200,
        due_chunks in 1u64..200,
    ) {
        let (reads, writes, kept) = disk;
        let due_bytes = due_chunks * CHUNK_BYTES;
        let config = WriteBackConfig { queue_chunks, due_bytes, ..config(timing) };
        let outcome = run(&config, Disk { reads, writes, kept }, &trace);
        let stat = outcome.stat;
        prop_assert_eq!(stat.written + stat.too_old + stat.queue_full, trace.stores_us.len() as u64);
        prop_assert_eq!(outcome.read_us.len(), trace.reads_us.len());
        prop_assert_eq!((stat.waiting_bytes, stat.in_flight), (0, 0));
        prop_assert!(outcome.waited_us.iter().all(|waited_us| *waited_us <= AGE_MAX_US));
        prop_assert!(outcome.waiting_max <= queue_chunks);
        prop_assert_eq!(outcome.beside_reads, 0);
    }
}
