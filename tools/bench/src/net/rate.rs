//! Bytes per second of whole transfers, plain and encrypted. Each run moves the same bytes by plain
//! sockets and by an agent, one after the other, so that both see the same minute of the machine.

use super::blocks::Shape;
use super::certificates::Certificates;
use super::gpu_raw::GpuRaw;
use super::pair::{Pair, Way, run_all};
use super::raw::Raw;
use super::segment::Segment;
use super::{peers, rail};
use crate::output::Error;
use crate::timing::median;
use forebay_net::{IPC, Op};
use forebay_results::Row;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use std::time::Instant;

/// Transfers before the first that counts: the number of flows is found meanwhile.
const WARM_UPS: u64 = 4;
/// Bytes of a block in the encrypted rows.
const TLS_BLOCK_BYTES: usize = 1_000_000;

/// A record of TLS, and how many bytes of them the cipher is timed with.
const RECORD_BYTES: usize = 16 << 10;
const CIPHER_BYTES: usize = 512 << 20;

/// What one kind of transfer gave.
#[derive(Default)]
struct Figures {
    gbps: Vec<f64>,
    /// By each of the means that are a ceiling; the best one counts.
    raw_gbps: Vec<(&'static str, Vec<f64>)>,
    /// Between GPUs: all bytes in one piece.
    contiguous_gbps: Vec<f64>,
    cpu_s_per_gb: f64,
}

impl Figures {
    fn ceiling(&self) -> f64 {
        self.raw_gbps.iter().map(|(_, gbps)| median(gbps)).fold(0.0, f64::max)
    }
}

/// What moves the same bytes without an agent.
enum Ceiling {
    Sockets(Raw),
    Gpus(GpuRaw),
}

impl Ceiling {
    fn between(way: &Way, pair: &mut Pair) -> Result<Ceiling, Error> {
        if way.goes_by_ipc() {
            let exported = pair.ask("export")?;
            let own = pair.memory.gpu().ok_or("it is in host memory")?;
            return Ok(Ceiling::Gpus(GpuRaw::open(own, &exported, pair.shape)?));
        }
        let streams = pair.flows().max(1);
        let port = pair.ask(&format!("raw {streams}"))?.parse()?;
        Ok(Ceiling::Sockets(Raw::connect(port, streams, pair.shape.bytes())?))
    }

    fn run(&mut self, op: Op, gb: f64, figures: &mut Figures) -> Result<(), Error> {
        let means = match self {
            Ceiling::Sockets(raw) => vec![("sockets", raw.run(op == Op::Write)?)],
            Ceiling::Gpus(raw) => {
                let times = raw.run(op)?;
                figures.contiguous_gbps.push(gb / times.contiguous.as_secs_f64());
                vec![("batch", times.batch), ("kernel", times.kernel)]
            }
        };
        if figures.raw_gbps.is_empty() {
            figures.raw_gbps = means.iter().map(|(by, _)| (*by, Vec::new())).collect();
        }
        let all = figures.raw_gbps.iter_mut().zip(means);
        all.for_each(|((_, gbps), (_, took))| gbps.push(gb / took.as_secs_f64()));
        Ok(())
    }
}

/// An operation by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum OpName {
    /// From this process to the other
    Write,
    /// From the other process to this
    Read,
}

impl OpName {
    pub fn op(self) -> Op {
        match self {
            OpName::Write => Op::Write,
            OpName::Read => Op::Read,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            OpName::Write => "write",
            OpName::Read => "read",
        }
    }
}

/// One operation on blocks of one size.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub op: OpName,
    pub shape: Shape,
    /// The blocks are divided among so many threads, each with a transfer of its own.
    pub threads: usize,
}

impl Case {
    /// Of its row: what is as usual is not part of it.
    fn name(self, way: &Way) -> String {
        let ucx = if way.rails.is_empty() { "" } else { "ucx." };
        let gpu = if way.segment == Segment::Gpu { "gpu." } else { "" };
        let mut name = format!("net.{ucx}{gpu}{}.{}", self.op.name(), self.shape.name());
        if self.threads > 1 {
            name += &format!(".{}threads", self.threads);
        }
        match way.segment {
            Segment::Heap => {}
            Segment::Gpu if way.rails.is_empty() => name += &format!(".{}", way.gpu_way.name()),
            Segment::Gpu => {}
            segment => name += &format!(".{segment}"),
        }
        name
    }
}

/// One operation on blocks of one size, and the same by other systems.
pub fn measure(way: &Way, case: Case, runs: u32, commands: &[String]) -> Result<Vec<Row>, Error> {
    let Case { op, shape, .. } = case;
    let name = case.name(way);
    let figures = transfers(way, case, runs)?;
    let mut row = Row::of_runs(&name, "GB/s", &figures.gbps).with_ceiling(figures.ceiling());
    row.cpu_s_per_gb = Some(figures.cpu_s_per_gb);
    let mut rows = Vec::new();
    for (system, peer) in peers::measure(commands, op.name(), shape, runs)? {
        rows.push(peers::row(&name, &system, &peer));
        if row.peer.as_ref().is_none_or(|best| best.value < peer.value) {
            row.peer = Some(peer);
        }
    }
    rows.insert(0, row);
    if !figures.contiguous_gbps.is_empty() {
        let all = figures.raw_gbps.into_iter().chain([("contiguous", figures.contiguous_gbps)]);
        rows.extend(
            all.map(|(by, gbps)| Row::of_runs(name.replace(".ipc", &format!(".{by}")), "GB/s", &gbps)),
        );
    }
    Ok(rows)
}

