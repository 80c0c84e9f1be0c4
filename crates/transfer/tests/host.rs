//! The host link through the whole mover: what callers get.
#![allow(clippy::unwrap_used)]

use forebay_transfer::HostLink;
use forebay_transfer::*;
use proptest::prelude::*;
use std::sync::Arc;

const HOST: Place = Place::Host(0);

/// A mover with one host link and two regions.
struct Bench {
    handle: MoverHandle,
    source: Arc<HostBuffer>,
    target: Arc<HostBuffer>,
    from: RegionId,
    to: RegionId,
    mover: Option<MoverThread>,
}

impl Bench {
    fn new(threads: usize, bytes: usize) -> Bench {
        let mover = MoverThread::spawn(Limits::default()).unwrap();
        let handle = mover.handle();
        let driver = Box::new(HostLink::new(threads).unwrap());
        let link = handle.add_link(LinkSpec::new("host", 4, 64 << 20), driver).unwrap();
        handle.add_path(PathSpec::direct(HOST, HOST, link)).unwrap().unwrap();
        let (source, target) = (Arc::new(HostBuffer::new(bytes)), Arc::new(HostBuffer::new(bytes)));
        let from = handle.register(HOST, source.clone()).unwrap();
        let to = handle.register(HOST, target.clone()).unwrap();
        Bench { handle, source, target, from, to, mover: Some(mover) }
    }

    /// Copies the blocks `(from, to, len)` and returns the end.
    fn copy(&self, blocks: &[(u64, u64, u64)]) -> End {
        let pair = |(from, to, len): &(u64, u64, u64)| {
            SpanPair::new(Span::new(self.from, *from, *len), Span::new(self.to, *to, *len))
        };
        self.handle.run(Transfer::new(blocks.iter().map(pair).collect(), Class::Demand)).unwrap()
    }
}

fn read(buffer: &HostBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    assert!(buffer.read(0, &mut bytes));
    bytes
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Blocks of any length in any order, from a few bytes to several lots.
    #[test]
    fn every_block_arrives_whole_and_nothing_else_changes(
        lens in prop::collection::vec(prop_oneof![1u64..5000, 20_000u64..400_000], 1..60),
        gap in 0u64..100,
        threads in 1usize..4,
        seed in any::<u64>(),
    ) {
        let total: u64 = lens.iter().map(|len| len + gap).sum();
        let bench = Bench::new(threads, total as usize);
        let bytes = pattern(total as usize);
        prop_assert!(bench.source.write(0, &bytes));

        // Sources lie in order, targets in another one.
        let mut order: Vec<usize> = (0..lens.len()).collect();
        order.sort_by_key(|at| (*at as u64 + 1).wrapping_mul(seed | 1));
        let mut blocks: Vec<(u64, u64, u64)> = Vec::new();
        let mut expected = vec![0; total as usize];
        let mut to = 0;
        for at in order {
            let from: u64 = lens[..at].iter().map(|len| len + gap).sum();
            blocks.push((from, to, lens[at]));
            let (from, at_target, len) = (from as usize, to as usize, lens[at] as usize);
            expected[at_target..at_target + len].copy_from_slice(&bytes[from..from + len]);
            to += len as u64 + gap;
        }

        prop_assert_eq!(bench.copy(&blocks), End::Done { bytes: lens.iter().sum() });
        prop_assert!(read(&bench.target) == expected);
    }
}

#[test]
fn a_copy_onto_itself_is_refused_and_changes_nothing() {
    let mut bench = Bench::new(2, 8192);
    bench.to = bench.from;
    let bytes = pattern(8192);
    assert!(bench.source.write(0, &bytes));
    let end = bench.copy(&[(0, 100, 4000)]);
    let End::Failed(Failure { reason: Reason::Link { error, .. }, moved_bytes: 0, .. }) = end else {
        panic!("{end:?}");
    };
    assert!(error.contains("overlaps"), "{error}");
    assert!(read(&bench.source) == bytes);
    assert_eq!(bench.copy(&[(0, 4000, 4000)]), End::Done { bytes: 4000 }, "beside each other is fine");
}

#[test]
fn many_submitters_get_their_own_ends() {
    let bench = Bench::new(3, 64 << 20);
    assert!(bench.source.write(0, &pattern(64 << 20)));
    std::thread::scope(|scope| {
        for submitter in 0..8u64 {
            let bench = &bench;
            scope.spawn(move || {
                for round in 0..4u64 {
                    let (at, len) = (submitter * (8 << 20), (7 << 20) + 17 * round);
                    assert_eq!(bench.copy(&[(at, at, len)]), End::Done { bytes: len });
                }
            });
        }
    });
    let (source, target) = (read(&bench.source), read(&bench.target));
    for slice in 0..8usize {
        let range = slice * (8 << 20)..slice * (8 << 20) + (7 << 20);
        assert!(source[range.clone()] == target[range]);
    }
}

#[test]
fn dropping_the_mover_waits_for_the_threads() {
    let mut bench = Bench::new(2, 32 << 20);
    let pair = SpanPair::new(Span::new(bench.from, 0, 32 << 20), Span::new(bench.to, 0, 32 << 20));
    bench.handle.submit(Transfer::new(vec![pair], Class::WriteBack), |_| {}).unwrap();
    drop(bench.mover.take());
    let before = read(&bench.target);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(read(&bench.target) == before, "nothing writes any more");
}
