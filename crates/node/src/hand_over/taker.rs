//! The new node's end of a hand-over: it asks the old one for its memory, and says when it has it.

use super::message::{Layout, Message, offer};
use super::table::{self, BadTable, Left};
use forebay_client::protocol::answer::{Answer, Refusal};
use forebay_client::protocol::frame::{Frame, Inbox};
use forebay_client::protocol::socket;
use forebay_transfer::listen::{NotWatched, credentials};
use rustix::fd::OwnedFd;
use rustix::process::geteuid;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use thiserror::Error;

/// Why a node does not take over from the one that is there, which goes on.
#[derive(Debug, Error)]
pub enum TakeOverError {
    #[error("the node that is there refuses: {0}")]
    Refused(String),
    #[error("the node that is there knows no hand-over, or speaks another protocol: {0}; end it first")]
    Protocol(String),
    #[error("user {uid} has the socket; memory is taken over from root and from one's own user only")]
    User { uid: u32 },
    #[error("the process that has the socket cannot be watched: {0}")]
    NotWatched(#[from] NotWatched),
    #[error("the table of chunks: {0}")]
    Table(#[from] BadTable),
    #[error("the table of chunks has {bytes} bytes; at most {allowed} may be")]
    TableLength { bytes: u64, allowed: u64 },
    #[error("the node that is there went on by itself, or ended")]
    Gone,
    #[error("the node that is there has not answered in time; it goes on, or is stopped")]
    Late,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The node from which memory is taken over.
#[derive(Debug)]
pub struct Predecessor {
    stream: OwnedFd,
    inbox: Inbox,
    descriptors: Vec<OwnedFd>,
    layout: Layout,
}

impl Predecessor {
    /// Asks the node that has the socket. `None` if no node has it. The node may take `patience` to
    /// end its own work.
    pub fn ask(
        path: &Path,
        layout: Layout,
        patience: Duration,
    ) -> Result<Option<Predecessor>, TakeOverError> {
        let stream = match socket::connect_to(path) {
            Ok(stream) => stream,
            Err(error) if is_nobody(&error) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let uid = credentials(&stream)?.uid;
        if uid != 0 && uid != geteuid().as_raw() {
            return Err(TakeOverError::User { uid });
        }
        socket::set_timeouts(&stream, Some(patience), Some(patience))?;
        socket::send_all(&stream, &offer(layout).encode())?;
        Ok(Some(Predecessor { stream, inbox: Inbox::default(), descriptors: Vec::new(), layout }))
    }

    /// Waits until the old node has given up everything: its memory, and the socket on which
    /// clients connect.
    pub fn receive(&mut self) -> Result<(Left, OwnedFd), TakeOverError> {
        let (mut lengths, mut parts) = ([0; 3], Vec::new());
        for length in &mut lengths {
            let Message::Part { bytes } = self.hear()? else {
                return Err(TakeOverError::Protocol("it gives nothing".into()));
            };
            *length = bytes;
        }
        parts.append(&mut self.descriptors);
        let parts: Result<[OwnedFd; 3], _> = parts.try_into();
        let [arena, table, listening] =
            parts.map_err(|_| TakeOverError::Protocol("descriptors are missing".into()))?;
        let (pages, kept) = table::decode(&self.read(table, lengths[1])?)?;
        Ok((Left { arena, pages, kept }, listening))
    }

    /// The bytes of the table. It is shorter than the memory that it describes.
    fn read(&self, file: OwnedFd, bytes: u64) -> Result<Vec<u8>, TakeOverError> {
        let allowed = self.layout.memory_bytes.max(1 << 20);
        let file = File::from(file);
        if bytes > allowed || file.metadata()?.len() != bytes {
            return Err(TakeOverError::TableLength { bytes, allowed });
        }
        let mut table = vec![0; usize::try_from(bytes).unwrap_or(0)];
        file.read_exact_at(&mut table, 0)?;
        Ok(table)
    }

    /// Says that everything is opened, and hears that it is this node's.
    pub fn say_ready(&mut self) -> Result<(), TakeOverError> {
        self.say(&Message::Ready)?;
        match self.hear()? {
            Message::Yours => Ok(()),
            other => Err(TakeOverError::Protocol(format!("it says {other:?}"))),
        }
    }

    /// Says that this node has the memory. It has it also if the old one does not hear that any
    /// more: after YOURS that one only ends, or sees this one end.
    pub fn say_taken(&self) {
        let _ = self.say(&Message::Taken);
    }

    /// This node has touched nothing and ends.
    pub fn give_up(self, why: &dyn std::fmt::Display) {
        // An old node that does not hear it sees the end.
        let _ = self.say(&Message::GaveUp(why.to_string()));
    }

    fn say(&self, message: &Message) -> io::Result<()> {
        socket::send_all(&self.stream, &message.encode().encode())
    }

    fn hear(&mut self) -> Result<Message, TakeOverError> {
        let mut bytes = [0; 4096];
        loop {
            let next = self.inbox.next_frame();
            if let Some(frame) = next.map_err(|bad| TakeOverError::Protocol(bad.to_string()))? {
                return understand(&frame);
            }
            let came = socket::receive_with(&self.stream, &mut bytes);
            let (received, descriptor) = came.map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => TakeOverError::Late,
                _ => TakeOverError::Io(error),
            })?;
            self.descriptors.extend(descriptor);
            if received == 0 {
                return Err(TakeOverError::Gone);
            }
            self.inbox.put(&bytes[..received]);
        }
    }
}

fn understand(frame: &Frame) -> Result<Message, TakeOverError> {
    let protocol = |bad: &dyn std::fmt::Display| TakeOverError::Protocol(bad.to_string());
    frame.check_unasked().map_err(|bad| protocol(&bad))?;
    match Answer::decode(frame) {
        Ok(Answer::Refused(Refusal::BadRequest, why)) => Err(TakeOverError::Protocol(why)),
        Ok(Answer::Refused(_, why)) => Err(TakeOverError::Refused(why)),
        _ => Message::decode(frame).map_err(|bad| protocol(&bad)),
    }
}

/// Whether no process has a socket.
fn is_nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}
