//! Measures one pair of hosts, this one and a peer: bytes in blocks of two sizes over one and
//! several connections, in both directions, by the mover that a node has.

use crate::cmd::preflight::net::line::{ANSWER_LIMIT, Credentials, Line};
use crate::cmd::preflight::net::questions::{Case, CaseFigures, PairFigures, Plan, Question, Segments};
use forebay_cuda::topology::Root;
use forebay_net::tcp::{Flow, PeerRegions};
use forebay_transfer::{
    Class, End, Failure, HostBuffer, Limits, LinkSpec, MoverHandle, MoverThread, PathSpec, Place, Reason,
    RegionId, Span, SpanPair, Transfer,
};
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Connections, and bytes of a block: of a whole chunk, and of a page of an engine.
pub const FLOWS: [usize; 2] = [1, 4];
pub const BLOCK_BYTES: [u64; 2] = [1 << 20, 26 << 10];
/// Two transfers are under way at a time, each in its half of the memory at both ends.
const HALVES: u64 = 2;
const HALF_BYTES: u64 = 8 << 20;
pub const REGION_BYTES: usize = (HALVES * HALF_BYTES) as usize;
/// The first transfers are so long, and later ones longer where that takes no time.
const FIRST_BYTES: u64 = 1 << 20;
/// Questions whose times are taken.
const QUESTIONS: usize = 11;
/// A pair that takes so many times what was planned is not measured to the end.
const PATIENCE: u32 = 4;

const HERE: Place = Place::Host(0);
const THERE: Place = Place::Peer(0);
/// Lots on a flow at a time, and their bytes.
const WINDOW: (u32, u64) = (2, 16 << 20);

/// Every way of moving bytes that is measured.
pub fn cases() -> Vec<Case> {
    let of_flows = |flows| {
        let of_block = move |block_bytes| [true, false].map(|sends| Case { flows, block_bytes, sends });
        BLOCK_BYTES.into_iter().flat_map(of_block)
    };
    FLOWS.into_iter().flat_map(of_flows).collect()
}

/// Measures the pair. The other end has to be a preflight that lets this host in.
pub fn measure(
    with: SocketAddr,
    credentials: &Credentials,
    plan: &Plan,
    root: &Root,
) -> Result<PairFigures, String> {
    let line = Line::connect(with, credentials).map_err(|error| error.to_string())?;
    let there = || line.ask::<Segments>(&Question::Segments, ANSWER_LIMIT);
    let before = [segments(root)?, there()?];
    let round_trip_us = round_trip_us(&line)?;
    let begin = Instant::now();
    let patience = Duration::from_millis(plan.case_ms) * cases().len() as u32 * PATIENCE;
    let mut figures = Vec::new();
    for flows in FLOWS {
        let joined = Joined::connect(with, credentials, flows)?;
        for case in cases().into_iter().filter(|case| case.flows == flows) {
            if begin.elapsed() < patience {
                figures.push(joined.run(case, plan)?);
            }
        }
    }
    let segments = [segments(root)?.since(before[0]), there()?.since(before[1])];
    Ok(PairFigures { cases: figures, round_trip_us, segments })
}

fn round_trip_us(line: &Line) -> Result<u64, String> {
    let ask = |_| line.about().map(|(_, sample)| sample.round_trip_us());
    let mut took =
        (0..QUESTIONS).map(ask).collect::<Result<Vec<u64>, _>>().map_err(|error| error.to_string())?;
    took.sort_unstable();
    Ok(took[QUESTIONS / 2])
}

/// What this host has sent over TCP, in its network namespace.
pub fn segments(root: &Root) -> Result<Segments, String> {
    let text = root.text("proc/net/snmp").ok_or("/proc/net/snmp cannot be read")?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp:"));
    let names = lines.next().unwrap_or_default().split_whitespace();
    let values = lines.next().unwrap_or_default().split_whitespace();
    let of = |wanted: &str| {
        let found = names.clone().zip(values.clone()).find(|(name, _)| *name == wanted);
        found
            .and_then(|(_, value)| value.parse().ok())
            .ok_or(format!("/proc/net/snmp has no {wanted} of TCP"))
    };
    Ok(Segments { sent: of("OutSegs")?, again: of("RetransSegs")? })
}

/// This host's memory and a peer's, joined by connections.
struct Joined {
    // Ends first: nothing touches the memory any more.
    _thread: MoverThread,
    mover: MoverHandle,
    ours: RegionId,
    theirs: RegionId,
}

