//! The old node's end of a hand-over: what it sends to the new one, and what it hears of it.

use super::message::{Message, NotGiven};
use super::states::Heard;
use super::table;
use super::table::Left;
use forebay_client::protocol::answer::{Answer, Refusal};
use forebay_client::protocol::frame::{Inbox, UNASKED};
use forebay_client::protocol::socket::{self, WakeUp};
use forebay_transfer::listen::Credentials;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// How long the new node may take to receive something that is short.
const SEND_LIMIT: Duration = Duration::from_secs(5);

/// A new node that may have this one's memory.
#[derive(Debug)]
pub struct Successor {
    stream: OwnedFd,
    credentials: Credentials,
    inbox: Inbox,
}

impl Successor {
    /// At the other end of this connection, of a user that may.
    pub fn new(stream: OwnedFd, credentials: Credentials) -> io::Result<Successor> {
        socket::set_timeouts(&stream, None, Some(SEND_LIMIT))?;
        Ok(Successor { stream, credentials, inbox: Inbox::default() })
    }

    pub fn process(&self) -> i32 {
        self.credentials.pid
    }

    /// The new node does not get the memory, and is told why.
    pub fn refuse(self, why: &NotGiven) {
        let frame = Answer::Refused(Refusal::NotAllowed, why.to_string()).encode(UNASKED);
        // Whoever does not read it sees the end.
        let _ = socket::send_some(&self.stream, &frame.encode());
    }

    /// Sends the memory, the table of what is in it, and the socket on which clients connect.
    pub fn give(&self, left: &Left, listening: BorrowedFd) -> io::Result<()> {
        let table = table::encode(left.pages, &left.kept);
        let mut file = File::from(memfd_create("forebay-table", MemfdFlags::CLOEXEC)?);
        file.write_all(&table)?;
        let parts = [(0, left.arena.as_fd()), (table.len() as u64, file.as_fd()), (0, listening)];
        for (bytes, part) in parts {
            socket::send_with(&self.stream, &Message::Part { bytes }.encode().encode(), part)?;
        }
        Ok(())
    }

    pub fn say_yours(&self) -> io::Result<()> {
        socket::send_all(&self.stream, &Message::Yours.encode().encode())
    }

    /// Waits until the new node says something, goes, or `limit` is over. What it said before it
    /// went is heard.
    pub fn hear(&mut self, limit: Duration) -> io::Result<Heard> {
        let (until, wake_up) = (Instant::now() + limit, WakeUp::new()?);
        let mut bytes = [0; 4096];
        loop {
            if let Some(frame) = self.inbox.next_frame().map_err(io::Error::other)? {
                frame.check_unasked().map_err(io::Error::other)?;
                return match Message::decode(&frame).map_err(io::Error::other)? {
                    Message::Ready => Ok(Heard::Ready),
                    Message::Taken => Ok(Heard::Taken),
                    Message::GaveUp(why) => Ok(Heard::GaveUp(why)),
                    other => Err(io::Error::other(format!("a new node says {other:?}"))),
                };
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Heard::Late);
            }
            let process = &self.credentials.process;
            let ready = socket::wait(&self.stream, &wake_up, Some(process), (true, false), Some(left))?;
            if ready.readable {
                match socket::receive(&self.stream, &mut bytes) {
                    Ok(0) => return Ok(Heard::Gone),
                    Ok(received) => self.inbox.put(&bytes[..received]),
                    // It went without reading what it was told, so that it has not acted on it.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(Heard::Gone),
                    Err(error) => return Err(error),
                }
            } else if ready.exited || ready.gone {
                return Ok(Heard::Gone);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_transfer::listen::credentials;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    const NO_TIME: Duration = Duration::from_millis(10);
    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (Successor, OwnedFd) {
        let kind = (AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC);
        let (here, there) = socketpair(kind.0, kind.1, kind.2, None).unwrap();
        let credentials = credentials(&here).unwrap();
        (Successor::new(here, credentials).unwrap(), there)
    }

    #[test]
    fn a_new_node_is_heard_until_it_goes_and_waited_for_no_longer_than_it_may_take() {
        let (mut successor, there) = pair();
        assert_eq!(successor.hear(NO_TIME).unwrap(), Heard::Late);
        for message in [Message::Ready, Message::Taken, Message::GaveUp("why".into())] {
            socket::send_all(&there, &message.encode().encode()).unwrap();
        }
        drop(there);
        assert_eq!(successor.hear(LONG).unwrap(), Heard::Ready);
        assert_eq!(successor.hear(LONG).unwrap(), Heard::Taken);
        assert_eq!(successor.hear(LONG).unwrap(), Heard::GaveUp("why".into()));
        assert_eq!(successor.hear(LONG).unwrap(), Heard::Gone);
    }

    #[test]
    fn a_new_node_that_went_without_reading_that_all_is_its_own_is_gone() {
        let (mut successor, there) = pair();
        socket::send_all(&there, &Message::Ready.encode().encode()).unwrap();
        assert_eq!(successor.hear(LONG).unwrap(), Heard::Ready);
        successor.say_yours().unwrap();
        drop(there);
        assert_eq!(successor.hear(LONG).unwrap(), Heard::Gone);
    }

    #[test]
    fn what_a_new_node_may_not_say_is_an_error() {
        let (mut successor, there) = pair();
        socket::send_all(&there, &Message::Yours.encode().encode()).unwrap();
        assert!(successor.hear(LONG).unwrap_err().to_string().contains("a new node says Yours"));
    }
}
