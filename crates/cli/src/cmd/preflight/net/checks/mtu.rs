//! Whether packets as long as the link allows reach a peer. Probes are UDP datagrams that no router
//! may cut. A peer's preflight echoes them; any other host answers that nobody listens there, which
//! says as well that the datagram arrived.

use crate::cmd::preflight::net::finding::{Check, Finding};
use forebay_cuda::preflight::Severity::{Fault, Unknown, Warning};
use rustix::net::sockopt;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

/// How long an answer may take, and how often a size is tried.
const WAIT: Duration = Duration::from_millis(200);
const TRIES: usize = 2;
/// How long a size is tried by which a host is judged that answers only that nobody listens: Linux
/// says so six times, and then once a second, whoever asks (`net.ipv4.icmp_ratelimit`).
const REFUSED_WAIT: Duration = Duration::from_millis(1500);
/// A host answers few datagrams for which nobody listens, so that few sizes are tried below the
/// link's own: with VXLAN, plain Ethernet, and tunnels over it.
const SIZES: [u32; 3] = [8950, 1500, 1400];
/// The first probe, which every network carries.
const SMALL: u32 = 200;
/// An IP packet has no more bytes, whatever the link says.
const PACKET_BYTES_MAX: u32 = 65_535;
const UDP_HEADER_BYTES: u32 = 8;

/// What became of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    Arrived,
    /// A router, or this host, says that it is too long, and what is not.
    TooLong(Option<u32>),
    Lost,
}

/// What is known of packets to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MtuFacts {
    /// Bytes of a packet on this host's link, and on the peer's where it told.
    pub link: u32,
    pub peer_link: Option<u32>,
    /// Whether short datagrams are answered, also after long ones.
    pub is_answered: bool,
    /// One as long as the link allows.
    pub whole: Probe,
    /// The longest that arrived of those that are shorter.
    pub largest: Option<u32>,
    /// The address from which the peer sees datagrams of this host come, where it told.
    pub seen_as: Option<IpAddr>,
}

impl MtuFacts {
    /// Sends probes. Takes six seconds at most, and less than one where all are answered.
    pub fn probe(to: SocketAddr, link: u32, peer_link: Option<u32>, cookie: &[u8]) -> io::Result<MtuFacts> {
        let link = link.min(PACKET_BYTES_MAX);
        let mut prober = Prober { to, cookie, is_echoed: false, seen_as: None };
        let small = SMALL.min(link);
        let mut is_answered = prober.probe_to_judge(small)? == Probe::Arrived;
        let whole = if is_answered { prober.probe_to_judge(link)? } else { Probe::Lost };
        if is_answered && whole == Probe::Lost {
            // Nothing is known of long ones where the host has fallen silent.
            is_answered = prober.probe_to_judge(small)? == Probe::Arrived;
        }
        let mut largest = None;
        if is_answered && whole != Probe::Arrived {
            for size in SIZES.into_iter().filter(|size| *size < link) {
                if prober.probe(size)? == Probe::Arrived {
                    largest = Some(size);
                    break;
                }
            }
        }
        Ok(MtuFacts { link, peer_link, is_answered, whole, largest, seen_as: prober.seen_as })
    }
}

struct Prober<'a> {
    to: SocketAddr,
    cookie: &'a [u8],
    /// Whether a preflight answers there, and not the system in its place.
    is_echoed: bool,
    seen_as: Option<IpAddr>,
}

impl Prober<'_> {
    /// As [`probe`](Prober::probe), as long as the host may keep silent although it arrived.
    fn probe_to_judge(&mut self, packet_bytes: u32) -> io::Result<Probe> {
        let begun = Instant::now();
        loop {
            let ended = self.probe(packet_bytes)?;
            if ended != Probe::Lost || self.is_echoed || begun.elapsed() >= REFUSED_WAIT {
                return Ok(ended);
            }
        }
    }

    /// Sends a packet of so many bytes.
    fn probe(&mut self, packet_bytes: u32) -> io::Result<Probe> {
        let mut ended = Probe::Lost;
        for _ in 0..TRIES {
            ended = self.probe_once(packet_bytes)?;
            if ended != Probe::Lost {
                break;
            }
        }
        Ok(ended)
    }

    fn probe_once(&mut self, packet_bytes: u32) -> io::Result<Probe> {
        let socket = self.socket()?;
        let ip_header_bytes = if self.to.is_ipv4() { 20 } else { 40 };
        let mut datagram = self.cookie.to_vec();
        datagram.resize((packet_bytes - ip_header_bytes - UDP_HEADER_BYTES) as usize, 0);
        let too_long = || Ok(Probe::TooLong(path_mtu(self.to)));
        let is_too_long = |error: &io::Error| error.raw_os_error() == Some(libc::EMSGSIZE);
        match socket.send(&datagram) {
            Err(error) if is_too_long(&error) => return too_long(),
            sent => sent?,
        };
        let mut answer = [0; 128];
        match socket.recv(&mut answer) {
            Ok(bytes) => {
                self.is_echoed = true;
                self.seen_as = self.address_in(&answer[..bytes]).or(self.seen_as);
                Ok(Probe::Arrived)
            }
            Err(error) if is_too_long(&error) => too_long(),
            // Nobody listens there, so it is there.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(Probe::Arrived),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Ok(Probe::Lost)
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable) =>
            {
                Ok(Probe::Lost)
            }
            Err(error) => Err(error),
        }
    }

    /// What an echo says behind the cookie.
    fn address_in(&self, answer: &[u8]) -> Option<IpAddr> {
        let text = answer.strip_prefix(self.cookie).filter(|_| !self.cookie.is_empty())?;
        std::str::from_utf8(text).ok()?.parse().ok()
    }

    /// A socket whose datagrams are never cut, and whose length is not bounded by what the system
    /// remembers of the path.
    fn socket(&self) -> io::Result<UdpSocket> {
        let any: IpAddr = if self.to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let socket = UdpSocket::bind((any, 0))?;
        match self.to.is_ipv4() {
            true => sockopt::set_ip_mtu_discover(&socket, sockopt::Ipv4PathMtuDiscovery::PROBE)?,
            false => sockopt::set_ipv6_mtu_discover(&socket, sockopt::Ipv6PathMtuDiscovery::PROBE)?,
        }
        socket.connect(self.to)?;
        socket.set_read_timeout(Some(WAIT))?;
        Ok(socket)
    }
}

