//! What a node is told at its start, in TOML, and which values are allowed.
//!
//! ```
//! use forebay_node::NodeConfig;
//!
//! let config = NodeConfig::from_toml("socket = '/run/forebay/node.sock'\n[memory]\nsize = '64GiB'\n")?;
//! assert_eq!(config.memory.size, 64 << 30);
//! let wrong = NodeConfig::from_toml("socket = 'x'\n[memory]\nsize = '1KiB'\n").unwrap_err();
//! assert!(wrong.to_string().contains("memory.size is 1KiB; allowed is"));
//! # Ok::<(), forebay_node::ConfigError>(())
//! ```

mod address;
mod environment;
mod machine;
mod metrics;
mod name;
mod peers;
mod relays;
mod sizes;
mod tenants;

pub use metrics::{CollectorConfig, MetricsConfig};
pub use peers::{DirectoryConfig, PeersConfig, RailConfig};
pub use relays::{RelayGpus, RelaysConfig};
pub(crate) use sizes::{largest_chunk, segment_bytes};
pub use tenants::{QuotaConfig, TenantsConfig};

use crate::directory::StaticError;
use crate::size;
use forebay_client::protocol::request::TOKEN_BYTES_MAX;
use forebay_store::log::{PAGE_BYTES, SEGMENT_BYTES, SEGMENTS};
use forebay_store::ssd::{Check, KeysNotRead};
use forebay_store::{SLAB_BYTES_MAX, SLABS_MAX, SLOT_ALIGN_BYTES, admission::Policy};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Threads that copy, where their number is not said.
const COPY_THREADS: u16 = 2;
/// The system's addresses of Unix sockets have so much room.
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Segments of a log that nothing was said of have as many bytes at least,
const SEGMENT_BYTES_MIN: u64 = 16 << 20;
/// and all at most these.
const SEGMENT_BYTES_MAX: u64 = *SEGMENT_BYTES.end();
/// A log has so many of them at most.
const SEGMENTS_MAX: u64 = *SEGMENTS.end();

/// All that a node is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeConfig {
    /// What other nodes call it. Otherwise the host's name with a digest of the machine and the
    /// socket behind it.
    #[serde(default, deserialize_with = "name::given")]
    pub name: String,
    pub socket: PathBuf,
    /// A file with what clients have to show; its last line break does not count. Without one they
    /// show nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// What is in it.
    #[serde(skip)]
    pub token: Vec<u8>,
    /// Users that may connect, by number, beside root and the node's own.
    #[serde(default)]
    pub allow_uids: Vec<u32>,
    /// Threads that copy what comes from disk into the arena.
    #[serde(default = "or::<usize, COPY_THREADS>")]
    pub copy_threads: usize,
    pub memory: MemoryConfig,
    /// Logs below it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssd: Vec<SsdConfig>,
    /// What goes from memory to the logs.
    #[serde(default)]
    pub write_back: WriteBackPolicy,
    /// Who compares what is read from the logs with its checksums.
    #[serde(default)]
    pub ssd_check: SsdCheck,
    #[serde(default)]
    pub limits: LimitsConfig,
    #[serde(default, skip_serializing_if = "is_default")]
    pub tenants: TenantsConfig,
    /// Other nodes. Without it there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peers: Option<PeersConfig>,
    /// Where nodes find each other. Without it this node finds none, but others may find it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<DirectoryConfig>,
    /// Where the node shows itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<MetricsConfig>,
    /// GPUs that relay for engines. Without it none do, and no driver is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relays: Option<RelaysConfig>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryConfig {
    /// Its length.
    #[serde(with = "size")]
    pub size: u64,
    #[serde(default)]
    pub pages: PagesConfig,
    /// The largest chunk there may be; 0 for the largest power of two up to a 64th of the arena and
    /// 256 MiB, or a usual chunk up to a 64th.
    #[serde(default, with = "size")]
    pub largest_chunk: u64,
    /// A usual chunk, also for the tables that decide what is written to disk.
    #[serde(default = "mebibyte", with = "size")]
    pub chunk_size: u64,
    /// Whether the node starts although the machine or its control group has less memory left.
    #[serde(default)]
    pub overcommit: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PagesConfig {
    /// Of 4 KiB.
    Base,
    /// Huge where the kernel gives them.
    #[default]
    Transparent,
    /// Reserved huge pages, or else transparent ones.
    Huge,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SsdConfig {
    /// Its file or partition. A file that is not there is made.
    pub path: PathBuf,
    /// How long it is made.
    #[serde(with = "size")]
    pub size: u64,
    /// The segments it is made of; a chunk is shorter than one. 0 for such as hold the largest
    /// chunk and four usual ones, if there are 64 of them, and 16 MiB at least.
    #[serde(default, with = "size")]
    pub segment_size: u64,
    /// Whether a log is made where there is none. Without it a missing log is an error, as it is
    /// when its disk is not mounted.
    #[serde(default = "yes")]
    pub create: bool,
}

/// Which chunks are written to the logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WriteBackPolicy {
    All,
    /// Those that were used twice.
    SecondHit,
    /// Whichever of both does better on a sample of the traffic.
    #[default]
    Adaptive,
}

