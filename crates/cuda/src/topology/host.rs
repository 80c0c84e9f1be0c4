//! What the system says of a host's memory and processors.

use super::root::Root;
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Memory of the host, and what this process may have of it. What the system does not tell is
/// `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFacts {
    pub total_bytes: Option<u64>,
    /// What could be had without anything else being moved out.
    pub available_bytes: Option<u64>,
    /// Length of a reserved huge page.
    pub huge_page_bytes: Option<u64>,
    /// Huge pages that are reserved.
    pub huge_pages: Option<u64>,
    pub huge_pages_free: Option<u64>,
    /// When programs get huge pages without reserving them.
    pub transparent: Option<Transparent>,
    /// The same for memory that is a file, which is what processes share.
    pub transparent_shared: Option<Transparent>,
    /// Bytes that this process may lock; `None` where there is no limit.
    pub memlock_bytes: Option<u64>,
}

/// When a program gets transparent huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transparent {
    /// Without asking.
    Always,
    Madvise,
    Never,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNode {
    pub id: u16,
    pub total_bytes: Option<u64>,
    /// Its memory that nothing uses.
    pub free_bytes: Option<u64>,
    /// Whether this process may run on a processor of it.
    pub usable: bool,
}

impl MemoryFacts {
    /// Of this host, now.
    pub fn read() -> MemoryFacts {
        MemoryFacts::read_at(&Root::default())
    }

    /// Of the tree at `root`. What a process may lock has no file; it is this process's.
    pub fn read_at(root: &Root) -> MemoryFacts {
        let meminfo = root.text("proc/meminfo").unwrap_or_default();
        let transparent = |file: &str| {
            let setting = root.text(&format!("sys/kernel/mm/transparent_hugepage/{file}"))?;
            Transparent::chosen(&setting)
        };
        MemoryFacts {
            total_bytes: in_meminfo(&meminfo, "MemTotal:"),
            available_bytes: in_meminfo(&meminfo, "MemAvailable:"),
            huge_page_bytes: in_meminfo(&meminfo, "Hugepagesize:"),
            huge_pages: in_meminfo(&meminfo, "HugePages_Total:"),
            huge_pages_free: in_meminfo(&meminfo, "HugePages_Free:"),
            transparent: transparent("enabled"),
            transparent_shared: transparent("shmem_enabled"),
            memlock_bytes: getrlimit(Resource::Memlock).current,
        }
    }
}

impl fmt::Display for MemoryFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known =
            |bytes: Option<u64>| bytes.map_or("an unknown number of".into(), |bytes| bytes.to_string());
        let (available, total) = (known(self.available_bytes), known(self.total_bytes));
        write!(f, "{available} of {total} bytes of memory are available")?;
        match self.memlock_bytes {
            Some(bytes) => write!(f, ", and this process may lock {bytes} bytes (ulimit -l)"),
            None => Ok(()),
        }
    }
}

impl Transparent {
    /// The word in brackets of `always [madvise] never`.
    fn chosen(setting: &str) -> Option<Transparent> {
        let chosen = setting.split_once('[')?.1.split_once(']')?.0;
        match chosen {
            "always" | "within_size" | "force" => Some(Transparent::Always),
            "madvise" | "advise" => Some(Transparent::Madvise),
            "never" | "deny" => Some(Transparent::Never),
            _ => None,
        }
    }
}

/// The NUMA nodes of the tree at `root`, by their numbers. `processors` are those that this process
/// may run on.
pub fn numa_nodes(root: &Root, processors: &BTreeSet<u32>) -> Vec<NumaNode> {
    let mut nodes: Vec<NumaNode> = root
        .names("sys/devices/system/node")
        .iter()
        .filter_map(|name| name.strip_prefix("node")?.parse().ok())
        .map(|id| {
            let meminfo = root.text(&format!("sys/devices/system/node/node{id}/meminfo")).unwrap_or_default();
            let cpus = root.text(&format!("sys/devices/system/node/node{id}/cpulist")).unwrap_or_default();
            NumaNode {
                id,
                total_bytes: in_meminfo(&meminfo, "MemTotal:"),
                free_bytes: in_meminfo(&meminfo, "MemFree:"),
                usable: !number_list(&cpus).is_disjoint(processors),
            }
        })
        .collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

/// Processors that this process may run on.
pub fn own_processors() -> BTreeSet<u32> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return BTreeSet::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u32).collect()
}

/// The value of a line of `meminfo`, in bytes where it has a unit. Lines of a node begin with the
/// node's name.
fn in_meminfo(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.split_whitespace().any(|word| word == key))?;
    let mut words = line.split_whitespace().skip_while(|word| *word != key).skip(1);
    let value: u64 = words.next()?.parse().ok()?;
    match words.next() {
        Some("kB") => value.checked_mul(1024),
        _ => Some(value),
    }
}

/// The numbers of a list such as `0-3,8`. A range is cut where no host has that many processors.
pub fn number_list(list: &str) -> BTreeSet<u32> {
    const MOST: u32 = 1 << 16;
    let numbers = list.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?.min(MOST))
    });
    numbers.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_meminfo_is_bytes_where_it_has_a_unit_and_a_count_where_not() {
        let meminfo = "MemTotal:  16 kB\nHugePages_Total:  3\nMemAvailable: lots\n";
        assert_eq!(in_meminfo(meminfo, "MemTotal:"), Some(16384));
        assert_eq!(in_meminfo(meminfo, "HugePages_Total:"), Some(3));
        assert_eq!(in_meminfo(meminfo, "MemAvailable:"), None);
        assert_eq!(in_meminfo(meminfo, "Hugepagesize:"), None);
        assert_eq!(in_meminfo("Node 1 MemTotal: 8 kB", "MemTotal:"), Some(8192));
        assert_eq!(in_meminfo("MemTotal: 18446744073709551615 kB", "MemTotal:"), None);
    }

    #[test]
    fn a_list_of_processors_is_read_whatever_it_holds() {
        assert_eq!(number_list("0-2,8\n"), [0, 1, 2, 8].into());
        assert_eq!(number_list(""), [].into());
        assert_eq!(number_list("5-3,x,7-,9"), [9].into());
        assert!(number_list("0-4294967295").len() < 100_000);
    }

    #[test]
    fn the_setting_of_transparent_huge_pages_is_the_word_in_brackets() {
        assert_eq!(Transparent::chosen("always [madvise] never"), Some(Transparent::Madvise));
        assert_eq!(Transparent::chosen("always within_size advise [never] deny"), Some(Transparent::Never));
        assert_eq!(Transparent::chosen("always madvise never"), None);
    }

    #[test]
    fn what_the_system_does_not_tell_is_unknown() {
        let nowhere = tempfile::tempdir().unwrap();
        let memory = MemoryFacts::read_at(&Root::new(nowhere.path()));
        assert_eq!(MemoryFacts { memlock_bytes: None, ..memory }, MemoryFacts::default());
        assert!(memory.to_string().contains("unknown"), "{memory}");
    }
}
