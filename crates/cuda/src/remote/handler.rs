//! One engine's request handler at the node: hears who it is, gives it staging and a ring, maps the
//! memory that it brings, and clears up when it goes.

use super::control::{Drained, Engine, RequestQueue};
use super::server::RelayServer;
use super::socket;
use super::staging::Share;
use super::wire::{self, Message, Offer, Uuid, VERSION};
use crate::device::Stream;
use crate::links::Direction;
use forebay_transfer::listen::RoomPlace;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// How long an engine may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
const FILES_MAX: usize = 256;

/// An engine that may be let in, and what it is offered.
struct Candidate {
    gpu: Uuid,
    relays: Vec<Offer>,
    shares: Vec<Share>,
}

/// An engine that is let in.
struct Attached {
    engine: Arc<Engine>,
    shares: Vec<Share>,
    process: OwnedFd,
    /// It may have been told of its staging.
    told: bool,
}

/// Serves the engine at the other end of a socket until it is gone and nothing of it is left. It
/// has its place until it has said who it is.
pub fn serve(
    server: &RelayServer,
    number: u64,
    socket: Arc<OwnedFd>,
    process: OwnedFd,
    place: RoomPlace<i32>,
) {
    let candidate = match greet(server, number, &socket, &place) {
        Ok(candidate) => candidate,
        Err(_) if place.is_evicted() => return,
        Err(why) => return refuse(server, &socket, why),
    };
    // What would have evicted it is gone with its place: nobody else has the socket any more.
    drop(place);
    let Some(socket) = Arc::into_inner(socket) else { return };
    let Some(attached) = attach(server, number, socket, process, candidate) else { return };
    let gpu = attached.engine.gpu;
    tracing::info!(%gpu, relays = attached.shares.len(), "engine attached to relays");
    let said_bye = attend(server, &attached);
    let drained = server.control.finish(&attached.engine);
    match &*attached.engine.violation.lock() {
        Some(violation) => {
            server.count_violation();
            tracing::warn!(%gpu, reason = %violation, "engine broke the protocol of relays");
        }
        None => tracing::info!(%gpu, said_bye, "engine left relays"),
    }
    if attached.told && !said_bye {
        // Its own copies to and from staging may still be under way.
        server.wait_for_end(&attached.process);
    }
    if drained == Drained::Lost {
        std::mem::forget(attached);
    }
}

/// Tells an engine that it is not let in.
pub fn refuse(server: &RelayServer, socket: &OwnedFd, reason: String) {
    server.count_refused(&reason);
    // Whoever does not read it sees the end.
    let _ = wire::send(socket, &Message::Refused { reason }, &[]);
}

/// Hears who the engine is, and finds staging for it.
fn greet(
    server: &RelayServer,
    number: u64,
    socket: &OwnedFd,
    place: &RoomPlace<i32>,
) -> Result<Candidate, String> {
    socket::set_timeout(socket, Some(HELLO_TIMEOUT)).map_err(|error| error.to_string())?;
    let (message, _) = wire::receive(socket).map_err(|error| format!("the hello: {error}"))?;
    let Message::Hello { version, token, gpu } = message else {
        return Err("the first message is no hello".into());
    };
    if version != VERSION {
        return Err(format!("version {version}; the node's is {VERSION}"));
    }
    server.admission.check_token(token.as_bytes()).map_err(|why| why.to_string())?;
    server.admit(number)?;
    if !place.leave() {
        return Err("it gave way to another connection".into());
    }
    let shares = server.shares(gpu)?;
    let relays = shares.iter().map(Share::offer).collect::<Result<_, _>>()?;
    Ok(Candidate { gpu, relays, shares })
}

/// Gives the engine a ring, and has it served. Whoever cannot be sees the end.
fn attach(
    server: &RelayServer,
    number: u64,
    socket: OwnedFd,
    process: OwnedFd,
    candidate: Candidate,
) -> Option<Attached> {
    let Candidate { gpu, relays, shares } = candidate;
    let ring = server.ring(relays.len()).ok()?;
    let (ringer, bell) = socket::bell().ok()?;
    let mut queues = Vec::with_capacity(2 * shares.len());
    for (share, relay) in shares.iter().zip(&relays) {
        for (nth, direction) in Direction::BOTH.into_iter().enumerate() {
            let stream = Stream::new(share.device()).ok()?;
            queues.push(RequestQueue::new(relay.gpu, direction, stream, share.staging(nth)));
        }
    }
    socket::set_timeout(&socket, None).ok()?;
    let engine = Arc::new(Engine::new(gpu, socket, ring));
    server.control.serve(&engine, bell, queues);
    if !server.attach(number, &engine) {
        socket::part(&engine.socket);
    }
    // It is counted before it knows. One that cannot be told is gone, and that is seen by whoever
    // listens to it.
    let welcome = Message::Welcome { relays };
    let told = wire::send(&engine.socket, &welcome, &[engine.ring.file(), ringer.as_fd()]).is_ok();
    Some(Attached { engine, shares, process, told })
}

/// Takes the engine's messages until it goes. Says whether it said goodbye.
fn attend(server: &RelayServer, attached: &Attached) -> bool {
    // Staging is the engine's until it has gone.
    debug_assert!(!attached.shares.is_empty());
    let engine = &attached.engine;
    while let Ok((message, descriptors)) = wire::receive(&engine.socket) {
        let answer = match message {
            Message::Bye => return true,
            Message::Memory { memory } => take_memory(server, engine, memory, descriptors),
            Message::Forget { memory } => {
                let gone = engine.memories.write().remove(&memory);
                // Without the lock, with which the control thread looks up memory.
                drop(gone);
                Ok(())
            }
            _ => Err("an engine says hello once, then memory, forget and bye".into()),
        };
        let answer = answer.map_or_else(|reason| Message::Refused { reason }, |()| Message::Done);
        if wire::send(&engine.socket, &answer, &[]).is_err() {
            break;
        }
    }
    false
}

/// Maps and pins memory that an engine brings, unless it is there already.
fn take_memory(
    server: &RelayServer,
    engine: &Engine,
    number: u64,
    descriptors: Vec<OwnedFd>,
) -> Result<(), String> {
    let [file] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|_| "memory comes with one file")?;
    let (held_bytes, count) = {
        let memories = engine.memories.read();
        if memories.contains_key(&number) {
            return Err(format!("memory {number} was given before"));
        }
        (memories.values().map(|memory| server.files.brought_bytes(memory)).sum::<u64>(), memories.len())
    };
    if count >= FILES_MAX {
        return Err(format!("an engine may bring {FILES_MAX} files"));
    }
    let most_bytes = server.config.memory_limit_bytes.saturating_sub(held_bytes);
    let memory = server.files.pin(server.device(), file, most_bytes)?;
    engine.memories.write().insert(number, memory);
    Ok(())
}
