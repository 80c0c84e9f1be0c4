//! Sites whose nodes know of each other by a list, and what their tests do first. Each program of
//! tests uses a part of it.
#![allow(dead_code)]

use crate::rig::*;
use forebay_node::{DirectoryConfig, NodeConfig, PeersConfig, SsdConfig, WriteBackPolicy};
use forebay_store::StoreEnd;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

static SITES: AtomicU8 = AtomicU8::new(1);

/// Sites whose nodes know of each other.
pub fn neighbours<const COUNT: usize>(names: [&str; COUNT]) -> [Site; COUNT] {
    // No two tests, and no two runs of them side by side, have the same address.
    let [low, high, ..] = std::process::id().to_le_bytes();
    let first = SITES.fetch_add(COUNT as u8, Ordering::Relaxed);
    let address = |nth: usize| SocketAddr::from(([127, low, high, first + nth as u8], 7600));
    let entry = |nth: usize| format!("[[nodes]]\nname = '{}'\naddress = '{}'\n", names[nth], address(nth));
    let list: String = (0..COUNT).map(entry).collect();
    std::array::from_fn(|nth| {
        let site = Site::new();
        let mut config = site.config();
        config.name = names[nth].into();
        config.peers = Some(PeersConfig { progress_limit_ms: 20_000, ..PeersConfig::new(address(nth)) });
        std::fs::write(site.folder.path().join("nodes.toml"), &list).unwrap();
        config.directory = Some(DirectoryConfig::of_file(site.folder.path().join("nodes.toml")));
        write(&site, &config);
        site
    })
}

/// Two sites whose nodes know of each other.
pub struct Pair {
    pub left: Site,
    pub right: Site,
}

impl Pair {
    pub fn new() -> Pair {
        let [left, right] = neighbours(["left", "right"]);
        Pair { left, right }
    }
}

pub fn write(site: &Site, config: &NodeConfig) {
    std::fs::write(site.folder.path().join("node.toml"), config.to_toml()).unwrap();
}

pub fn store_all(peer: &Peer) {
    assert!((0..CHUNKS).all(|number| peer.store(number) == StoreEnd::Stored { bytes: CHUNK_BYTES }));
}

/// The next node of this site has all chunks on its disk, and none in memory.
pub fn store_all_on_disk(site: &Site) {
    let mut config = site.config();
    config.ssd = vec![SsdConfig { path: log(site), size: 16 << 20, segment_size: 1 << 20, create: true }];
    config.write_back = WriteBackPolicy::All;
    write(site, &config);
    let first = site.node();
    store_all(&site.peer());
    first.drain(Duration::from_secs(60)).unwrap();
}

pub fn log(site: &Site) -> PathBuf {
    site.folder.path().join("log")
}