/// Who compares chunks that clients have read from the logs with their checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SsdCheck {
    /// The node, before it tells anybody. Whoever uses them does so again.
    #[default]
    AtRead,
    /// Only whoever uses them, as engines do in GPU memory.
    AtUse,
}

impl From<SsdCheck> for Check {
    fn from(check: SsdCheck) -> Check {
        match check {
            SsdCheck::AtRead => Check::AtRead,
            SsdCheck::AtUse => Check::AtUse,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    pub clients: usize,
    /// Connections at a time that have not said who they are, at each of the node's ports: clients'
    /// socket, peers' port, and the port for metrics. Of more the oldest gives way.
    pub unauthenticated: usize,
    /// How long a connection may take to say who it is.
    pub authentication_ms: u64,
    /// Bytes of requests that have come in part, of all clients together.
    #[serde(with = "size")]
    pub unfinished: u64,
    pub leases_per_client: usize,
    /// Slots that a client writes at a time.
    pub slots_per_client: usize,
    /// Chunks on their way into memory for a client at a time.
    pub loads_per_client: usize,
    /// Longest time that a lease lives without being renewed.
    pub lease_s: u64,
    /// How long a node that is to end waits for what clients hold.
    pub drain_s: u64,
    /// How long it then takes at most to write what waits for the logs, and to close them.
    pub close_s: u64,
}

/// Why there is no configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("{}: {error}", path.display())]
    Read { path: PathBuf, error: std::io::Error },
    /// The text is not TOML with these fields; says where, and what is allowed there.
    #[error("{0}")]
    Toml(String),
    #[error("directory.file: {0}")]
    List(#[from] StaticError),
    #[error("tenants: {0}")]
    Keys(#[from] KeysNotRead),
    #[error("{field} is {value}; allowed is {allowed}")]
    Value { field: &'static str, value: String, allowed: String },
}

impl ConfigError {
    fn value(field: &'static str, value: impl ToString, allowed: impl ToString) -> ConfigError {
        ConfigError::Value { field, value: value.to_string(), allowed: allowed.to_string() }
    }
}

impl Default for LimitsConfig {
    /// 64 clients, and as many connections that have two seconds to become one, with 64 MiB of
    /// unfinished requests; 4096 leases, 1024 slots and 1024 chunks under way each; leases of a
    /// minute; 30 seconds for the end, and 60 more to close the logs.
    fn default() -> LimitsConfig {
        LimitsConfig {
            clients: 64,
            unauthenticated: 64,
            authentication_ms: 2000,
            unfinished: 64 << 20,
            leases_per_client: 4096,
            slots_per_client: 1024,
            loads_per_client: 1024,
            lease_s: 60,
            drain_s: 30,
            close_s: 60,
        }
    }
}

impl LimitsConfig {
    /// [`lease_s`](LimitsConfig::lease_s) in microseconds.
    pub fn lease_us(&self) -> u64 {
        self.lease_s.saturating_mul(1_000_000)
    }

    /// Chunks on their way into memory for all clients at a time.
    pub fn loads(&self) -> usize {
        self.clients.saturating_mul(self.loads_per_client)
    }
}

impl From<PagesConfig> for forebay_transfer::Pages {
    fn from(pages: PagesConfig) -> forebay_transfer::Pages {
        match pages {
            PagesConfig::Base => forebay_transfer::Pages::Base,
            PagesConfig::Transparent => forebay_transfer::Pages::Transparent,
            PagesConfig::Huge => forebay_transfer::Pages::Huge,
        }
    }
}

impl WriteBackPolicy {
    /// As the store calls it.
    pub fn policy(self) -> Policy {
        match self {
            WriteBackPolicy::All => Policy::All,
            WriteBackPolicy::SecondHit => Policy::SecondHit,
            WriteBackPolicy::Adaptive => Policy::Adaptive,
        }
    }
}

impl NodeConfig {
    /// A node with this much memory, this socket, and nothing else.
    pub fn new(socket: impl Into<PathBuf>, memory_bytes: u64) -> NodeConfig {
        let socket = socket.into();
        NodeConfig {
            name: name::default(&socket),
            socket,
            token_file: None,
            token: Vec::new(),
            allow_uids: Vec::new(),
            copy_threads: COPY_THREADS.into(),
            memory: MemoryConfig {
                size: memory_bytes,
                pages: PagesConfig::default(),
                largest_chunk: 0,
                chunk_size: mebibyte(),
                overcommit: false,
            },
            ssd: Vec::new(),
            write_back: WriteBackPolicy::default(),
            ssd_check: SsdCheck::default(),
            limits: LimitsConfig::default(),
            tenants: TenantsConfig::default(),
            peers: None,
            directory: None,
            metrics: None,
            relays: None,
        }
    }

    /// Reads a file and those that it names.
    pub fn read(path: &Path) -> Result<NodeConfig, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::Read { path: path.to_owned(), error })?;
        let text = environment::expand(&text, |name| std::env::var(name).ok());
        let mut config = text.and_then(|text| NodeConfig::from_toml(&text)).map_err(|error| match error {
            ConfigError::Toml(message) => ConfigError::Toml(format!("{}: {message}", path.display())),
            other => other,
        })?;
        if let Some(path) = &config.token_file {
            config.token = read_token(path, TOKEN_BYTES_MAX)?;
        }
        if let Some(peers) = &mut config.peers {
            peers.read_files()?;
        }
        config.check_list()?;
        // Read again, and kept, by whoever starts the node.
        config.tenants.read_keys()?;
        Ok(config)
    }

    /// What a text says, if it is allowed.
    pub fn from_toml(text: &str) -> Result<NodeConfig, ConfigError> {
        let wrong = |error: toml::de::Error| ConfigError::Toml(error.to_string().trim_end().to_owned());
        let from = toml::Deserializer::parse(text).map_err(wrong)?;
        let read: Result<NodeConfig, _> = serde_path_to_error::deserialize(from);
        let mut config = read.map_err(|error| {
            let key = error.path().to_string();
            let ConfigError::Toml(why) = wrong(error.into_inner()) else { return ConfigError::Toml(key) };
            ConfigError::Toml(if key == "." { why } else { format!("{key}: {why}") })
        })?;
        if config.name.is_empty() {
            config.name = name::default(&config.socket);
        }
        config.check()?;
        Ok(config)
    }

    /// The same with every value that follows from others filled in: what a node uses that is
    /// started so.
    pub fn effective(&self) -> NodeConfig {
        let mut config = self.clone();
        let largest = largest_chunk(self);
        config.memory.largest_chunk = largest;
        // A log that is there keeps the segments it was made with.
        for ssd in config.ssd.iter_mut().filter(|ssd| !ssd.path.exists()) {
            ssd.segment_size = segment_bytes(ssd, self.memory.chunk_size, largest);
        }
        config
    }

    /// All of it, what was not said included.
    pub fn to_toml(&self) -> String {
        // A structure of tables, numbers and text always has a TOML form.
        toml::to_string_pretty(self).unwrap_or_default()
    }

    /// Whether all values are allowed, each and together. The start of a node asks this too,
    /// however it was told.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_memory()?;
        self.check_logs()?;
        self.check_limits()?;
        name::check(&self.name)?;
        socket_path("socket", &self.socket)?;
        count_in("copy_threads", self.copy_threads as u64, 1, 64)?;
        self.tenants.check(self.memory.size, self.ssd.iter().map(|ssd| ssd.size).sum())?;
        self.metrics.as_ref().map_or(Ok(()), MetricsConfig::check)?;
        self.peers.as_ref().map_or(Ok(()), PeersConfig::check)?;
        self.relays.as_ref().map_or(Ok(()), |relays| relays.check(&self.socket))?;
        self.directory.as_ref().map_or(Ok(()), |directory| directory.check(self.peers.as_ref()))
    }

    /// Whether the list of nodes can be read, and this node is who it is there.
    pub(crate) fn check_list(&self) -> Result<(), ConfigError> {
        let list = self.directory.as_ref().and_then(|directory| directory.file.as_deref());
        match (list, &self.peers) {
            (Some(list), Some(peers)) => peers::check_list(list, &self.name, peers),
            _ => Ok(()),
        }
    }

    fn check_memory(&self) -> Result<(), ConfigError> {
        let MemoryConfig { size: memory, largest_chunk, chunk_size, .. } = self.memory;
        let slab = SLOT_ALIGN_BYTES;
        size_in("memory.size", memory, 64 * slab, SLAB_BYTES_MAX * SLABS_MAX)?;
        let most = memory.min(SLAB_BYTES_MAX);
        // What is not said is allowed also where the arena is shorter than that.
        size_in("memory.chunk_size", chunk_size, 1, most.max(mebibyte()))?;
        if largest_chunk != 0 {
            let least = memory.div_ceil(SLABS_MAX).next_multiple_of(slab);
            size_in("memory.largest_chunk", largest_chunk, least, most)?;
        }
        Ok(())
    }

    fn check_logs(&self) -> Result<(), ConfigError> {
        for (nth, ssd) in self.ssd.iter().enumerate() {
            let (least, most) = match ssd.segment_size {
                0 => (SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX),
                told => {
                    size_in("ssd.segment_size", told, *SEGMENT_BYTES.start(), SEGMENT_BYTES_MAX)?;
                    whole_pages("ssd.segment_size", told)?;
                    (told, told)
                }
            };
            // Four segments, and what the log needs beside them.
            size_in("ssd.size", ssd.size, 5 * least, most * SEGMENTS_MAX)?;
            whole_pages("ssd.size", ssd.size)?;
            if self.ssd[..nth].iter().any(|other| is_same(&other.path, &ssd.path)) {
                let path = format!("{:?}", ssd.path);
                return Err(ConfigError::value("the path of two logs", path, "each log once"));
            }
        }
        count_in("ssd logs", self.ssd.len() as u64, 0, forebay_store::ssd::VOLUMES_MAX as u64)
    }

    fn check_limits(&self) -> Result<(), ConfigError> {
        let limits = &self.limits;
        count_in("limits.clients", limits.clients as u64, 1, 4096)?;
        count_in("limits.unauthenticated", limits.unauthenticated as u64, 1, 4096)?;
        count_in("limits.authentication_ms", limits.authentication_ms, 50, 60_000)?;
        size_in("limits.unfinished", limits.unfinished, 16 << 20, 1 << 40)?;
        count_in("limits.leases_per_client", limits.leases_per_client as u64, 1, 65_536)?;
        count_in("limits.slots_per_client", limits.slots_per_client as u64, 1, 65_536)?;
        count_in("limits.loads_per_client", limits.loads_per_client as u64, 1, 65_536)?;
        count_in("limits.lease_s", limits.lease_s, 1, 86_400)?;
        count_in("limits.drain_s", limits.drain_s, 0, 86_400)?;
        count_in("limits.close_s", limits.close_s, 1, 86_400)
    }
}

/// Reads a token of so many bytes at most.
fn read_token(path: &Path, bytes_max: usize) -> Result<Vec<u8>, ConfigError> {
    let failed = |error| ConfigError::Read { path: path.to_owned(), error };
    let file = File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.permissions().mode();
    if mode & 0o007 != 0 {
        let mode = format!("{:04o}", mode & 0o7777);
        tracing::warn!(path = %path.display(), mode, "every user may read a token");
    }
    let mut token = Vec::new();
    // A file without an end is as wrong as one that is too long.
    file.take(bytes_max as u64 + 2).read_to_end(&mut token).map_err(failed)?;
    if token.last() == Some(&b'\n') {
        token.pop();
    }
    count_in("the length of the token", token.len() as u64, 1, bytes_max as u64)?;
    Ok(token)
}

fn size_in(field: &'static str, bytes: u64, least: u64, most: u64) -> Result<(), ConfigError> {
    if (least..=most).contains(&bytes) {
        return Ok(());
    }
    let allowed = format!("{} to {}", size::write(least), size::write(most));
    Err(ConfigError::value(field, size::write(bytes), allowed))
}

fn whole_pages(field: &'static str, bytes: u64) -> Result<(), ConfigError> {
    let page = PAGE_BYTES as u64;
    if bytes.is_multiple_of(page) {
        return Ok(());
    }
    Err(ConfigError::value(field, size::write(bytes), format!("a multiple of {}", size::write(page))))
}

fn count_in(field: &'static str, count: u64, least: u64, most: u64) -> Result<(), ConfigError> {
    if (least..=most).contains(&count) {
        return Ok(());
    }
    Err(ConfigError::value(field, count, format!("{least} to {most}")))
}

/// What fits into an address of a Unix socket.
fn socket_path(field: &'static str, path: &Path) -> Result<(), ConfigError> {
    let bytes = path.as_os_str().as_encoded_bytes();
    if (1..=SOCKET_PATH_BYTES_MAX).contains(&bytes.len()) && !bytes.contains(&0) {
        return Ok(());
    }
    let allowed = format!("a path of 1 to {SOCKET_PATH_BYTES_MAX} bytes");
    Err(ConfigError::value(field, format!("{path:?}"), allowed))
}

/// Whether two paths lead to one file, as far as that can be told of files that may not be there.
fn is_same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    matches!((real(one), real(other)), (Ok(one), Ok(other)) if one == other)
}

fn is_default(tenants: &TenantsConfig) -> bool {
    *tenants == TenantsConfig::default()
}

/// A number that is meant where none is given.
fn or<T: From<u16>, const NUMBER: u16>() -> T {
    NUMBER.into()
}

fn yes() -> bool {
    true
}

fn mebibyte() -> u64 {
    1 << 20
}

#[cfg(test)]
mod tests;
