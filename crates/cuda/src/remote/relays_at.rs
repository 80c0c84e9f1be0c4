//! Which node's relays a copier uses, and what the environment says of that.

use std::io;
use std::path::PathBuf;

/// Where a process reads which node's relays to use, unless it says so itself: the path of the
/// socket.
pub const RELAYS_VARIABLE: &str = "FOREBAY_RELAYS";
/// Where it reads in which file the token is, if the node wants one.
pub const TOKEN_VARIABLE: &str = "FOREBAY_TOKEN_FILE";

/// Which node's relays a copier uses beside its own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum NodeRelays {
    /// Those that the environment names, if any ([`RelaysAt::from_environment`]).
    #[default]
    FromEnvironment,
    /// None, whatever the environment says: for a copier none of whose copies would go over them.
    None,
    At(RelaysAt),
}

/// Whom to attach to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelaysAt {
    /// The node's socket for relays.
    pub socket: PathBuf,
    /// What the node wants to be shown, if anything.
    pub token: String,
}

impl RelaysAt {
    /// What the environment says; nothing where it names no socket.
    pub fn from_environment() -> io::Result<Option<RelaysAt>> {
        let Some(socket) = std::env::var_os(RELAYS_VARIABLE).filter(|path| !path.is_empty()) else {
            return Ok(None);
        };
        let token = match std::env::var_os(TOKEN_VARIABLE).filter(|path| !path.is_empty()) {
            Some(file) => std::fs::read_to_string(file)?.trim_end().to_owned(),
            None => String::new(),
        };
        Ok(Some(RelaysAt { socket: socket.into(), token }))
    }
}
