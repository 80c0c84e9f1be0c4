//! What this process may have of the host, against what a node of this configuration needs: memory,
//! locked memory, files, threads, huge pages and `/dev/shm`. Limits are the process's own: run it
//! as the service will run.

use crate::cmd::preflight::net::finding::{Check, Finding};
use forebay_cuda::preflight::Severity::{self, Fault, Unknown, Warning};
use forebay_cuda::topology::{MemoryFacts, Root};
use forebay_node::{Node, NodeConfig, PagesConfig};
use rustix::process::{Resource, getrlimit};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A process that may lock less cannot register buffers of network cards and disk rings.
const LOCK_BYTES: u64 = 1 << 30;
/// Engines of several processes share memory in `/dev/shm`; containers have 64 MiB unless told.
const SHM_BYTES: u64 = 1 << 30;
/// Open files and threads beside those of clients and peers.
const OWN: u64 = 64;
/// Open files, and threads, of a client.
const FILES_PER_CLIENT: u64 = 4;
const THREADS_PER_CLIENT: u64 = 2;
/// Without a configuration: those of a node's defaults.
const FILES: u64 = 1_024;

/// What there is. `None`: no limit for limits, and not known for files of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    pub lock_bytes: Option<u64>,
    pub files: Option<u64>,
    /// Free in `/dev/shm`.
    pub shm_bytes: Option<u64>,
    /// In reserved huge pages that nobody has.
    pub huge_bytes: Option<u64>,
    /// What the control group leaves of these.
    pub group_huge_bytes: Option<u64>,
    /// Threads that the control group leaves.
    pub tasks: Option<u64>,
    /// Why a node would not start for lack of memory.
    pub no_memory: Option<String>,
    /// Whether a node of this configuration runs, and has its memory.
    pub is_taken: bool,
}

/// What a node needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    pub lock_bytes: u64,
    /// Whether network cards read the arena themselves, which they cannot unless it is locked.
    pub is_registered: bool,
    pub files: u64,
    pub huge_bytes: u64,
    pub tasks: u64,
}

impl Limits {
    pub fn read(root: &Root, config: Option<&NodeConfig>) -> Limits {
        let memory = MemoryFacts::read_at(root);
        let shm = rustix::fs::statvfs("/dev/shm").ok();
        let is_taken = config.is_some_and(|config| UnixStream::connect(&config.socket).is_ok());
        let to_start = config.filter(|_| !is_taken);
        Limits {
            lock_bytes: memory.memlock_bytes,
            files: getrlimit(Resource::Nofile).current,
            shm_bytes: shm.map(|shm| shm.f_bavail.saturating_mul(shm.f_frsize)),
            huge_bytes: memory
                .huge_pages_free
                .zip(memory.huge_page_bytes)
                .map(|(pages, bytes)| pages * bytes),
            group_huge_bytes: left_in_group(
                root,
                "hugetlb",
                &[
                    ("hugetlb.2MB.max", "hugetlb.2MB.current"),
                    ("hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes"),
                ],
            ),
            tasks: left_in_group(root, "pids", &[("pids.max", "pids.current")]),
            no_memory: to_start
                .and_then(|config| Node::check_memory(config).err())
                .map(|error| error.to_string()),
            is_taken,
        }
    }
}

/// The least that this process's control group, and those above it, leave of what a controller
/// counts. `None`: no group has a limit.
fn left_in_group(root: &Root, controller: &str, files: &[(&str, &str)]) -> Option<u64> {
    let groups = root.text("proc/self/cgroup")?;
    let number = |path: &Path| root.text(path.to_str()?)?.parse::<u64>().ok();
    let mut left = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else { continue };
        let mount = match controllers {
            "" => "sys/fs/cgroup".into(),
            some if some.split(',').any(|name| name == controller) => format!("sys/fs/cgroup/{controller}"),
            _ => continue,
        };
        // A container may see its own group where the mount begins.
        for above in Path::new(group.trim_start_matches('/')).ancestors() {
            let folder = Path::new(&mount).join(above);
            let of = |(most, used): &(&str, &str)| {
                Some(number(&folder.join(most))?.saturating_sub(number(&folder.join(used))?))
            };
            left.extend(files.iter().filter_map(of));
        }
    }
    left.into_iter().min()
}

