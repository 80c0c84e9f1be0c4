//! The system calls of attaching: packets with descriptors, bells and waits.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect,
    recvmsg, sendmsg, shutdown, socket_with, socketpair,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

const PACKET_BYTES: usize = 32 << 10;
/// Descriptors in a packet at most.
const DESCRIPTORS: usize = 2;

pub fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket)
}

/// How long a send or a receive may wait; `None` for as long as it takes.
pub fn set_timeout(socket: &OwnedFd, timeout: Option<Duration>) -> io::Result<()> {
    sockopt::set_socket_timeout(socket, Timeout::Recv, timeout)?;
    Ok(sockopt::set_socket_timeout(socket, Timeout::Send, timeout)?)
}

pub fn send(socket: &OwnedFd, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for a packet"));
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(packet)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

/// Receives a packet, and the descriptors that came along. The end of the other side is an error.
pub fn receive(socket: &OwnedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut packet = vec![0; PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut was_reset = false;
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut packet)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            // The other side left without hearing all. This is told once, before what it said
            // itself.
            Err(Errno::CONNRESET) if !was_reset => was_reset = true,
            received => break received?,
        }
    };
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptors = descriptors.flatten().collect();
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    packet.truncate(received.bytes);
    Ok((packet, descriptors))
}

/// The next connection, if one is there.
pub fn accept_from(listener: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(accept_with(listener, SocketFlags::CLOEXEC)?)
}

/// Ends both directions, so that both ends see it although descriptors stay open.
pub fn part(socket: &OwnedFd) {
    // A socket that is not connected any more has nothing to end.
    let _ = shutdown(socket, Shutdown::Both);
}

/// Rings a [`Bell`], here or in another process.
#[derive(Debug)]
pub struct Ringer(OwnedFd);

/// Wakes a thread that [waits](wait) for it.
#[derive(Debug)]
pub struct Bell(OwnedFd);

/// A bell and what rings it. Two sockets, because whoever has the one can do nothing to the other
/// that makes it block.
pub fn bell() -> io::Result<(Ringer, Bell)> {
    let (ringer, bell) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    Ok((Ringer(ringer), Bell(bell)))
}

impl Ringer {
    /// What came from another process.
    pub fn received(descriptor: OwnedFd) -> Ringer {
        Ringer(descriptor)
    }

    /// The thread goes on, now or when it next waits.
    pub fn ring(&self) {
        // A socket that is full wakes as well, and one whose other end is gone wakes nobody.
        let _ = rustix::net::send(&self.0, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

impl Bell {
    /// Forgets that it was rung. Says whether it can be rung again.
    pub fn clear(&self) -> bool {
        !matches!(rustix::net::recv(&self.0, &mut [0; 256], RecvFlags::DONTWAIT), Ok((0, _)))
    }
}

impl AsFd for Ringer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until something is readable or its other end closed (for `ended`: closed), or the time is
/// over. Says which, in order.
pub fn wait(
    readable: &[BorrowedFd<'_>],
    ended: &[BorrowedFd<'_>],
    timeout: Option<Duration>,
) -> io::Result<Vec<bool>> {
    let wanted = |fds: &[BorrowedFd<'_>], wanted| fds.iter().map(|_| wanted).collect::<Vec<PollFlags>>();
    let flags = [wanted(readable, PollFlags::IN), wanted(ended, PollFlags::empty())].concat();
    let all = [readable, ended].concat();
    let mut fds: Vec<_> = all.iter().zip(flags).map(|(fd, wanted)| PollFd::new(fd, wanted)).collect();
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect()),
        Err(error) => Err(error.into()),
    }
}
