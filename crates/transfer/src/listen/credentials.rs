//! Who is at the other end of a UNIX socket, as the kernel says: its user, and its process as a
//! descriptor that is readable when the process has ended.

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};
use thiserror::Error;

/// Who a process is, as the kernel says.
#[derive(Debug)]
pub struct Credentials {
    pub uid: u32,
    /// Its number in this process's namespace.
    pub pid: i32,
    /// Readable when it has ended, and with it everything that it had the hardware do.
    pub process: OwnedFd,
}

impl Credentials {
    /// Whether it is root or this process's own user.
    pub fn is_operator(&self) -> bool {
        self.uid == 0 || self.uid == rustix::process::geteuid().as_raw()
    }
}

/// Why the process at the other end cannot be watched.
#[derive(Debug, Error)]
pub enum NotWatched {
    #[error("its number is not known here; is it in another process namespace?")]
    NoNumber,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Who is at the other end. Fails where this process cannot see the other one, as across process
/// namespaces.
pub fn credentials(socket: &OwnedFd) -> Result<Credentials, NotWatched> {
    let peer = ask(socket)?;
    let process = pidfd_open(number(peer.pid)?, PidfdFlags::empty()).map_err(io::Error::from)?;
    Ok(Credentials { uid: peer.uid, pid: peer.pid, process })
}

/// Asks by the system call itself: in `rustix` a peer's number is never 0, which the kernel says of
/// one that is not seen here.
fn ask(socket: &OwnedFd) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    let (to, length) = ((&raw mut peer).cast(), &raw mut bytes);
    // SAFETY: both places live through the call, the kernel writes no more than `bytes` bytes to
    // the first one, and any bytes make a `ucred`.
    let status =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, length) };
    match status {
        0 => Ok(peer),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A process's number, of what the kernel says of a peer.
fn number(pid: libc::pid_t) -> Result<Pid, NotWatched> {
    Pid::from_raw(pid).ok_or(NotWatched::NoNumber)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn a_peer_is_who_the_kernel_says() {
        let (here, _there) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let peer = ask(&here).unwrap();
        assert_eq!(u32::try_from(peer.pid).unwrap(), std::process::id());
        assert_eq!(credentials(&here).unwrap().uid, rustix::process::geteuid().as_raw());
    }

    #[test]
    fn a_peer_without_a_number_is_an_error_that_hints_at_namespaces() {
        let why = number(0).unwrap_err();
        assert!(matches!(why, NotWatched::NoNumber));
        assert!(why.to_string().contains("another process namespace"), "{why}");
    }

    #[test]
    fn what_is_no_socket_has_no_peer_and_the_error_is_the_systems() {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(
            matches!(credentials(&file), Err(NotWatched::Io(why)) if why.raw_os_error() == Some(libc::ENOTSOCK))
        );
    }
}