/// What the system has learnt of the path from routers.
fn path_mtu(to: SocketAddr) -> Option<u32> {
    let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    if to.is_ipv4() { sockopt::ip_mtu(&socket).ok() } else { sockopt::ipv6_mtu(&socket).ok() }
}

pub fn judge(peer: &str, facts: &MtuFacts) -> Finding {
    let MtuFacts { link, peer_link, is_answered, whole, largest, .. } = facts;
    let bad = |severity, seen: String, action: &str| {
        Finding::bad(
            Check::Mtu,
            severity,
            peer,
            seen,
            format!("packets of {link} bytes, the link's MTU"),
            action,
        )
    };
    if !is_answered {
        let seen = "short UDP datagrams are not answered either".into();
        let action = "run `forebay preflight net --pause` there, and let UDP to its port through";
        return bad(Unknown, seen, action);
    }
    let still = largest.map_or(String::new(), |size| format!("; {size} bytes do"));
    match whole {
        Probe::Lost => {
            let seen = format!("packets of {link} bytes do not arrive, and nobody says why{still}");
            let action = "connections will hang once they send much: set the same MTU on all links and switches, \
                          and let ICMP 'fragmentation needed' through";
            bad(Fault, seen, action)
        }
        Probe::TooLong(path) => {
            let path = path.map_or(String::new(), |path| format!(", where {path} are the most"));
            let seen = format!("packets of {link} bytes are too long for the way{path}{still}");
            bad(Warning, seen, "raise the MTU of the links between, or lower this one's")
        }
        Probe::Arrived => match peer_link.filter(|other| other != link) {
            None => Finding::ok(Check::Mtu, peer, format!("packets of {link} bytes, the link's MTU, arrive")),
            Some(other) => {
                let seen =
                    format!("packets of {link} bytes arrive, and the peer's link has an MTU of {other}");
                bad(Warning, seen, "set the same MTU at both ends")
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_cuda::preflight::Severity;

    #[test]
    fn a_packet_that_is_lost_without_a_word_is_a_fault_and_no_answer_at_all_is_unknown() {
        let good = MtuFacts {
            link: 9000,
            peer_link: Some(9000),
            is_answered: true,
            whole: Probe::Arrived,
            largest: None,
            seen_as: None,
        };
        let hole = MtuFacts { whole: Probe::Lost, largest: Some(1500), ..good.clone() };
        let told = MtuFacts { whole: Probe::TooLong(Some(1500)), ..hole.clone() };
        let table = [
            (good.clone(), Severity::Ok, "packets of 9000 bytes, the link's MTU, arrive"),
            (MtuFacts { peer_link: None, ..good.clone() }, Severity::Ok, "arrive"),
            (
                MtuFacts { peer_link: Some(9100), ..good.clone() },
                Warning,
                "the peer's link has an MTU of 9100",
            ),
            (hole, Fault, "do not arrive, and nobody says why; 1500 bytes do"),
            (told, Warning, "too long for the way, where 1500 are the most"),
            (
                MtuFacts { is_answered: false, whole: Probe::Lost, ..good },
                Unknown,
                "short UDP datagrams are not answered either",
            ),
        ];
        for (facts, severity, says) in table {
            let found = judge("left", &facts);
            assert!(found.severity == severity && found.seen.contains(says), "{facts:?}: {found:?}");
        }
    }

    #[test]
    fn a_host_where_nobody_listens_has_been_reached_all_the_same() {
        let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let facts = MtuFacts::probe(nobody, 65_536, None, &[]).unwrap();
        assert_eq!((facts.link, facts.is_answered, facts.whole), (65_535, true, Probe::Arrived));
    }

    #[test]
    fn somebody_who_never_answers_is_waited_for_no_longer_than_told() {
        let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
        let begin = std::time::Instant::now();
        let facts = MtuFacts::probe(silent.local_addr().unwrap(), 1500, None, &[]).unwrap();
        assert!(!facts.is_answered && begin.elapsed() < Duration::from_secs(4));
    }
}
