//! How an agent is set up.

use crate::capabilities::RAILS_MAX;
use crate::error::AgentError;
use crate::metadata::is_name;
use crate::tcp::{Service, TOKEN_BYTES_MAX, TlsConfig};
use crate::transports::RailOptions;
use std::net::SocketAddr;
use std::sync::Arc;

/// How an agent is set up.
#[derive(Clone)]
pub struct AgentConfig {
    /// What peers call it; 1 to 256 bytes.
    pub name: String,
    /// The node that it is, the same after each start. `None`: a new one each time.
    pub node: Option<[u8; 16]>,
    /// Where it listens; port 0 is any. `None`: nobody can connect to it, and it asks only.
    pub listen: Option<SocketAddr>,
    /// What its metadata say that peers should connect to. `None`: what it listens on.
    pub advertise: Option<SocketAddr>,
    /// Shown to peers, and asked of those who connect; 256 bytes at most.
    pub token: Vec<u8>,
    /// TLS, both ways, with certificates at both ends. `None`: plain text.
    pub tls: Option<Arc<TlsConfig>>,
    /// Plain text also where others than this machine's programs can read along.
    pub plain_beyond_loopback: bool,
    /// What carries bytes beside TCP, where a peer has the same: opened when it is first needed.
    /// Peers are reached over TCP all the same, and over TCP alone where a rail fails. At most
    /// [`RAILS_MAX`](crate::RAILS_MAX).
    pub rails: Vec<RailOptions>,
    /// Connections to a peer at most, beside one over each further rail. There is one at first, and
    /// more as far as they make transfers faster.
    pub flows_max: usize,
    /// How long a connection may take to come about; whatever waits for it fails then.
    pub connect_limit_us: u64,
    /// A peer that moves no byte of what is due for this long counts as frozen.
    pub progress_limit_us: u64,
    /// Connections of peers that were not let in yet at a time; of more the oldest gives way.
    pub pending_max: usize,
    /// How long a peer that connects may take to say who it is.
    pub greeting_limit_us: u64,
    /// Connections of peers at a time, of all peers, that were let in.
    pub accepted_max: usize,
    pub accepted_per_peer_max: usize,
    /// Answers what peers ask with [`Agent::call`](crate::Agent::call). `None`: such calls are
    /// refused.
    pub service: Option<Arc<dyn Service>>,
}

impl AgentConfig {
    /// An agent that listens on any port of the loopback address.
    pub fn named(name: impl Into<String>) -> AgentConfig {
        AgentConfig {
            name: name.into(),
            node: None,
            listen: Some(([127, 0, 0, 1], 0).into()),
            advertise: None,
            token: Vec::new(),
            tls: None,
            plain_beyond_loopback: false,
            rails: Vec::new(),
            flows_max: 4,
            connect_limit_us: 5_000_000,
            progress_limit_us: 2_000_000,
            pending_max: 64,
            greeting_limit_us: 2_000_000,
            accepted_max: 256,
            accepted_per_peer_max: 32,
            service: None,
        }
    }

    pub(crate) fn check(&self) -> Result<(), AgentError> {
        if !is_name(&self.name) {
            return Err(AgentError::Name { bytes: self.name.len() });
        }
        if self.token.len() > TOKEN_BYTES_MAX.into() {
            return Err(AgentError::Token { bytes: self.token.len() });
        }
        if self.rails.len() > RAILS_MAX {
            return Err(AgentError::Rails { rails: self.rails.len() });
        }
        match (self.listen, self.advertise) {
            (Some(listen), None) if listen.ip().is_unspecified() => Err(AgentError::Unspecified { listen }),
            _ => Ok(()),
        }
    }
}
