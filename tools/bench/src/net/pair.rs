//! The two processes: this one with its agent and memory, and the owner that it has started and
//! speaks to. Ended together.

use super::blocks::{Shape, fill_all, wrong_blocks};
use super::certificates;
use super::gpu::GpuWay;
use super::rail::{self, Rail};
use super::segment::{End, Memory, Segment};
use crate::output::Error;
use crate::timing::cpu_s;
use forebay_net::{Agent, AgentConfig, BadRun, Descriptors, Op, PeerStat, Prepared, Request, Select};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Barrier, mpsc};
use std::time::{Duration, Instant};

/// How the two ends speak.
#[derive(Debug, Clone)]
pub struct Way {
    /// Connections at most.
    pub flows: usize,
    /// Where the certificates are; `None`: plain text.
    pub tls: Option<PathBuf>,
    /// What the blocks lie in, at both ends.
    pub segment: Segment,
    /// How they go between GPUs.
    pub gpu_way: GpuWay,
    /// What carries them instead of TCP, at both ends. Empty: TCP.
    pub rails: Vec<Rail>,
}

impl Way {
    /// Plain TCP between memory of the allocator.
    pub fn plain(flows: usize) -> Way {
        Way { flows, tls: None, segment: Segment::Heap, gpu_way: GpuWay::Tcp, rails: Vec::new() }
    }

    /// Whether the asking end's GPU copies.
    pub fn goes_by_ipc(&self) -> bool {
        self.segment == Segment::Gpu && self.gpu_way == GpuWay::Ipc
    }

    /// How an end is set up.
    pub fn config(&self, name: &str) -> Result<AgentConfig, Error> {
        let tls = self.tls.as_deref().map(certificates::load).transpose()?;
        let rails = self.rails.iter().map(|rail| rail.0.clone()).collect();
        Ok(AgentConfig { flows_max: self.flows, tls, rails, ..AgentConfig::named(name) })
    }
}

/// A transfer may take so long.
const LIMIT_US: Option<u64> = Some(120_000_000);

/// Two processes with the same blocks in different orders.
pub struct Pair {
    pub shape: Shape,
    pub agent: Agent,
    pub memory: Memory,
    local: Prepared,
    remote: Prepared,
    /// Where the memory begins, here and there.
    bases: [u64; 2],
    peer: String,
    owner: Owner,
}

/// The other process. Killed when this is dropped.
struct Owner {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Pair {
    pub fn start(way: &Way, shape: Shape) -> Result<Pair, Error> {
        let mut owner = Owner::start(way, shape)?;
        let first = owner.line()?;
        let (metadata, base) = first.split_once(' ').ok_or("the other process did not start")?;
        let agent = Agent::start(way.config("asking")?)?;
        let memory = Memory::new(way.segment, End::Asking, shape.bytes())?;
        let bases = [memory.register(&agent, way.gpu_way)?.base(), base.parse()?];
        let peer = agent.add_peer(&hex::decode(metadata)?)?;
        let blocks = |base: u64, end: End| {
            let block = |block| (base + shape.offset(end, block) as u64, shape.block_bytes as u64);
            Descriptors::from_blocks((0..shape.blocks).map(block))
        };
        let local = agent.prepare_local(&blocks(bases[0], End::Asking)?)?;
        let remote = agent.prepare_remote(&peer, &blocks(bases[1], End::Owner)?)?;
        agent.connect(&peer)?;
        if !way.rails.is_empty() {
            rail::wait_until_taken(&agent, way.rails.len())?;
        }
        Ok(Pair { shape, agent, memory, local, remote, bases, peer, owner })
    }

    /// Other lists of the same memory; `list` is given its first address.
    pub fn prepare(
        &self,
        list: impl Fn(u64) -> Result<Descriptors, BadRun>,
    ) -> Result<(Prepared, Prepared), Error> {
        let [here, there] = self.bases;
        let local = self.agent.prepare_local(&list(here)?)?;
        Ok((local, self.agent.prepare_remote(&self.peer, &list(there)?)?))
    }

    /// All blocks from one end to the other.
    pub fn request(&self, op: Op) -> Result<Request, Error> {
        Ok(self.agent.request(op, (&self.local, Select::All), (&self.remote, Select::All), None, LIMIT_US)?)
    }

