//! What a host gives at best: every GPU's own link at once, each fed with lots that wait behind one
//! another. Whoever copies for one GPU over all links cannot be faster.

use super::rig::Rig;
use super::way::Course;
use crate::output::Outcome;
use std::time::Instant;

/// Bytes of a lot: large enough that a link carries nothing but bytes, small enough that all GPUs
/// begin at once.
const LOT_BYTES: u64 = 4 << 20;
/// Bytes for each GPU each way.
const BYTES: u64 = 512 << 20;

/// 10^9 bytes per second of all GPUs' links together.
pub fn ceiling(rig: &Rig, course: Course) -> Outcome<f64> {
    let bytes = rig.ends.iter().map(|ends| ends.bytes()).min().unwrap_or(0).min(BYTES);
    let lot_bytes = LOT_BYTES.min(bytes);
    let begin = Instant::now();
    for at in (0..bytes / lot_bytes).map(|lot| lot * lot_bytes) {
        for ends in &rig.ends {
            let _current = ends.device.enter()?;
            for &direction in course.directions() {
                let (from, to) = ends.addresses(direction);
                // SAFETY: the ranges are the rig's, and nothing else copies now.
                unsafe { ends.stream(direction).copy(from + at, to + at, lot_bytes)? };
            }
        }
    }
    for ends in &rig.ends {
        let _current = ends.device.enter()?;
        for &direction in course.directions() {
            ends.stream(direction).synchronize()?;
        }
    }
    let wall_s = begin.elapsed().as_secs_f64();
    let lots = bytes / lot_bytes * (rig.ends.len() * course.directions().len()) as u64;
    Ok((lots * lot_bytes) as f64 / 1e9 / wall_s)
}
