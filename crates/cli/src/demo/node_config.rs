//! What the demo's nodes read: a configuration each when they start, and one list of all of them.

use super::spec::{CHUNK_TOKENS, ClusterSpec, node_name};
use crate::cmd::engine::SEGMENT_BYTES;
use forebay_node::{DirectoryConfig, NodeConfig, PagesConfig, PeersConfig, SsdConfig, WriteBackPolicy};
use forebay_router::Policy;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

/// Memory comes in whole slabs, and a node needs a few to begin with.
const MEMORY_UNIT_BYTES: u64 = 1 << 20;
const MEMORY_BYTES_MIN: u64 = 8 << 20;

/// Where a node's engines find it.
pub fn socket(directory: &Path, node: usize) -> PathBuf {
    directory.join(format!("{}.sock", node_name(node)))
}

/// Writes the configuration of a node that shares the memory and the SSDs of `cluster` evenly with
/// the others, takes any free port for them, and looks for them in the list.
pub fn write(directory: &Path, node: usize, cluster: &ClusterSpec, policy: Policy) -> io::Result<PathBuf> {
    let (name, host, nodes) = (node_name(node), &cluster.host, u64::from(cluster.nodes));
    let chunk_bytes = CHUNK_TOKENS as u64 * cluster.bytes_per_token();
    let memory_bytes = (host.memory_tokens * cluster.bytes_per_token() / nodes).max(MEMORY_BYTES_MIN);
    let memory_bytes = memory_bytes.next_multiple_of(MEMORY_UNIT_BYTES);
    let mut config = NodeConfig::new(socket(directory, node), memory_bytes);
    config.name.clone_from(&name);
    config.peers = Some(PeersConfig::new((Ipv4Addr::LOCALHOST, 0).into()));
    config.directory = Some(DirectoryConfig::of_file(list(directory)));
    config.memory.pages = PagesConfig::Base;
    config.memory.chunk_size = chunk_bytes;
    config.write_back = WriteBackPolicy::All;
    if let Some(ssd) = &host.ssd {
        let named = |error| io::Error::other(format!("{}: {error}", ssd.directory.display()));
        std::fs::create_dir_all(&ssd.directory).map_err(named)?;
        let path = ssd.directory.join(format!("{}-{name}.log", policy.name()));
        let segment_size = SEGMENT_BYTES.max((4 * chunk_bytes).next_multiple_of(MEMORY_UNIT_BYTES));
        config.ssd.push(SsdConfig { path, size: ssd.bytes / nodes, segment_size, create: true });
    }
    let path = directory.join(format!("{name}.toml"));
    std::fs::write(&path, config.to_toml())?;
    Ok(path)
}

/// Writes, at once, where the nodes are. Nodes that run read it again.
pub fn write_list(directory: &Path, addresses: &[SocketAddr]) -> io::Result<()> {
    let entry =
        |(node, address)| format!("[[nodes]]\nname = {:?}\naddress = \"{address}\"\n", node_name(node));
    let entries: String = addresses.iter().enumerate().map(entry).collect();
    let draft = directory.join("nodes.draft");
    std::fs::write(&draft, entries)?;
    std::fs::rename(&draft, list(directory))
}

fn list(directory: &Path) -> PathBuf {
    directory.join("nodes.toml")
}
