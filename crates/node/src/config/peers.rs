//! What a node is told of other nodes and of the ways to them, and which values are allowed.

use super::{ConfigError, address, count_in, or, read_token, size_in};
use crate::directory::{self, PREFIX_BYTES_MAX, StaticDirectory, TTL_S};
use crate::size;
use forebay_net::tcp::{TOKEN_BYTES_MAX, is_beyond_loopback};
use forebay_net::{NoSuchTransport, RAILS_MAX, RailOptions, TlsConfig};
use forebay_otlp::endpoint;
use forebay_store::SLOT_ALIGN_BYTES;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Connections to a peer; of all other nodes, and of one of them; and how long a peer may move
/// nothing, where they are not said.
const FLOWS_MAX: u16 = 4;
const CONNECTIONS_MAX: u16 = 256;
const CONNECTIONS_PER_PEER: u16 = 32;
const PROGRESS_LIMIT_MS: u16 = 2000;
/// How long a node is believed to live, where it is not said.
const TTL_S_USUAL: u16 = 10;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeersConfig {
    /// Where they connect.
    #[serde(deserialize_with = "address::deserialize")]
    pub listen: SocketAddr,
    /// Where they are told to connect, if that is another address.
    #[serde(default, deserialize_with = "address::deserialize", skip_serializing_if = "Option::is_none")]
    pub advertise: Option<SocketAddr>,
    /// A file with what nodes show each other; all of them have the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// What is in it.
    #[serde(skip)]
    pub token: Vec<u8>,
    /// This node's certificate, in PEM, with what leads to its authority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// The authorities whose nodes are let in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authorities: Option<PathBuf>,
    /// What is in these files.
    #[serde(skip)]
    pub tls: Option<Arc<TlsConfig>>,
    /// Plain text also where others than this host's programs can read along.
    #[serde(default)]
    pub plain_beyond_loopback: bool,
    /// Connections to a peer at most.
    #[serde(default = "or::<usize, FLOWS_MAX>")]
    pub flows_max: usize,
    /// Connections of other nodes at a time, of all of them.
    #[serde(default = "or::<usize, CONNECTIONS_MAX>")]
    pub connections_max: usize,
    /// And of one of them.
    #[serde(default = "or::<usize, CONNECTIONS_PER_PEER>")]
    pub connections_per_peer: usize,
    /// A peer that moves no byte of what is due for so long counts as frozen.
    #[serde(default = "or::<u64, PROGRESS_LIMIT_MS>")]
    pub progress_limit_ms: u64,
    /// Bytes that may be leased to a peer at a time.
    #[serde(default = "gibibyte", with = "size")]
    pub lent_per_peer: u64,
    /// What carries bytes beside TCP, where a peer has the same; over TCP alone where a rail fails.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rails: Vec<RailConfig>,
}

/// A rail: a transport, and where it is opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RailConfig {
    /// The transport's name: `memory`, `rdma`, `tcp`.
    pub fabric: String,
    /// On which devices, as the transport names them: `mlx5_0:1`, `eth0`. None named: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
}

/// Where nodes find each other: a file or etcd.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectoryConfig {
    /// A list of nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// `http://host:port` of each etcd.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub etcd: Vec<String>,
    /// All keys in etcd are below it.
    #[serde(default = "prefix")]
    pub prefix: String,
    /// A node that is silent for so long counts as dead.
    #[serde(default = "or::<u32, TTL_S_USUAL>")]
    pub ttl_s: u32,
}

impl PeersConfig {
    /// Listens here, in plain text and without a token.
    pub fn new(listen: SocketAddr) -> PeersConfig {
        PeersConfig {
            listen,
            advertise: None,
            token_file: None,
            token: Vec::new(),
            certificate: None,
            key: None,
            authorities: None,
            tls: None,
            plain_beyond_loopback: false,
            flows_max: FLOWS_MAX.into(),
            connections_max: CONNECTIONS_MAX.into(),
            connections_per_peer: CONNECTIONS_PER_PEER.into(),
            progress_limit_ms: PROGRESS_LIMIT_MS.into(),
            lent_per_peer: gibibyte(),
            rails: Vec::new(),
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        count_in("peers.flows_max", self.flows_max as u64, 1, 64)?;
        count_in("peers.connections_max", self.connections_max as u64, 1, 65_536)?;
        count_in("peers.connections_per_peer", self.connections_per_peer as u64, 1, 65_536)?;
        count_in("peers.progress_limit_ms", self.progress_limit_ms, 50, 600_000)?;
        size_in("peers.lent_per_peer", self.lent_per_peer, SLOT_ALIGN_BYTES, 1 << 50)?;
        count_in("the number of peers.rails", self.rails.len() as u64, 0, RAILS_MAX as u64)?;
        self.rails.iter().try_for_each(RailConfig::check)?;
        let tls =
            [&self.certificate, &self.key, &self.authorities].iter().filter(|file| file.is_some()).count();
        if ![0, 3].contains(&tls) {
            let field = "the number of peers.certificate, peers.key and peers.authorities";
            return Err(ConfigError::value(field, tls, "all three, or none"));
        }
        self.check_address(tls == 3)
    }

    fn check_address(&self, has_tls: bool) -> Result<(), ConfigError> {
        let refuse = |allowed| Err(ConfigError::value("peers.listen", self.listen, allowed));
        if self.listen.ip().is_unspecified() && self.advertise.is_none() {
            return refuse("an address that peers can connect to, or any with peers.advertise");
        }
        if let Some(told) = self.advertise.filter(|told| told.ip().is_unspecified() || told.port() == 0) {
            let allowed = "an address and a port to which peers can connect";
            return Err(ConfigError::value("peers.advertise", told, allowed));
        }
        if is_beyond_loopback(self.listen) && !has_tls && !self.plain_beyond_loopback {
            return refuse(
                "a loopback address, or any with TLS (peers.certificate, peers.key, peers.authorities) or with \
                 peers.plain_beyond_loopback",
            );
        }
        Ok(())
    }

    /// Where other nodes are told to connect.
    pub fn advertised(&self) -> SocketAddr {
        self.advertise.unwrap_or(self.listen)
    }

    pub(super) fn read_files(&mut self) -> Result<(), ConfigError> {
        if let Some(path) = &self.token_file {
            self.token = read_token(path, TOKEN_BYTES_MAX.into())?;
        }
        if let (Some(certificate), Some(key), Some(authorities)) =
            (&self.certificate, &self.key, &self.authorities)
        {
            let tls = TlsConfig::from_pem(&read(certificate)?, &read(key)?, &read(authorities)?);
            self.tls = Some(Arc::new(tls.map_err(|error| ConfigError::Toml(format!("peers: {error}")))?));
        }
        Ok(())
    }
}

impl RailConfig {
    /// As the agent calls it.
    pub fn options(&self) -> Result<RailOptions, NoSuchTransport> {
        RailOptions::named(&self.fabric, self.devices.clone())
    }

