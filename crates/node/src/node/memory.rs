//! Whether the memory that a node is told to take is there: what the machine and the control groups
//! of this process have left. It knows the files in which the kernel says so, as text.

use crate::config::{MemoryConfig, NodeConfig, PagesConfig};
use std::fmt;
use std::path::{Component, Path, PathBuf};
use thiserror::Error;

/// The program itself: its threads, tables and buffers.
const OWN_BYTES: u64 = 16 << 20;

/// The text of a file, if there is one.
type Files<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// Memory that a node takes at its start and keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Needed {
    pub arena_bytes: u64,
    pub staging_bytes: u64,
    pub pages: PagesConfig,
}

/// Something that bounds memory, and what is left below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryBound {
    /// The machine, or a control group.
    pub what: String,
    pub limit_bytes: u64,
    pub left_bytes: u64,
}

impl MemoryBound {
    /// The one of this process that has least left; `None` where the system tells of none.
    pub fn tightest() -> Option<MemoryBound> {
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        tightest(&read(Path::new("/proc/meminfo")).unwrap_or_default(), &read)
    }
}

/// Why a node does not take so much memory.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "memory.size: an arena of {}, staging of {} and the program's own {} need {}; {} has {} left of {}: \
     make memory.size smaller, or set memory.overcommit = true if that much will be free",
    Bytes(*.arena_bytes), Bytes(*.staging_bytes), Bytes(OWN_BYTES), Bytes(*.need_bytes), .bound,
    Bytes(*.left_bytes), Bytes(*.limit_bytes)
)]
pub struct NoMemory {
    arena_bytes: u64,
    staging_bytes: u64,
    need_bytes: u64,
    bound: String,
    left_bytes: u64,
    limit_bytes: u64,
}

/// Refuses what the machine has not left, or says it in the log where the configuration allows it.
/// `arena_bytes` is what the arena takes beside what it has.
pub(super) fn check(config: &NodeConfig, arena_bytes: u64, staging_bytes: u64) -> Result<(), NoMemory> {
    let MemoryConfig { pages, overcommit, .. } = config.memory;
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    match (fits(Needed { arena_bytes, staging_bytes, pages }, &read), overcommit) {
        (Err(refused), true) => {
            tracing::warn!(reason = %refused, "more memory than is left");
            Ok(())
        }
        (checked, _) => checked,
    }
}

/// Compares what is needed with what every bound has left.
fn fits(needed: Needed, read: Files<'_>) -> Result<(), NoMemory> {
    let Needed { arena_bytes, staging_bytes, pages } = needed;
    let meminfo = read(Path::new("/proc/meminfo")).unwrap_or_default();
    let own = if pages == PagesConfig::Huge && is_reserved(&meminfo, arena_bytes) { 0 } else { arena_bytes };
    let need_bytes = own.saturating_add(staging_bytes).saturating_add(OWN_BYTES);
    match tightest(&meminfo, read) {
        Some(MemoryBound { what, limit_bytes, left_bytes }) if left_bytes < need_bytes => {
            Err(NoMemory { arena_bytes, staging_bytes, need_bytes, bound: what, left_bytes, limit_bytes })
        }
        _ => Ok(()),
    }
}

/// Whether so much is set aside in huge pages, which no bound below counts.
fn is_reserved(meminfo: &str, bytes: u64) -> bool {
    let free = line_of(meminfo, "HugePages_Free:").unwrap_or(0);
    let page = line_of(meminfo, "Hugepagesize:").unwrap_or(0).saturating_mul(1024);
    page > 0 && bytes.is_multiple_of(page) && free.saturating_mul(page) >= bytes
}

fn tightest(meminfo: &str, read: Files<'_>) -> Option<MemoryBound> {
    let kib = |name| line_of(meminfo, name).map(|kib| kib.saturating_mul(1024));
    let machine = kib("MemTotal:").zip(kib("MemAvailable:")).map(|(limit_bytes, left_bytes)| MemoryBound {
        what: "the machine (MemAvailable in /proc/meminfo)".into(),
        limit_bytes,
        left_bytes,
    });
    machine.into_iter().chain(group_bounds(read)).min_by_key(|bound| bound.left_bytes)
}

/// Both versions of control groups; a machine may have both mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    /// Files with limits.
    fn limits(self) -> &'static [&'static str] {
        match self {
            Version::One => &["memory.limit_in_bytes"],
            Version::Two => &["memory.max", "memory.high"],
        }
    }

    fn usage(self) -> &'static str {
        match self {
            Version::One => "memory.usage_in_bytes",
            Version::Two => "memory.current",
        }
    }

    /// Lines of `memory.stat` that count what the kernel gives up when memory is short: pages of
    /// files.
    fn reclaimable(self) -> [&'static str; 2] {
        match self {
            Version::One => ["total_active_file", "total_inactive_file"],
            Version::Two => ["active_file", "inactive_file"],
        }
    }
}