impl Joined {
    fn connect(with: SocketAddr, credentials: &Credentials, flows: usize) -> Result<Joined, String> {
        let thread = MoverThread::spawn(Limits::default()).map_err(|error| error.to_string())?;
        let (mover, regions) = (thread.handle(), PeerRegions::default());
        let mut found = None;
        for nth in 0..flows {
            let flow = Flow::connect(with, credentials.me, regions.clone(), credentials.flow_options());
            let (flow, peer) = flow.map_err(|error| error.to_string())?;
            found = found.or(peer.regions.first().copied());
            add(&mover, flow, nth).map_err(|error| error.to_string())?;
        }
        let region = found.filter(|region| region.len >= REGION_BYTES as u64);
        let region = region.ok_or("the peer offers no memory to measure with")?;
        let closed = |error: forebay_transfer::Closed| error.to_string();
        let theirs = regions.register(&mover, THERE, region, 0).map_err(closed)?;
        let ours = mover.register(HERE, Arc::new(HostBuffer::new(REGION_BYTES))).map_err(closed)?;
        Ok(Joined { _thread: thread, mover, ours, theirs })
    }

    /// Moves bytes for as long, or as many, as the plan says.
    fn run(&self, case: Case, plan: &Plan) -> Result<CaseFigures, String> {
        let (sender, receiver) = mpsc::channel();
        let (begin, limit) = (Instant::now(), Duration::from_millis(plan.case_ms));
        let mut free: Vec<u64> = (0..HALVES).collect();
        let (mut begun_bytes, mut bytes, mut each, mut damaged) = (0, 0, FIRST_BYTES, 0);
        loop {
            while begin.elapsed() < limit && begun_bytes < plan.case_bytes {
                let Some(half) = free.pop() else { break };
                let transfer = self.transfer(case, half, each);
                begun_bytes += transfer.pairs.iter().map(|pair| pair.from.len).sum::<u64>();
                let (sender, begin) = (sender.clone(), Instant::now());
                let on_end = move |end| drop(sender.send((half, end, begin.elapsed())));
                self.mover.submit(transfer, on_end).map_err(|error| error.to_string())?;
            }
            if free.len() as u64 == HALVES {
                return Ok(CaseFigures { case, bytes, seconds: begin.elapsed().as_secs_f64(), damaged });
            }
            let (half, end, took) = receiver.recv().map_err(|_| "the mover has ended")?;
            match end {
                End::Done { bytes: moved } => bytes += moved,
                End::Failed(Failure { reason: Reason::Corrupt { .. }, .. }) => damaged += 1,
                End::Failed(failure) => return Err(failure.reason.to_string()),
                End::Cancelled { .. } => return Err("the transfer was cancelled".into()),
            }
            free.push(half);
            if took < limit / 8 {
                each = (each * 2).min(HALF_BYTES);
            }
        }
    }

    /// Blocks in ascending order there and in descending order here, so that they stay blocks.
    fn transfer(&self, case: Case, half: u64, bytes: u64) -> Transfer {
        let blocks = (bytes / case.block_bytes).max(1);
        let pair = |block: u64| {
            let at = |nth: u64| half * HALF_BYTES + nth * case.block_bytes;
            let ours = Span::new(self.ours, at(blocks - 1 - block), case.block_bytes);
            let theirs = Span::new(self.theirs, at(block), case.block_bytes);
            if case.sends { SpanPair::new(ours, theirs) } else { SpanPair::new(theirs, ours) }
        };
        Transfer::new((0..blocks).map(pair).collect(), Class::Scrub)
    }
}

/// Makes a connection a way for bytes in both directions.
fn add(mover: &MoverHandle, flow: Flow, nth: usize) -> Result<(), Box<dyn std::error::Error>> {
    let link = mover.add_link(LinkSpec::new(format!("flow{nth}"), WINDOW.0, WINDOW.1), Box::new(flow))?;
    mover.add_path(PathSpec::direct(HERE, THERE, link))??;
    mover.add_path(PathSpec::direct(THERE, HERE, link))??;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_goes_over_one_and_several_connections_in_both_directions() {
        let all = cases();
        assert_eq!(all.len(), FLOWS.len() * BLOCK_BYTES.len() * 2);
        assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn what_was_sent_again_is_read_from_the_kernels_counters() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::new(folder.path());
        assert!(segments(&root).is_err());
        std::fs::create_dir_all(folder.path().join("proc/net")).unwrap();
        let text = "Ip: Forwarding\nIp: 1\nTcp: InSegs OutSegs RetransSegs\nTcp: 5 1000 7\nUdp: X\nUdp: 0\n";
        std::fs::write(folder.path().join("proc/net/snmp"), text).unwrap();
        assert_eq!(segments(&root), Ok(Segments { sent: 1000, again: 7 }));
        let here = segments(&Root::default()).unwrap();
        assert!(here.again <= here.sent);
    }
}
