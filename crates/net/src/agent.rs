//! The agent itself: what a program calls. This file starts and ends the parts and hands wishes to
//! them.

use crate::call_handler::{self, CallHandler};
use crate::config::AgentConfig;
use crate::connect;
use crate::descriptors::{Descriptors, Select};
use crate::device::Device;
use crate::endpoints::EndpointPool;
use crate::error::{AgentError, PeerError};
use crate::ipc::asker;
use crate::ipc::grants::Grants;
use crate::memory::{OwnMemory, Registration};
use crate::metadata::{Metadata, is_name};
use crate::notify;
use crate::peer::Peer;
use crate::prepared::{Blocks, Op, Pairs};
use crate::rails::Rails;
use crate::request::{Request, Requests};
use crate::shared::{RegionGuard, Shared};
use crate::stat::PeerStat;
use crate::tcp::{
    Access, CallError, Exports, FlowOptions, Identity, LeaseTable, PeerRegion, PeerRegions, ServerOptions,
    ServerStats, Service, StagingMemory, TcpServer,
};
use crate::timer::TimerThread;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Backing, Forked, Ipc, Limits, MoverHandle, MoverThread, Place, Process, RegionId};
use rustix::fd::BorrowedFd;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

/// A list of memory, checked and ready for requests.
#[derive(Clone)]
pub struct Prepared {
    blocks: Arc<Blocks>,
    /// `None`: this end's.
    peer: Option<Arc<Peer>>,
}

impl Prepared {
    pub fn len(&self) -> u64 {
        self.blocks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The peer whose memory it is; `None`: this end's.
    pub fn peer(&self) -> Option<&str> {
        self.peer.as_ref().map(|peer| peer.name.as_str())
    }
}

/// One end in one process. Dropping it cancels what is under way and waits until nothing touches
/// memory any more.
pub struct Agent {
    pub(crate) shared: Arc<Shared>,
    pub(crate) requests: Arc<Requests>,
    address: Option<SocketAddr>,
    leases: LeaseTable,
    memory: OwnMemory,
    peers: Mutex<HashMap<String, Arc<Peer>>>,
    /// `None`: peers cannot connect, or cannot any more.
    server: Mutex<Option<TcpServer>>,
    timer: Option<TimerThread>,
    mover: Option<MoverThread>,
}

fn system(what: &'static str) -> impl Fn(std::io::Error) -> AgentError {
    move |source| AgentError::System { what, source }
}

impl Agent {
    /// Starts an agent with a mover of its own.
    pub fn start(config: AgentConfig) -> Result<Agent, AgentError> {
        let thread = MoverThread::spawn(Limits::default()).map_err(system("the mover's thread"))?;
        let mut agent = Agent::start_on(config, thread.handle(), Place::Host(0))?;
        agent.mover = Some(thread);
        Ok(agent)
    }

    /// Starts an agent on somebody's mover, whose places of peers are all the agent's. Memory is
    /// registered at `here`.
    pub fn start_on(config: AgentConfig, mover: MoverHandle, here: Place) -> Result<Agent, AgentError> {
        config.check()?;
        let mut me = Identity::starting([0; 16]).map_err(system("random numbers"))?;
        me.node = config.node.unwrap_or(me.instance);
        let timer_thread = TimerThread::spawn().map_err(system("the timer's thread"))?;
        let timer = timer_thread.timer();
        let leases = LeaseTable::new(timer.clone());
        let exports = Arc::new(Exports::new(leases.clone()));
        let rails = Arc::new(Rails::new(config.rails.clone()));
        let grants = Arc::new(Grants::new(Arc::clone(&exports), rails.host));
        let (words, service) = (Arc::clone(&grants), config.service.clone());
        let calls = Arc::new(CallHandler::new(leases.clone(), Arc::clone(&rails), words, service));
        let server = serve(&config, me, &exports, &calls)?;
        if let Some(server) = &server {
            rails.serve_at(server.acceptor());
        }
        let flow_options = FlowOptions {
            token: config.token,
            tls: config.tls,
            plain_beyond_loopback: config.plain_beyond_loopback,
            connect_limit_us: config.connect_limit_us,
            progress_limit_us: config.progress_limit_us,
            ..FlowOptions::default()
        };
        let memory = OwnMemory::new(mover.clone(), here, exports);
        let op_timeout_us =
            flow_options.op_limit_us.saturating_add(config.progress_limit_us.saturating_mul(4));
        let shared = Shared {
            name: config.name,
            me,
            flow_options,
            flows_max: config.flows_max.max(1),
            pool: EndpointPool::new(mover.clone(), here, op_timeout_us),
            mover,
            timer,
            regions: PeerRegions::default(),
            calls,
            rails,
            ipc: OnceLock::new(),
            grants,
            grant_numbers: Arc::default(),
            caller_regions: Mutex::default(),
            process: Process::current(),
        };
        let address = config.advertise.or(server.as_ref().map(TcpServer::address));
        Ok(Agent {
            shared: Arc::new(shared),
            requests: Arc::default(),
            address: address.filter(|_| server.is_some()),
            leases,
            memory,
            peers: Mutex::default(),
            server: Mutex::new(server),
            timer: Some(timer_thread),
            mover: None,
        })
    }

