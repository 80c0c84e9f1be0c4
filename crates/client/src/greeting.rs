//! How a process comes to be a node's client: it says who it is, and is let in or told why not. A
//! process that only wants to know one thing asks that next, and goes.

use super::{ClientOptions, ConnectError};
use crate::protocol::answer::{Answer, NodeStat, Refusal};
use crate::protocol::control::{Control, Report};
use crate::protocol::explain::{Explained, Prompt};
use crate::protocol::frame::{Frame, Inbox};
use crate::protocol::request::{Hello, Request};
use crate::protocol::socket;
use forebay_kv::ChunkId;
use rustix::fd::OwnedFd;
use std::time::Duration;

/// The number of the only request behind the greeting.
const ONLY_NUMBER: u64 = 1;

/// A client that was let in.
pub struct Greeted {
    pub socket: OwnedFd,
    /// Which life of the node this is.
    pub instance: [u8; 16],
    pub arena_bytes: u64,
    /// The node's memory, not mapped yet.
    pub arena: OwnedFd,
}

/// How long a node may take to answer.
pub fn patience(options: &ClientOptions) -> Duration {
    Duration::from_micros(options.answer_limit_us.max(1))
}

/// Connects, and is let in.
pub fn greet(options: &ClientOptions) -> Result<Greeted, ConnectError> {
    let patience = Some(patience(options));
    let failed = |error| ConnectError::Socket { path: options.socket.clone(), error };
    let socket = socket::connect_to(&options.socket).map_err(failed)?;
    socket::set_timeouts(&socket, patience, patience).map_err(failed)?;
    let ClientOptions { token, name, tenant, .. } = options.clone();
    let hello = Request::Hello(Hello { token, name, tenant }).encode(0);
    let asked = hello.asked();
    // A node that has no room hangs up before it hears who asks, and says why.
    let said = socket::send_all(&socket, &hello.encode());
    let (answer, descriptor) = next_answer(&socket).map_err(|error| failed(said.err().unwrap_or(error)))?;
    // Whoever is not let in may not have been heard.
    let names_hello = answer.check(asked).or_else(|wrong| match Answer::decode(&answer) {
        Ok(Answer::Refused(..)) => answer.check_unasked(),
        _ => Err(wrong),
    });
    names_hello.map_err(|bad| ConnectError::Protocol(bad.to_string()))?;
    match Answer::decode(&answer) {
        Ok(Answer::Welcome { instance, arena_bytes }) => {
            let arena = descriptor.ok_or_else(|| ConnectError::Protocol("no arena".into()))?;
            Ok(Greeted { socket, instance, arena_bytes, arena })
        }
        Ok(Answer::Refused(Refusal::Draining | Refusal::Limit, why)) => Err(ConnectError::Busy(why)),
        Ok(Answer::Refused(_, why)) => Err(ConnectError::Refused(why)),
        other => Err(ConnectError::Protocol(format!("no welcome but {other:?}"))),
    }
}

/// What a node counts, for a process that keeps no connection: without threads, and without a look
/// at the node's memory.
pub fn ask_stat(options: &ClientOptions) -> Result<NodeStat, ConnectError> {
    match ask_once(options, &Request::Stat)? {
        Answer::Stat(stat) => Ok(stat),
        other => Err(ConnectError::Protocol(format!("no counts but {other:?}"))),
    }
}

/// What a node knows of why a prompt was no hit. The same.
pub fn ask_why(options: &ClientOptions, prompt: Prompt) -> Result<Explained, ConnectError> {
    match ask_once(options, &Request::Explain(prompt))? {
        Answer::Explained(explained) => Ok(*explained),
        Answer::Refused(_, why) => Err(ConnectError::Refused(why)),
        other => Err(ConnectError::Protocol(format!("no explanation but {other:?}"))),
    }
}

/// What becomes of chunks, by name. The same.
pub fn ask_control(options: &ClientOptions, control: Control) -> Result<Vec<Report>, ConnectError> {
    match ask_once(options, &Request::Control(control))? {
        Answer::Controlled(reports) => Ok(reports),
        Answer::Refused(_, why) => Err(ConnectError::Refused(why)),
        other => Err(ConnectError::Protocol(format!("no reports but {other:?}"))),
    }
}

/// What the chunks of a prompt are called in each namespace that clients of this tenant have
/// described. The same.
pub fn ask_names(options: &ClientOptions, tokens: &[u32]) -> Result<Vec<Vec<ChunkId>>, ConnectError> {
    let named = names(tokens, |request| ask_once(options, request).map(Some))?;
    Ok(named.unwrap_or_default())
}

