//! Which transports there are: the one place that names them all. `transport.rs` says how to add
//! one.

use crate::transport::Transport;
use crate::ucx::Fabric;
use thiserror::Error;

/// The transports that configuration, command line and Python can name.
pub static TRANSPORTS: &[&dyn Transport] = &[&Fabric::Memory, &Fabric::Rdma, &Fabric::Tcp];

/// A rail of an agent: a transport on some devices. An agent may have several, also of one
/// transport.
#[derive(Debug, Clone)]
pub struct RailOptions {
    pub transport: &'static dyn Transport,
    /// On which devices, as the transport names them: `mlx5_0:1`, `eth0`. None named: all.
    pub devices: Vec<String>,
}

/// No transport has this name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("fabric {name:?}: allowed are {}", NoSuchTransport::allowed())]
pub struct NoSuchTransport {
    pub name: String,
}

impl RailOptions {
    /// A rail over the transport with this name.
    pub fn named(name: &str, devices: Vec<String>) -> Result<RailOptions, NoSuchTransport> {
        let found = TRANSPORTS.iter().copied().find(|transport| transport.info().name == name);
        let transport = found.ok_or_else(|| NoSuchTransport { name: name.to_owned() })?;
        Ok(RailOptions { transport, devices })
    }

    /// The transport's name.
    pub fn name(&self) -> &'static str {
        self.transport.info().name
    }
}

impl PartialEq for RailOptions {
    fn eq(&self, other: &RailOptions) -> bool {
        self.transport.info() == other.transport.info() && self.devices == other.devices
    }
}

impl Eq for RailOptions {}

impl NoSuchTransport {
    /// The names that there are.
    pub fn allowed() -> String {
        let names =
            TRANSPORTS.iter().map(|transport| format!("{:?}", transport.info().name)).collect::<Vec<_>>();
        let (last, others) =
            names.split_last().map_or(("", &[][..]), |(last, others)| (last.as_str(), others));
        format!("{} and {last}", others.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_transports_share_a_name_a_label_or_a_code() {
        for (nth, one) in TRANSPORTS.iter().enumerate() {
            for other in &TRANSPORTS[..nth] {
                let (one, other) = (one.info(), other.info());
                assert!(one.name != other.name && one.path != other.path && one.code != other.code);
            }
        }
    }
}