    /// Refuses in any other process than the one that started it: a child of `fork()` has none of
    /// its threads, and shares its sockets. What has no error to give gives nothing there.
    pub fn here(&self) -> Result<(), Forked> {
        self.shared.process.check()
    }

    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Where peers connect to. `None`: nobody can.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    pub fn identity(&self) -> Identity {
        self.shared.me
    }

    pub fn mover(&self) -> &MoverHandle {
        &self.shared.mover
    }

    /// The leases under which peers use memory that is offered under leases only.
    pub fn leases(&self) -> &LeaseTable {
        &self.leases
    }

    /// Makes memory known: requests of this end may use it, and peers what `access` says. Peers
    /// find it at its addresses.
    pub fn register(&self, backing: Arc<dyn Backing>, access: Access) -> Result<Registration, AgentError> {
        self.here()?;
        self.memory.register(backing, access)
    }

    /// Makes a GPU a place of this agent, whose links are on its mover. Bytes of GPUs pass through
    /// `memory` on their way to and from peers; the agent's first GPU brings it for all.
    pub fn add_device(&self, device: Device, memory: StagingMemory) -> Result<(), AgentError> {
        self.here()?;
        self.shared.pool.devices.add_device(device, memory)
    }

    /// Has bytes between this agent's GPUs and those of peers on this host go by IPC from now on:
    /// the asking end's GPU copies, and no byte passes a connection. Whatever cannot go so goes as
    /// before. Peers that are let in can then reach all of the allocations in which memory lies
    /// that is registered.
    pub fn add_ipc(&self, ipc: Arc<dyn Ipc>) -> Result<(), AgentError> {
        self.here()?;
        self.shared.grants.export_by(Arc::clone(&ipc));
        // One for all: the first one that is given.
        let _ = self.shared.ipc.set(ipc);
        Ok(())
    }

    /// As [`register`](Agent::register), for `len` bytes at `base` of a GPU, which are `region` to
    /// the mover. After an error the region is the caller's still; it ends with the registration.
    pub fn register_device(
        &self,
        place: Place,
        (region, base, len): (RegionId, u64, u64),
        access: Access,
    ) -> Result<Registration, AgentError> {
        self.here()?;
        let devices = &self.shared.pool.devices;
        let registration =
            self.memory.register_device((region, base, len), devices.stager(place)?, access)?;
        devices.add_region(region, place);
        Ok(registration)
    }

    /// Forgets memory. Requests of this end that use it are cancelled, what peers do with it fails.
    /// When this returns, nothing touches the memory any more; after an error something may, such
    /// as the GPU of a peer that is stopped, and this can be called again. Not to be called where
    /// requests' ends are.
    pub fn deregister(&self, registration: Registration) -> Result<(), AgentError> {
        self.here()?;
        self.memory.deregister(registration, &self.requests, &self.shared.grants)?;
        self.shared.pool.devices.forget_region(registration.region());
        Ok(())
    }

    /// What others need to know to reach this agent and its memory, as it is now.
    pub fn metadata(&self) -> Vec<u8> {
        if self.here().is_err() {
            return Vec::new();
        }
        let (name, regions) = (self.name().to_owned(), self.memory.offered());
        Metadata { name, identity: self.shared.me, address: self.address, regions }.encode()
    }

    /// Learns of a peer, or more about one, and says its name. Nothing is connected yet. Another
    /// instance replaces the one before, whatever was prepared for that fails from now on.
    pub fn add_peer(&self, metadata: &[u8]) -> Result<String, AgentError> {
        self.here()?;
        let Metadata { name, identity, address, regions } = Metadata::parse(metadata)?;
        let instance = Some(identity.instance);
        let mut peers = self.peers.lock();
        let same = peers.get(&name).filter(|peer| peer.instance == instance && peer.address == address);
        if let Some(peer) = same.filter(|peer| peer.state().connection.dead().is_none()) {
            peer.set_memory(&regions);
            peer.forget_old(&self.shared);
            return Ok(name);
        }
        let peer = Peer::new(name.clone(), address, instance, self.shared.flows_max);
        peer.set_memory(&regions);
        let before = peers.insert(name.clone(), peer);
        drop(peers);
        if let Some(before) = before {
            connect::bury(&self.shared, &before, &PeerError::Restarted { peer: name.clone() });
        }
        Ok(name)
    }

