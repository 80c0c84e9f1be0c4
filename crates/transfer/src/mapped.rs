//! Whether memory that somebody else owns is there. Programs register addresses that were never
//! mapped, that were unmapped since, or whose file has become shorter: touching those ends the
//! process by a signal. Driver: this file asks the kernel, which answers with an error instead.
//!
//! [`check`] looks at every mapping of a range, once, when the range is registered. [`is_there`] is
//! for later, before each use: it finds holes anywhere, and what was forbidden or cut off at either
//! end; it costs three system calls, whatever the length.

use rustix::mm::{Advice, MsyncFlags, madvise, msync};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use thiserror::Error;

/// Why memory cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Absent {
    #[error("memory at {base:#x} of {len} bytes cannot be; allowed: addresses above 0, 1 to 2^63 - 1 bytes")]
    Unsound { base: u64, len: u64 },
    #[error("memory at {base:#x} of {len} bytes: {:#x}..{:#x} {why}", part.start, part.end)]
    Part { base: u64, len: u64, part: Range<u64>, why: &'static str },
}

const NOT_MAPPED: &str = "is not mapped";
const NOT_READABLE: &str = "cannot be read";
const NOT_WRITABLE: &str = "cannot be written";
const BEHIND_THE_FILE: &str = "lies behind the end of its file";

/// Whether a range can be memory of a process at all.
pub fn check_range(base: u64, len: u64) -> Result<(), Absent> {
    let fits = base.checked_add(len).is_some();
    let sound = base > 0 && len > 0 && fits && i64::try_from(len).is_ok();
    if sound { Ok(()) } else { Err(Absent::Unsound { base, len }) }
}

/// Checks that all of a range is mapped, can be read, and written if `write`. Costs a look at the
/// process's mappings up to there, and at one page of each that is a file's.
pub fn check(base: u64, len: u64, write: bool) -> Result<(), Absent> {
    check_range(base, len)?;
    let part = |part, why| Err(Absent::Part { base, len, part, why });
    let end = base + len;
    let Ok(maps) = File::open("/proc/self/maps") else {
        // Without the list there is the second best look.
        return if is_there(base, len, write) { Ok(()) } else { part(base..end, NOT_MAPPED) };
    };
    let mut at = base;
    for line in BufReader::with_capacity(64 << 10, maps).lines() {
        let Some(mapping) = line.ok().as_deref().and_then(Mapping::parse) else { continue };
        if mapping.end <= at {
            continue;
        }
        if mapping.start > at {
            return part(at..mapping.start.min(end), NOT_MAPPED);
        }
        let here = at..mapping.end.min(end);
        if !mapping.readable {
            return part(here, NOT_READABLE);
        }
        if write && !mapping.writable {
            return part(here, NOT_WRITABLE);
        }
        // A file that is too short lacks its last pages.
        if mapping.is_file && !populate(here.end - 1, here.end, false) {
            return part(here, BEHIND_THE_FILE);
        }
        at = here.end;
        if at == end {
            return Ok(());
        }
    }
    part(at..end, NOT_MAPPED)
}

/// Whether a range that was good once can still be touched: none of it was unmapped, and both of
/// its ends can be read, and written if `write`. What is forbidden between two ends that are not is
/// not found.
pub fn is_there(base: u64, len: u64, write: bool) -> bool {
    if len == 0 {
        return true;
    }
    if check_range(base, len).is_err() {
        return false;
    }
    let (end, page) = (base + len, page_bytes());
    if len <= page {
        return populate(base, end, write);
    }
    is_mapped(base, end) && populate(base, base + 1, write) && populate(end - 1, end, write)
}

/// A line of `/proc/self/maps`.
struct Mapping {
    start: u64,
    end: u64,
    readable: bool,
    writable: bool,
    is_file: bool,
}

impl Mapping {
    fn parse(line: &str) -> Option<Mapping> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let rights = fields.next()?.as_bytes();
        let inode = fields.nth(2)?;
        Some(Mapping {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            readable: rights.first() == Some(&b'r'),
            writable: rights.get(1) == Some(&b'w'),
            is_file: inode != "0",
        })
    }
}

fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// The whole pages of a range: their start and length.
fn pages(start: u64, end: u64) -> (*mut std::ffi::c_void, usize) {
    let first = start / page_bytes() * page_bytes();
    (first as *mut _, (end.next_multiple_of(page_bytes()) - first) as usize)
}

/// Whether no page of a range is unmapped.
fn is_mapped(start: u64, end: u64) -> bool {
    let (first, len) = pages(start, end);
    // SAFETY: this only looks the mappings up: Linux begins no write-back for `MS_ASYNC`.
    unsafe { msync(first, len, MsyncFlags::ASYNC) }.is_ok()
}

