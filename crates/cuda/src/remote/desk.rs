//! One engine's desk at the node: hears who it is, gives it staging and a ring, maps the memory that it brings, and clears up
//! when it goes. This file knows one engine and what it may have; it must never know how requests are carried out.

use super::control::{Engine, RequestQueue, Rest};

use super::peer;
use super::serve::{House, Share};
use super::shared::SharedFile;
use super::socket;
use super::wire::{self, Offer, Uuid, VERSION, Word};
use crate::device::Stream;
use crate::links::Direction;
use crate::pinned::Registered;
use forebay_transfer::Backing;
use rustix::fs::fstat;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// How long an engine may take to say who it is.
const HELLO_PATIENCE: Duration = Duration::from_secs(2);
/// Files that one engine may bring.
const FILES_MAX: usize = 256;

/// An engine that may be let in, and what it is offered.
struct Caller {
    gpu: Uuid,
    relays: Vec<Offer>,
    shares: Vec<Share>,
    process: OwnedFd,
}

/// An engine that is let in.
struct Guest {
    engine: Arc<Engine>,
    shares: Vec<Share>,
    process: OwnedFd,
    /// It may have been told of its staging.
    told: bool,
}

/// Serves one engine until it is gone and nothing of it is left.
pub fn serve(house: &House, number: u64, socket: OwnedFd) {
    let guest = match greet(house, &socket) {
        Ok(caller) => seat(house, number, socket, caller),
        Err(why) => return refuse(house, &socket, why),
    };
    let Some(guest) = guest else { return };
    let said_bye = attend(house, &guest);
    let rest = house.control.finish(&guest.engine);
    if guest.engine.violation.lock().is_some() {
        house.count_violation();
    }
    if guest.told && !said_bye {
        // Its own copies to and from staging may still be under way.
        house.wait_for_end(&guest.process);
    }
    if rest == Rest::Lost {
        std::mem::forget(guest);
    }
}

/// Tells an engine that it is not let in.
pub fn refuse(house: &House, socket: &OwnedFd, reason: String) {
    house.count_refused();
    // Whoever does not read it sees the end.
    let _ = wire::send(socket, &Word::Refused { reason }, &[]);
}

/// Hears who the engine is, and finds staging for it.
fn greet(house: &House, socket: &OwnedFd) -> Result<Caller, String> {
    let credentials = peer::credentials(socket)
        .map_err(|error| format!("the engine's process cannot be watched: {error}"))?;
    let uid = credentials.uid;
    let ours = rustix::process::geteuid().as_raw();
    if uid != 0 && uid != ours && !house.config.uids.contains(&uid) {
        return Err(format!("user {uid} may not attach; root and the node's own may"));
    }
    socket::set_patience(socket, Some(HELLO_PATIENCE)).map_err(|error| error.to_string())?;
    let (word, _) = wire::receive(socket).map_err(|error| format!("the hello: {error}"))?;
    let Word::Hello { version, token, gpu } = word else {
        return Err("the first word is no hello".into());
    };
    if version != VERSION {
        return Err(format!("version {version}; the node's is {VERSION}"));
    }
    if !is_token(&house.config.token, token.as_bytes()) {
        return Err("the token is wrong".into());
    }
    let shares = house.shares(gpu)?;
    let relays = shares.iter().map(Share::offer).collect::<Result<_, _>>()?;
    Ok(Caller { gpu, relays, shares, process: credentials.process })
}

/// Takes the same time wherever a token of the right length is wrong.
fn is_token(wanted: &[u8], shown: &[u8]) -> bool {
    let differences = wanted.iter().zip(shown).fold(0, |sum, (ours, theirs)| sum | (ours ^ theirs));
    wanted.is_empty() || (wanted.len() == shown.len() && differences == 0)
}