    /// Learns of a peer by address only. Whoever answers there is meant; of its memory nothing is
    /// known but what
    /// [`region`](Agent::region) says.
    pub fn add_address(&self, name: &str, address: SocketAddr) -> Result<(), AgentError> {
        self.here()?;
        if !is_name(name) {
            return Err(AgentError::Name { bytes: name.len() });
        }
        let mut peers = self.peers.lock();
        let same = |peer: &&Arc<Peer>| peer.instance.is_none() && peer.address == Some(address);
        if peers.get(name).filter(same).is_some() {
            return Ok(());
        }
        let peer = Peer::new(name.to_owned(), Some(address), None, self.shared.flows_max);
        let before = peers.insert(name.to_owned(), peer);
        drop(peers);
        if let Some(before) = before {
            connect::bury(&self.shared, &before, &PeerError::Removed { peer: name.to_owned() });
        }
        Ok(())
    }

    /// Forgets a peer. Requests that it is part of are cancelled and waited for. Not to be called
    /// where their ends are.
    pub fn remove_peer(&self, name: &str) -> Result<(), AgentError> {
        self.here()?;
        let removed = self.peers.lock().remove(name);
        let peer = removed.ok_or_else(|| AgentError::NoSuchPeer { peer: name.to_owned() })?;
        self.requests.cancel_to(&peer);
        connect::bury(&self.shared, &peer, &PeerError::Removed { peer: name.to_owned() });
        Ok(())
    }

    pub fn peer_names(&self) -> Vec<String> {
        if self.here().is_err() {
            return Vec::new();
        }
        let mut names: Vec<String> = self.peers.lock().keys().cloned().collect();
        names.sort_unstable();
        names
    }

    pub(crate) fn peer(&self, name: &str) -> Result<Arc<Peer>, AgentError> {
        self.here()?;
        let found = self.peers.lock().get(name).cloned();
        found.ok_or_else(|| AgentError::NoSuchPeer { peer: name.to_owned() })
    }

    /// Connects to a peer, if it is not, and waits for it.
    pub fn connect(&self, name: &str) -> Result<(), AgentError> {
        let peer = self.peer(name)?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let until_us = self.shared.connect_until_us();
        connect::when_up(&self.shared, &peer, until_us, move |up| drop(sender.send(up)));
        Ok(receiver.recv().unwrap_or(Err(PeerError::Ended))?)
    }

    /// Checks a list of this end's memory.
    pub fn prepare_local(&self, list: &Descriptors) -> Result<Prepared, AgentError> {
        self.here()?;
        Ok(Prepared { blocks: Arc::new(self.memory.resolve(list)?), peer: None })
    }

    /// Checks a list of a peer's memory against what its metadata say.
    pub fn prepare_remote(&self, name: &str, list: &Descriptors) -> Result<Prepared, AgentError> {
        let peer = self.peer(name)?;
        let blocks = peer.resolve(&self.shared, list)?;
        Ok(Prepared { blocks: Arc::new(blocks), peer: Some(peer) })
    }

    /// Makes a request of blocks here and as many there. With a notification the peer learns of its
    /// end, after every byte is in place; `limit_us` is how long a post of it may take.
    pub fn request(
        &self,
        op: Op,
        local: (&Prepared, Select),
        remote: (&Prepared, Select),
        notification: Option<Vec<u8>>,
        limit_us: Option<u64>,
    ) -> Result<Request, AgentError> {
        self.here()?;
        let (None, Some(peer)) = (&local.0.peer, &remote.0.peer) else { return Err(AgentError::Sides) };
        notify::check(notification.as_deref())?;
        let pairs = Pairs::of(op, (&local.0.blocks, &local.1), (&remote.0.blocks, &remote.1))?;
        Ok(Request::new(&self.shared, &self.requests, Arc::clone(peer), pairs, notification, limit_us))
    }

