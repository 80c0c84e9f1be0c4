//! One run of all checks: what is looked at, at once where it takes time, and judged.

use super::checks::dns::{self, Name, Resolver};
use super::checks::limits::{self, Limits, Needs};
use super::checks::numa::{self, NumaFacts};
use super::checks::ports::{self, Expected};
use super::checks::rates::{self, RatedHost, RatedPair, rates_of};
use super::checks::rdma::{self, RdmaPort};
use super::checks::transports::{self, Rail};
use super::finding::{Check, Finding, complete};
use super::line::CONNECT_LIMIT;
use super::look::{Here, Seen};
use super::measure::baseline::{Baseline, Rates};
use super::measure::pair::BLOCK_BYTES;
use super::measure::tournament::{self, Played, Player};
use super::peers::{HostPort, Listed, Own, Peer};
use super::report::{Measured, MeasuredPair, Report};
use forebay_cuda::preflight::Severity::Unknown;
use forebay_node::NodeConfig;
use forebay_results::output::Error;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// Peers that refuse are tried again so often while they are waited for.
const AGAIN: Duration = Duration::from_secs(1);

/// What is checked, and against what.
pub struct Checker {
    pub here: Here,
    pub config: Option<NodeConfig>,
    pub listed: Listed,
    pub own: Own,
    /// Where ZeroMQ has to answer.
    pub zmq: Vec<HostPort>,
    /// How long peers are waited for that do not answer yet.
    pub wait: Duration,
    pub baseline: Option<PathBuf>,
}

impl Checker {
    /// The peers, and the names that were looked up to find them.
    pub fn peers(&self) -> (Vec<Peer>, Vec<Name>) {
        let names = at_once(&self.names(), |name| Name::look_up(name));
        (self.listed.peers(&names, &self.own), names)
    }

