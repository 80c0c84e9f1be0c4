//! Everything that is asked of one peer, and what that says about it. Takes a few seconds at most,
//! whatever the peer does.

use super::checks::clocks::{self, Sample};
use super::checks::mtu::{self, MtuFacts};
use super::checks::ports::{self, Expected, Port};
use super::checks::route::{self, Listening, RouteFacts};
use super::checks::versions::{self, Versions};
use super::finding::{Check, Finding};
use super::line::{ANSWER_LIMIT, Credentials, Line};
use super::peers::Peer;
use super::questions::{HostFacts, Question};
use super::way::Way;
use forebay_cuda::preflight::Severity::Unknown;
use forebay_cuda::topology::Root;
use std::time::{Duration, Instant};

/// Times that a peer's clock is asked for, and how long at most.
const SAMPLES: usize = 5;
const SAMPLES_LIMIT: Duration = Duration::from_secs(1);

/// What this host is, as far as its peers are concerned.
pub struct Here {
    pub root: Root,
    pub credentials: Credentials,
    pub versions: Versions,
    pub listens_at: Option<Listening>,
}

/// What is known of a peer.
pub struct Seen {
    pub peer: Peer,
    pub port: Port,
    pub way: Result<Way, String>,
    /// Times that it told, with its version; or why it did not.
    about: Result<(String, Vec<Sample>), String>,
    /// `None` of a node, which answers no preflight.
    pub host: Option<HostFacts>,
    mtu: Result<MtuFacts, String>,
    pub line: Option<Line>,
}

impl Seen {
    /// Looks at a peer.
    pub fn look(peer: &Peer, here: &Here) -> Seen {
        let way = Way::to(peer.address.ip(), &here.root).map_err(|error| error.to_string());
        let (port, line) = match Line::connect(peer.address, &here.credentials) {
            Ok(line) => (Port::Open, Some(line)),
            Err(error) => match Port::of(&error) {
                Port::Silent => (ports::silent(peer.address), None),
                port => (port, None),
            },
        };
        let about = line.as_ref().map_or_else(|| Err("there is no connection".into()), about);
        let host = line.as_ref().and_then(|line| {
            let reaching = way.as_ref().ok()?.source?;
            line.ask::<HostFacts>(&Question::Host { reaching }, ANSWER_LIMIT).ok()
        });
        let mtu = probe(peer, &way, host.as_ref());
        Seen { peer: peer.clone(), port, way, about, host, mtu, line }
    }

    /// The shortest round trip of a small question, in microseconds.
    pub fn round_trip_us(&self) -> Option<u64> {
        self.about.as_ref().ok()?.1.iter().map(Sample::round_trip_us).min()
    }

    pub fn findings(&self, here: &Here) -> Vec<Finding> {
        let name = &*self.peer.name;
        let mut found = vec![ports::judge(name, &self.port, Expected::Forebay)];
        let seen_as = self.mtu.as_ref().ok().and_then(|mtu| mtu.seen_as);
        let route = RouteFacts {
            peer: self.peer.address.ip(),
            way: self.way.clone(),
            listens_at: here.listens_at.clone(),
            back: self.host.as_ref().and_then(|host| host.back.clone()),
            seen_as,
        };
        found.push(route::judge(name, &route));
        found.push(match &self.mtu {
            Ok(facts) => mtu::judge(name, facts),
            Err(why) => unknown(Check::Mtu, name, format!("not probed: {why}"), "probes that go out"),
        });
        // Why there is no connection is said already.
        if self.port == Port::Open {
            found.extend(self.agreement(here));
        }
        found
    }

    /// Whether clocks and versions agree.
    fn agreement(&self, here: &Here) -> [Finding; 2] {
        let name = &*self.peer.name;
        let (version, samples) = match &self.about {
            Ok((version, samples)) => (version, samples),
            Err(why) => {
                let none =
                    |check| unknown(check, name, format!("it does not tell: {why}"), "a Forebay that tells");
                return [none(Check::Clocks), none(Check::Versions)];
            }
        };
        let clock = match clocks::offset(samples) {
            Some(offset) => clocks::judge(name, offset),
            None => unknown(Check::Clocks, name, "it was not asked".into(), "an answer"),
        };
        let of_node = || Versions { forebay: version.clone(), ..Versions::default() };
        let there = self.host.as_ref().map_or_else(of_node, |host| host.versions.clone());
        [clock, versions::judge(name, &here.versions, &there)]
    }
}

fn unknown(check: Check, name: &str, seen: String, expected: &str) -> Finding {
    Finding::bad(check, Unknown, name, seen, expected, "update the peer, or look at its log")
}

fn about(line: &Line) -> Result<(String, Vec<Sample>), String> {
    let (mut samples, mut version) = (Vec::new(), String::new());
    let begin = Instant::now();
    while samples.len() < SAMPLES && begin.elapsed() < SAMPLES_LIMIT {
        let (about, sample) = line.about().map_err(|error| error.to_string())?;
        version = about.version;
        samples.push(sample);
    }
    Ok((version, samples))
}

fn probe(peer: &Peer, way: &Result<Way, String>, host: Option<&HostFacts>) -> Result<MtuFacts, String> {
    let way = way.as_ref().map_err(String::clone)?;
    let link = way.mtu.ok_or_else(|| format!("the system does not tell the MTU of {}", way.device))?;
    let peer_link = host.and_then(|host| host.back.as_ref()?.mtu);
    let cookie = host.and_then(|host| host.cookie).map_or(Vec::new(), Vec::from);
    MtuFacts::probe(peer.address, link, peer_link, &cookie).map_err(|error| error.to_string())
}