    /// A comma would make one name two.
    fn check(&self) -> Result<(), ConfigError> {
        self.options().map_err(|none| {
            let (name, allowed) = (format!("{:?}", none.name), NoSuchTransport::allowed());
            ConfigError::value("the fabric of peers.rails", name, allowed)
        })?;
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte);
        let is_device = |name: &&String| !name.is_empty() && name.bytes().all(allowed);
        match self.devices.iter().find(|name| !is_device(name)) {
            None => Ok(()),
            Some(name) => {
                let allowed = "letters, digits and _-.: as the transport names it";
                Err(ConfigError::value("a device of peers.rails", format!("{name:?}"), allowed))
            }
        }
    }
}

impl DirectoryConfig {
    pub fn of_file(path: impl Into<PathBuf>) -> DirectoryConfig {
        let ttl_s = TTL_S_USUAL.into();
        DirectoryConfig { file: Some(path.into()), etcd: Vec::new(), prefix: prefix(), ttl_s }
    }

    pub(super) fn check(&self, peers: Option<&PeersConfig>) -> Result<(), ConfigError> {
        let wrong = |field, value: String, allowed: &str| Err(ConfigError::value(field, value, allowed));
        let given = usize::from(self.file.is_some()) + usize::from(!self.etcd.is_empty());
        if given != 1 {
            let field = "the number of directory.file and directory.etcd";
            return wrong(field, given.to_string(), "one of them");
        }
        let Some(peers) = peers else {
            let allowed = "peers.listen beside it, where the nodes that it lists connect";
            return wrong("[directory] without [peers]", "given".into(), allowed);
        };
        if peers.advertised().port() == 0 && !self.etcd.is_empty() {
            let allowed = "a port other than 0 where etcd tells it to others, or any with peers.advertise";
            return wrong("peers.listen", peers.listen.to_string(), allowed);
        }
        if let Some(bad) = self.etcd.iter().find(|text| endpoint::parse(text).is_none()) {
            return wrong("directory.etcd", format!("{:?}", endpoint::without_user(bad)), endpoint::ALLOWED);
        }
        if self.prefix.len() > PREFIX_BYTES_MAX || self.prefix.chars().any(char::is_control) {
            let value = format!("a text of {} bytes", self.prefix.len());
            let allowed = format!("at most {PREFIX_BYTES_MAX}, without control characters");
            return wrong("directory.prefix", value, &allowed);
        }
        count_in("directory.ttl_s", self.ttl_s.into(), (*TTL_S.start()).into(), (*TTL_S.end()).into())
    }
}

/// Whether a list of nodes can be read, and has this node's name for its address and for no other
/// one.
pub(super) fn check_list(list: &Path, name: &str, peers: &PeersConfig) -> Result<(), ConfigError> {
    let (node, addresses) = (directory::node_of_name(name), [peers.advertised(), peers.listen]);
    let nodes = StaticDirectory::read(list)?;
    // Where the system chooses the port, whoever writes the list does so after the start.
    if peers.advertised().port() == 0 {
        return Ok(());
    }
    for record in nodes {
        let is_here = addresses.contains(&record.address);
        let (list, told, there) = (list.display(), peers.advertised(), record.address);
        if record.node == node && !is_here {
            let is = format!("{name:?}, which {list} has for a node at {there}, while this one is at {told}");
            let allowed = "a name that no other node has, or peers.advertise with that address";
            return Err(ConfigError::value("name", is, allowed));
        }
        if record.node != node && is_here {
            let is = format!("{name:?}, while {list} calls the node at {there} {:?}", record.name);
            return Err(ConfigError::value("name", is, "the name that the list has for this node"));
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>, ConfigError> {
    std::fs::read(path).map_err(|error| ConfigError::Read { path: path.to_owned(), error })
}

fn prefix() -> String {
    "/forebay".into()
}

fn gibibyte() -> u64 {
    1 << 30
}
