//! Where the node of this host is when nobody named its socket: which paths are looked at, which
//! one a node of this user takes, and whether one answers there.

use forebay_client::{ClientOptions, ConnectError, NodeStat};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where a service's node is, and one that root starts.
const OF_HOST: &str = "/run/forebay/node.sock";
/// What a socket is called in the folder of a user.
const NAME: &str = "node.sock";
/// Others may reach a folder, and may not put anything there.
const OTHERS_WRITE: u32 = 0o022;

/// Why this user has no place for a socket.
#[derive(Debug, thiserror::Error)]
pub enum NoPlace {
    #[error("{}: {error}; name another socket", folder.display())]
    Folder { folder: PathBuf, error: io::Error },
    /// Whoever owns it could put a socket of his own there.
    #[error("{} is not this user's alone; name another socket", .0.display())]
    OfOthers(PathBuf),
}

/// What was found at a socket.
#[derive(Debug)]
pub enum Seen {
    /// Nobody listens there.
    Nobody(ConnectError),
    /// A node, which this process may use.
    Node(NodeStat),
    /// Something that this process may not use or does not understand.
    Refused(ConnectError),
}

/// Where a node is looked for, in this order.
pub fn usual() -> Vec<PathBuf> {
    let mut places = vec![PathBuf::from(OF_HOST), folder_of_user().join(NAME)];
    places.dedup();
    places
}

/// Where a node of this user listens. Its folder is made, and belongs to this user alone.
pub fn of_user() -> Result<PathBuf, NoPlace> {
    let folder = folder_of_user();
    make(&folder)?;
    Ok(folder.join(NAME))
}

/// The one of the usual sockets that is there, or the first of them.
pub fn usual_one() -> PathBuf {
    let places = usual();
    let there = places.iter().find(|socket| socket.exists());
    there.or(places.first()).cloned().unwrap_or_default()
}

/// How a command reaches the node at a socket, with the token in a file if the node asks for one.
pub fn options(command: &str, socket: &Path, token: Option<&Path>) -> Result<ClientOptions, String> {
    let mut options = named(command, socket);
    if let Some(file) = token {
        let token = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
        options.token = token.strip_suffix(b"\n").unwrap_or(&token).to_vec();
    }
    Ok(options)
}

fn named(command: &str, socket: &Path) -> ClientOptions {
    let name = format!("forebay {command} {}", std::process::id());
    ClientOptions { name, ..ClientOptions::new(socket) }
}

/// Asks whoever listens at a socket.
pub fn look(socket: &Path) -> Seen {
    match forebay_client::ask_stat(&named("look", socket)) {
        Ok(stat) => Seen::Node(stat),
        Err(error) if nobody_listens(&error) => Seen::Nobody(error),
        Err(error) => Seen::Refused(error),
    }
}

/// A socket that is not there, or that a process left behind.
fn nobody_listens(error: &ConnectError) -> bool {
    use io::ErrorKind::{ConnectionRefused, NotFound};
    matches!(error, ConnectError::Socket { error, .. } if matches!(error.kind(), NotFound | ConnectionRefused))
}

fn folder_of_user() -> PathBuf {
    let uid = rustix::process::geteuid();
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()) {
        _ if uid.is_root() => Path::new(OF_HOST).parent().unwrap_or(Path::new("/run")).into(),
        Some(folder) => PathBuf::from(folder).join("forebay"),
        None => PathBuf::from(format!("/tmp/forebay-{}", uid.as_raw())),
    }
}

/// Makes a folder for the socket of this user, or finds it there.
fn make(folder: &Path) -> Result<(), NoPlace> {
    let uid = rustix::process::geteuid();
    // Engines of other users may be admitted to root's node.
    let mode = if uid.is_root() { 0o755 } else { 0o700 };
    let failed = |error| NoPlace::Folder { folder: folder.into(), error };
    match DirBuilder::new().mode(mode).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    // Not what a link leads to.
    let there = std::fs::symlink_metadata(folder).map_err(failed)?;
    // Root may use the folder of a service, which is its user's.
    let is_ours = uid.is_root() || there.uid() == uid.as_raw();
    let is_safe = is_ours && there.is_dir() && there.mode() & OTHERS_WRITE == 0;
    if is_safe { Ok(()) } else { Err(NoPlace::OfOthers(folder.into())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_folder_that_others_may_write_to_or_that_is_a_link_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        assert!(make(&at("own")).is_ok() && make(&at("own")).is_ok(), "the second time it is there");
        assert_eq!(std::fs::metadata(at("own")).unwrap().mode() & OTHERS_WRITE, 0);
        symlink(at("own"), at("link")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        for name in ["link", "file"] {
            assert!(matches!(make(&at(name)), Err(NoPlace::OfOthers(_))), "{name}");
        }
        assert!(matches!(make(&at("none/below")), Err(NoPlace::Folder { .. })));
        std::fs::create_dir(at("open")).unwrap();
        std::fs::set_permissions(at("open"), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(make(&at("open")), Err(NoPlace::OfOthers(_))));
    }

    #[test]
    fn nobody_at_a_socket_and_something_else_there_are_told_apart() {
        let root = tempfile::tempdir().unwrap();
        let none = root.path().join("none.sock");
        assert!(matches!(look(&none), Seen::Nobody(_)));
        let other = root.path().join("other.sock");
        let listener = std::os::unix::net::UnixListener::bind(&other).unwrap();
        let accepted = std::thread::spawn(move || drop(listener.accept()));
        assert!(matches!(look(&other), Seen::Refused(_)));
        accepted.join().unwrap();
    }
}
