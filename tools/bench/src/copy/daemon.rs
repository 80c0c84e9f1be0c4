//! Copies over relays that another process owns: an engine that has one GPU, attached to a node
//! that has them all. The engine is this process; the node is another one, since that is what is
//! measured. Host memory is a file that both have mapped. This file knows the two processes; how
//! relays work is `forebay_cuda::remote`'s.

use super::bytes::{fill, first_wrong};
use super::ceiling::ceiling;
use super::other::Other;
use super::rig::Rig;
use super::size::Size;
use super::way::{Course, Way};
use crate::output::{CommandResult, Outcome};
use crate::timing::{Cost, cost, median};
use forebay_cuda::device::{DeviceMemory, Stream};
use forebay_cuda::driver::Driver;
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::pinned::{PinnedBuffer, PinnedPool, PoolConfig};
use forebay_cuda::remote::{NodeRelays, Relays, RelaysAt, RelaysConfig, Status};
use forebay_cuda::{Copier, CopierOptions};
use forebay_results::{Peer, Row};
use forebay_transfer::Backing;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes of a copy, if the rig has as many.
const BYTES_MAX: u64 = 1 << 30;
/// How long the other process may take to relay: it pins what is shared.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The GPU that the engine has.
const GPU: u16 = 0;

/// Arguments of the other process.
#[derive(clap::Args)]
pub struct NodeArgs {
    /// Where engines attach
    socket: PathBuf,
}

/// The other process: relays until its standard input ends.
pub fn run_node(args: NodeArgs) -> CommandResult {
    let (gpus, uids, token) = (None, Vec::new(), Vec::new());
    let config = RelaysConfig { socket: args.socket, gpus, token, uids, memory_limit_bytes: 4 * BYTES_MAX };
    let relays = Relays::start(Driver::load()?, config)?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    drop(relays);
    Ok(())
}

/// Rows of copies over another process's relays; their peer is the same within one process.
pub fn rows(rig: &Rig, runs: u32) -> Outcome<Vec<Row>> {
    let folder = tempfile::tempdir()?;
    let _node = Other::start("copy-node", &folder.path().join("relays.sock"), &[])?;
    let bytes = rig.ends[usize::from(GPU)].bytes().min(BYTES_MAX);
    let engine = Engine::start(rig.driver(), &folder.path().join("relays.sock"), bytes)?;
    let mut rows = Vec::new();
    for course in [Course::H2d, Course::D2h] {
        let direction = course.directions()[0];
        let (mut rates, mut own, mut ceilings, mut cpu_s) = (Vec::new(), Vec::new(), Vec::new(), 0.0);
        for _ in 0..runs {
            let jobs = [rig.whole(usize::from(GPU), direction, bytes)];
            own.push(rig.timed(Way::Best, &jobs)?.again.gb_per_s(bytes));
            ceilings.push(ceiling(rig, course)?);
            let cost = engine.copy(direction)?;
            rates.push(cost.gb_per_s(bytes));
            cpu_s += cost.cpu_s;
        }
        let name = format!("copy.{}.daemon.{}", course.name(), Size(bytes));
        let mut row = Row::of_runs(name, "GB/s", &rates).with_ceiling(median(&ceilings));
        row.cpu_s_per_gb = Some(cpu_s / (bytes as f64 / 1e9 * f64::from(runs)));
        let version = env!("CARGO_PKG_VERSION").into();
        row.peer = Some(Peer { name: "in process".into(), version, value: median(&own) });
        rows.push(row);
    }
    Ok(rows)
}

/// This process as an engine with one GPU.
struct Engine {
    copier: Copier,
    /// Host memory, read and written, and memory of the GPU.
    ends: [PinnedBuffer; 2],
    memory: DeviceMemory,
}

impl Engine {
    fn start(driver: &'static Driver, socket: &Path, bytes: u64) -> Outcome<Engine> {
        let relays = NodeRelays::At(RelaysAt { socket: socket.to_owned(), token: String::new() });
        let options = CopierOptions { devices: Some(vec![GPU]), relays, ..CopierOptions::default() };
        let copier = Copier::with_driver(driver, &options)?;
        let device = copier.devices().next().cloned().ok_or("no GPU")?;
        let pool = PinnedPool::new(&device, PoolConfig::shared(4 * BYTES_MAX));
        let ends = [pool.take(bytes)?, pool.take(bytes)?];
        // SAFETY: nobody else has the memory yet.
        fill(unsafe { bytes_of(&ends[0]) }, 77);
        let memory = DeviceMemory::new(&device, bytes)?;
        let attachment = copier.relays(GPU).ok_or("the copier uses no relays")?;
        match attachment.wait(TIMEOUT, |status| matches!(status, Status::Attached { .. })) {
            Status::Attached { .. } => {}
            Status::Detached { reason } => return Err(format!("the relays do not attach: {reason}").into()),
        }
        let begin = Instant::now();
        while attachment.shared_bytes() < 2 * bytes {
            if begin.elapsed() > TIMEOUT {
                return Err(format!("the relays have not mapped host memory after {TIMEOUT:?}").into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Engine { copier, ends, memory })
    }

    /// Copies twice, times the second one and looks at every byte.
    fn copy(&self, direction: Direction) -> Outcome<Cost> {
        let bytes = self.memory.bytes();
        let (host, device) = (self.ends[direction as usize].as_ptr() as u64, self.memory.address());
        let (from, to) = match direction {
            Direction::HostToDevice => (host, device),
            Direction::DeviceToHost => (device, host),
        };
        // SAFETY: nothing copies now.
        unsafe { bytes_of(&self.ends[1]) }.fill(0);
        // SAFETY: both ranges are the engine's, which does nothing else with them.
        let copy = || unsafe { self.copier.copy_and_wait(GPU, direction, &[Piece { from, to, bytes }]) };
        copy()?;
        let cost = cost(|| Ok(copy()?))?;
        self.check(direction)?;
        Ok(cost)
    }

    fn check(&self, direction: Direction) -> Outcome<()> {
        if direction == Direction::HostToDevice {
            let stream = Stream::new(self.memory.device())?;
            let _current = self.memory.device().enter()?;
            // SAFETY: both ranges are the engine's and as long as each other; nothing else uses
            // them now.
            unsafe { stream.copy(self.memory.address(), self.ends[1].as_ptr() as u64, self.memory.bytes())? };
            stream.synchronize()?;
        }
        let whole = Piece { from: 0, to: 0, bytes: self.memory.bytes() };
        // SAFETY: nothing copies now.
        match first_wrong(unsafe { bytes_of(&self.ends[0]) }, unsafe { bytes_of(&self.ends[1]) }, &[whole]) {
            None => Ok(()),
            Some(piece) => Err(format!("wrong bytes over another process's relays: {piece:?}").into()),
        }
    }
}

/// The bytes of a buffer.
///
/// # Safety
///
/// Nothing writes them in the meantime, and nobody reads them while they are written through this.
#[allow(clippy::mut_from_ref)]
unsafe fn bytes_of(buffer: &PinnedBuffer) -> &mut [u8] {
    // SAFETY: the buffer has these bytes; the rest is this function's contract.
    unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr(), buffer.len()) }
}
