//! What `forebay doctor` makes of what it saw. Pure: facts in, findings out.

use super::super::findings::Check;
use super::super::node_socket::Seen;
use super::super::program::Version;
use super::super::python::Packages;
use super::facts::{Facts, Gpus, Node};
use forebay_cuda::preflight::Severity::{Fault, Note, Unknown, Warning};
use forebay_cuda::preflight::{Finding, huge_pages, memory_lock, without_driver};
use forebay_cuda::topology::MemoryFacts;
use forebay_node::MemoryBound;

/// vLLM's processes send each other what is computed over it.
const SHARED_WANTED_BYTES: u64 = 1 << 30;
/// A smaller arena keeps hardly a prompt.
const MEMORY_WANTED_BYTES: u64 = 1 << 30;

/// All verdicts, in the order in which a reader would mend things.
pub fn checks(facts: &Facts, allowed_plugins: Option<&str>) -> Vec<Check> {
    let (python, packages) = &facts.python;
    let mut all = of_python(python, packages, allowed_plugins);
    all.push(Check::new("glibc", glibc(&facts.glibc)));
    all.push(Check::new("gpu", gpus(&facts.gpus)));
    all.push(Check::new("memory", memory_left(facts.memory_left.as_ref())));
    all.push(Check::new("pages", pages(&facts.memory)));
    all.push(Check::new("memlock", memlock(&facts.memory)));
    all.push(Check::new("shm", shared(facts.shared_left)));
    all.push(Check::new("io_uring", uring(&facts.uring)));
    all.push(Check::new("node", node(&facts.node)));
    all
}

fn of_python(python: &str, packages: &Result<Packages, String>, allowed: Option<&str>) -> Vec<Check> {
    match packages {
        Ok(packages) => packages.checks(allowed),
        Err(error) => {
            let why = format!("what {python} has of vLLM and of the package is not known");
            vec![Check::new("package", Finding::new(Unknown, error, &why, ""))]
        }
    }
}

fn glibc(versions: &Result<(Version, Version), String>) -> Finding {
    match versions {
        Ok((has, needs)) if has < needs => {
            let what = format!("glibc is {has}, and the libraries of `forebay run` need {needs}");
            Finding::new(Fault, what, "`forebay run` starts no program here", "use a later container")
        }
        Ok((has, needs)) => Finding::ok(format!("glibc is {has}; the libraries need {needs} or later")),
        Err(error) => {
            let action = "install the wheel, or run the program where it was built";
            Finding::new(Unknown, error, "`forebay run` has no library to start programs with", action)
        }
    }
}

fn gpus(gpus: &Gpus) -> Finding {
    match gpus {
        Gpus::Seen(host) if host.gpus.is_empty() => {
            let action = "check CUDA_VISIBLE_DEVICES and what devices the container was given";
            Finding::new(Warning, "the driver shows this process no GPU", "vLLM for GPUs needs one", action)
        }
        Gpus::Seen(host) => {
            let (version, count) = (host.cuda_version, host.gpus.len());
            let name = host.gpus.first().map_or("", |gpu| gpu.name.as_str());
            let cuda = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
            Finding::ok(format!("{count} GPUs ({name}), the driver supports {cuda}"))
        }
        Gpus::NoDriver { on_pci: 0, .. } => Finding::new(Note, "no GPU and no CUDA driver", "", ""),
        Gpus::NoDriver { on_pci, error } => {
            let finding = without_driver(error);
            Finding { what: format!("{on_pci} GPUs on PCIe, and {}", finding.what), ..finding }
        }
        Gpus::Broken(error) => without_driver(error),
    }
}

fn memory_left(left: Option<&MemoryBound>) -> Finding {
    let Some(MemoryBound { what, left_bytes, limit_bytes }) = left else {
        let what = "how much memory is left is not known";
        return Finding::new(Unknown, what, "a node may take more than there is", "name --memory with care");
    };
    let told = format!("{} of {} are left of {what}", gib(*left_bytes), gib(*limit_bytes));
    if *left_bytes < MEMORY_WANTED_BYTES {
        let why = "a node with so little keeps hardly a prompt";
        return Finding::new(Warning, told, why, "end what needs memory, or raise the limit");
    }
    Finding::ok(told)
}

fn pages(memory: &MemoryFacts) -> Finding {
    if memory.transparent.is_none() && memory.huge_pages.is_none() {
        let what = "whether there are huge pages is not known";
        return Finding::new(Unknown, what, "pinning may take long", "");
    }
    huge_pages(memory).unwrap_or_else(|| Finding::ok("there are huge pages"))
}

fn memlock(memory: &MemoryFacts) -> Finding {
    memory_lock(memory).unwrap_or_else(|| Finding::ok("memory may be locked"))
}

fn shared(left: Option<u64>) -> Finding {
    let why = "vLLM's processes share memory there, and so do NCCL's";
    let action = "--shm-size for a container, an emptyDir of medium Memory for a pod";
    match left {
        None => Finding::new(Unknown, "/dev/shm cannot be seen", why, action),
        Some(left) if left < SHARED_WANTED_BYTES => {
            Finding::new(Warning, format!("{} are left in /dev/shm", gib(left)), why, action)
        }
        Some(left) => Finding::ok(format!("{} are left in /dev/shm", gib(left))),
    }
}

fn uring(uring: &Result<(), String>) -> Finding {
    match uring {
        Ok(()) => Finding::ok("io_uring can be used"),
        Err(error) => {
            let why = "a node with an SSD works with threads instead, which is slower";
            let action =
                "allow io_uring: the container's seccomp profile, /proc/sys/kernel/io_uring_disabled";
            Finding::new(Warning, format!("io_uring cannot be used: {error}"), why, action)
        }
    }
}

