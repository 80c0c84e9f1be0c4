//! Which transports of a machine a rail has taken, and which not and why. UCX tells it in print
//! only; this file reads that print. It must never fail because a line looks unlike those of the
//! version that it was written for.

use super::fabric::Fabric;
use std::fmt;

/// A transport on a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resource {
    /// As UCX names it: `rc_mlx5`, `tcp`, `sysv`, ...
    pub name: String,
    /// As UCX names it: `mlx5_0:1`, `eth0`, `memory`, ...
    pub device: String,
}

/// A transport that carries a flow, and for what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lane {
    pub transport: Resource,
    /// What UCX uses it for, in its own words: `am`, `am_bw#0`, `rma_bw#0`, ...
    pub uses: Vec<String>,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.name, self.device)
    }
}

/// What carries an endpoint's bytes, and why nothing else of the machine does, for people. `open`:
/// what the rail was allowed.
pub(super) fn report(
    (fabric, version): (Fabric, (u32, u32, u32)),
    machine: &[Resource],
    open: &[Resource],
    taken: &[Lane],
) -> String {
    let (major, minor, release) = version;
    let mut out = format!("UCX {major}.{minor}.{release}, fabric {fabric:?}\n");
    for lane in taken {
        out += &format!("  taken  {}: {}\n", lane.transport, lane.uses.join(" "));
    }
    for found in machine.iter().filter(|found| taken.iter().all(|lane| lane.transport != **found)) {
        let why = match () {
            () if open.contains(found) => "UCX chose others",
            () if Fabric::of(&found.name) == Some(fabric) => "not among the devices of the rail",
            () => "of another fabric",
        };
        out += &format!("  left   {found}: {why}\n");
    }
    out
}

/// The transports of a context: lines like
/// `#      resource 1  :  md 1  dev 1  flags -- sysv/memory`.
pub(super) fn resources(print: &str) -> Vec<Resource> {
    let lines = print.lines().filter(|line| line.contains(" resource "));
    lines.filter_map(|line| transport(line.split_whitespace().last()?)).collect()
}

/// The lanes of an endpoint: lines like
/// `#  lane[1]:  3:cma/memory.0 md[3]  -> md[3]/cma/sysdev[255] rma_bw#0`.
pub(super) fn lanes(print: &str) -> Vec<Lane> {
    print.lines().filter_map(lane).collect()
}

fn lane(line: &str) -> Option<Lane> {
    let (_, rest) = line.split_once("lane[")?;
    let (_, rest) = rest.split_once("]:")?;
    let (here, there) = rest.split_once("->")?;
    let (_, name) = here.split_whitespace().next()?.split_once(':')?;
    let name = name.rsplit_once('.').map_or(name, |(name, _path)| name);
    let uses = there.split_whitespace().skip(1).map(String::from).collect();
    Some(Lane { transport: transport(name)?, uses })
}

fn transport(text: &str) -> Option<Resource> {
    let (name, device) = text.split_once('/')?;
    Some(Resource { name: name.into(), device: device.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: &str = "#\n# UCP context\n#     component 0  :  self\n#            md 0  :  component 0  self \n\
        #      resource 0  :  md 0  dev 0  flags -- self/memory0\n\
        #      resource 1  :  md 1  dev 1  flags -- tcp/lo\n\
        #      resource 2  :  md 2  dev 2  flags -- sysv/memory\n\
        #      resource 3  :  md 4  dev 2  flags -- cma/memory\n\
        #      resource 4  :  md 3  dev 2  flags -- posix/memory\n#\n";
    const ENDPOINT: &str = "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n\
        #                 lane[0]:  2:sysv/memory.0 md[2]           -> md[2]/sysv/sysdev[255] am am_bw#0\n\
        #                 lane[1]:  3:cma/memory.0 md[4]            -> md[4]/cma/sysdev[255] rma_bw#0\n#\n\
        #                 am_send: 0..<egr/short>..93..<egr/bcopy>..8256..<rndv>..(inf)\n";

    fn named(name: &str) -> Resource {
        transport(name).unwrap()
    }

    #[test]
    fn what_ucx_prints_is_read() {
        let names: Vec<_> = resources(CONTEXT).iter().map(Resource::to_string).collect();
        assert_eq!(names, ["self/memory0", "tcp/lo", "sysv/memory", "cma/memory", "posix/memory"]);
        let lanes = lanes(ENDPOINT);
        assert_eq!(lanes.len(), 2);
        assert_eq!(
            (&lanes[0].transport, lanes[0].uses.join(" ")),
            (&named("sysv/memory"), "am am_bw#0".into())
        );
        assert_eq!(lanes[1].transport, named("cma/memory"));
        assert_eq!((super::lanes("lane[ ]: ->"), resources("a resource without a slash")), (vec![], vec![]));
    }

    #[test]
    fn what_was_not_taken_has_a_reason() {
        let machine = resources(CONTEXT);
        let open: Vec<_> = machine.iter().filter(|found| found.name != "posix").cloned().collect();
        let open: Vec<_> =
            open.into_iter().filter(|found| Fabric::of(&found.name) == Some(Fabric::Memory)).collect();
        let taken = vec![Lane { transport: named("sysv/memory"), uses: vec!["am".into()] }];
        assert_eq!(
            report((Fabric::Memory, (1, 13, 1)), &machine, &open, &taken),
            "UCX 1.13.1, fabric Memory\n  taken  sysv/memory: am\n  left   self/memory0: of another fabric\n  \
             left   tcp/lo: of another fabric\n  left   cma/memory: UCX chose others\n  \
             left   posix/memory: not among the devices of the rail\n"
        );
    }
}
