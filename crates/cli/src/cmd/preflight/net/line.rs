//! A connection to a peer, made and let in as a node's would be, on which questions are asked. It
//! carries no operations.

use super::checks::clocks::Sample;
use super::questions::{self, Question};
use forebay_net::tcp::{Flow, FlowError, FlowHandle, FlowOptions, PeerRegions};
use forebay_net::{About, CallError, Identity, TlsConfig};
use forebay_node::PeersConfig;
use serde::de::DeserializeOwned;
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// How long a connection may take to come about, and to be let in.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// How long an answer may take.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Who this host is to its peers, and what it shows them.
#[derive(Clone)]
pub struct Credentials {
    pub me: Identity,
    pub token: Vec<u8>,
    pub tls: Option<Arc<TlsConfig>>,
    /// Plain text also beyond loopback.
    pub is_plain: bool,
}

/// A connection that was let in.
pub struct Line {
    handle: FlowHandle,
    _flow: Flow,
}

impl Credentials {
    /// Those of the node with this configuration; without one, nothing is shown, and nothing needs
    /// to be hidden.
    pub fn new(node: [u8; 16], peers: Option<&PeersConfig>) -> std::io::Result<Credentials> {
        Ok(Credentials {
            me: Identity::starting(node)?,
            token: peers.map_or(Vec::new(), |peers| peers.token.clone()),
            tls: peers.and_then(|peers| peers.tls.clone()),
            is_plain: peers.is_none_or(|peers| peers.plain_beyond_loopback),
        })
    }

    /// How flows of this host are made.
    pub fn flow_options(&self) -> FlowOptions {
        FlowOptions {
            token: self.token.clone(),
            tls: self.tls.clone(),
            plain_beyond_loopback: self.is_plain,
            connect_limit_us: CONNECT_LIMIT.as_micros() as u64,
            ..FlowOptions::default()
        }
    }
}

impl Line {
    pub fn connect(to: SocketAddr, credentials: &Credentials) -> Result<Line, FlowError> {
        let options = credentials.flow_options();
        let (flow, _) = Flow::connect(to, credentials.me, PeerRegions::default(), options)?;
        Ok(Line { handle: flow.handle(), _flow: flow })
    }

    /// What the peer says of itself, and when.
    pub fn about(&self) -> Result<(About, Sample), CallError> {
        let asked_us = About::now().time_us;
        let answer = self.call(About::question(), ANSWER_LIMIT)?;
        let heard_us = About::now().time_us;
        let nothing = || CallError::Refused("its answer means nothing here".into());
        let about = About::parse(&answer).ok_or_else(nothing)?;
        let sample = Sample { asked_us, told_us: about.time_us, heard_us };
        Ok((about, sample))
    }

    /// Asks a preflight. A node declines.
    pub fn ask<A: DeserializeOwned>(&self, question: &Question, limit: Duration) -> Result<A, String> {
        match self.call(question.to_call(), limit) {
            Ok(answer) => questions::read(&answer),
            Err(CallError::Refused(why)) => Err(why),
            Err(error) => Err(error.to_string()),
        }
    }

    fn call(&self, call: Vec<u8>, limit: Duration) -> Result<Vec<u8>, CallError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.handle.call(call, limit.as_micros() as u64, move |answer| drop(sender.send(answer)));
        receiver.recv().unwrap_or_else(|_| Err(forebay_net::tcp::Broken::Ended.into()))
    }
}