/// The limits of all control groups that this process is in.
fn group_bounds(read: Files<'_>) -> Vec<MemoryBound> {
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let mounts = read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
    let mut bounds = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(group)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let version = match (number, controllers) {
            ("0", "") => Version::Two,
            (_, controllers) if controllers.split(',').any(|name| name == "memory") => Version::One,
            _ => continue,
        };
        for (root, point) in mounts_of(&mounts, version) {
            for directory in levels(&root, &point, Path::new(group)) {
                bounds.extend(bounds_at(&directory, version, read));
            }
        }
    }
    bounds
}

/// Where the hierarchy is mounted: which group the mount shows, and where.
fn mounts_of(mounts: &str, version: Version) -> Vec<(PathBuf, PathBuf)> {
    let of_line = |line: &str| {
        let (place, file_system) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (root, point) = (place.next()?, place.next()?);
        let mut file_system = file_system.split(' ');
        let (kind, options) = (file_system.next()?, file_system.nth(1)?);
        let fits = match version {
            Version::One => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
            Version::Two => kind == "cgroup2",
        };
        fits.then(|| (root.into(), point.into()))
    };
    mounts.lines().filter_map(of_line).collect()
}

/// Directories of a group and of all groups above it, as far as the mount shows them.
fn levels(root: &Path, point: &Path, group: &Path) -> Vec<PathBuf> {
    let below = group.strip_prefix(root).unwrap_or(Path::new(""));
    let names = below.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name),
        _ => None,
    });
    let mut directory = point.to_owned();
    let mut found = vec![directory.clone()];
    for name in names {
        directory.push(name);
        found.push(directory.clone());
    }
    found
}

fn bounds_at(directory: &Path, version: Version, read: Files<'_>) -> Vec<MemoryBound> {
    let number = |name: &str| read(&directory.join(name))?.trim().parse::<u64>().ok();
    let Some(used) = number(version.usage()) else { return Vec::new() };
    let stat = read(&directory.join("memory.stat")).unwrap_or_default();
    let reclaimable: u64 =
        version.reclaimable().iter().filter_map(|name| line_of(&stat, name)).fold(0, u64::saturating_add);
    let used = used.saturating_sub(reclaimable);
    let bound = |name: &&str| {
        // "max" is no number, and no limit.
        let limit_bytes = number(name)?;
        let what = format!("the control group {} ({name})", directory.display());
        Some(MemoryBound { what, limit_bytes, left_bytes: limit_bytes.saturating_sub(used) })
    };
    version.limits().iter().filter_map(bound).collect()
}

/// The number in the line that begins with this name.
fn line_of(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == name).then(|| words.next()?.parse().ok()).flatten()
    })
}

