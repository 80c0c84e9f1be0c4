//! What all handlers of the API share.

use crate::device::DeviceMemory;
use crate::hand_over::Offers;
use crate::job::Intake;
use crate::stats::Stats;
use forebay_transfer::lock::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;

#[derive(Debug)]
pub struct App {
    /// Where jobs go.
    pub intake: Arc<Intake>,
    /// Served name of the model.
    pub model: String,
    pub vocab: u32,
    /// Tokens per streamed chunk after the first.
    pub stream_interval: usize,
    pub block_tokens: usize,
    /// What the engine counts, written by its thread.
    pub stats: Arc<Mutex<Stats>>,
    /// Prompts that are kept for other engines, in `device`.
    pub offers: Arc<Offers>,
    pub device: DeviceMemory,
    /// Where the API listens.
    pub address: SocketAddr,
    /// Engines of another identity have KV of another kind.
    pub identity: String,
}
