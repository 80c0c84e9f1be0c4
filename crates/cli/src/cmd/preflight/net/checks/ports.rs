//! Whether peers answer: that somebody listens, that nothing between swallows it, that it is
//! Forebay, and that it lets this host in. Other ports are those of ZeroMQ, which vLLM's KV events
//! and NIXL's side channel speak.

use crate::cmd::preflight::net::finding::{Check, Finding};
use forebay_cuda::preflight::Severity::{self, Fault, Warning};
use forebay_net::UnreachableReason;
use forebay_net::tcp::{Broken, FlowError};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

const HTTP_LIMIT: Duration = Duration::from_millis(500);

/// How an attempt to speak to somebody ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Port {
    Open,
    /// Nobody listens there.
    Refused,
    /// Nothing comes back, not even a refusal.
    Filtered,
    /// Somebody accepts and says nothing.
    Silent,
    /// For any other reason, with the words.
    Closed(UnreachableReason, String),
}

impl Port {
    pub fn of(error: &FlowError) -> Port {
        let reason = UnreachableReason::from(error);
        match error {
            FlowError::Connect { .. } if reason == UnreachableReason::Refused => Port::Refused,
            FlowError::Connect { .. } if reason == UnreachableReason::TimedOut => Port::Filtered,
            FlowError::Greeting { broken: Broken::Frozen { .. }, .. } => Port::Silent,
            // Without the address, which is what the finding is about.
            FlowError::Connect { source, .. } => Port::Closed(reason, source.to_string()),
            FlowError::Greeting { broken, .. } => Port::Closed(reason, broken.to_string()),
            _ => Port::Closed(reason, error.to_string()),
        }
    }

    /// Whether it may be otherwise in a while.
    pub fn may_come(&self) -> bool {
        use UnreachableReason::{Closed, Ended, Full, NoRoute};
        match self {
            Port::Open => false,
            Port::Refused | Port::Filtered | Port::Silent => true,
            Port::Closed(reason, _) => [Closed, Ended, Full, NoRoute].contains(reason),
        }
    }
}

/// Who accepts and says nothing to Forebay may wait for the end of a line, as most servers of HTTP
/// do. Tells whether it is one.
pub fn silent(address: SocketAddr) -> Port {
    let answer = || -> io::Result<[u8; 5]> {
        let mut stream = TcpStream::connect_timeout(&address, HTTP_LIMIT)?;
        stream.set_read_timeout(Some(HTTP_LIMIT))?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut start = [0; 5];
        stream.read_exact(&mut start).map(|()| start)
    };
    match answer() {
        Ok(start) if &start == b"HTTP/" => {
            Port::Closed(UnreachableReason::NotForebay, "HTTP is spoken there".into())
        }
        _ => Port::Silent,
    }
}

/// The first bytes of ZeroMQ's greeting: 0xFF, eight of any value, 0x7F.
const GREETING_BYTES: usize = 10;

/// Whether ZeroMQ answers at an address.
pub fn zeromq(address: SocketAddr, limit: Duration) -> Port {
    let connected = TcpStream::connect_timeout(&address, limit);
    let mut stream = match connected {
        Ok(stream) => stream,
        Err(source) => return Port::of(&FlowError::Connect { address, source }),
    };
    let mut greeting = [0; GREETING_BYTES];
    let read = stream.set_read_timeout(Some(limit)).and_then(|()| stream.read_exact(&mut greeting));
    match read {
        Ok(()) if greeting[0] == 0xFF && greeting[GREETING_BYTES - 1] == 0x7F => Port::Open,
        Ok(()) => not_zeromq(format!("it says {:?}", String::from_utf8_lossy(&greeting))),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Port::Silent,
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => not_zeromq("it hangs up".into()),
        Err(error) => closed(&error),
    }
}

fn not_zeromq(says: String) -> Port {
    Port::Closed(UnreachableReason::NotForebay, format!("{says}, which is no greeting of ZeroMQ"))
}

fn closed(error: &io::Error) -> Port {
    Port::Closed(UnreachableReason::Closed, error.to_string())
}

/// What is expected there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    Forebay,
    ZeroMq,
}

