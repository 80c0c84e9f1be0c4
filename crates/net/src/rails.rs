//! The rails of this agent: transports that are opened when they are first needed, and the answers
//! to peers who ask for them.

use crate::capabilities::{Capabilities, Host, Question};
use crate::tcp::{Acceptor, Reply};
use crate::transport::{self, OpenTransport, TransportError, TransportInfo};
use crate::transports::RailOptions;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Peers that are answered at a time; others are refused. Each costs a thread for the milliseconds
/// that a transport needs.
const ANSWERING_MAX: usize = 8;

/// The rails of one agent.
pub(crate) struct Rails {
    rails: Vec<Rail>,
    pub host: Host,
    /// Where peers come in. Not there for an agent that does not listen: then nobody asks.
    acceptor: OnceLock<Acceptor>,
    answering: AtomicUsize,
}

/// A transport on some devices, opened when it is first needed.
struct Rail {
    options: RailOptions,
    opened: OnceLock<Result<Box<dyn OpenTransport>, TransportError>>,
}

impl Rails {
    pub fn new(options: Vec<RailOptions>) -> Rails {
        let rail = |options| Rail { options, opened: OnceLock::new() };
        Rails {
            rails: options.into_iter().map(rail).collect(),
            host: host(),
            acceptor: OnceLock::new(),
            answering: AtomicUsize::new(0),
        }
    }

    /// Has what peers offer served at this acceptor.
    pub fn serve_at(&self, acceptor: Acceptor) {
        // It is said once, by whoever starts the agent.
        let _ = self.acceptor.set(acceptor);
    }

    pub fn is_empty(&self) -> bool {
        self.rails.is_empty()
    }

    pub fn options(&self, nth: usize) -> Option<&RailOptions> {
        self.rails.get(nth).map(|rail| &rail.options)
    }

    /// What the agent was given, whether it can be opened or not.
    pub fn infos(&self) -> Vec<TransportInfo> {
        self.rails.iter().map(|rail| rail.options.transport.info()).collect()
    }

    /// Opens a rail, or says again why it cannot be.
    pub fn open(&self, nth: usize) -> Result<&dyn OpenTransport, TransportError> {
        self.rails[nth].open()
    }

    fn opened(&self) -> impl Iterator<Item = (u8, &dyn OpenTransport)> {
        let code = |rail: &Rail| rail.options.transport.info().code;
        self.rails.iter().filter_map(move |rail| rail.open().ok().map(|opened| (code(rail), opened)))
    }

    /// Answers what a peer says, on a thread of its own if a transport is needed: that takes its
    /// time.
    pub fn call(self: &Arc<Rails>, body: Vec<u8>, reply: Reply) {
        if self.is_empty() {
            // Nothing that takes time.
            return self.reply(&body, reply);
        }
        if self.answering.fetch_add(1, Ordering::AcqRel) >= ANSWERING_MAX {
            self.answering.fetch_sub(1, Ordering::AcqRel);
            return reply.refuse(format!("{ANSWERING_MAX} peers are being answered"));
        }
        let answering = Answering(Arc::clone(self));
        // Without a thread the reply is dropped, which refuses.
        let answer = move || answering.0.reply(&body, reply);
        let _ = std::thread::Builder::new().name("forebay-rails".into()).spawn(answer);
    }

    fn reply(&self, body: &[u8], reply: Reply) {
        match self.answer(body) {
            Ok(answer) => reply.send(answer),
            Err(why) => reply.refuse(why),
        }
    }

    fn answer(&self, body: &[u8]) -> Result<Vec<u8>, String> {
        match Question::parse(body) {
            Some(Question::Capabilities) => {
                let codes = self.opened().map(|(code, _)| code).collect();
                Ok(Capabilities { host: self.host, codes }.to_bytes())
            }
            Some(Question::Offer { code, nth, offer }) => self.accept(code, nth, offer),
            None => Err("words about rails that mean nothing here".into()),
        }
    }

    fn accept(&self, code: u8, nth: u8, offer: &[u8]) -> Result<Vec<u8>, String> {
        let rails: Vec<_> = self.opened().filter(|rail| rail.0 == code).collect();
        let rail = usize::from(nth).checked_rem(rails.len()).and_then(|nth| rails.get(nth));
        let (_, rail) = rail.ok_or_else(|| format!("there is no rail with code {code}"))?;
        // A peer may be faster than the start of this agent.
        transport::accept(*rail, self.acceptor.wait(), offer).map_err(|error| error.to_string())
    }
}

impl Rail {
    fn open(&self) -> Result<&dyn OpenTransport, TransportError> {
        let opened = self.opened.get_or_init(|| self.options.transport.open(&self.options.devices));
        opened.as_deref().map_err(TransportError::clone)
    }
}

/// One of those that are answered at a time.
struct Answering(Arc<Rails>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.answering.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What tells this host, since it was started, from others.
fn host() -> Host {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.trim().chars().filter(|letter| *letter != '-').collect();
    u128::from_str_radix(&digits, 16).ok().filter(|id| *id != 0).map(u128::to_be_bytes)
}
