//! A log that one thread has to itself: a disk tier driven with blocking I/O, for tools and tests.
//! This file carries out what the tier asks for, one thing after another. Time stands still
//! meanwhile.

use super::commit::Commit;
use super::format::{ChunkCopy, NotOpened};
use super::medium::Medium;
use super::reclaim::{Relocation, RelocationEnd};
use super::recovery::Recovered;
use super::tier::{DiskBegun, DiskTier, DiskTierConfig, DiskWrite};
use super::verify::{ChunkFault, read_chunk};
use crate::checksum::crc32c;
use crate::shape::{ChunkShape, ShapeError};
use crate::stat::{NotCommitted, Refused};
use crate::tenant::TenantId;
use crate::tier::ReadEnd;
use forebay_kv::ChunkId;
use std::io;
use thiserror::Error;

const NOW_US: u64 = 0;

/// A log that is open for one thread.
pub struct Offline<'a> {
    tier: DiskTier,
    medium: &'a dyn Medium,
}

/// Why a change to a log was not made, or is not durable.
#[derive(Debug, Error)]
pub enum OfflineError {
    /// The disk failed. What was durable before still is.
    #[error("the disk failed: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    NotCommitted(#[from] NotCommitted),
}

impl<'a> Offline<'a> {
    /// Opens a log, whatever state a crash left it in.
    pub fn open(
        config: &DiskTierConfig,
        medium: &'a dyn Medium,
    ) -> Result<(Offline<'a>, Recovered), NotOpened> {
        let (tier, found) = DiskTier::open(config, &[medium])?;
        Ok((Offline { tier, medium }, found.into_iter().next().unwrap_or_default()))
    }

    pub fn tier(&self) -> &DiskTier {
        &self.tier
    }

    /// Stores a chunk. It survives a crash after the next [`settle`](Offline::settle).
    pub fn store(
        &mut self,
        tenant: TenantId,
        id: &ChunkId,
        parent: Option<&ChunkId>,
        layers: &[Vec<u8>],
    ) -> Result<(), OfflineError> {
        let shape = ChunkShape::new(layers.iter().map(|layer| layer.len() as u64))?;
        let begun = match self.tier.begin_write(NOW_US, tenant, id, parent, &shape) {
            // Segments that were emptied can be filled again once that is durable.
            Err(_) => {
                self.settle()?;
                self.tier.begin_write(NOW_US, tenant, id, parent, &shape)?
            }
            Ok(begun) => begun,
        };
        let DiskBegun::Write(write) = begun else { return Ok(()) };
        match self.write_layers(&write, layers) {
            Ok(()) => Ok(self.tier.end_write(NOW_US, write)?),
            Err(error) => {
                self.tier.abort(NOW_US, write, 0);
                Err(error.into())
            }
        }
    }

    fn write_layers(&self, write: &DiskWrite, layers: &[Vec<u8>]) -> io::Result<()> {
        let shape = &write.shape;
        let mut slot = vec![0; shape.footer_at() as usize];
        for (bytes, place) in layers.iter().zip((0..shape.layers()).filter_map(|layer| shape.layer(layer))) {
            slot[place.start as usize..place.end as usize].copy_from_slice(bytes);
        }
        let crcs: Vec<u32> = layers.iter().map(|layer| crc32c(layer)).collect();
        slot.extend(self.tier.footer(write, &crcs).encode());
        self.medium.write_at(write.slot_at, &slot)
    }

    /// Drops a copy of a chunk that was found damaged. Says whether it was the one that counts.
    pub fn drop_copy(&mut self, tenant: TenantId, copy: &ChunkCopy) -> bool {
        let Some((lease, _)) = self.tier.lease(NOW_US, tenant, &[copy.id], 1) else { return false };
        let mut is_dropped = false;
        if let Ok(read) = self.tier.begin_read(NOW_US, lease, 0) {
            is_dropped = read.copy == *copy;
            let end = if is_dropped { ReadEnd::Corrupt } else { ReadEnd::Done };
            self.tier.end_read(NOW_US, read, end);
        }
        self.tier.release(NOW_US, lease);
        is_dropped
    }

    /// Drops all chunks of a tenant and overwrites every byte that no other chunk has. Says how
    /// many chunks there were.
    pub fn purge(&mut self, tenant: TenantId) -> Result<usize, OfflineError> {
        let gone = self.tier.doom_tenant(NOW_US, tenant);
        self.settle()?;
        Ok(gone)
    }

    /// Makes everything durable, and does all that is waiting to be done.
    pub fn settle(&mut self) -> Result<(), OfflineError> {
        loop {
            while let Some(relocation) = self.tier.next_relocation(NOW_US) {
                self.relocate(relocation)?;
            }
            self.overwrite()?;
            match self.tier.next_commit(NOW_US, 0) {
                Some(commit) => self.carry_out(commit)?,
                None => return Ok(()),
            }
        }
    }

    /// Makes everything durable, and says in the file that it was closed in good order.
    pub fn close(mut self) -> Result<(), OfflineError> {
        self.settle()?;
        match self.tier.close(0) {
            Some(commit) => self.carry_out(commit),
            None => Ok(()),
        }
    }

    fn relocate(&mut self, relocation: Relocation) -> Result<(), OfflineError> {
        let (copy, shape) = (relocation.read.copy, &relocation.read.shape);
        let outcome = match read_chunk(self.medium, &copy, shape, relocation.read.slot_at) {
            Ok((mut slot, old)) => {
                let footer = self.tier.footer(&relocation.write, &old.crcs()).with_encrypted(old.encrypted);
                slot.truncate(shape.footer_at() as usize);
                slot.extend(footer.encode());
                self.medium.write_at(relocation.write.slot_at, &slot).map(|()| RelocationEnd::Written)
            }
            Err(ChunkFault::Io(error)) => Err(error),
            Err(_) => Ok(RelocationEnd::Corrupt),
        };
        let failed = RelocationEnd::Failed { read_lost_bytes: 0, write_lost_bytes: 0 };
        self.tier.end_relocation(NOW_US, relocation, *outcome.as_ref().unwrap_or(&failed));
        outcome?;
        Ok(())
    }

    fn overwrite(&mut self) -> Result<(), OfflineError> {
        while let Some(scrub) = self.tier.next_scrub(NOW_US) {
            let outcome = self.medium.write_at(scrub.offset, &vec![0; scrub.bytes as usize]);
            self.tier.end_scrub(scrub, outcome.is_ok());
            outcome?;
        }
        Ok(())
    }

    fn carry_out(&mut self, commit: Commit) -> Result<(), OfflineError> {
        let outcome = commit.write_to(self.medium);
        self.tier.end_commit(NOW_US, commit, outcome.is_ok());
        Ok(outcome?)
    }
}
