//! Copies of which the driver refuses a call, each call in its turn: what is said to be copied is, and when the copy returns nothing of it
//! is under way any more.

use crate::common::{Fake, Host, World, alone, pattern};
use crate::courier::pages;
use forebay_cuda::CopierOptions;
use forebay_cuda::device::DeviceMemory;
use forebay_cuda::links::Direction;
use forebay_cuda::rates::Rates;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const CALLS: [&str; 5] =
    ["cuMemcpyBatchAsync", "cuMemcpyAsync", "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"];

/// Memory to copy between.
struct Site<'a> {
    world: &'a World<'a>,
    page: u64,
    bytes: u64,
    source: Arc<Host>,
    target: Arc<Host>,
    memory: DeviceMemory,
}

impl Site<'_> {
    fn new<'a>(world: &'a World<'a>, page: u64, bytes: u64) -> Site<'a> {
        let (source, target, memory) = (world.host(bytes), world.host(bytes), world.memory(0, 2 * bytes));
        Site { world, page, bytes, source, target, memory }
    }

    /// Copies there and back, one of the two with a call refused, and then both with none. Says whether there was such a call.
    fn there_and_back(&self, refused_way: Direction, refused: &str) -> bool {
        let mut was_met = false;
        for seed in 1..3 {
            self.source.fill(&pattern(seed, self.bytes));
            let mut is_copied = true;
            for (way, host) in
                [(Direction::HostToDevice, &self.source), (Direction::DeviceToHost, &self.target)]
            {
                let pieces = pages(way, host.address(), self.memory.address(), self.page, self.bytes);
                let is_refused = seed == 1 && way == refused_way;
                self.world.fake.control(if is_refused { refused } else { "" });
                // SAFETY: all memory outlives the copies, and nothing else uses it.
                let copied = unsafe { self.world.copier.copy_and_wait(0, way, &pieces) };
                was_met |= is_refused && self.world.fake.stat("live.failing") == 0;
                self.world.fake.control("mend");
                assert!(copied.is_ok() || is_refused, "after {refused}: {copied:?}");
                is_copied &= copied.is_ok();
            }
            assert!(!is_copied || self.target.bytes() == pattern(seed, self.bytes), "{refused}");
        }
        was_met
    }
}

/// Copies of a run, of small pages, and of pages that batches take.
fn with_each_call_refused(options: CopierOptions, fake: &Fake) {
    let world = fake.world(options);
    for (page, bytes) in [(6 * MIB, 6 * MIB), (16 << 10, 2 * MIB), (64 << 10, 4 * MIB)] {
        let site = Site::new(&world, page, bytes);
        for (way, call) in Direction::BOTH.into_iter().flat_map(|way| CALLS.map(|call| (way, call))) {
            let met = |nth: &u64| site.there_and_back(way, &format!("fail {call} {nth} 719"));
            assert!((1..1000).take_while(met).count() < 999, "{call} in copies of {bytes} bytes");
        }
    }
    world.end();
}

#[test]
fn a_refused_call_costs_a_chain_at_most_and_leaves_nothing_under_way() {
    alone("refused::a_refused_call_costs_a_chain_at_most_and_leaves_nothing_under_way", &[], |fake| {
        with_each_call_refused(CopierOptions::default(), fake);
    });
}

#[test]
fn a_refused_call_costs_a_transfer_at_most_and_leaves_nothing_under_way() {
    alone("refused::a_refused_call_costs_a_transfer_at_most_and_leaves_nothing_under_way", &[], |fake| {
        let movers = |rates: Rates, way| rates.with_mover_bytes(way, MIB);
        let rates = Direction::BOTH.into_iter().fold(Rates::default(), movers);
        with_each_call_refused(CopierOptions { rates: Some(rates), ..CopierOptions::default() }, fake);
    });
}
