//! The system calls of the local socket: bytes and one descriptor, and the waits.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    recvmsg, send, sendmsg, shutdown, socket_with,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

/// Connects without waiting for a node that does not accept.
pub fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket)
}

/// The number of the process that connected; 0 where the system does not say.
pub fn peer_process(socket: &OwnedFd) -> i32 {
    sockopt::socket_peercred(socket).map_or(0, |credentials| credentials.pid.as_raw_pid())
}

/// How long a send or a receive may wait; `None` for as long as it takes.
pub fn set_timeouts(socket: &OwnedFd, receive: Option<Duration>, send: Option<Duration>) -> io::Result<()> {
    sockopt::set_socket_timeout(socket, Timeout::Recv, receive)?;
    Ok(sockopt::set_socket_timeout(socket, Timeout::Send, send)?)
}

/// Sends all of it, waiting as long as the socket's timeout allows.
pub fn send_all(socket: &OwnedFd, mut bytes: &[u8]) -> io::Result<()> {
    send_from(socket, &mut bytes)
}

/// The same. After an error `bytes` are those that were not sent.
pub fn send_from(socket: &OwnedFd, bytes: &mut &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => *bytes = &bytes[sent..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Sends what there is room for now, and says how much that was.
pub fn send_some(socket: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(0),
            sent => return Ok(sent?),
        }
    }
}

/// Sends bytes with a descriptor, of which none or some go now: it goes with the first of them.
pub fn send_some_with(socket: &OwnedFd, bytes: &[u8], descriptor: BorrowedFd) -> io::Result<usize> {
    loop {
        match send_once(socket, bytes, descriptor, SendFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(0),
            sent => return Ok(sent?),
        }
    }
}

/// Sends bytes with a descriptor. Few enough to fit at once.
pub fn send_with(socket: &OwnedFd, bytes: &[u8], descriptor: BorrowedFd) -> io::Result<()> {
    let sent = send_once(socket, bytes, descriptor, SendFlags::empty())?;
    send_all(socket, &bytes[sent..])
}

fn send_once(
    socket: &OwnedFd,
    bytes: &[u8],
    descriptor: BorrowedFd,
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL)
}

/// Receives what has come, or waits for it. 0 is the end.
pub fn receive(socket: &OwnedFd, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        match recv(socket, &mut *bytes, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            received => return Ok(received?.1),
        }
    }
}

/// The same, with a descriptor if one came along.
pub fn receive_with(socket: &OwnedFd, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok((received.bytes, descriptors.flatten().next()))
}

/// Ends what comes in, so that whoever waits for it goes on.
pub fn shut_receiving(socket: &OwnedFd) {
    // A socket that is not connected any more has nothing to end.
    let _ = shutdown(socket, Shutdown::Read);
}

/// Ends both directions, so that the other end sees it although this descriptor stays open.
pub fn disconnect(socket: &OwnedFd) {
    // A socket that is not connected any more has nothing to end.
    let _ = shutdown(socket, Shutdown::Both);
}

/// Wakes a thread that [waits](wait).
#[derive(Debug)]
pub struct WakeUp(OwnedFd);

impl WakeUp {
    /// One that nobody has called.
    pub fn new() -> io::Result<WakeUp> {
        Ok(WakeUp(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// The thread goes on, now or when it next waits.
    pub fn wake(&self) {
        // A counter that is full wakes as well.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// What a wait has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ready {
    /// There is something to receive, if only the end.
    pub readable: bool,
    /// The other end is gone.
    pub gone: bool,
    /// Somebody called.
    pub woken: bool,
    /// The process at the other end has exited, whoever has its socket.
    pub exited: bool,
}

/// Waits until there is something to receive (if `receiving`), there is room to send (if
/// `sending`), somebody calls, the process (if any) has exited, or the time is over. The other
/// end's going ends every wait.
pub fn wait(
    socket: &impl AsFd,
    wake_up: &WakeUp,
    process: Option<&OwnedFd>,
    (receiving, sending): (bool, bool),
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let mut wanted = PollFlags::empty();
    wanted.set(PollFlags::IN, receiving);
    wanted.set(PollFlags::OUT, sending);
    // Without a process the third is the second once more.
    let third = process.unwrap_or(&wake_up.0);
    let mut fds = [
        PollFd::new(socket, wanted),
        PollFd::new(&wake_up.0, PollFlags::IN),
        PollFd::new(third, PollFlags::IN),
    ];
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let (found, woken) = (fds[0].revents(), !fds[1].revents().is_empty());
    if woken {
        wake_up.clear();
    }
    let gone = found.intersects(PollFlags::ERR | PollFlags::HUP);
    let exited = process.is_some() && !fds[2].revents().is_empty();
    Ok(Ready { readable: found.contains(PollFlags::IN), gone, woken, exited })
}
