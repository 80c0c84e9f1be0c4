//! The system calls of the TCP link: vectored sends and receives that never wait, and the wait for whatever comes first.
//! This file knows sockets; it must never know frames or operations.

use super::carrier::Carrier;
use super::connection::Wire;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::net::sockopt;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

/// A connected socket.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
}

/// What a wait has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ready {
    /// There may be something to receive, if only the end.
    pub readable: bool,
    /// The peer has taken enough for more to be sent. Only where that was waited for.
    pub writable: bool,
    /// The peer is gone, and has thrown away what it had not received.
    pub reset: bool,
}

impl Socket {
    /// A socket that sends small frames at once. `buffer_bytes`: of each direction; the system decides otherwise.
    pub fn new(stream: TcpStream, buffer_bytes: Option<usize>) -> io::Result<Socket> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        if let Some(bytes) = buffer_bytes {
            sockopt::set_socket_send_buffer_size(&stream, bytes)?;
            sockopt::set_socket_recv_buffer_size(&stream, bytes)?;
        }
        Ok(Socket { stream })
    }
}

impl Wire for Socket {
    unsafe fn send(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        let message = message(slices);
        // SAFETY: the message names the slices, which the caller says are readable; nothing is written through them.
        let sent = unsafe { libc::sendmsg(self.stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    unsafe fn receive(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        let mut message = message(slices);
        // SAFETY: the message names the slices, which the caller says are writable, and no other memory.
        let received = unsafe { libc::recvmsg(self.stream.as_raw_fd(), &mut message, 0) };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    }
}

impl Carrier for Socket {
    fn wait(&mut self, waker: &WakeUp, sending: bool, timeout: Option<Duration>) -> io::Result<Ready> {
        wait(self.stream.as_fd(), waker, sending, timeout)
    }

    fn watch(&self) -> io::Result<Option<Watch>> {
        Ok(Some(Watch(self.stream.as_fd().try_clone_to_owned()?)))
    }

    /// The peer's system throws away what the peer has not received.
    fn reset(self: Box<Self>) {
        // An error leaves an ordinary close, which the peer sees as well.
        let _ = sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO));
    }

    fn part(self: Box<Self>, farewell: &[u8]) {
        // Whoever does not listen is not told.
        let _ = rustix::net::send(&self.stream, farewell, rustix::net::SendFlags::NOSIGNAL);
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }
}

/// Waits for a socket that others use meanwhile.
#[derive(Debug)]
pub struct Watch(OwnedFd);

impl Watch {
    /// As [`Carrier::wait`].
    pub fn wait(&self, waker: &WakeUp, sending: bool, timeout: Option<Duration>) -> io::Result<Ready> {
        wait(self.0.as_fd(), waker, sending, timeout)
    }
}

fn wait(
    socket: BorrowedFd<'_>,
    waker: &WakeUp,
    sending: bool,
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let output = if sending { PollFlags::OUT } else { PollFlags::empty() };
    let mut fds = [
        PollFd::from_borrowed_fd(socket, PollFlags::IN | PollFlags::RDHUP | output),
        PollFd::new(&waker.0, PollFlags::IN),
    ];
    poll_for(&mut fds, timeout)?;
    let (found, woken) = (fds[0].revents(), !fds[1].revents().is_empty());
    if woken {
        waker.clear();
    }
    let reset = found.intersects(PollFlags::ERR | PollFlags::HUP);
    let readable = reset || found.intersects(PollFlags::IN | PollFlags::RDHUP);
    Ok(Ready { readable, writable: found.intersects(PollFlags::OUT), reset })
}

fn message(slices: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: all zeros is a message that names nothing.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = slices.as_ptr().cast_mut();
    message.msg_iovlen = slices.len();
    message
}

/// Interrupts a wait, from any thread. Kept for the next wait if there is none.
#[derive(Debug, Clone)]
pub struct WakeUp(Arc<OwnedFd>);

impl WakeUp {
    pub fn new() -> io::Result<WakeUp> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(WakeUp(Arc::new(fd)))
    }

    pub fn wake(&self) {
        // It fails only when 2^64 - 2 wake-ups wait, and then the waiter is awake.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Waits for a wake-up, or for `other` to be readable if there is one, or for the end of `timeout`.
    pub fn wait(&self, other: Option<&dyn AsFd>, timeout: Option<Duration>) -> io::Result<()> {
        let mut fds = vec![PollFd::new(&self.0, PollFlags::IN)];
        fds.extend(other.map(|other| PollFd::from_borrowed_fd(other.as_fd(), PollFlags::IN)));
        poll_for(&mut fds, timeout)?;
        if !fds[0].revents().is_empty() {
            self.clear();
        }
        Ok(())
    }

    /// Waits as [`wait`](WakeUp::wait) does, for whatever is to happen to `others`. Says whether there was a wake-up.
    pub fn wait_beside<'a>(
        &'a self,
        others: &mut Vec<PollFd<'a>>,
        timeout: Option<Duration>,
    ) -> io::Result<bool> {
        others.push(PollFd::new(&self.0, PollFlags::IN));
        poll_for(others, timeout)?;
        let woken = others.pop().is_some_and(|fd| !fd.revents().is_empty());
        if woken {
            self.clear();
        }
        Ok(woken)
    }

    fn clear(&self) {
        // It fails only when somebody else has cleared it.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// A wait that a signal cuts short has found nothing.
fn poll_for(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    match poll(fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