    /// Sends a notification. `on_end` is called once, on any thread: after a success the peer has
    /// it, exactly once. An error means that nothing is sent: there is no such peer, or too many
    /// are on their way to it.
    pub fn notify(
        &self,
        name: &str,
        text: Vec<u8>,
        on_end: impl FnOnce(Result<(), PeerError>) + Send + 'static,
    ) -> Result<(), AgentError> {
        self.send_notification(name, text, None, on_end)
    }

    /// As [`notify`](Agent::notify), but where too many are on their way to that peer, it waits for
    /// room, as long as a connection may take to come about. Not to be called where requests' and
    /// notifications' ends are.
    pub fn notify_when_room(
        &self,
        name: &str,
        text: Vec<u8>,
        on_end: impl FnOnce(Result<(), PeerError>) + Send + 'static,
    ) -> Result<(), AgentError> {
        let limit = Duration::from_micros(self.shared.flow_options.connect_limit_us);
        self.send_notification(name, text, Instant::now().checked_add(limit), on_end)
    }

    fn send_notification(
        &self,
        name: &str,
        text: Vec<u8>,
        wait_until: Option<Instant>,
        on_end: impl FnOnce(Result<(), PeerError>) + Send + 'static,
    ) -> Result<(), AgentError> {
        notify::check(Some(&text))?;
        let peer = self.peer(name)?;
        let its = Arc::downgrade(&peer);
        let on_end = move |end: Result<(), PeerError>| {
            if let (Err(why), Some(peer)) = (&end, its.upgrade()) {
                peer.lost_notification(why);
            }
            on_end(end);
        };
        Ok(notify::send(&self.shared, &peer, text, self.shared.connect_until_us(), wait_until, on_end)?)
    }

    /// The notifications that have come since the last call, with the names of their senders.
    pub fn take_notifications(&self) -> Vec<(String, Vec<u8>)> {
        if self.here().is_err() {
            return Vec::new();
        }
        self.shared.calls.take_notifications()
    }

    /// A descriptor that becomes readable when a request has ended or a notification has come.
    /// [`clear_event`](Agent::clear_event) comes before looking at what happened.
    pub fn event_fd(&self) -> Result<BorrowedFd<'_>, AgentError> {
        self.here()?;
        self.shared.calls.event.fd().map_err(system("an event descriptor"))
    }

    /// Makes [`event_fd`](Agent::event_fd) unreadable until something more happens.
    pub fn clear_event(&self) {
        // The descriptor is the parent's too: an event that is cleared here is one that it does not
        // see.
        if self.here().is_ok() {
            self.shared.calls.event.clear();
        }
    }

    /// Asks a peer's service, once. `on_reply` is called once, on any thread.
    pub fn call(
        &self,
        name: &str,
        body: Vec<u8>,
        limit_us: u64,
        on_reply: impl FnOnce(Result<Vec<u8>, PeerError>) + Send + 'static,
    ) -> Result<(), AgentError> {
        self.call_and_hear(name, body, limit_us, on_reply, |_| {})
    }

    /// The same, for who has to know the answer also after the limit: `on_late` is called then,
    /// once, if one comes.
    pub fn call_and_hear(
        &self,
        name: &str,
        mut body: Vec<u8>,
        limit_us: u64,
        on_reply: impl FnOnce(Result<Vec<u8>, PeerError>) + Send + 'static,
        on_late: impl FnOnce(Vec<u8>) + Send + 'static,
    ) -> Result<(), AgentError> {
        let peer = self.peer(name)?;
        body.insert(0, call_handler::CALLS);
        let until_us = self.shared.timer.now_us().saturating_add(limit_us);
        let (its, timer) = (Arc::clone(&peer), self.shared.timer.clone());
        connect::when_up(&self.shared, &peer, until_us.min(self.shared.connect_until_us()), move |up| {
            let name = its.name.clone();
            let Some(flow) = its.flow().filter(|_| up.is_ok()) else {
                let gone = || PeerError::Unreachable { peer: name, why: "it was lost a moment ago".into() };
                return on_reply(Err(up.err().or_else(|| its.error()).unwrap_or_else(gone)));
            };
            let left_us = until_us.saturating_sub(timer.now_us());
            let on_reply = move |answer: Result<Vec<u8>, CallError>| {
                on_reply(answer.map_err(|why| match why {
                    // The caller's limit, not what the connection had left of it.
                    CallError::Late { .. } => PeerError::Late { limit_us },
                    why => PeerError::Unanswered { peer: name, why },
                }));
            };
            flow.call_and_hear(body, left_us, on_reply, on_late);
        });
        Ok(())
    }

