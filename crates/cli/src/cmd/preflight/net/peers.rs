//! Who this host's peers are: those of the configuration's list, of a list that is given, and those
//! that are named one by one; without this host itself.

use super::checks::dns::Name;
use super::way::LocalAddress;
use forebay_node::NodeConfig;
use forebay_node::directory::{NodeRecord, StaticDirectory};
use forebay_results::output::Error;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// Each has a thread while it is looked at.
const PEERS_MAX: usize = 256;

/// A peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub name: String,
    pub address: SocketAddr,
}

/// `HOST:PORT`, where the host is a name or an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPort {
    pub host: String,
    pub port: u16,
}

/// Where peers are said.
#[derive(Debug, Clone, Default)]
pub struct Listed {
    /// In a list of nodes, as `directory.file` is one.
    pub records: Vec<NodeRecord>,
    /// One by one.
    pub named: Vec<HostPort>,
}

impl FromStr for HostPort {
    type Err = String;

    fn from_str(text: &str) -> Result<HostPort, String> {
        let allowed = || {
            format!("'{text}' is not allowed: HOST:PORT, such as node-1:7600, 10.0.0.1:7600 or [::1]:7600")
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(allowed)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_address = bare.is_some_and(|bare| bare.parse::<std::net::Ipv6Addr>().is_ok());
        let is_name = !host.is_empty() && !host.contains([':', '[', ']', '/', ' ']);
        match port.parse() {
            Ok(port) if port > 0 && (is_address || is_name) => {
                Ok(HostPort { host: bare.unwrap_or(host).to_owned(), port })
            }
            _ => Err(allowed()),
        }
    }
}

impl HostPort {
    /// The address, if the host is one.
    pub fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

impl Listed {
    pub fn read(
        config: Option<&NodeConfig>,
        file: Option<&PathBuf>,
        named: &[HostPort],
    ) -> Result<Listed, Error> {
        let of_config = config.and_then(|config| config.directory.as_ref()?.file.as_ref());
        let mut records = Vec::new();
        for path in [of_config, file].into_iter().flatten() {
            records.extend(StaticDirectory::read(path)?);
        }
        let peers = records.len() + named.len();
        if peers > PEERS_MAX {
            return Err(format!("{peers} peers are given; allowed are {PEERS_MAX}").into());
        }
        Ok(Listed { records, named: named.to_vec() })
    }

    /// The peers. Hosts that do not resolve are none; `names` are those that were looked up.
    pub fn peers(&self, names: &[Name], own: &Own) -> Vec<Peer> {
        let listed =
            self.records.iter().map(|record| Peer { name: record.name.clone(), address: record.address });
        let named = self.named.iter().filter_map(|given| {
            let looked_up = || names.iter().find(|name| name.name == given.host)?.addresses().next();
            let address = SocketAddr::new(given.address().or_else(looked_up)?, given.port);
            Some(Peer { name: format!("{}:{}", given.host, given.port), address })
        });
        let mut peers: Vec<Peer> = Vec::new();
        for peer in listed.chain(named) {
            if !own.is_at(peer.address) && !peers.iter().any(|other| other.address == peer.address) {
                peers.push(peer);
            }
        }
        peers
    }
}

/// Where this host itself is, as lists of nodes have it.
#[derive(Debug, Clone, Default)]
pub struct Own {
    /// Where it listens, and where others are told to connect.
    pub at: Vec<SocketAddr>,
    pub addresses: Vec<LocalAddress>,
}

impl Own {
    fn is_at(&self, address: SocketAddr) -> bool {
        let is_local = || self.addresses.iter().any(|local| local.address == address.ip());
        let has_port = || self.at.iter().any(|at| at.port() == address.port());
        self.at.contains(&address)
            || (self.at.iter().any(|at| at.ip().is_unspecified()) && has_port() && is_local())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::preflight::net::checks::dns::Lookup;
    use std::time::Duration;

    #[test]
    fn a_peer_is_a_host_and_a_port() {
        let parse = |text: &str| text.parse::<HostPort>();
        assert_eq!(parse("node-1.kv:7600"), Ok(HostPort { host: "node-1.kv".into(), port: 7600 }));
        assert_eq!(parse("[fe80::1]:7600").unwrap().address(), Some("fe80::1".parse().unwrap()));
        for bad in
            ["", "node", "node:", ":7600", "node:0", "node:99999", "fe80::1", "http://node:1", "[node]:1"]
        {
            assert!(parse(bad).unwrap_err().contains(&format!("'{bad}' is not allowed: HOST:PORT")), "{bad}");
        }
    }

    #[test]
    fn each_peer_is_there_once_and_this_host_is_none() {
        let record = |name: &str, address: &str| NodeRecord {
            node: [0; 16],
            instance: [0; 16],
            name: name.into(),
            address: address.parse().unwrap(),
        };
        let listed = Listed {
            records: vec![record("left", "10.0.0.1:7600"), record("right", "10.0.0.2:7600")],
            named: ["10.0.0.2:7600", "third:7600", "nobody:7600"].map(|text| text.parse().unwrap()).to_vec(),
        };
        let lookup = |found: Result<&str, &str>| Lookup {
            took: Duration::ZERO,
            found: found.map(|one| [one.parse().unwrap()].into()).map_err(str::to_owned),
        };
        let names = [("third", Ok("10.0.0.3")), ("nobody", Err("Name or service not known"))]
            .map(|(name, found)| Name { name: name.into(), first: lookup(found), second: None });
        let peers = |at: &str, local: &[&str]| {
            let addresses = local
                .iter()
                .map(|address| LocalAddress { address: address.parse().unwrap(), device: "eth0".into() });
            let own = Own { at: vec![at.parse().unwrap()], addresses: addresses.collect() };
            listed.peers(&names, &own).into_iter().map(|peer| peer.name).collect::<Vec<_>>()
        };
        assert_eq!(peers("10.0.0.1:7600", &[]), ["right", "third:7600"]);
        assert_eq!(peers("0.0.0.0:7600", &["10.0.0.2"]), ["left", "third:7600"]);
        assert_eq!(peers("0.0.0.0:7601", &["10.0.0.2"]), ["left", "right", "third:7600"]);
    }
}
