//! What tests of several crates share: waiting, being skipped, what an idle process uses, what code
//! under test logs, and what a page of metrics promises.

pub mod idle;
mod log;
pub mod metrics;
mod wait;

pub use log::{Log, logged};
pub use wait::{ended, eventually, eventually_async};

use std::fmt::Display;
use std::io::Write;

/// The file to which skipped tests are added. `make test` sets it, and `testing/skips.py` reads it.
const LIST: &str = "FOREBAY_SKIPS";

/// Says that the test that calls this ends without having tested, and why. The test returns after
/// it. libtest calls such a test passed and hides what it printed, so its name is added to a list:
/// `PACKAGE::TEST<tab>REASON`, a line each.
///
/// # Panics
/// Where the list cannot be written, or the thread has not the name of a test: a skip that nobody
/// sees, or expects, is a defect.
pub fn skipped(why: impl Display) {
    eprintln!("SKIPPED: {why}");
    if let Some(list) = std::env::var_os(LIST) {
        add(list.as_ref(), &why.to_string());
    }
}

fn add(list: &std::path::Path, why: &str) {
    let thread = std::thread::current();
    // Cargo tells a test its package, and libtest names a test's thread after the test.
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let test = thread.name().expect("what skips a test runs in the test's thread, or has its name");
    let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
    let line = format!("{package}::{test}\t{why}\n");
    let file = std::fs::File::options().create(true).append(true).open(list);
    // One write: several test processes add to the same file.
    let added = file.and_then(|mut file| file.write_all(line.as_bytes()));
    assert!(added.is_ok(), "{}: {added:?}", list.display());
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_skipped_test_stands_in_the_list_by_its_name_in_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let list = folder.path().join("skips");
        super::add(&list, "no\n  etcd");
        super::add(&list, "again");
        let name = "testkit::tests::a_skipped_test_stands_in_the_list_by_its_name_in_one_line";
        let wanted = format!("{name}\tno etcd\n{name}\tagain\n");
        assert_eq!(std::fs::read_to_string(&list).unwrap(), wanted);
    }
}
