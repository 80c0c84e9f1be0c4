//! The SSD below the demo's memory tier: a log for each policy in one directory, so that each
//! policy finds what it left there and nothing of the others.

use super::shape::{CHUNK_TOKENS, HostShape, SsdShape};
use forebay_results::output::Error;
use forebay_store::WriteBackConfig;
use forebay_store::admission::Policy;
use forebay_store::disk::DiskOptions;
use forebay_store::ssd::{Existing, Ssd, SsdOptions, Volume, init};
use forebay_transfer::{MoverHandle, Place};

/// Length of a segment: some 80 chunks of the demo.
pub const SEGMENT_BYTES: u64 = 4 << 20;

impl SsdShape {
    /// Opens the log of an arm, and makes it first if it is not there.
    pub fn open(&self, arm: &str, mover: &MoverHandle, host: Place) -> Result<Ssd, Error> {
        let named = |error: &dyn std::fmt::Display| format!("{}: {error}", self.directory.display());
        std::fs::create_dir_all(&self.directory).map_err(|error| named(&error))?;
        let path = self.directory.join(format!("{arm}.log"));
        if !path.exists() {
            init(&path, self.bytes, SEGMENT_BYTES, Existing::Keep)?;
        }
        let volume = Volume::open(&path, DiskOptions::default())?;
        Ok(Ssd::open(mover, host, vec![volume], SsdOptions::default())?)
    }

    /// Everything that memory takes in is written.
    pub fn write_back(&self, host: &HostShape) -> WriteBackConfig {
        let bytes_per_token = host.bytes_per_token();
        let memory_bytes = host.memory_tokens * bytes_per_token;
        WriteBackConfig::new(Policy::All, memory_bytes, self.bytes, CHUNK_TOKENS as u64 * bytes_per_token)
    }
}
