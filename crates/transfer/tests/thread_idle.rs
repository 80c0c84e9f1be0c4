//! A mover with nothing to do costs nothing. Alone in its process, because it watches all movers
//! there.

#![allow(clippy::unwrap_used)]

use forebay_transfer::{
    Class, Completion, End, HostBuffer, Limits, Link, LinkOp, LinkSpec, Memory, MoverThread, Outcome,
    PathSpec, Place, Span, SpanPair, Transfer,
};
use std::sync::Arc;
use std::time::Duration;

/// Says that it has moved everything.
struct Nothing;

impl Link for Nothing {
    fn start(&mut self, op: LinkOp, _: &Arc<Memory>, done: Completion) {
        done.finish(Outcome::Moved { bytes: op.bytes });
    }
}

#[test]
fn an_idle_mover_uses_no_cpu() {
    let (here, there) = (Place::Host(0), Place::Device(0));
    let thread = MoverThread::spawn(Limits::default()).unwrap();
    let mover = thread.handle();
    let region = |place| mover.register(place, Arc::new(HostBuffer::new(100))).unwrap();
    let (from, to) = (Span::new(region(here), 0, 100), Span::new(region(there), 0, 100));
    let link = mover.add_link(LinkSpec::new("link", 4, 1 << 30), Box::new(Nothing)).unwrap();
    mover.add_path(PathSpec::direct(here, there, link)).unwrap().unwrap();
    let transfer = Transfer::new(vec![SpanPair::new(from, to)], Class::Demand);
    assert_eq!(mover.run(transfer).unwrap(), End::Done { bytes: 100 });
    // One window of a few has to be quiet: in the first one its start may still be under way.
    let mut ticks = Vec::new();
    while ticks.last().is_none_or(|last| *last > 1) {
        assert!(ticks.len() < 5, "{ticks:?} hundredths of a second of CPU in 1.5 s each");
        let before = cpu_ticks();
        std::thread::sleep(Duration::from_millis(1_500));
        ticks.push(cpu_ticks() - before);
    }
}

/// User and system time of the mover's thread, in hundredths of a second.
fn cpu_ticks() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        let stat = std::fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
        let (name, fields) = stat.rsplit_once(") ")?;
        let fields: Vec<u64> =
            fields.split(' ').skip(11).take(2).filter_map(|field| field.parse().ok()).collect();
        name.contains("forebay-mover").then(|| fields.iter().sum::<u64>())
    });
    let ticks: Vec<u64> = tasks.collect();
    assert_eq!(ticks.len(), 1, "the mover's thread");
    ticks[0]
}