/// The names in one namespace after the other. `None` if `ask` does not get an answer.
pub(super) fn names(
    tokens: &[u32],
    ask: impl Fn(&Request) -> Result<Option<Answer>, ConnectError>,
) -> Result<Option<Vec<Vec<ChunkId>>>, ConnectError> {
    let mut named = Vec::new();
    loop {
        let request = Request::NameChunks { tokens: tokens.to_vec(), namespace: named.len() as u32 };
        match ask(&request)? {
            Some(Answer::Named { ids, namespaces }) if (named.len() as u32) < namespaces => named.push(ids),
            Some(Answer::Named { .. }) => return Ok(Some(named)),
            Some(Answer::Refused(_, why)) => return Err(ConnectError::Refused(why)),
            Some(other) => return Err(ConnectError::Protocol(format!("no names but {other:?}"))),
            None => return Ok(None),
        }
    }
}

fn ask_once(options: &ClientOptions, request: &Request) -> Result<Answer, ConnectError> {
    request.check().map_err(|bad| ConnectError::Refused(bad.to_string()))?;
    let failed = |error| ConnectError::Socket { path: options.socket.clone(), error };
    let Greeted { socket, .. } = greet(options)?;
    let request = request.encode(ONLY_NUMBER);
    let asked = request.asked();
    socket::send_all(&socket, &request.encode()).map_err(failed)?;
    let (answer, _) = next_answer(&socket).map_err(failed)?;
    // It knows then that this client did not just die.
    let _ = socket::send_all(&socket, &Request::Bye.encode(0).encode());
    answer.check(asked).map_err(|bad| ConnectError::Protocol(bad.to_string()))?;
    Answer::decode(&answer).map_err(|bad| ConnectError::Protocol(bad.to_string()))
}

/// The next frame, and the descriptor that came with it.
fn next_answer(socket: &OwnedFd) -> std::io::Result<(Frame, Option<OwnedFd>)> {
    let (mut inbox, mut bytes) = (Inbox::default(), [0; 4096]);
    let mut descriptor = None;
    loop {
        let (received, came) = socket::receive_with(socket, &mut bytes)?;
        descriptor = descriptor.or(came);
        if received == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        inbox.put(&bytes[..received]);
        if let Some(frame) = inbox.next_frame().map_err(std::io::Error::other)? {
            return Ok((frame, descriptor));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_transfer::{Arena, Backing, Pages};
    use rustix::fd::AsFd;
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::thread::JoinHandle;

    /// A node that lets its one client in, answers with `stat` if there is one, and says what it
    /// was asked.
    fn node(path: &Path, stat: Option<NodeStat>) -> JoinHandle<Vec<Request>> {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            let stream: OwnedFd = listener.accept().unwrap().0.into();
            let arena = Arena::new(1 << 20, Pages::Base).unwrap();
            let (mut inbox, mut bytes, mut asked) = (Inbox::default(), [0; 4096], Vec::new());
            while let Ok(received @ 1..) = socket::receive(&stream, &mut bytes) {
                inbox.put(&bytes[..received]);
                while let Some(frame) = inbox.next_frame().unwrap() {
                    let request = Request::decode(&frame).unwrap();
                    if matches!(request, Request::Hello(_)) {
                        let welcome = Answer::Welcome { instance: [1; 16], arena_bytes: arena.len() as u64 };
                        let welcome = welcome.encode(frame.asked()).encode();
                        socket::send_with(&stream, &welcome, arena.as_fd()).unwrap();
                    } else if let (Request::Stat, Some(stat)) = (&request, stat) {
                        let answer = Answer::Stat(stat).encode(frame.asked()).encode();
                        socket::send_all(&stream, &answer).unwrap();
                    }
                    asked.push(request);
                }
            }
            asked
        })
    }

    #[test]
    fn whoever_asks_only_what_a_node_counts_says_goodbye() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.sock");
        let counted = NodeStat { capacity_bytes: 7, ..NodeStat::default() };
        let node = node(&path, Some(counted));
        assert_eq!(ask_stat(&ClientOptions::new(&path)).unwrap(), counted);
        let asked = node.join().unwrap();
        assert!(matches!(asked[..], [Request::Hello(_), Request::Stat, Request::Bye]), "{asked:?}");
    }

    #[test]
    fn a_node_that_falls_silent_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.sock");
        let node = node(&path, None);
        let options = ClientOptions { answer_limit_us: 50_000, ..ClientOptions::new(&path) };
        assert!(matches!(ask_stat(&options), Err(ConnectError::Socket { .. })));
        assert_eq!(node.join().unwrap().len(), 2, "it has been asked");
    }
}
