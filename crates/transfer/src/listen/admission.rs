//! Who may use a UNIX socket: root, the process's own user, users by number, and of those who shows
//! the token. Each listener has one `Admission` and asks it twice: for the user when a connection
//! is accepted, and for the token when the client has said it.

use super::credentials::{Credentials, NotWatched, credentials};
use std::os::fd::OwnedFd;
use thiserror::Error;

/// Why a client may not use the socket.
#[derive(Debug, Error)]
pub enum NotAdmitted {
    #[error("the client's process cannot be watched: {0}")]
    NotWatched(#[from] NotWatched),
    #[error("user {uid} may not connect; root and the node's own may")]
    User { uid: u32 },
    #[error("the token is wrong")]
    Token,
}

/// The users and the token that a listener takes.
#[derive(Clone, Default)]
pub struct Admission {
    token: Vec<u8>,
    uids: Vec<u32>,
}

impl Admission {
    /// An empty token asks for none. `uids` are users beside root and this process's own.
    pub fn new(token: Vec<u8>, uids: Vec<u32>) -> Admission {
        Admission { token, uids }
    }

    /// Permissions for the socket's file. They keep other users out where no other may connect;
    /// else everybody may try, and [`check_user`](Admission::check_user) decides.
    pub fn mode(&self) -> u32 {
        if self.uids.is_empty() { 0o600 } else { 0o666 }
    }

    /// Refuses a connection of a user that may not connect.
    pub fn check_user(&self, socket: &OwnedFd) -> Result<Credentials, NotAdmitted> {
        let found = credentials(socket)?;
        match found.uid {
            uid if found.is_operator() || self.uids.contains(&uid) => Ok(found),
            uid => Err(NotAdmitted::User { uid }),
        }
    }

    /// Refuses a wrong token. It takes the same time wherever a token of the right length is wrong.
    pub fn check_token(&self, shown: &[u8]) -> Result<(), NotAdmitted> {
        let differences = self.token.iter().zip(shown).fold(0, |sum, (ours, theirs)| sum | (ours ^ theirs));
        let is_right = self.token.is_empty() || (shown.len() == self.token.len() && differences == 0);
        is_right.then_some(()).ok_or(NotAdmitted::Token)
    }
}

impl std::fmt::Debug for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admission").field("uids", &self.uids).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn only_the_whole_token_is_right_and_an_empty_one_asks_for_nothing() {
        let admission = Admission::new(b"secret".to_vec(), Vec::new());
        assert!(admission.check_token(b"secret").is_ok());
        for wrong in [b"".as_slice(), b"secre", b"secrets", b"Secret", b"secreT"] {
            assert_eq!(admission.check_token(wrong).unwrap_err().to_string(), "the token is wrong");
        }
        assert!(Admission::default().check_token(b"anything").is_ok());
    }

    #[test]
    fn the_own_user_may_connect_and_the_file_keeps_others_out_unless_some_may() {
        let (here, _there) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        assert!(Admission::default().check_user(&here).is_ok());
        assert_eq!(Admission::default().mode(), 0o600);
        assert_eq!(Admission::new(Vec::new(), vec![7]).mode(), 0o666);
    }
}