    /// Makes a peer's region a region of the mover, for transfers that the caller submits there
    /// itself. They need a connection: [`connect`](Agent::connect) or [`call`](Agent::call) first.
    /// `lease`: under which they run; 0: none.
    pub fn region(&self, name: &str, region: PeerRegion, lease: u64) -> Result<RegionId, AgentError> {
        let peer = self.peer(name)?;
        let mut site = peer.site();
        let endpoint = site.endpoint(&self.shared.pool);
        let (place, uses) = (endpoint.place, Arc::clone(&endpoint.uses));
        let id = self.shared.regions.register(&self.shared.mover, place, region, lease)?;
        self.shared.caller_regions().insert(id, RegionGuard::OverFlows { _uses: uses });
        Ok(id)
    }

    /// The same for memory of a GPU of a peer on this host, that the GPU at `place` reaches by IPC.
    /// Waits for the peer. `None`: it does not; [`region`](Agent::region) has it over TCP all the
    /// same.
    pub fn ipc_region(
        &self,
        name: &str,
        place: Place,
        region: PeerRegion,
        lease: u64,
    ) -> Result<Option<RegionId>, AgentError> {
        let peer = self.peer(name)?;
        let opened = asker::open_one(&self.shared, &peer, place, region, lease);
        let id = opened.as_ref().map(|open| open.id);
        let caller_regions = opened.map(|region| (region.id, RegionGuard::Open { _region: region }));
        self.shared.caller_regions().extend(caller_regions);
        Ok(id)
    }

    /// Forgets a region that [`region`](Agent::region) or [`ipc_region`](Agent::ipc_region) made.
    /// Refused while a transfer uses it.
    pub fn forget_region(&self, id: RegionId) -> Result<(), AgentError> {
        self.here()?;
        self.shared.regions.unregister(&self.shared.mover, id)??;
        self.shared.caller_regions().remove(&id);
        Ok(())
    }

    /// What went on at the port where peers connect. `None`: there is none, or it is closed.
    pub fn port_stats(&self) -> Option<ServerStats> {
        self.here().ok()?;
        self.server.lock().as_ref().map(TcpServer::stats)
    }

    /// Closes the port where peers connect, and the connections that came through it. When this
    /// returns another process can listen there, whoever still has a share of the agent.
    pub fn close_port(&self) {
        if self.here().is_ok() {
            let server = self.server.lock().take();
            drop(server);
        }
    }

    pub fn stats(&self) -> Vec<PeerStat> {
        if self.here().is_err() {
            return Vec::new();
        }
        let mut peers: Vec<_> = self.peers.lock().values().cloned().collect();
        peers.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        peers.iter().map(|peer| PeerStat::of(peer, &self.shared.rails)).collect()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if self.here().is_err() {
            // All of it is the parent's, and is left as it is.
            std::mem::forget(Arc::clone(&self.shared));
            std::mem::forget(std::mem::take(&mut self.peers));
            std::mem::forget((self.server.get_mut().take(), self.timer.take(), self.mover.take()));
            return;
        }
        self.requests.close();
        let peers: Vec<_> = self.peers.lock().drain().map(|(_, peer)| peer).collect();
        for peer in peers {
            connect::bury(&self.shared, &peer, &PeerError::Ended);
        }
        if let Err(peers) = self.shared.grants.close() {
            tracing::warn!(peers, "GPU memory is given up that peers may still reach");
        }
        // Nobody comes in any more, then nothing is due any more, then nothing moves any more.
        self.close_port();
        self.timer.take();
        self.mover.take();
    }
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, address) = (self.name(), self.address);
        f.debug_struct("Agent").field("name", &name).field("address", &address).finish_non_exhaustive()
    }
}

fn serve(
    config: &AgentConfig,
    me: Identity,
    exports: &Arc<Exports>,
    calls: &Arc<CallHandler>,
) -> Result<Option<TcpServer>, AgentError> {
    let Some(listen) = config.listen else { return Ok(None) };
    let options = ServerOptions {
        token: config.token.clone(),
        tls: config.tls.clone(),
        plain_beyond_loopback: config.plain_beyond_loopback,
        progress_limit_us: config.progress_limit_us,
        pending_max: config.pending_max,
        greeting_limit_us: config.greeting_limit_us,
        flows_max: config.accepted_max,
        flows_per_peer_max: config.accepted_per_peer_max,
        ..ServerOptions::default()
    };
    let (exports, service) = (Arc::clone(exports), Arc::clone(calls) as Arc<dyn Service>);
    let server = TcpServer::listen(listen, me, exports, Some(service), options);
    server.map(Some).map_err(system("listening for peers"))
}