/// Encrypted WRITEs of large blocks beside plain ones, and what the cipher alone gives.
pub fn measure_tls(way: &Way, runs: u32) -> Result<Vec<Row>, Error> {
    let shape = Shape::new(TLS_BLOCK_BYTES, None);
    let case = Case { op: OpName::Write, shape, threads: 1 };
    let plain = median(&transfers(way, case, runs)?.gbps);
    let certificates = Certificates::make()?;
    let encrypted = Way { tls: Some(certificates.directory().to_path_buf()), ..way.clone() };
    let figures = transfers(&encrypted, case, runs)?;
    let mut row = Row::of_runs("net.tls.write.1mb", "GB/s", &figures.gbps).with_ceiling(plain);
    row.cpu_s_per_gb = Some(figures.cpu_s_per_gb);
    Ok(vec![row, cipher(runs)?])
}

/// Bytes per second that one thread seals and another opens at the same time, in records as TLS has
/// them.
fn cipher(runs: u32) -> Result<Row, Error> {
    let failed = |_| "the cipher failed";
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[7; 32]).map_err(failed)?);
    let nonce = || Nonce::assume_unique_for_key([0; 12]);
    let pass = |opens: bool| -> Result<(), &'static str> {
        let mut record = vec![1; RECORD_BYTES];
        key.seal_in_place_append_tag(nonce(), Aad::empty(), &mut record).map_err(failed)?;
        let sealed = record.clone();
        for _ in 0..CIPHER_BYTES / RECORD_BYTES {
            if opens {
                record.copy_from_slice(&sealed);
                key.open_in_place(nonce(), Aad::empty(), &mut record).map_err(failed)?;
            } else {
                record.truncate(RECORD_BYTES);
                key.seal_in_place_append_tag(nonce(), Aad::empty(), &mut record).map_err(failed)?;
            }
        }
        Ok(())
    };
    let mut gbps = Vec::new();
    for _ in 0..runs {
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| pass(true));
            pass(false)?;
            opening.join().map_err(|_| "a thread panicked")?
        })?;
        gbps.push(CIPHER_BYTES as f64 / 1e9 / begin.elapsed().as_secs_f64());
    }
    Ok(Row::of_runs("net.tls.aes_256_gcm", "GB/s", &gbps))
}

fn transfers(way: &Way, case: Case, runs: u32) -> Result<Figures, Error> {
    let (op, shape) = (case.op.op(), case.shape);
    let mut pair = Pair::start(way, shape)?;
    let requests = pair.requests(op, case.threads)?;
    for _ in 0..WARM_UPS {
        run_all(&requests)?;
    }
    let mut ceiling = Ceiling::between(way, &mut pair)?;
    let gb = shape.bytes() as f64 / 1e9;
    ceiling.run(op, gb, &mut Figures::default())?;
    let mut figures = Figures::default();
    for number in 1..=u64::from(runs) {
        ceiling.run(op, gb, &mut figures)?;
        pair.fill(op, number)?;
        let cpu_before_s = pair.cpu_s()?;
        figures.gbps.push(gb / run_all(&requests)?.as_secs_f64());
        figures.cpu_s_per_gb += (pair.cpu_s()? - cpu_before_s) / (gb * f64::from(runs));
        pair.check(op, number)?;
    }
    check_way(way, &mut pair)?;
    Ok(figures)
}

/// Whether the bytes took the rails, and lay in what was wished for as far as the system gave it.
fn check_way(way: &Way, pair: &mut Pair) -> Result<(), Error> {
    let strayed = if way.rails.is_empty() { 0 } else { rail::bytes_over_tcp(&pair.agent)? };
    if strayed > 0 {
        return Err(format!("{strayed} bytes went over TCP instead of a rail").into());
    }
    if way.goes_by_ipc() {
        let (tcp, ipc) = (rail::bytes_over_tcp(&pair.agent)?, rail::bytes_over(&pair.agent, IPC)?);
        if tcp > 0 || ipc == 0 {
            return Err(format!("{tcp} bytes went over TCP instead of IPC, which carried {ipc}").into());
        }
    }
    if way.segment == Segment::Hugepages {
        let mb = |bytes: usize| bytes / 1_000_000;
        let (here, there) = (pair.memory.huge_bytes()?, pair.ask("huge")?.parse()?);
        let all = mb(pair.shape.bytes());
        eprintln!("hugepages: {} of {all} MB here and {} there were in huge pages", mb(here), mb(there));
    }
    Ok(())
}
