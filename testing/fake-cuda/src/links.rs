//! Virtual links: how long bytes take.
//!
//! A link serves one piece after another. A piece that crosses several links (a GPU's PCIe link and
//! the host's memory, say) ends when the slowest of them is done with it.

use crate::stats::Way;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How far a busy link may lag behind its own schedule and still catch up: sleeps last longer than
/// asked for.
const CATCH_UP: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Link {
    HostToDevice(usize),
    DeviceToHost(usize),
    /// What one GPU sends over NVLink.
    Peer(usize),
    HostReads,
    HostWrites,
}

/// All links of the machine.
#[derive(Default)]
pub struct Links {
    /// GB/s by the names of the setting. Not there: no limit.
    rates: HashMap<String, f64>,
    free_at: HashMap<Link, Instant>,
}

impl Links {
    /// Sets rates, as `h2d=2.0,d2h=2.0,p2p=12,host_h2d=6,host_d2h=6,h2d.1=0.5`. 0: no limit.
    pub fn set(&mut self, rates: &str) -> Result<(), String> {
        for part in rates.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, rate) =
                part.split_once('=').ok_or_else(|| format!("rate {part:?}: want NAME=GB_PER_S"))?;
            let base = name.split('.').next().unwrap_or_default();
            if !["h2d", "d2h", "p2p", "host_h2d", "host_d2h"].contains(&base) {
                return Err(format!(
                    "rate {name:?}: want h2d, d2h, p2p (or .GPU of them), host_h2d or host_d2h"
                ));
            }
            let rate: f64 =
                rate.parse().map_err(|_| format!("rate {name}: {rate:?} is no number of GB/s"))?;
            self.rates.insert(name.into(), rate);
        }
        Ok(())
    }

    /// When a piece that starts now will have gone over `ways`. `busy`: the same engine has just
    /// moved another piece, so the links need not be idle between the two.
    pub fn reserve(&mut self, ways: &[Way], bytes: u64, now: Instant, busy: bool) -> Option<Instant> {
        let links: Vec<(Link, f64)> = ways.iter().flat_map(|&way| self.crossed(way)).collect();
        let earliest = if busy { now.checked_sub(CATCH_UP).unwrap_or(now) } else { now };
        let ends = links.into_iter().map(|(link, gb_per_s)| {
            let free_at = self.free_at.entry(link).or_insert(earliest);
            *free_at = (*free_at).max(earliest) + Duration::from_secs_f64(bytes as f64 / (gb_per_s * 1e9));
            *free_at
        });
        ends.max()
    }

    /// The links with a limit that bytes on `way` cross.
    fn crossed(&self, way: Way) -> Vec<(Link, f64)> {
        let links: &[(Link, &str, Option<usize>)] = match way {
            Way::HostToDevice(gpu) => {
                &[(Link::HostToDevice(gpu), "h2d", Some(gpu)), (Link::HostReads, "host_h2d", None)]
            }
            Way::DeviceToHost(gpu) => {
                &[(Link::DeviceToHost(gpu), "d2h", Some(gpu)), (Link::HostWrites, "host_d2h", None)]
            }
            Way::Peer(from, _) => &[(Link::Peer(from), "p2p", Some(from))],
            Way::Local(_) | Way::Host => &[],
        };
        links.iter().filter_map(|&(link, name, gpu)| Some((link, self.rate(name, gpu)?))).collect()
    }

    fn rate(&self, name: &str, gpu: Option<usize>) -> Option<f64> {
        let own = gpu.and_then(|gpu| self.rates.get(&format!("{name}.{gpu}")));
        own.or_else(|| self.rates.get(name)).copied().filter(|&rate| rate > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_link_on_the_way_says_how_long_a_piece_takes() {
        let mut links = Links::default();
        links.set("h2d=2,h2d.1=1,host_h2d=2").unwrap();
        let now = Instant::now();
        let own = links.reserve(&[Way::HostToDevice(0)], 2_000_000, now, false).unwrap();
        assert_eq!(own - now, Duration::from_millis(1));
        let shared = links.reserve(&[Way::HostToDevice(1)], 2_000_000, now, false).unwrap();
        assert_eq!(
            shared - now,
            Duration::from_millis(2),
            "its own link takes 2 ms, the host is busy for 1 ms more"
        );
        assert_eq!(links.reserve(&[Way::Local(0)], 1 << 40, now, false), None);
    }

    #[test]
    fn a_rate_that_makes_no_sense_is_refused_by_name() {
        let mut links = Links::default();
        assert!(links.set("pcie=3").unwrap_err().contains("pcie"));
        assert!(links.set("h2d=fast").unwrap_err().contains("fast"));
    }
}