fn node(node: &Node) -> Finding {
    let socket = node.socket.display();
    match &node.seen {
        Seen::Node(stat) => {
            let (used, capacity) = (stat.used_bytes >> 20, stat.capacity_bytes >> 20);
            Finding::ok(format!("a node answers at {socket}; {used} of {capacity} MiB are used"))
        }
        Seen::Nobody(error) => {
            let what = format!("no node: {error}");
            let action = "forebay vllm serve starts one, and so does forebay node --memory SIZE";
            Finding::new(Note, what, "", action)
        }
        Seen::Refused(error) => {
            let what = format!("{socket}: {error}");
            Finding::new(Fault, what, "engines of this user cannot use the node", "see docs/node.md")
        }
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / (1_u64 << 30) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_client::{ConnectError, NodeStat};
    use forebay_cuda::driver::LoadError;
    use forebay_cuda::preflight::Severity::{self, Ok as Well};
    use forebay_cuda::topology::{GpuFacts, Topology, Transparent};
    use std::path::PathBuf;

    fn versions(has: &str, needs: &str) -> Result<(Version, Version), String> {
        Ok((has.parse().unwrap(), needs.parse().unwrap()))
    }

    fn no_library() -> LoadError {
        LoadError::NoLibrary { path: "libcuda.so.1".into(), error: "not there".into() }
    }

    /// Facts of a host where all is well.
    fn good() -> Facts {
        let packages = Packages {
            python: "3.12.3".into(),
            forebay: Some(env!("CARGO_PKG_VERSION").into()),
            vllm: Some("0.33.0".into()),
            plugins: vec!["forebay".into()],
            import_error: None,
        };
        let gpus = vec![GpuFacts { name: "H100".into(), ..GpuFacts::default() }];
        let bound = MemoryBound { what: "the machine".into(), limit_bytes: 8 << 30, left_bytes: 4 << 30 };
        Facts {
            glibc: versions("2.36", "2.17"),
            uring: Ok(()),
            memory: MemoryFacts { transparent: Some(Transparent::Madvise), ..MemoryFacts::default() },
            memory_left: Some(bound),
            shared_left: Some(4 << 30),
            gpus: Gpus::Seen(Topology { cuda_version: 13_000, gpus, ..Topology::default() }),
            python: ("python3".into(), Ok(packages)),
            node: Node { socket: PathBuf::from("/n.sock"), seen: Seen::Node(NodeStat::default()) },
        }
    }

    /// The verdicts of a host that is changed, but for those that are well.
    fn found(change: impl FnOnce(&mut Facts)) -> Vec<(&'static str, Severity)> {
        let mut facts = good();
        change(&mut facts);
        let all = checks(&facts, None).into_iter().map(|check| (check.check, check.finding.severity));
        all.filter(|(_, severity)| *severity != Well).collect()
    }

    #[test]
    fn a_host_where_all_is_well_has_each_check_and_no_other_verdict() {
        let all: Vec<&str> = checks(&good(), None).iter().map(|check| check.check).collect();
        let [python, host] = [
            &["package", "vllm", "plug-in"][..],
            &["glibc", "gpu", "memory", "pages", "memlock", "shm", "io_uring", "node"],
        ];
        assert_eq!(all, [python, host].concat());
        assert_eq!(found(|_| ()), []);
    }

    #[test]
    fn what_could_not_be_seen_is_unknown() {
        let unknown = |check| vec![(check, Unknown)];
        assert_eq!(found(|facts| facts.glibc = Err("no library".into())), unknown("glibc"));
        assert_eq!(found(|facts| facts.memory = MemoryFacts::default()), unknown("pages"));
        assert_eq!(found(|facts| facts.memory_left = None), unknown("memory"));
        assert_eq!(found(|facts| facts.shared_left = None), unknown("shm"));
        assert_eq!(found(|facts| facts.python.1 = Err("no python".into())), unknown("package"));
    }

    #[test]
    fn what_is_wrong_is_a_warning_or_a_fault() {
        let little = |facts: &mut Facts| facts.memory_left.as_mut().unwrap().left_bytes = (1 << 30) - 1;
        assert_eq!(found(|facts| facts.glibc = versions("2.16", "2.17")), [("glibc", Fault)]);
        assert_eq!(found(|facts| facts.uring = Err("EPERM".into())), [("io_uring", Warning)]);
        assert_eq!(found(little), [("memory", Warning)]);
        assert_eq!(found(|facts| facts.shared_left = Some(64 << 20)), [("shm", Warning)]);
        assert_eq!(found(|facts| facts.memory.memlock_bytes = Some(1 << 20)), [("memlock", Warning)]);
        assert_eq!(found(|facts| facts.gpus = Gpus::Seen(Topology::default())), [("gpu", Warning)]);
        let missing =
            |on_pci| move |facts: &mut Facts| facts.gpus = Gpus::NoDriver { on_pci, error: no_library() };
        assert_eq!(found(missing(0)), [("gpu", Note)], "a host without GPUs");
        assert_eq!(found(missing(2)), [("gpu", Fault)]);
        let seen = |seen: fn(ConnectError) -> Seen| {
            move |facts: &mut Facts| {
                facts.node.seen = seen(ConnectError::Refused("the token is wrong".into()))
            }
        };
        assert_eq!(found(seen(Seen::Nobody)), [("node", Note)], "it need not run");
        assert_eq!(found(seen(Seen::Refused)), [("node", Fault)]);
    }
}
