//! The file of a UNIX socket. One process at a time binds it, and only the process that bound it
//! removes it: the file's device and inode say whose it is.

use rustix::fs::{self, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with, sockopt,
};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Connections that wait to be accepted at most.
const BACKLOG: i32 = 128;
/// How long a start waits for others that bind sockets in the same directory.
const TURN_LIMIT: Duration = Duration::from_secs(5);
/// Pause between two looks whether they are done.
const TURN_PAUSE: Duration = Duration::from_millis(10);

/// A socket's file. It goes with this value, unless another process has put its own in the place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

/// Binds a socket with the permissions `mode`, and listens on it, without blocking. The file of a
/// socket on which nobody listens any more is replaced; one that somebody has is not.
pub fn bind_socket(path: &Path, kind: SocketType, mode: u32) -> io::Result<(OwnedFd, SocketFile)> {
    let _turn = take_turn(path)?;
    refuse_if_taken(path, kind)?;
    match fs::lstat(path) {
        Ok(found) if FileType::from_raw_mode(found.st_mode) == FileType::Socket => fs::unlink(path)?,
        Ok(_) => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is no socket"));
        }
        Err(_) => {}
    }
    let socket = new_socket(kind)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    let found = fs::lstat(path)?;
    let file = SocketFile { path: path.into(), identity: (found.st_dev, found.st_ino) };
    // Nobody can connect before it listens.
    fs::chmod(path, Mode::from_raw_mode(mode))?;
    listen(&socket, BACKLOG)?;
    Ok((socket, file))
}

/// Goes on with a socket that another process has bound to `path` and gives up: it listens as one
/// of this process, with the permissions `mode`. Whoever waits to be accepted goes on waiting.
pub fn inherit_socket(path: &Path, socket: &OwnedFd, mode: u32) -> io::Result<SocketFile> {
    let found = fs::lstat(path)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is no socket"));
    }
    fs::chmod(path, Mode::from_raw_mode(mode))?;
    // Clients that connect see this process at the other end from now on.
    listen(socket, BACKLOG)?;
    Ok(SocketFile { path: path.into(), identity: (found.st_dev, found.st_ino) })
}

impl SocketFile {
    /// The file stays: it is another process's.
    pub fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours = |found: fs::Stat| (found.st_dev, found.st_ino) == self.identity;
        if fs::lstat(&self.path).is_ok_and(is_ours) {
            // What is left behind is replaced by the next one.
            let _ = fs::unlink(&self.path);
        }
    }
}

fn new_socket(kind: SocketType) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, kind, flags, None)?)
}

/// Locks the directory, so that of two starts one sees what the other has bound.
fn take_turn(path: &Path) -> io::Result<Option<OwnedFd>> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = fs::open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let until = Instant::now() + TURN_LIMIT;
    loop {
        match fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(directory)),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(TURN_PAUSE),
            Err(Errno::WOULDBLOCK) => {
                let limit_s = TURN_LIMIT.as_secs();
                let why = format!("another process has had its directory locked for {limit_s} s");
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            Err(Errno::INTR) => {}
            // This file system has no such locks.
            Err(_) => return Ok(None),
        }
    }
}

/// An error that says who has the socket, if somebody has. It never waits for whoever that is.
fn refuse_if_taken(path: &Path, kind: SocketType) -> io::Result<()> {
    let socket = new_socket(kind)?;
    let why = match connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED | Errno::NOENT) => return Ok(()),
        Ok(()) => {
            let process = sockopt::socket_peercred(&socket).ok().map(|peer| peer.pid.as_raw_nonzero().get());
            format!("another node answers on this socket: {}", describe(process))
        }
        Err(Errno::AGAIN) => {
            format!("{} has this socket and accepts no connections", describe(listener_of(path)))
        }
        Err(Errno::PROTOTYPE) => {
            format!("{} has this socket for something else", describe(listener_of(path)))
        }
        Err(error) => return Err(error.into()),
    };
    let why = format!("{why}; end that process, or give this node another socket");
    Err(io::Error::new(io::ErrorKind::AddrInUse, why))
}

/// Names a process, and says whether it is stopped.
fn describe(process: Option<i32>) -> String {
    let Some(process) = process else { return "another process".into() };
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let name = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(')'));
    match name {
        Some((name, rest)) if rest.trim_start().starts_with(['T', 't']) => {
            format!("process {process} ({name}, stopped)")
        }
        Some((name, _)) => format!("process {process} ({name})"),
        None => format!("process {process}"),
    }
}

