//! What a cache counts, by name.

use crate::cost_model::Tier;
use crate::load::TierBytes;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident,)+) => {
        /// Counters, written by all threads.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[doc = $doc])* pub $name: AtomicU64,)+
        }

        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct Stats {
            $($(#[doc = $doc])* pub $name: u64,)+
        }

        impl Counters {
            pub fn read(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }

        impl Stats {
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)+]
            }
        }
    };
}

counters! {
    loads,
    /// Loads that ended with fewer tokens than asked for.
    loads_short,
    loads_under_way,
    /// Bytes that were copied into pages.
    bytes_loaded,
    /// Of those, what was in the node's memory when the load began.
    bytes_memory,
    /// Of those, what was on the node's disk.
    bytes_disk,
    /// Of those, what other nodes had.
    bytes_peer,
    /// Bytes that came over links of GPUs that the node has.
    bytes_relayed,
    /// Of those GPUs, how many relay now.
    relays,
    /// How often the node's relays were lost.
    relays_lost,
    /// Microseconds from the beginning to the end of loads, added up.
    load_us,
    /// Chunks of loads that were in the node's memory.
    chunks_memory,
    /// Chunks of loads that were on the node's disk.
    chunks_disk,
    /// Chunks of loads that other nodes had.
    chunks_peer,
    /// Chunks with bytes that were not those that were stored.
    chunks_corrupt,
    /// Layers of ended loads that an engine had to wait for.
    layers_late,
    /// Microseconds that engines waited for layers of ended loads.
    bubble_us,
    /// Loads straight from another engine's pages.
    reads,
    /// Of those, what brought nothing.
    reads_failed,
    /// Of those, what brought other bytes than the other engine has.
    reads_corrupt,
    bytes_read,
    /// Microseconds from the beginning to the end of these loads, added up.
    read_us,
    /// Chunks that were given to be stored.
    stores,
    /// Of those, what the node took or had.
    stores_done,
    /// Of those, what was not stored because too many bytes were on their way.
    stores_refused,
    /// Of those, what was not stored for any other reason.
    stores_failed,
    bytes_stored,
    /// Bytes of stores that are on their way.
    bytes_storing,
}

impl Counters {
    /// Bytes were copied into pages.
    pub fn add_loaded(&self, bytes: &TierBytes) {
        add(&self.bytes_loaded, bytes.sum());
        for (tier, bytes) in bytes.iter() {
            let counter = match tier {
                Tier::Memory => &self.bytes_memory,
                Tier::Disk => &self.bytes_disk,
                Tier::Peer => &self.bytes_peer,
            };
            add(counter, bytes);
        }
    }
}

pub fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

pub fn take(counter: &AtomicU64, by: u64) {
    counter.fetch_sub(by, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_counted_together_and_where_they_were() {
        let (counters, mut bytes) = (Counters::default(), TierBytes::default());
        [(Tier::Memory, 3), (Tier::Disk, 50), (Tier::Peer, 700)]
            .into_iter()
            .for_each(|(tier, count)| bytes.add(tier, count));
        counters.add_loaded(&bytes);
        counters.add_loaded(&bytes);
        let Stats { bytes_loaded, bytes_memory, bytes_disk, bytes_peer, .. } = counters.read();
        assert_eq!((bytes_loaded, bytes_memory, bytes_disk, bytes_peer), (1506, 6, 100, 1400));
    }
}