impl Needs {
    pub fn of(config: Option<&NodeConfig>) -> Needs {
        let Some(config) = config else {
            return Needs {
                lock_bytes: LOCK_BYTES,
                is_registered: false,
                files: FILES,
                huge_bytes: 0,
                tasks: OWN,
            };
        };
        let peers = config.peers.as_ref();
        let (clients, connections) =
            (config.limits.clients as u64, peers.map_or(0, |peers| peers.connections_max as u64));
        let is_registered = peers.is_some_and(|peers| peers.rails.iter().any(|rail| rail.fabric == "rdma"));
        let is_huge = config.memory.pages == PagesConfig::Huge;
        let arena = config.memory.size;
        Needs {
            lock_bytes: if is_registered { arena.max(LOCK_BYTES) } else { LOCK_BYTES },
            is_registered,
            files: clients * FILES_PER_CLIENT + connections + 3 * config.limits.unauthenticated as u64 + OWN,
            huge_bytes: if is_huge { arena } else { 0 },
            tasks: clients * THREADS_PER_CLIENT + connections + OWN,
        }
    }
}

pub fn judge(limits: &Limits, needs: &Needs) -> Vec<Finding> {
    let mut found: Vec<Finding> = Vec::new();
    if let Some(why) = &limits.no_memory {
        let action = "make memory.size smaller, or the host's or the control group's memory larger";
        found.push(bad(
            Fault,
            "memory",
            why.clone(),
            "memory for a node of this configuration".into(),
            action,
        ));
    }
    found.extend(locked(limits, needs));
    found.extend(less(
        "open files",
        limits.files,
        needs.files,
        "ulimit -n, LimitNOFILE= in the systemd unit",
    ));
    found.extend(less(
        "threads",
        limits.tasks,
        needs.tasks,
        "raise pids.max of the control group, TasksMax= in the unit",
    ));
    found.extend(shared_memory(limits));
    found.extend(huge_pages(limits, needs));
    if found.is_empty() {
        found.push(Finding::ok(Check::Limits, "", "memory, files, threads and pages are enough"));
    }
    found
}

fn bad(severity: Severity, limit: &str, seen: String, expected: String, action: &str) -> Finding {
    Finding::bad(Check::Limits, severity, limit, seen, expected, action)
}

/// A limit that is too low.
fn less(limit: &str, there: Option<u64>, need: u64, action: &str) -> Option<Finding> {
    let there = there.filter(|there| *there < need)?;
    Some(bad(Warning, limit, format!("this process may have {there}"), format!("{need} at least"), action))
}

fn locked(limits: &Limits, needs: &Needs) -> Option<Finding> {
    let there = limits.lock_bytes.filter(|bytes| *bytes < needs.lock_bytes)?;
    let severity = if needs.is_registered { Fault } else { Warning };
    let action = "ulimit -l unlimited, LimitMEMLOCK=infinity in the systemd unit, IPC_LOCK for a container";
    let seen = format!("this process may lock {there} bytes");
    let expected = match needs.is_registered {
        true => format!("{} bytes: network cards read the arena", needs.lock_bytes),
        false => format!("{} bytes: network cards and disk rings register buffers", needs.lock_bytes),
    };
    Some(bad(severity, "locked memory", seen, expected, action))
}

fn shared_memory(limits: &Limits) -> Option<Finding> {
    let (limit, action) =
        ("/dev/shm", "--shm-size for a container, an emptyDir with medium: Memory in Kubernetes");
    match limits.shm_bytes {
        None => Some(bad(Unknown, limit, "it is not there".into(), format!("{SHM_BYTES} bytes"), action)),
        Some(free) if free < SHM_BYTES => {
            let expected = format!("{SHM_BYTES}: engines of several processes share memory there");
            Some(bad(Warning, limit, format!("{free} bytes are free"), expected, action))
        }
        Some(_) => None,
    }
}

