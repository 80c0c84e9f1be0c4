//! The node's side: the socket on which engines attach, and the threads that serve them, one each.

use super::control::Control;
use super::handler;
use super::server::{RelayError, RelayServer, RelaysConfig};
use super::socket;
use crate::driver::Driver;
use crate::pinned::Shareable;
use forebay_transfer::listen::{SocketFile, bind_socket};
use rustix::net::SocketType;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Pause when the system has no descriptors or threads left.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// What relays did and hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RelaysStat {
    pub gpus: usize,
    pub engines: usize,
    /// Staging that they have, on all GPUs together.
    pub staging_bytes: u64,
    /// Requests that were started, and their bytes.
    pub requests: u64,
    pub bytes: u64,
    pub refused: u64,
    /// Engines that wrote nonsense and were parted from.
    pub violations: u64,
}

/// The relays of a node. Dropping them parts from all engines.
#[derive(Debug)]
pub struct Relays {
    server: Arc<RelayServer>,
    listener: Option<JoinHandle<()>>,
    file: Option<SocketFile>,
    // Dropped last: request handlers wait for it.
    _control: Control,
}

impl Relays {
    pub fn start(driver: &'static Driver, config: RelaysConfig) -> Result<Relays, RelayError> {
        Relays::beside(driver, config, None)
    }

    /// The same in a process with an arena, which engines bring too: it is what they load from.
    pub fn beside(
        driver: &'static Driver,
        config: RelaysConfig,
        arena: Option<Arc<dyn Shareable>>,
    ) -> Result<Relays, RelayError> {
        let control = Control::spawn()?;
        let server = Arc::new(RelayServer::new(driver, config, arena, control.shared())?);
        let path = &server.config.socket;
        let (listener, file) = bind_socket(path, SocketType::SEQPACKET, server.admission.mode())
            .map_err(|error| RelayError::Socket { path: path.clone(), error })?;
        tracing::info!(socket = %path.display(), gpus = server.gpus().0, "relays start");
        let own = Arc::clone(&server);
        let thread = std::thread::Builder::new().name("forebay-listen".into());
        let listener = thread.spawn(move || accept(&own, &listener))?;
        Ok(Relays { server, listener: Some(listener), file: Some(file), _control: control })
    }

    pub fn socket(&self) -> &Path {
        &self.server.config.socket
    }

    #[cfg(test)]
    pub(super) fn server(&self) -> &Arc<RelayServer> {
        &self.server
    }

    pub fn stat(&self) -> RelaysStat {
        let (requests, bytes) = self.server.control.counters();
        let (gpus, staging_bytes) = self.server.gpus();
        let (refused, violations) = self.server.counts();
        let engines = self.server.engines();
        RelaysStat { gpus, engines, staging_bytes, requests, bytes, refused, violations }
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        self.server.stop();
        if let Some(listener) = self.listener.take() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = listener.join();
        }
        // The next node finds its place free.
        self.file = None;
        self.server.part_from_all();
    }
}

/// Gives each connection a thread, until the relays end.
fn accept(server: &Arc<RelayServer>, listener: &OwnedFd) {
    while !server.is_stopping() {
        if server.wait_for_connection(listener).is_err() {
            std::thread::sleep(RETRY_AFTER);
        }
        match socket::accept_from(listener) {
            Ok(socket) => greet(server, socket),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => std::thread::sleep(RETRY_AFTER),
        }
    }
}

/// Gives a connection of a user that may attach a thread, as soon as there is a place among those
/// that have not said who they are.
fn greet(server: &Arc<RelayServer>, socket: OwnedFd) {
    let credentials = match server.admission.check_user(&socket) {
        Ok(credentials) => credentials,
        Err(why) => return handler::refuse(server, &socket, why.to_string()),
    };
    let socket = Arc::new(socket);
    let (evicting, evicted) = (Arc::clone(server), Arc::clone(&socket));
    let evict = move || {
        handler::refuse(&evicting, &evicted, "it did not say who it is before others came".into());
        socket::part(&evicted);
    };
    let Some(place) = server.room.enter(&credentials.pid, evict, || server.is_stopping()) else { return };
    let (number, own) = (server.enter(), Arc::clone(server));
    let serve = move || {
        handler::serve(&own, number, socket, credentials.process, place);
        own.leave(number);
    };
    if std::thread::Builder::new().name("forebay-relays".into()).spawn(serve).is_err() {
        // An engine for whom there is no thread sees the end.
        server.leave(number);
    }
}