    /// Host names that are used: of peers, of ZeroMQ, of etcd and of the metrics' collector.
    fn names(&self) -> Vec<String> {
        let given = self.listed.named.iter().chain(&self.zmq).filter(|given| given.address().is_none());
        let mut names: Vec<String> = given.map(|given| given.host.clone()).collect();
        let config = self.config.as_ref();
        let etcd =
            config.and_then(|config| config.directory.as_ref()).map_or(&[][..], |directory| &directory.etcd);
        let push =
            config.and_then(|config| config.metrics.as_ref()?.push.as_ref()).map(|push| &push.endpoint);
        let hosts = etcd.iter().chain(push).filter_map(|endpoint| endpoint.parse::<http::Uri>().ok());
        let hosts = hosts.filter_map(|uri| uri.host().map(|host| host.trim_matches(['[', ']']).to_owned()));
        names.extend(hosts.filter(|host| host.parse::<std::net::IpAddr>().is_err()));
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Runs all checks, and measures if that is wanted.
    pub fn run(&self, measures: bool) -> Result<Report, Error> {
        let begin = Instant::now();
        let (peers, names) = self.peers();
        let mut findings = dns::judge(&names, Resolver::read(&self.here.root));
        let (seen, zeromq) = std::thread::scope(|scope| {
            let zeromq = scope.spawn(|| self.zeromq(&names));
            (self.look(&peers), joined(zeromq))
        });
        findings.extend(seen.iter().flat_map(|seen| seen.findings(&self.here)));
        findings.extend(zeromq);
        findings.extend(self.host(&seen));
        let looked = begin.elapsed();
        let measured = if measures { Some(self.measure(&seen, &mut findings)?) } else { None };
        if measured.is_none() {
            findings.extend(self.latency(&seen));
        }
        let peers = peers.into_iter().map(|peer| (peer.address.to_string(), peer.name)).collect();
        let mut report = Report::new(complete(findings, measures), peers, measured);
        report.seconds = looked.as_secs_f64();
        Ok(report)
    }

    /// Looks at all peers at once, and again at those that may still come, as long as they are
    /// waited for.
    fn look(&self, peers: &[Peer]) -> Vec<Seen> {
        let begin = Instant::now();
        let mut seen = at_once(peers, |peer| Seen::look(peer, &self.here));
        while begin.elapsed() < self.wait && seen.iter().any(|seen| seen.port.may_come()) {
            std::thread::sleep(AGAIN);
            let (late, there): (Vec<Seen>, Vec<Seen>) =
                seen.into_iter().partition(|seen| seen.port.may_come());
            seen = there;
            let late: Vec<Peer> = late.into_iter().map(|seen| seen.peer).collect();
            seen.extend(at_once(&late, |peer| Seen::look(peer, &self.here)));
        }
        seen
    }

    fn zeromq(&self, names: &[Name]) -> Vec<Finding> {
        at_once(&self.zmq, |given| {
            let subject = format!("{}:{}", given.host, given.port);
            let looked_up = || names.iter().find(|name| name.name == given.host)?.addresses().next();
            match given.address().or_else(looked_up) {
                Some(ip) => {
                    let port = ports::zeromq(SocketAddr::new(ip, given.port), CONNECT_LIMIT);
                    ports::judge(&subject, &port, Expected::ZeroMq)
                }
                None => {
                    let (seen, expected) = ("not tried: its host does not resolve", "an address");
                    Finding::bad(Check::Ports, Unknown, subject, seen, expected, "see dns")
                }
            }
        })
    }

    /// What needs no peer.
    fn host(&self, seen: &[Seen]) -> Vec<Finding> {
        let (root, config) = (&self.here.root, self.config.as_ref());
        let rails = config.and_then(|config| config.peers.as_ref()).map_or(&[][..], |peers| &peers.rails);
        let of_rdma = rails.iter().filter(|rail| rail.fabric == "rdma");
        // A rail without devices takes all of them.
        let takes_all = of_rdma.clone().any(|rail| rail.devices.is_empty());
        let named: Vec<String> = of_rdma.clone().flat_map(|rail| rail.devices.clone()).collect();
        let wanted = (of_rdma.count() > 0).then(|| if takes_all { &[][..] } else { &named[..] });
        let rdma_ports = rdma::read(root);
        let mut findings = rdma::judge(&rdma_ports, wanted);
        findings.extend(limits::judge(&Limits::read(root, config), &Needs::of(config)));
        let ports_up = rdma_ports.iter().filter(|port| port.is_up()).count();
        let rails: Vec<Rail> =
            rails.iter().filter_map(|rail| rail.options().ok()).map(|rail| Rail::open(&rail)).collect();
        findings.extend(transports::judge(&rails, ports_up));
        findings.extend(numa::judge(&self.numa_facts(seen, &rdma_ports)));
        findings
    }

    fn numa_facts(&self, seen: &[Seen], rdma_ports: &[RdmaPort]) -> NumaFacts {
        let sorted = |mut names: Vec<String>| {
            names.sort_unstable();
            names.dedup();
            names
        };
        let nets =
            sorted(seen.iter().filter_map(|seen| Some(seen.way.as_ref().ok()?.device.clone())).collect());
        let rdma = sorted(rdma_ports.iter().map(|port| port.device.clone()).collect());
        let logs = self.config.as_ref().map_or(&[][..], |config| &config.ssd);
        let paths: Vec<&Path> = logs.iter().map(|ssd| &*ssd.path).collect();
        NumaFacts::read(&self.here.root, &nets, &rdma, &paths)
    }

    /// How far peers are from this host.
    fn latency(&self, seen: &[Seen]) -> Vec<Finding> {
        let answered: Vec<(&Seen, u64)> =
            seen.iter().filter_map(|seen| Some((seen, seen.round_trip_us()?))).collect();
        let names = answered.iter().map(|(seen, _)| seen.peer.name.clone());
        let names: Vec<String> = std::iter::once("this host".into()).chain(names).collect();
        let trips: Vec<_> = answered.iter().enumerate().map(|(nth, (_, us))| ((0, nth + 1), *us)).collect();
        rates::latency(&names, &trips)
    }

    /// Measures all pairs of hosts where a preflight answers, and judges.
    fn measure(&self, seen: &[Seen], findings: &mut Vec<Finding>) -> Result<Measured, Error> {
        let begin = Instant::now();
        let (play, rest): (Vec<&Seen>, Vec<&Seen>) = seen.iter().partition(|seen| seen.host.is_some());
        findings.extend(rest.iter().map(|seen| not_measured(&seen.peer.name)));
        let hosts = self.rated_hosts(&play);
        let names: Vec<String> = hosts.iter().map(|host| host.name.clone()).collect();
        let players = self.players(&play);
        let pairs = players.len() * (players.len() - 1) / 2;
        let plan = tournament::plan(tournament::rounds(players.len()).len());
        let bytes_max = tournament::bytes_max(pairs, &plan);
        println!("{pairs} pairs of hosts are measured; at most {:.1} GB are moved", bytes_max as f64 / 1e9);
        let played = tournament::play(&players, &self.here.credentials, &self.here.root);
        let rated: Vec<RatedPair> = played.iter().filter_map(rated).collect();
        findings.extend(played.iter().filter_map(|played| failed(played, &names)));
        findings.extend(rates::damage(&names, &rated));
        findings.extend(rates::bandwidth(&hosts, &rated));
        let trips: Vec<_> = rated.iter().map(|pair| (pair.hosts, pair.round_trip_us)).collect();
        findings.extend(rates::latency(&names, &trips));
        findings.extend(rates::loss(&names, &rated));
        let by_name: BTreeMap<String, Rates> =
            (0..hosts.len()).filter_map(|host| rates_by_name(host, &names, &rated)).collect();
        findings.extend(self.drift(&by_name)?);
        let pairs = played.into_iter().filter_map(|played| {
            let hosts = [names[played.hosts.0].clone(), names[played.hosts.1].clone()];
            Some(MeasuredPair { hosts, figures: played.figures.ok()? })
        });
        let pairs: Vec<MeasuredPair> = pairs.collect();
        let bytes = pairs.iter().map(|pair| pair.figures.bytes()).sum();
        Ok(Measured { seconds: begin.elapsed().as_secs_f64(), bytes, bytes_max, hosts: by_name, pairs })
    }

    /// This host first.
    fn players<'a>(&self, play: &[&'a Seen]) -> Vec<Player<'a>> {
        let own = self.own.at.first().copied().unwrap_or(([127, 0, 0, 1], 0).into());
        let here = Player { address: own, line: None };
        let others = play.iter().map(|seen| Player { address: seen.peer.address, line: seen.line.as_ref() });
        std::iter::once(here).chain(others).collect()
    }

    fn rated_hosts(&self, play: &[&Seen]) -> Vec<RatedHost> {
        let bytes_per_s = |mbit_per_s: u32| f64::from(mbit_per_s) * 125_000.0;
        let own = play.iter().filter_map(|seen| seen.way.as_ref().ok()?.mbit_per_s).max();
        let name = self.config.as_ref().map_or("this host".into(), |config| config.name.clone());
        let here = RatedHost { name, link_bytes_per_s: own.map(bytes_per_s) };
        let others = play.iter().map(|seen| {
            let link = seen.host.as_ref().and_then(|host| host.back.as_ref()?.mbit_per_s);
            RatedHost { name: seen.peer.name.clone(), link_bytes_per_s: link.map(bytes_per_s) }
        });
        std::iter::once(here).chain(others).collect()
    }

    /// What has become slower; the first figures are the baseline.
    fn drift(&self, now: &BTreeMap<String, Rates>) -> Result<Vec<Finding>, Error> {
        let Some(path) = &self.baseline else { return Ok(Vec::new()) };
        if let Some(baseline) = Baseline::read(path)? {
            return Ok(baseline.judge(now));
        }
        if !now.is_empty() {
            Baseline { date: forebay_results::date(), hosts: now.clone() }.write(path)?;
            println!("these figures are the baseline from now on: {}", path.display());
        }
        Ok(Vec::new())
    }
}

