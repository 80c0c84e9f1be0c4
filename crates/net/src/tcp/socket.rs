//! A socket as a carrier: vectored sends and receives that never wait, and the wait for whatever
//! comes first.

use super::carrier::{Carrier, Ready, Wire};
use super::wake::WakeUp;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::net::sockopt;
use std::io;
use std::net::TcpStream;
use std::time::Duration;

/// A connected socket.
pub(super) struct Socket {
    stream: TcpStream,
}

impl Socket {
    /// A socket that sends small frames at once. `buffer_bytes`: of each direction; the system
    /// decides otherwise.
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
        // SAFETY: the message names the slices, which the caller says are readable; nothing is
        // written through them.
        let sent = unsafe { libc::sendmsg(self.stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    unsafe fn receive(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        let mut message = message(slices);
        // SAFETY: the message names the slices, which the caller says are writable, and no other
        // memory.
        let received = unsafe { libc::recvmsg(self.stream.as_raw_fd(), &mut message, 0) };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    }
}

impl Carrier for Socket {
    fn wait(&mut self, waker: &WakeUp, sending: bool, timeout: Option<Duration>) -> io::Result<Ready> {
        wait(self.stream.as_fd(), waker, sending, timeout)
    }

    fn watch(&self) -> io::Result<Option<OwnedFd>> {
        Ok(Some(self.stream.as_fd().try_clone_to_owned()?))
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
pub(super) struct Watch(pub OwnedFd);

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
    let mut fds = Vec::with_capacity(2);
    fds.push(PollFd::from_borrowed_fd(socket, PollFlags::IN | PollFlags::RDHUP | output));
    waker.wait_beside(&mut fds, timeout)?;
    let found = fds[0].revents();
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