/// Has the kernel bring pages in as a touch would, and says whether that would have ended well.
fn populate(start: u64, end: u64, write: bool) -> bool {
    let (first, len) = pages(start, end);
    let advice = if write { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
    // SAFETY: the pages become present as they would by being used; their contents stay as they
    // are.
    match unsafe { madvise(first, len, advice) } {
        Ok(()) => true,
        // A kernel before 5.14, memory of a device, which has no pages, or forbidden memory: the
        // kernel copies a byte of it instead. It writes none, which may be somebody's.
        Err(rustix::io::Errno::INVAL) => can_be_copied(start) && (!write || is_writable(start)),
        Err(error) => error == rustix::io::Errno::AGAIN,
    }
}

/// Whether the mapping of an address may be written, as the list of mappings says.
fn is_writable(address: u64) -> bool {
    let Ok(maps) = File::open("/proc/self/maps") else { return true };
    let mappings = BufReader::with_capacity(64 << 10, maps).lines();
    let mut mappings = mappings.filter_map(|line| Mapping::parse(&line.ok()?));
    mappings.find(|mapping| mapping.end > address).is_some_and(|mapping| mapping.writable)
}

/// Whether the kernel can read a byte.
fn can_be_copied(address: u64) -> bool {
    let Ok((_reader, writer)) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC) else {
        return true;
    };
    let raw = std::os::fd::AsRawFd::as_raw_fd(&writer);
    // SAFETY: the kernel reads one byte, or says that it cannot be read.
    let written = unsafe { libc::write(raw, address as *const _, 1) };
    written == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

    fn map(pages: u64, rights: ProtFlags) -> u64 {
        let len = (pages * page_bytes()) as usize;
        // SAFETY: a new mapping, at a place that the kernel chooses.
        unsafe { mmap_anonymous(std::ptr::null_mut(), len, rights, MapFlags::PRIVATE) }.unwrap() as u64
    }

    fn part_of(error: Result<(), Absent>) -> (Range<u64>, &'static str) {
        match error.unwrap_err() {
            Absent::Part { part, why, .. } => (part, why),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn memory_that_is_not_there_is_refused_with_its_range() {
        let page = page_bytes();
        let base = map(8, ProtFlags::READ | ProtFlags::WRITE);
        assert_eq!(check(base, 8 * page, true), Ok(()));
        assert!(is_there(base + 1, 8 * page - 2, true));
        // SAFETY: the test's own mapping, which nobody uses.
        unsafe { mprotect((base + 5 * page) as *mut _, page as usize, MprotectFlags::READ) }.unwrap();
        assert_eq!(check(base, 8 * page, false), Ok(()));
        assert_eq!(part_of(check(base, 8 * page, true)), (base + 5 * page..base + 6 * page, NOT_WRITABLE));
        assert!(is_there(base, 6 * page, false) && !is_there(base, 6 * page, true));
        // SAFETY: as above.
        unsafe { mprotect((base + 5 * page) as *mut _, page as usize, MprotectFlags::empty()) }.unwrap();
        assert_eq!(part_of(check(base, 8 * page, false)), (base + 5 * page..base + 6 * page, NOT_READABLE));
        assert!(!is_there(base, 5 * page + 1, false) && is_there(base, 5 * page, true));
        // SAFETY: as above.
        unsafe { munmap((base + 2 * page) as *mut _, page as usize) }.unwrap();
        assert_eq!(part_of(check(base + 1, 4 * page, false)), (base + 2 * page..base + 3 * page, NOT_MAPPED));
        assert!(!is_there(base, 5 * page, false) && !is_there(base + 2 * page, 1, false));
        assert!(is_there(base, 2 * page, true));
    }

    #[test]
    fn the_part_of_a_file_behind_its_end_is_refused() {
        let page = page_bytes();
        let file = rustix::fs::memfd_create("cut", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4 * page).unwrap();
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at a place that the kernel chooses.
        let base = unsafe {
            mmap(std::ptr::null_mut(), 4 * page as usize, rights, MapFlags::SHARED, &file, 0).unwrap() as u64
        };
        assert_eq!(check(base, 4 * page, true), Ok(()));
        assert!(is_there(base, 4 * page, true));
        rustix::fs::ftruncate(&file, 2 * page).unwrap();
        assert_eq!(part_of(check(base, 4 * page, false)), (base..base + 4 * page, BEHIND_THE_FILE));
        assert_eq!(check(base, 2 * page, true), Ok(()));
        assert!(!is_there(base, 4 * page, false) && is_there(base, 2 * page, true));
    }

    #[test]
    fn ranges_that_no_process_has_are_refused() {
        for (base, len) in [(0, 10), (4096, 0), (4096, 1 << 63), (u64::MAX - 5, 10), (1, u64::MAX)] {
            assert_eq!(check(base, len, false), Err(Absent::Unsound { base, len }));
            assert!(len == 0 || !is_there(base, len, false));
        }
        // Never mapped on Linux: the first pages.
        assert_eq!(part_of(check(8, 8, false)), (8..16, NOT_MAPPED));
    }
}