/// Does something with all of them at once, in threads; in their order.
fn at_once<T: Sync, R: Send>(all: &[T], act: impl Fn(&T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let begun: Vec<_> = all.iter().map(|one| scope.spawn(|| act(one))).collect();
        begun.into_iter().map(joined).collect()
    })
}

/// What a thread has returned. A panic of it is one of this.
fn joined<R>(thread: ScopedJoinHandle<'_, R>) -> R {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn not_measured(name: &str) -> Finding {
    let action = "run `forebay preflight net --pause` there, with the same list of hosts";
    let seen = "not measured: no preflight answers there";
    Finding::bad(Check::Bandwidth, Unknown, name, seen, "a preflight", action)
}

fn failed(played: &Played, names: &[String]) -> Option<Finding> {
    let why = played.figures.as_ref().err()?;
    let subject = format!("{} and {}", names[played.hosts.0], names[played.hosts.1]);
    let action = "see what the two say of each other, and measure again";
    Some(Finding::bad(Check::Bandwidth, Unknown, subject, format!("not measured: {why}"), "figures", action))
}

fn rated(played: &Played) -> Option<RatedPair> {
    let figures = played.figures.as_ref().ok()?;
    let rate = |sends| figures.best(sends, BLOCK_BYTES[0]);
    Some(RatedPair {
        hosts: played.hosts,
        bytes_per_s: [rate(true)?, rate(false)?],
        round_trip_us: figures.round_trip_us,
        segments: figures.segments,
        damaged: figures.damaged(),
    })
}

fn rates_by_name(host: usize, names: &[String], pairs: &[RatedPair]) -> Option<(String, Rates)> {
    let (sends_bytes_per_s, receives_bytes_per_s) = rates_of(host, pairs)?;
    Some((names[host].clone(), Rates { sends_bytes_per_s, receives_bytes_per_s }))
}