/// Bytes as people read them.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 30 => write!(f, "{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
            bytes => write!(f, "{:.1} MiB", bytes as f64 / (1u64 << 20) as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const GIB: u64 = 1 << 30;
    const MEMINFO: &str = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\n\
        MemAvailable:   16777216 kB\nHugePages_Total:    2048\nHugePages_Free:     2048\n\
        Hugepagesize:       2048 kB\n";
    const V2: &str = "25 1 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
        36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    const DOCKER: &str = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";

    /// What it is, which files there are, and what is said if it is refused.
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], Option<&'a str>);

    /// What is said when an arena of 8 GiB with 1 GiB of staging is asked for beside these files.
    fn asked(pages: PagesConfig, files: &[(&str, &str)]) -> Result<(), String> {
        let files: HashMap<&Path, &str> = files.iter().map(|(path, text)| (Path::new(path), *text)).collect();
        let read = |path: &Path| files.get(path).map(|text| (*text).to_owned());
        let needed = Needed { arena_bytes: 8 * GIB, staging_bytes: GIB, pages };
        fits(needed, &read).map_err(|refused| refused.to_string())
    }

    #[test]
    fn more_than_the_machine_or_any_control_group_has_left_is_refused_with_both_numbers() {
        let meminfo = ("/proc/meminfo", MEMINFO);
        let little = MEMINFO.replace("16777216", "8388608");
        let table: &[Case<'_>] = &[
            ("nothing is known", &[], None),
            ("the machine has enough", &[meminfo], None),
            (
                "the machine has too little",
                &[("/proc/meminfo", &little)],
                Some(
                    "need 9.0 GiB; the machine (MemAvailable in /proc/meminfo) has 8.0 GiB left of 32.0 GiB",
                ),
            ),
            (
                "a group of version 2 without limits",
                &[
                    meminfo,
                    ("/proc/self/cgroup", "0::/a.slice/b.service\n"),
                    ("/proc/self/mountinfo", V2),
                    ("/sys/fs/cgroup/a.slice/b.service/memory.max", "max\n"),
                    ("/sys/fs/cgroup/a.slice/b.service/memory.high", "max\n"),
                    ("/sys/fs/cgroup/a.slice/b.service/memory.current", "4096\n"),
                ],
                None,
            ),
            (
                "memory.max of the group itself",
                &[
                    meminfo,
                    ("/proc/self/cgroup", "0::/a.slice/b.service\n"),
                    ("/proc/self/mountinfo", V2),
                    ("/sys/fs/cgroup/a.slice/b.service/memory.max", "9663676416\n"),
                    ("/sys/fs/cgroup/a.slice/b.service/memory.current", "1073741824\n"),
                ],
                Some(
                    "the control group /sys/fs/cgroup/a.slice/b.service (memory.max) has 8.0 GiB left of 9.0 GiB",
                ),
            ),
            (
                "memory.high of a group above",
                &[
                    meminfo,
                    ("/proc/self/cgroup", "0::/a.slice/b.service\n"),
                    ("/proc/self/mountinfo", V2),
                    ("/sys/fs/cgroup/a.slice/memory.high", "5368709120\n"),
                    ("/sys/fs/cgroup/a.slice/memory.current", "1073741824\n"),
                    ("/sys/fs/cgroup/a.slice/b.service/memory.max", "max\n"),
                    ("/sys/fs/cgroup/a.slice/b.service/memory.current", "4096\n"),
                ],
                Some("the control group /sys/fs/cgroup/a.slice (memory.high) has 4.0 GiB left of 5.0 GiB"),
            ),
            (
                "pages of files in a full group are given up",
                &[
                    meminfo,
                    ("/proc/self/cgroup", "0::/a\n"),
                    ("/proc/self/mountinfo", V2),
                    ("/sys/fs/cgroup/a/memory.max", "10737418240\n"),
                    ("/sys/fs/cgroup/a/memory.current", "10737418240\n"),
                    (
                        "/sys/fs/cgroup/a/memory.stat",
                        "anon 1\nactive_file 5368709120\ninactive_file 5368709120\n",
                    ),
                ],
                None,
            ),
            (
                "version 1 beside version 2",
                &[
                    meminfo,
                    ("/proc/self/cgroup", "5:devices:/x\n4:memory:/forebay\n0::/\n"),
                    ("/proc/self/mountinfo", V1),
                    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
                    ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "8589934592\n"),
                    ("/sys/fs/cgroup/memory/forebay/memory.limit_in_bytes", "314572800\n"),
                    ("/sys/fs/cgroup/memory/forebay/memory.usage_in_bytes", "0\n"),
                ],
                Some("/sys/fs/cgroup/memory/forebay (memory.limit_in_bytes) has 300.0 MiB left of 300.0 MiB"),
            ),
            (
                "a container sees its own group at the mount",
                &[
                    meminfo,
                    ("/proc/self/cgroup", "4:cpu,memory:/docker/abc/engines\n"),
                    ("/proc/self/mountinfo", DOCKER),
                    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
                    ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n"),
                ],
                Some("/sys/fs/cgroup/memory (memory.limit_in_bytes) has 1.0 GiB left of 1.0 GiB"),
            ),
            (
                "a group inside of the container's",
                &[
                    meminfo,
                    ("/proc/self/cgroup", "4:memory:/docker/abc/engines\n"),
                    ("/proc/self/mountinfo", DOCKER),
                    ("/sys/fs/cgroup/memory/engines/memory.limit_in_bytes", "2147483648\n"),
                    ("/sys/fs/cgroup/memory/engines/memory.usage_in_bytes", "1073741824\n"),
                ],
                Some("/sys/fs/cgroup/memory/engines (memory.limit_in_bytes) has 1.0 GiB left of 2.0 GiB"),
            ),
            (
                "a group outside of the namespace",
                &[
                    meminfo,
                    ("/proc/self/cgroup", "0::/../other\n"),
                    ("/proc/self/mountinfo", V2),
                    ("/sys/fs/cgroup/memory.max", "1073741824\n"),
                    ("/sys/fs/cgroup/memory.current", "0\n"),
                ],
                Some("/sys/fs/cgroup (memory.max) has 1.0 GiB left of 1.0 GiB"),
            ),
        ];
        for (case, files, expected) in table {
            match (asked(PagesConfig::Transparent, files), expected) {
                (Ok(()), None) => {}
                (Err(said), Some(expected)) => {
                    assert!(said.contains(expected), "{case}: {said}");
                    assert!(said.contains("memory.overcommit = true"), "{case}: {said}");
                }
                (result, _) => panic!("{case}: {result:?}"),
            }
        }
    }

    #[test]
    fn reserved_huge_pages_are_not_taken_from_what_is_free() {
        let reserved = MEMINFO.replace("16777216", "2097152").replace("_Free:     2048", "_Free:     4096");
        let few = MEMINFO.replace("16777216", "2097152");
        assert_eq!(asked(PagesConfig::Huge, &[("/proc/meminfo", &reserved)]), Ok(()));
        // Then transparent pages are taken.
        assert!(asked(PagesConfig::Huge, &[("/proc/meminfo", &few)]).is_err());
        assert!(asked(PagesConfig::Base, &[("/proc/meminfo", &reserved)]).is_err());
    }
}