/// Gives the engine a ring, and has it served. Whoever cannot be sees the end.
fn seat(house: &House, number: u64, socket: OwnedFd, caller: Caller) -> Option<Guest> {
    let Caller { gpu, relays, shares, process } = caller;
    let ring = house.ring(relays.len()).ok()?;
    let (ringer, bell) = socket::bell().ok()?;
    let mut queues = Vec::with_capacity(2 * shares.len());
    for (share, relay) in shares.iter().zip(&relays) {
        for (nth, direction) in Direction::BOTH.into_iter().enumerate() {
            let stream = Stream::new(share.device()).ok()?;
            queues.push(RequestQueue::new(relay.gpu, direction, stream, share.staging(nth)));
        }
    }
    socket::set_patience(&socket, None).ok()?;
    let engine = Arc::new(Engine::new(gpu, socket, ring));
    house.control.serve(&engine, bell, queues);
    if !house.seat(number, &engine) {
        socket::part(&engine.socket);
    }
    // It is counted before it knows. One that cannot be told is gone, and that is seen by whoever listens to it.
    let welcome = Word::Welcome { relays };
    let told = wire::send(&engine.socket, &welcome, &[engine.ring.file(), ringer.as_fd()]).is_ok();
    Some(Guest { engine, shares, process, told })
}

/// Takes the engine's words until it goes. Says whether it said goodbye.
fn attend(house: &House, guest: &Guest) -> bool {
    // Staging is the engine's until it has gone.
    debug_assert!(!guest.shares.is_empty());
    let engine = &guest.engine;
    while let Ok((word, descriptors)) = wire::receive(&engine.socket) {
        let answer = match word {
            Word::Bye => return true,
            Word::Memory { memory } => take_memory(house, engine, memory, descriptors),
            Word::Forget { memory } => {
                let gone = engine.memories.write().remove(&memory);
                // Unpinning takes seconds, in which the control thread looks up memory.
                drop(gone);
                Ok(())
            }
            _ => Err("an engine says hello once, then memory, forget and bye".into()),
        };
        let answer = answer.map_or_else(|reason| Word::Refused { reason }, |()| Word::Done);
        if wire::send(&engine.socket, &answer, &[]).is_err() {
            break;
        }
    }
    false
}

/// Maps and pins memory that an engine brings, unless it is there already.
fn take_memory(house: &House, engine: &Engine, number: u64, descriptors: Vec<OwnedFd>) -> Result<(), String> {
    let [file] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|_| "memory comes with one file")?;
    let (held_bytes, count) = {
        let memories = engine.memories.read();
        if memories.contains_key(&number) {
            return Err(format!("memory {number} was given before"));
        }
        (memories.values().map(|memory| memory.len() as u64).sum::<u64>(), memories.len())
    };
    if count >= FILES_MAX {
        return Err(format!("an engine may bring {FILES_MAX} files"));
    }
    let memory = pin(house, file, house.config.memory_limit_bytes.saturating_sub(held_bytes))?;
    engine.memories.write().insert(number, memory);
    Ok(())
}

fn pin(house: &House, file: OwnedFd, most_bytes: u64) -> Result<Arc<Registered>, String> {
    let stat = fstat(&file).map_err(|error| error.to_string())?;
    let identity = (stat.st_dev, stat.st_ino);
    // Engines that bring the same memory wait for who came first.
    let mut pinned = house.pinned.lock();
    pinned.retain(|_, memory| memory.strong_count() > 0);
    let known = pinned.get(&identity).and_then(std::sync::Weak::upgrade);
    if let Some(memory) = known.filter(|memory| memory.len() as u64 == stat.st_size as u64) {
        let fits = memory.len() as u64 <= most_bytes;
        return fits.then_some(memory).ok_or_else(|| format!("{most_bytes} bytes more are allowed"));
    }
    let file = SharedFile::open(file, most_bytes).map_err(|error| error.to_string())?;
    let memory = Registered::new(house.device(), Arc::new(file)).map_err(|error| error.to_string())?;
    let memory = Arc::new(memory);
    pinned.insert(identity, Arc::downgrade(&memory));
    Ok(memory)
}
