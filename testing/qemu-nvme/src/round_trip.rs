//! A round trip: random data are written in one shape and read in another, and all memory around
//! them must stay as it was.

use crate::shape::random_bytes;
use crate::{Area, Drive, GuestMemory, Queue, Shape};
use forebay_ring::nvme::{Command, Format, Outcome};
use rand::RngExt;
use rand::rngs::StdRng;
use std::ops::Range;

/// What is around data in memory.
const AROUND: u8 = 0xa5;

/// Where a round trip puts its data.
#[derive(Debug, Clone)]
pub struct Place {
    /// Guest memory.
    pub area: Area,
    /// Blocks of the drive that nobody else uses.
    pub blocks: Range<u64>,
    /// Bytes of a block.
    pub block_bytes: u64,
}

impl Place {
    /// Memory of its own, and these blocks.
    pub fn new(drive: &mut Drive, blocks: Range<u64>) -> Place {
        let area = Area { data: drive.take(Area::DATA_BYTES), lists: drive.take(Area::LIST_BYTES) };
        Place { area, blocks, block_bytes: drive.namespace.block_bytes }
    }
}

/// Writes and reads once: two commands. Says what was wrong.
pub fn round_trip(
    queue: &mut Queue<()>,
    rng: &mut StdRng,
    place: &Place,
    formats: [Format; 2],
) -> Result<(), String> {
    // Short ones are as many as long ones, which take most of the time.
    let most = if rng.random() { Area::LONGEST } else { Area::LONGEST / 16 } / place.block_bytes;
    let blocks = rng.random_range(1..=most);
    let first = rng.random_range(place.blocks.start..=place.blocks.end - blocks);
    let data = random_bytes(rng, blocks * place.block_bytes);
    let [write, read] = formats.map(|format| Shape::random(rng, format, data.len() as u64, place.area));

    let mut image = vec![AROUND; Area::span(data.len() as u64) as usize];
    write.scatter(&data, &mut image, place.area.data);
    queue.memory().write(place.area.data, &image);
    let pointer = write.encode(queue.memory());
    ends_well(queue, &Drive::write(first, blocks as u32, pointer))?;

    queue.memory().fill(place.area.data, image.len(), AROUND);
    let pointer = read.encode(queue.memory());
    ends_well(queue, &Drive::read(first, blocks as u32, pointer))?;
    image.fill(AROUND);
    read.scatter(&data, &mut image, place.area.data);
    match first_difference(queue.memory(), place.area.data, &image) {
        None => Ok(()),
        Some(at) => {
            let (write, read) = (write.kind(), read.kind());
            Err(format!("byte {at} of the area is wrong: written as {write}, read as {read}"))
        }
    }
}

fn ends_well(queue: &mut Queue<()>, command: &Command) -> Result<(), String> {
    queue.submit(command, ()).map_err(|refused| refused.reason.to_string())?;
    queue.ring();
    match queue.wait().outcome {
        Outcome::Done(_) => Ok(()),
        other => Err(format!("{command:?} ended with {other:?}")),
    }
}

fn first_difference(memory: &GuestMemory, address: u64, wanted: &[u8]) -> Option<usize> {
    let found = memory.copy(address, wanted.len());
    if found == wanted {
        return None;
    }
    found.iter().zip(wanted).position(|(found, wanted)| found != wanted)
}