fn huge_pages(limits: &Limits, needs: &Needs) -> Option<Finding> {
    if needs.huge_bytes == 0 || limits.is_taken {
        return None;
    }
    let expected = format!("{} bytes, since memory.pages is \"huge\"", needs.huge_bytes);
    let there = match (limits.huge_bytes, limits.group_huge_bytes) {
        (None, _) => {
            let seen = "the system does not tell how many are free".into();
            return Some(bad(Unknown, "huge pages", seen, expected, "mount /proc in the container"));
        }
        (Some(free), group) => group.map_or(free, |group| group.min(free)),
    };
    (there < needs.huge_bytes).then(|| {
        let action = "reserve more (vm.nr_hugepages), raise hugetlb of the control group, or transparent ones are taken";
        bad(Warning, "huge pages", format!("{there} bytes are free"), expected, action)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enough() -> Limits {
        Limits {
            lock_bytes: None,
            files: None,
            shm_bytes: Some(4 << 30),
            huge_bytes: Some(64 << 30),
            group_huge_bytes: None,
            tasks: None,
            no_memory: None,
            is_taken: false,
        }
    }

    const PEERS: &str = "[peers]\nlisten = '127.0.0.1:7600'\n";

    fn needs(more: &str) -> Needs {
        let text = format!("socket = '/run/node.sock'\n[memory]\nsize = '8GiB'\n{more}");
        Needs::of(Some(&NodeConfig::from_toml(&text).unwrap()))
    }

    #[test]
    fn limits_below_what_the_configuration_needs_are_told_with_both_numbers() {
        let rdma = needs(&format!("{PEERS}[[peers.rails]]\nfabric = 'rdma'\n"));
        let huge = needs("pages = 'huge'\n");
        let plain = needs(PEERS);
        assert_eq!(judge(&enough(), &rdma)[0].severity, Severity::Ok);
        let table = [
            (Limits { lock_bytes: Some(8 << 20), ..enough() }, plain, Warning, "may lock 8388608 bytes"),
            (Limits { lock_bytes: Some(2 << 30), ..enough() }, rdma, Fault, "may lock 2147483648 bytes"),
            (Limits { files: Some(256), ..enough() }, plain, Warning, "may have 256"),
            (Limits { tasks: Some(100), ..enough() }, plain, Warning, "may have 100"),
            (Limits { shm_bytes: Some(64 << 20), ..enough() }, plain, Warning, "67108864 bytes are free"),
            (Limits { shm_bytes: None, ..enough() }, plain, Unknown, "not there"),
            (Limits { huge_bytes: Some(1 << 30), ..enough() }, huge, Warning, "1073741824 bytes are free"),
            (Limits { group_huge_bytes: Some(1 << 21), ..enough() }, huge, Warning, "2097152 bytes are free"),
            (Limits { huge_bytes: None, ..enough() }, huge, Unknown, "does not tell"),
            (Limits { no_memory: Some("need 9.0 GiB".into()), ..enough() }, plain, Fault, "need 9.0 GiB"),
        ];
        for (limits, needs, severity, says) in table {
            let found = judge(&limits, &needs);
            assert!(found.len() == 1 && found[0].severity == severity, "{found:?}");
            assert!(found[0].seen.contains(says), "{found:?}");
        }
        let taken = Limits { huge_bytes: Some(0), is_taken: true, ..enough() };
        assert_eq!(judge(&taken, &huge)[0].severity, Severity::Ok, "the node has them");
        let lock = Limits { lock_bytes: Some(2 << 30), huge_bytes: Some(0), ..enough() };
        assert_eq!(judge(&lock, &plain)[0].severity, Severity::Ok, "without RDMA 1 GiB is enough");
    }

    #[test]
    fn the_least_that_any_control_group_leaves_counts() {
        let left = |files: &[(&str, &str)]| {
            let folder = tempfile::tempdir().unwrap();
            for (path, text) in files {
                let path = folder.path().join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            left_in_group(&Root::new(folder.path()), "pids", &[("pids.max", "pids.current")])
        };
        let v2 = ("proc/self/cgroup", "0::/a.slice/b.service\n");
        let own = "sys/fs/cgroup/a.slice/b.service";
        let (most, used) = (format!("{own}/pids.max"), format!("{own}/pids.current"));
        assert_eq!(left(&[v2, (&most, "max\n"), (&used, "5\n")]), None);
        assert_eq!(left(&[v2, (&most, "100\n"), (&used, "40\n")]), Some(60));
        let above = [("sys/fs/cgroup/a.slice/pids.max", "50"), ("sys/fs/cgroup/a.slice/pids.current", "45")];
        assert_eq!(left(&[&[v2, (&*most, "100\n"), (&*used, "40\n")][..], &above].concat()), Some(5));
        let container = [("sys/fs/cgroup/pids.max", "20"), ("sys/fs/cgroup/pids.current", "8")];
        assert_eq!(left(&[&[("proc/self/cgroup", "0::/\n")][..], &container].concat()), Some(12));
        let v1 = ("proc/self/cgroup", "7:pids:/x\n4:memory:/y\n");
        let in_v1 = [("sys/fs/cgroup/pids/x/pids.max", "9"), ("sys/fs/cgroup/pids/x/pids.current", "2")];
        assert_eq!(left(&[&[v1][..], &in_v1].concat()), Some(7));
        assert_eq!(left(&[]), None);
    }
}