/// The process that listens on a socket, if this one may know.
fn listener_of(path: &Path) -> Option<i32> {
    let sockets = std::fs::read_to_string("/proc/net/unix").ok()?;
    let inode = listening_inode(&sockets, path)?;
    let wanted = format!("socket:[{inode}]");
    let has_it = |process: &i32| {
        let fds = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        fds.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|is| is.as_os_str() == wanted.as_str())
    };
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(has_it)
}

/// In a table of the system's UNIX sockets, the inode of the one that listens on a path.
fn listening_inode(sockets: &str, path: &Path) -> Option<u64> {
    /// Of a socket that listens.
    const ACCEPTS: &str = "00010000";
    sockets.lines().skip(1).find_map(|line| {
        let mut words = line.split_whitespace();
        let (flags, inode) = (words.nth(3)?, words.nth(2)?);
        let name = words.next()?;
        (flags == ACCEPTS && Path::new(name) == path).then(|| inode.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const MODE: u32 = 0o600;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.sock");
        (folder, path)
    }

    #[test]
    fn a_process_that_ends_leaves_the_socket_of_its_successor() {
        let (_folder, path) = place();
        let (_first, first_file) = bind_socket(&path, SocketType::STREAM, MODE).unwrap();
        std::fs::remove_file(&path).unwrap();
        let (_second, second_file) = bind_socket(&path, SocketType::STREAM, MODE).unwrap();
        drop(first_file);
        assert!(path.exists(), "it is the second one's");
        drop(second_file);
        assert!(!path.exists());
    }

    #[test]
    fn whoever_inherits_a_socket_has_those_that_wait_and_its_file() {
        let (_folder, path) = place();
        let (first, first_file) = bind_socket(&path, SocketType::STREAM, MODE).unwrap();
        let waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let second = first.try_clone().unwrap();
        let second_file = inherit_socket(&path, &second, 0o666).unwrap();
        drop(first);
        first_file.leave();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        std::os::unix::net::UnixListener::from(second).accept().unwrap();
        drop((waiting, second_file));
        assert!(!path.exists());
    }

    #[test]
    fn of_many_that_bind_at_once_one_has_the_socket_and_its_file() {
        for _ in 0..20 {
            let (_folder, path) = place();
            // What a dead process left has everybody remove it.
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            let bound: Vec<_> = std::thread::scope(|scope| {
                let bind = || bind_socket(&path, SocketType::STREAM, MODE).ok();
                let threads: Vec<_> = (0..6).map(|_| scope.spawn(bind)).collect();
                threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(bound.len(), 1);
            assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
        }
    }

    #[test]
    fn whoever_has_a_socket_and_accepts_nothing_is_named_at_once() {
        let (_folder, path) = place();
        let (_first, _file) = bind_socket(&path, SocketType::STREAM, MODE).unwrap();
        let mut callers = Vec::new();
        let full = loop {
            let caller = new_socket(SocketType::STREAM).unwrap();
            match connect(&caller, &SocketAddrUnix::new(&path).unwrap()) {
                Ok(()) => callers.push(caller),
                Err(error) => break error,
            }
        };
        assert_eq!(full, Errno::AGAIN);
        let start = Instant::now();
        let why = bind_socket(&path, SocketType::STREAM, MODE).unwrap_err().to_string();
        assert!(start.elapsed() < TURN_LIMIT, "it does not wait for it");
        assert!(why.contains(&format!("process {}", std::process::id())), "{why}");
        assert!(why.contains("accepts no connections") && why.contains("another socket"), "{why}");
    }

    #[test]
    fn the_socket_that_listens_is_found_among_those_of_its_path() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
                     0: 00000003 00000000 00000000 0001 03 11 /run/node.sock\n\
                     0: 00000002 00000000 00010000 0001 01 12 /run/other.sock\n\
                     0: 00000002 00000000 00010000 0001 01 13 /run/node.sock\n\
                     0: 00000002 00000000 00000000 0001 01 14\n";
        assert_eq!(listening_inode(table, Path::new("/run/node.sock")), Some(13));
        assert_eq!(listening_inode(table, Path::new("/run/nothing.sock")), None);
    }
}
