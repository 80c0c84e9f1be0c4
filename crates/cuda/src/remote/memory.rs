//! The engine's memory that a node maps: all that is published in this process, handed on as it
//! comes and taken back as it goes.

use super::error::NotAttached;
use super::session::{Known, Session};
use super::socket;
use super::wire::{self, Message};
use crate::kernels::Piece;
use crate::links::{Direction, SHARED};
use crate::pinned::{self, Shareable};
use forebay_transfer::lock::RwLock;
use forebay_transfer::{Backing, MoverHandle, RegionId, Span};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a node may take for a message: memory has to be pinned and unpinned, which takes
/// seconds for what is large.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Between two looks at whether the answer is still waited for.
const LOOK: Duration = Duration::from_millis(20);

/// What copies may look up: memory that the node has now, by its first address, with the address
/// behind it and its region.
#[derive(Debug, Default)]
pub struct Reach(RwLock<BTreeMap<u64, (u64, RegionId)>>);

impl Reach {
    /// Where pieces' host sides lie, if the node has them all.
    pub fn spans(&self, direction: Direction, pieces: &[Piece]) -> Option<Vec<Span>> {
        let ranges = self.0.read();
        let span = |piece: &Piece| {
            let (host, ..) = direction.sides(piece);
            let (start, (end, region)) = ranges.range(..=host).next_back()?;
            let fits = host.checked_add(piece.bytes).is_some_and(|behind| behind <= *end);
            fits.then(|| Span::new(*region, host - start, piece.bytes))
        };
        pieces.iter().map(span).collect()
    }

    pub fn bytes(&self) -> u64 {
        let ranges = self.0.read();
        ranges.iter().map(|(start, (end, _))| end - start).sum()
    }

    fn add(&self, memory: &dyn Shareable, region: RegionId) {
        let start = memory.as_ptr() as u64;
        self.0.write().insert(start, (start + memory.len() as u64, region));
    }

    fn remove(&self, memory: &dyn Shareable) {
        self.0.write().remove(&(memory.as_ptr() as u64));
    }
}

/// The memories of an attachment. Only its own thread has them.
pub struct Memories {
    mover: MoverHandle,
    reach: Arc<Reach>,
    /// By their numbers, which are those that the node hears.
    regions: BTreeMap<u64, (RegionId, Arc<dyn Shareable>)>,
    /// What this node will not have.
    refused: BTreeSet<u64>,
    /// Whether the attachment ends: then no answer of the node is waited for any more.
    is_closing: Box<dyn Fn() -> bool + Send>,
}

impl Memories {
    pub fn new(
        mover: &MoverHandle,
        reach: &Arc<Reach>,
        is_closing: impl Fn() -> bool + Send + 'static,
    ) -> Memories {
        let (mover, reach, is_closing) = (mover.clone(), Arc::clone(reach), Box::new(is_closing));
        Memories { mover, reach, regions: BTreeMap::new(), refused: BTreeSet::new(), is_closing }
    }

    /// Gives a new node everything. To be called before its relays are put into service: what
    /// copies use already must be there by then.
    pub fn introduce(&mut self, session: &Session) -> Result<(), NotAttached> {
        self.refused.clear();
        for (number, (region, memory)) in &self.regions {
            // What the node will not have goes over other paths.
            if give(session, &*self.is_closing, *number, *region, memory)?.is_none() {
                self.reach.add(&**memory, *region);
            }
        }
        self.follow(Some(session))
    }

    /// Does what is to be done about changes. Without a session memory only goes.
    pub fn follow(&mut self, session: Option<&Session>) -> Result<(), NotAttached> {
        let published = pinned::published();
        let gone: Vec<u64> =
            self.regions.keys().filter(|number| !published.contains_key(number)).copied().collect();
        gone.into_iter().try_for_each(|number| self.take_back(session, number))?;
        let Some(session) = session else { return Ok(()) };
        for (number, memory) in published {
            if !self.regions.contains_key(&number) && !self.refused.contains(&number) {
                self.hand_on(session, number, memory)?;
            }
        }
        Ok(())
    }

    /// No copy uses this node's relays any more.
    pub fn part(&self) {
        self.reach.0.write().clear();
    }

    fn hand_on(
        &mut self,
        session: &Session,
        number: u64,
        memory: Arc<dyn Shareable>,
    ) -> Result<(), NotAttached> {
        let region = self.mover.register(SHARED, Arc::clone(&memory) as Arc<dyn Backing>)?;
        let given = give(session, &*self.is_closing, number, region, &memory);
        if !matches!(given, Ok(None)) {
            // Nobody has been told of the region, so nothing uses it.
            let _ = self.mover.unregister(region)?;
        }
        if given?.is_some() {
            self.refused.insert(number);
            return Ok(());
        }
        self.reach.add(&*memory, region);
        self.regions.insert(number, (region, memory));
        Ok(())
    }

    /// Memory that a copy still uses, although its owner does not have it any more, stays until
    /// something else changes.
    fn take_back(&mut self, session: Option<&Session>, number: u64) -> Result<(), NotAttached> {
        let Some((region, memory)) = self.regions.get(&number) else { return Ok(()) };
        self.reach.remove(&**memory);
        if self.mover.unregister(*region)?.is_err() {
            return Ok(());
        }
        let region = *region;
        self.regions.remove(&number);
        if let Some(session) = session {
            session.forget(region);
            ask(session, &*self.is_closing, &Message::Forget { memory: number }, &[])?;
        }
        Ok(())
    }
}

/// Gives a node memory. If it will not have it, says why.
fn give(
    session: &Session,
    is_closing: &dyn Fn() -> bool,
    number: u64,
    region: RegionId,
    memory: &Arc<dyn Shareable>,
) -> Result<Option<String>, NotAttached> {
    let message = Message::Memory { memory: number };
    let file = memory.file().into_iter().collect::<Vec<_>>();
    match ask(session, is_closing, &message, &file) {
        Ok(Message::Done) => {
            session.know(region, Known { memory: number, offset: 0 });
            Ok(None)
        }
        Ok(message) => Err(NotAttached::Nonsense(format!("{message:?}"))),
        Err(NotAttached::Refused(reason)) => Ok(Some(reason)),
        Err(error) => Err(error),
    }
}

/// Says a message and hears the answer, unless nobody waits for it any more.
fn ask(
    session: &Session,
    is_closing: &dyn Fn() -> bool,
    message: &Message,
    descriptors: &[BorrowedFd<'_>],
) -> Result<Message, NotAttached> {
    wire::send(&session.socket, message, descriptors)?;
    let begun = Instant::now();
    let fds = [session.socket.as_fd(), session.process.as_fd()];
    loop {
        match socket::wait(&fds, &[], Some(LOOK))?[..] {
            [false, false] => {}
            [false, _] => return Err(NotAttached::Io(ErrorKind::ConnectionReset.into())),
            _ => return Ok(hear(&session.socket)?.0),
        }
        if is_closing() || session.is_down() || begun.elapsed() > TIMEOUT {
            return Err(NotAttached::Io(ErrorKind::TimedOut.into()));
        }
    }
}

/// Hears an answer that is there, and the descriptors that came along.
pub fn hear(socket: &OwnedFd) -> Result<(Message, Vec<OwnedFd>), NotAttached> {
    match wire::receive(socket)? {
        (Message::Refused { reason }, _) => Err(NotAttached::Refused(reason)),
        answer => Ok(answer),
    }
}