pub fn judge(peer: &str, port: &Port, expected: Expected) -> Finding {
    let who = match expected {
        Expected::Forebay => "a node, or `forebay preflight net --pause`, that lets this host in",
        Expected::ZeroMq => "ZeroMQ",
    };
    let bad = |severity: Severity, seen: String, action: &str| {
        Finding::bad(Check::Ports, severity, peer, seen, who, action)
    };
    match port {
        Port::Open if expected == Expected::Forebay => {
            Finding::ok(Check::Ports, peer, "a Forebay lets this host in")
        }
        Port::Open => Finding::ok(Check::Ports, peer, "ZeroMQ answers"),
        Port::Refused => {
            bad(Fault, "refused: nobody listens there".into(), UnreachableReason::Refused.advice())
        }
        Port::Filtered => {
            let action =
                "look at firewalls, network policies and security groups, and whether the host is up";
            bad(Fault, "filtered: nothing comes back".into(), action)
        }
        Port::Silent => {
            let action =
                "another service may have the port, or a proxy accepts for it: look who listens there";
            bad(Fault, "it accepts and says nothing".into(), action)
        }
        Port::Closed(reason, why) => {
            use UnreachableReason::{Ended, Full, NotForebay, Token};
            let (severity, what) = match reason {
                Ended | Full => (Warning, reason.label()),
                NotForebay => (Fault, "wrong service"),
                Token => (Fault, "wrong token"),
                _ => (Fault, reason.label()),
            };
            bad(severity, format!("{what}: {why}"), reason.advice())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn refused_filtered_silent_and_wrong_are_told_apart() {
        let address = "10.0.0.2:7600".parse().unwrap();
        let connect = |kind: ErrorKind| FlowError::Connect { address, source: kind.into() };
        let greeting = |broken| FlowError::Greeting { address, broken };
        let table = [
            (connect(ErrorKind::ConnectionRefused), "refused: nobody listens there"),
            (connect(ErrorKind::TimedOut), "filtered: nothing comes back"),
            (greeting(Broken::Frozen { limit_us: 1 }), "it accepts and says nothing"),
            (greeting(Broken::Closed), "closed: the peer closed the connection"),
            (greeting(Broken::Bad(forebay_net::tcp::BadFrame::Http)), "wrong service: the peer sent HTTP"),
            (connect(ErrorKind::HostUnreachable), "no_route: "),
        ];
        for (error, says) in table {
            let found = judge("right", &Port::of(&error), Expected::Forebay);
            assert!(found.severity == Fault && found.seen.starts_with(says), "{found:?}");
        }
        let refused = |code| Broken::Refused(forebay_net::tcp::Refusal { code, text: "why".into() });
        use forebay_net::RefusalCode::{Token, TooManyFlows};
        let token = judge("right", &Port::of(&greeting(refused(Token))), Expected::Forebay);
        assert!(token.severity == Fault && token.seen.starts_with("wrong token: "), "{token:?}");
        let full = judge("right", &Port::of(&greeting(refused(TooManyFlows))), Expected::Forebay);
        assert_eq!(full.severity, Warning, "{full:?}");
    }

    #[test]
    fn what_may_come_is_waited_for_and_what_is_wrong_is_not() {
        let closed = |reason| Port::Closed(reason, String::new());
        assert!([Port::Refused, Port::Filtered, closed(UnreachableReason::Full)].iter().all(Port::may_come));
        let wrong = [Port::Open, closed(UnreachableReason::Token), closed(UnreachableReason::NotForebay)];
        assert!(!wrong.iter().any(Port::may_come));
    }

    #[test]
    fn zeromq_is_known_by_its_greeting() {
        let limit = Duration::from_millis(300);
        let answered = |bytes: &'static [u8]| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let answers = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(bytes).unwrap();
                // Until the other end has read it.
                drop(stream.read(&mut [0; 1]));
            });
            let port = zeromq(address, limit);
            answers.join().unwrap();
            port
        };
        assert_eq!(answered(&[0xFF, 0, 0, 0, 0, 0, 0, 0, 1, 0x7F, 3]), Port::Open);
        assert!(matches!(answered(b"HTTP/1.1 400 Bad"), Port::Closed(UnreachableReason::NotForebay, _)));
        assert_eq!(answered(b""), Port::Silent);
    }
}
