//! Fills a log with chunks whose bytes anyone can compute, and says which are durable.
//! `tests/test_format.py` reads such logs with a reader of its own.
//!
//! ```text
//! write_log FILE CHUNKS [SEED]
//! ```
//!
//! makes FILE a log of 24 MiB, stores chunks 0, 1, .. and prints `NUMBER ID TENANT PARENT LENGTHS`
//! for each as soon as it would survive a crash. Old chunks give way to new ones when the log is
//! full. With a CHUNKS of 0 it goes on until it is killed; otherwise it closes the log.

use forebay_kv::ChunkId;
use forebay_store::TenantId;
use forebay_store::log::{DiskTierConfig, Layout, LogUuid, Medium, Offline, empty_log};
use std::error::Error;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

const FILE_BYTES: u64 = 24 << 20;
const SEGMENT_BYTES: u64 = 2 << 20;

/// Chunks between two commits.
const BATCH: u64 = 10;

/// A file, through the page cache: some temporary directories cannot do direct I/O.
struct Plain(File);

impl Medium for Plain {
    fn bytes(&self) -> u64 {
        FILE_BYTES
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn withdraw(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.write_at(offset, &vec![0; bytes as usize])
    }

    fn restore(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
        Ok(())
    }
}

struct Chunk {
    number: u64,
    id: ChunkId,
    tenant: TenantId,
    parent: Option<ChunkId>,
    layers: Vec<Vec<u8>>,
}

fn id(number: u64, seed: u8) -> ChunkId {
    let mut bytes = [seed; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    ChunkId::from_bytes(bytes)
}

/// Chunk `number`: one of five shapes, every third chunk with a parent. Byte i of layer l is n + 7
/// l + i * (2 s + 1), mod 251.
fn chunk(number: u64, seed: u8) -> Chunk {
    let lengths: &[u64] = match (number % 4, number % 32) {
        (0, _) => &[20_000],
        (1, _) => &[100, 4096, 9000],
        (2, _) => &[1],
        // Two extents.
        (_, 7) => &[520_000, 7000, 530_000],
        _ => &[2500; 40],
    };
    let step = 2 * u64::from(seed) + 1;
    let byte = |layer: u64, at: u64| ((number + 7 * layer + at * step) % 251) as u8;
    let layer = |(layer, bytes): (usize, &u64)| (0..*bytes).map(|at| byte(layer as u64, at)).collect();
    let parent = (number.is_multiple_of(3) && number > 0).then(|| id(number - 1, seed));
    let layers = lengths.iter().enumerate().map(layer).collect();
    Chunk { number, id: id(number, seed), tenant: TenantId(((number + 1) / 3 % 5) as u16), parent, layers }
}

fn say(chunk: &Chunk) -> io::Result<()> {
    let hex = |id: &ChunkId| id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let parent = chunk.parent.as_ref().map_or("-".to_owned(), hex);
    let lengths: Vec<String> = chunk.layers.iter().map(|layer| layer.len().to_string()).collect();
    writeln!(
        io::stdout(),
        "{} {} {} {parent} {}",
        chunk.number,
        hex(&chunk.id),
        chunk.tenant.0,
        lengths.join(",")
    )
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, chunks, rest @ ..] = arguments.as_slice() else {
        return Err("write_log FILE CHUNKS [SEED]".into());
    };
    let seed: u8 = rest.first().map_or(Ok(0), |seed| seed.parse())?;
    let last = Some(chunks.parse::<u64>()?).filter(|chunks| *chunks > 0).unwrap_or(u64::MAX);
    let medium = Plain(File::options().read(true).write(true).create(true).truncate(true).open(path)?);
    medium.0.set_len(FILE_BYTES)?;
    for (offset, page) in empty_log(LogUuid([seed; 16]), Layout::new(FILE_BYTES, SEGMENT_BYTES)?) {
        medium.write_at(offset, &page)?;
    }
    let (mut log, _) = Offline::open(&DiskTierConfig::default(), &medium)?;
    let mut not_durable = Vec::new();
    for number in 0..last {
        let chunk = chunk(number, seed);
        let parent = chunk.parent.as_ref().filter(|parent| log.tier().contains(parent));
        log.store(chunk.tenant, &chunk.id, parent, &chunk.layers)?;
        not_durable.push(chunk);
        if (number + 1).is_multiple_of(BATCH) {
            log.settle()?;
            not_durable.drain(..).try_for_each(|chunk| say(&chunk))?;
        }
    }
    log.close()?;
    Ok(not_durable.iter().try_for_each(say)?)
}
