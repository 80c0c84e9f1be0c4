//! `forebay bench copy --host`: scattered copies in host memory through the whole mover, from
//! submission to end, beside what the machine's memory gives to plain memcpy.
//!
//! Every run copies a GiB three times, one after another so that all see the same minute of the
//! machine: as plain memcpy in whole parts, one per thread, which is the ceiling; as plain memcpy
//! block by block, which is the peer; and as one transfer of all blocks. Blocks lie in different
//! random orders at the source and at the target, so that none can be merged.

use crate::output::Outcome;
use crate::timing::{Cost, cost};
use forebay_results::{Peer, Row};
use forebay_transfer::HostLink;
use forebay_transfer::{
    Class, End, HostBuffer, Limits, LinkSpec, MoverHandle, MoverThread, PathSpec, Place, RegionId, Span,
    SpanPair, Transfer,
};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use std::sync::Arc;
use std::time::Instant;

const GIB: usize = 1 << 30;
const HOST: Place = Place::Host(0);

pub fn rows(runs: u32, threads: u32) -> Outcome<Vec<Row>> {
    let bench = CopyBench::new(threads as usize)?;
    let sizes = [("26kib", 26 << 10), ("256kib", 256 << 10), ("1gib", GIB)];
    sizes.into_iter().map(|(name, block_bytes)| bench.measure(name, block_bytes, runs)).collect()
}

/// The same bytes twice: for memcpy, which needs slices, and registered with the mover.
struct CopyBench {
    threads: usize,
    plain_source: Vec<u8>,
    target: Arc<HostBuffer>,
    from: RegionId,
    to: RegionId,
    handle: MoverHandle,
    _mover: MoverThread,
}

/// A block's offset at the source and at the target.
type Block = (usize, usize);

impl CopyBench {
    fn new(threads: usize) -> Outcome<CopyBench> {
        let plain_source: Vec<u8> = (0..GIB as u64 / 8)
            .flat_map(|word| (word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes())
            .collect();
        let (source, target) = (Arc::new(HostBuffer::new(GIB)), Arc::new(HostBuffer::new(GIB)));
        source.write(0, &plain_source);
        target.write(0, &plain_source);
        let mover = MoverThread::spawn(Limits::default())?;
        let handle = mover.handle();
        let link = handle.add_link(LinkSpec::new("host", 4, 64 << 20), Box::new(HostLink::new(threads)?))?;
        handle.add_path(PathSpec::direct(HOST, HOST, link))??;
        let (from, to) = (handle.register(HOST, source)?, handle.register(HOST, target.clone())?);
        Ok(CopyBench { threads, plain_source, target, from, to, handle, _mover: mover })
    }

    fn measure(&self, name: &str, block_bytes: usize, runs: u32) -> Outcome<Row> {
        let blocks = scattered(block_bytes);
        let total = (blocks.len() * block_bytes) as f64 / 1e9;
        let whole = GIB / self.threads;
        let parts: Vec<Block> = (0..self.threads).map(|part| (part * whole, part * whole)).collect();
        self.check(&blocks, block_bytes)?;
        let (mut ceilings, mut peers, mut links, mut cpu_s) = (Vec::new(), Vec::new(), Vec::new(), 0.0);
        for _ in 0..runs {
            ceilings.push((parts.len() * whole) as f64 / 1e9 / self.memcpy(&parts, whole));
            peers.push(total / self.memcpy(&blocks, block_bytes));
            let cost = self.transfer(&blocks, block_bytes)?;
            links.push(total / cost.wall_s);
            cpu_s += cost.cpu_s;
        }
        let ceiling = Row::of_runs("ceiling", "GB/s", &ceilings).value;
        let peer = Row::of_runs("peer", "GB/s", &peers).value;
        let mut row = Row::of_runs(format!("copy.host.{name}"), "GB/s", &links).with_ceiling(ceiling);
        row.cpu_s_per_gb = Some(cpu_s / (total * f64::from(runs)));
        if blocks.len() >= self.threads {
            row.peer = Some(Peer { name: "memcpy".into(), version: libc_version(), value: peer });
        }
        Ok(row)
    }

    /// Seconds that plain memcpy takes for the blocks, divided among the threads.
    fn memcpy(&self, blocks: &[Block], block_bytes: usize) -> f64 {
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for share in blocks.chunks(blocks.len().div_ceil(self.threads)) {
                scope.spawn(move || {
                    for (from, to) in share {
                        self.target.write(*to, &self.plain_source[*from..from + block_bytes]);
                    }
                });
            }
        });
        begin.elapsed().as_secs_f64()
    }

    fn transfer(&self, blocks: &[Block], block_bytes: usize) -> Outcome<Cost> {
        let len = block_bytes as u64;
        let pair = |(from, to): &Block| {
            SpanPair::new(Span::new(self.from, *from as u64, len), Span::new(self.to, *to as u64, len))
        };
        let transfer = Transfer::new(blocks.iter().map(pair).collect(), Class::Demand);
        cost(|| match self.handle.run(transfer)? {
            End::Done { bytes } if bytes == blocks.len() as u64 * len => Ok(()),
            end => Err(format!("the copy ended as {end:?}").into()),
        })
    }

    /// Copies once and looks at every byte; also warms everything up.
    fn check(&self, blocks: &[Block], block_bytes: usize) -> Outcome<()> {
        self.target.write(0, &vec![0; GIB]);
        self.transfer(blocks, block_bytes)?;
        let mut copied = vec![0; block_bytes];
        for (from, to) in blocks {
            self.target.read(*to, &mut copied);
            if copied != self.plain_source[*from..from + block_bytes] {
                return Err(format!("wrong bytes in the block copied from {from} to {to}").into());
            }
        }
        Ok(())
    }
}

/// As many blocks as fit into a GiB, in one random order at the source and another at the target.
fn scattered(block_bytes: usize) -> Vec<Block> {
    let mut random = StdRng::seed_from_u64(block_bytes as u64);
    let mut order = || {
        let mut offsets: Vec<usize> = (0..GIB / block_bytes).map(|block| block * block_bytes).collect();
        offsets.shuffle(&mut random);
        offsets
    };
    let sources = order();
    sources.into_iter().zip(order()).collect()
}

/// The C library that memcpy comes from, as its own tool names it.
fn libc_version() -> String {
    std::process::Command::new("getconf")
        .arg("GNU_LIBC_VERSION")
        .output()
        .ok()
        .filter(|output| output.status.success())
        .map_or_else(|| "unknown".into(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
