//! The fixture itself: QEMU's controller answers, and nothing stays when a test is over.

use qemu_nvme::{AdminQueues, Error, GuestMemory, Qemu, Settings};
use std::path::PathBuf;

const ADMIN: AdminQueues = AdminQueues {
    submission: GuestMemory::FIRST_FREE,
    completion: GuestMemory::FIRST_FREE + 0x1000,
    entries: 16,
};

/// A running QEMU, or none where this machine cannot have one.
fn started() -> Option<Qemu> {
    match Qemu::start(&Settings::default()) {
        Ok(qemu) => Some(qemu),
        Err(why @ Error::Missing(_)) => {
            testkit::skipped(why);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn is_running(pid: u32) -> bool {
    state(pid).is_some()
}

/// The letter that proc(5) gives the state of a process.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

#[test]
fn the_controller_is_ready_once_it_is_enabled_and_not_before() {
    let Some(qemu) = started() else { return };
    let (cap, version) = (qemu.read64(0), qemu.read32(8));
    assert_eq!(cap & 0xffff, 2047, "CAP.MQES");
    assert_eq!(cap >> 32 & 0xf, 0, "CAP.DSTRD: doorbells of 4 bytes, as the mailbox has them");
    assert_eq!(version, 0x0001_0400, "NVMe 1.4");
    assert_eq!(qemu.read32(0x1c) & 1, 0, "CSTS.RDY");
    for _ in 0..2 {
        qemu.enable(ADMIN);
        assert_eq!(qemu.read32(0x1c) & 1, 1, "CSTS.RDY");
        qemu.disable();
        assert_eq!(qemu.read32(0x1c) & 1, 0, "CSTS.RDY");
    }
}

#[test]
fn qemu_ends_with_a_test_that_panics() {
    let Some(qemu) = started() else { return };
    let pid = qemu.pid();
    assert!(is_running(pid));
    let panicked = std::thread::spawn(move || {
        let _qemu = qemu;
        panic!("as a test that fails");
    });
    assert!(panicked.join().is_err());
    assert!(!is_running(pid));
}

#[test]
fn qemu_ends_with_the_thread_that_started_it() {
    // A thread that ends without dropping it stands for a test that is killed.
    let start = || started().map(|qemu| std::mem::ManuallyDrop::new(qemu).pid());
    let thread = std::thread::Builder::new().name(std::thread::current().name().unwrap().to_owned());
    let Some(pid) = thread.spawn(start).unwrap().join().unwrap() else { return };
    // Nobody has waited for it, so its pid is not used again.
    testkit::eventually("QEMU is killed", || state(pid) == Some('Z'));
}

#[test]
fn no_file_of_a_running_qemu_has_a_name() {
    let Some(qemu) = started() else { return };
    let entries = std::fs::read_dir(format!("/proc/{}/fd", qemu.pid())).unwrap();
    let files: Vec<PathBuf> = entries.filter_map(|entry| entry.unwrap().path().read_link().ok()).collect();
    let has_name = |file: &&PathBuf| file.is_absolute() && !file.starts_with("/dev") && file.exists();
    assert!(files.iter().any(|file| file.starts_with("/memfd:disk (deleted)")), "{files:?}");
    assert_eq!(files.iter().find(has_name), None);
}