    /// The same blocks divided among so many threads: a request for each.
    pub fn requests(&self, op: Op, threads: usize) -> Result<Vec<Request>, Error> {
        let part = |nth: usize| {
            let [from, to] = [nth, nth + 1].map(|nth| (nth * self.shape.blocks / threads) as u32);
            let [here, there] = [&self.local, &self.remote].map(|list| (list, select(from..to)));
            Ok(self.agent.request(op, here, there, None, LIMIT_US)?)
        };
        if threads == 1 { Ok(vec![self.request(op)?]) } else { (0..threads).map(part).collect() }
    }

    /// Fills the blocks that are to be moved.
    pub fn fill(&mut self, op: Op, run: u64) -> Result<(), Error> {
        match op {
            Op::Write => fill_all(self.shape, End::Asking, &self.memory, run),
            Op::Read => drop(self.ask(&format!("fill {run}"))?),
        }
        Ok(())
    }

    /// Compares the blocks that have been moved.
    pub fn check(&mut self, op: Op, run: u64) -> Result<(), Error> {
        let wrong = match op {
            Op::Write => self.ask(&format!("check {run}"))?.parse()?,
            Op::Read => wrong_blocks(self.shape, End::Asking, &self.memory, run),
        };
        if wrong > 0 {
            Err(format!("{wrong} of {} blocks are wrong", self.shape.blocks).into())
        } else {
            Ok(())
        }
    }

    /// Connections that carry bytes.
    pub fn flows(&self) -> usize {
        let at_work = |peer: &PeerStat| peer.flows.iter().filter(|flow| !flow.stands_by).count();
        self.agent.stats().first().map_or(0, at_work)
    }

    /// Tells the other process something and waits for its answer.
    pub fn ask(&mut self, line: &str) -> Result<String, Error> {
        writeln!(self.owner.input, "{line}")?;
        self.owner.line()
    }

    /// Processor time of both so far.
    pub fn cpu_s(&mut self) -> Result<f64, Error> {
        Ok(cpu_s() + self.ask("cpu")?.parse::<f64>()?)
    }

    /// Sends the other process a signal.
    pub fn signal(&self, signal: Signal) -> Result<(), Error> {
        let pid = Pid::from_raw(self.owner.child.id() as i32).ok_or("the other process has no id")?;
        Ok(kill_process(pid, signal)?)
    }
}

/// Posts a request and waits for its end, which has to be a success.
pub fn run(request: &Request) -> Result<(), Error> {
    let (sender, receiver) = mpsc::sync_channel(1);
    request.post(move |end| drop(sender.send(end)))?;
    match receiver.recv()? {
        forebay_net::End::Done { bytes } if bytes == request.bytes() => Ok(()),
        end => Err(format!("the transfer ended as {end:?}").into()),
    }
}

/// Has each request run by a thread of its own, all begun at once, and says how long it took until
/// the last had ended.
pub fn run_all(requests: &[Request]) -> Result<Duration, Error> {
    if let [only] = requests {
        let begin = Instant::now();
        return run(only).map(|()| begin.elapsed());
    }
    let start = Barrier::new(requests.len() + 1);
    let one = |request: &Request| {
        start.wait();
        run(request).map(|()| Instant::now())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = requests.iter().map(|request| scope.spawn(|| one(request))).collect();
        start.wait();
        let begin = Instant::now();
        let ends = threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked")?);
        let ends = ends.collect::<Result<Vec<Instant>, Error>>()?;
        Ok(ends.into_iter().max().unwrap_or(begin).duration_since(begin))
    })
}

fn select(blocks: Range<u32>) -> Select {
    Select::Indices(blocks.collect())
}

impl Owner {
    fn start(way: &Way, shape: Shape) -> Result<Owner, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench", "net-owner"]);
        command.arg("--block-bytes").arg(shape.block_bytes.to_string());
        command.arg("--blocks").arg(shape.blocks.to_string()).arg("--flows").arg(way.flows.to_string());
        command.args(way.tls.iter().flat_map(|dir| ["--tls".into(), dir.clone().into_os_string()]));
        command.arg("--segment").arg(way.segment.name());
        command.args(way.rails.iter().flat_map(|rail| ["--rail".to_owned(), rail.to_string()]));
        // Its standard output is for answers. UCX would write its warnings there.
        command.env("UCX_LOG_FILE", "stderr");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (input, output) = input.zip(output).ok_or("the other process has no pipes")?;
        Ok(Owner { child, input, output: BufReader::new(output) })
    }

    fn line(&mut self) -> Result<String, Error> {
        let mut line = String::new();
        match self.output.read_line(&mut line)? {
            0 => Err("the other process has ended".into()),
            _ => Ok(line.trim().to_owned()),
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
