//! What would carry bytes to peers beside TCP, and why nothing does. Opens what the configuration
//! names, as a node does when it first needs it.

use crate::cmd::preflight::net::finding::{Check, Finding};
use forebay_cuda::preflight::Severity::Warning;
use forebay_net::RailOptions;

/// A rail of the configuration, and why it cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rail {
    pub name: String,
    pub unopened: Option<String>,
}

impl Rail {
    pub fn open(options: &RailOptions) -> Rail {
        let unopened = options.transport.open(&options.devices).err().map(|error| error.to_string());
        let devices = if options.devices.is_empty() {
            String::new()
        } else {
            format!(" on {}", options.devices.join(", "))
        };
        Rail { name: format!("{}{devices}", options.name()), unopened }
    }
}

/// `ports_up`: ports of RDMA that are up.
pub fn judge(rails: &[Rail], ports_up: usize) -> Vec<Finding> {
    if rails.is_empty() && ports_up > 0 {
        let seen = format!("TCP carries all bytes, and {ports_up} ports of RDMA are up");
        let action = "add [[peers.rails]] with fabric = \"rdma\", if they lead to peers";
        return vec![Finding::bad(Check::Transports, Warning, "", seen, "a rail over them", action)];
    }
    if rails.is_empty() {
        return vec![Finding::ok(Check::Transports, "", "TCP carries all bytes; there is nothing faster")];
    }
    rails.iter().map(judge_one).collect()
}

fn judge_one(rail: &Rail) -> Finding {
    match &rail.unopened {
        None => Finding::ok(
            Check::Transports,
            &*rail.name,
            "it opens; where a peer has it too, it carries the bytes",
        ),
        Some(why) => {
            let seen = format!("it cannot be opened, so that TCP carries the bytes: {why}");
            let action = "install UCX (libucx0), give the container the devices, or take the rail out";
            Finding::bad(Check::Transports, Warning, &*rail.name, seen, "a rail that opens", action)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_cuda::preflight::Severity;

    #[test]
    fn tcp_beside_ports_that_are_up_and_rails_that_do_not_open_are_told() {
        let rail =
            |unopened: Option<&str>| Rail { name: "rdma".into(), unopened: unopened.map(str::to_owned) };
        assert_eq!(judge(&[], 0)[0].severity, Severity::Ok);
        assert!(judge(&[], 2)[0].seen.contains("2 ports of RDMA are up"));
        assert_eq!(judge(&[], 2)[0].severity, Warning);
        let found = judge(&[rail(None), rail(Some("no libucp.so.0"))], 0);
        assert_eq!((found[0].severity, found[1].severity), (Severity::Ok, Warning));
        assert!(found[1].seen.contains("TCP carries the bytes: no libucp.so.0"), "{found:?}");
    }
}
