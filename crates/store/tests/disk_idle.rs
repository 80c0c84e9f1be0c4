//! An idle disk link costs nothing. Alone in its process, because it watches all threads of disk
//! links there.

#![allow(clippy::unwrap_used)]

use forebay_store::disk::{DiskFile, DiskLink, DiskOptions, Driver};
use forebay_transfer::HostBuffer;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn an_idle_link_never_wakes_up() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for driver in [Driver::Uring, Driver::Threads] {
        let path = directory.path().join(format!("{driver:?}"));
        let options = DiskOptions { driver, ..DiskOptions::default() };
        let link = match DiskLink::open(DiskFile::create(path, 4096).unwrap(), options) {
            Ok(link) => link,
            Err(error) => {
                testkit::skipped(format_args!("{driver:?}: {error}"));
                continue;
            }
        };
        let memory = Arc::new(HostBuffer::new(4096));
        let _ = link.handle().pin(memory);
        testkit::idle::assert_idle(
            &format!("{driver:?}: wake-ups in half a second of nothing to do"),
            0,
            || {
                let before = context_switches();
                std::thread::sleep(Duration::from_millis(500));
                context_switches() - before
            },
        );
    }
}

/// Voluntary context switches of all threads of disk links.
fn context_switches() -> u64 {
    let switches = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        let status = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"))?;
        let count: u64 = line.split_whitespace().last()?.parse().ok()?;
        status.starts_with("Name:\tforebay-disk").then_some(count)
    });
    switches.sum()
}
