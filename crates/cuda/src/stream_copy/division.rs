//! How a stream copy is divided: over which paths that are free now, and by what the copies before
//! measured of them. What GPUs copy at the same time is noted here, since these leave each other's
//! links alone.

use super::meter::{Meter, Part};
use super::relay_pipeline::RelayPipeline;
use super::{GpuDirection, LATELY_US, StreamCopies};
use crate::device::{Device, StreamId};
use crate::driver::CudaError;
use crate::links::Direction;
use forebay_transfer::lock::MutexGuard;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Copies of two GPUs that come within this are one load on both.
const AT_ONCE_US: u64 = 2_000;

/// What a path carries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathRate {
    /// The GPU whose memory is copied to or from.
    pub gpu: u16,
    pub direction: Direction,
    /// The GPU whose PCIe link it is.
    pub over: u16,
    /// 0 if nothing goes there now.
    pub bytes_per_s: f64,
    /// By copies of this process; otherwise it is where these begin.
    pub is_measured: bool,
}

/// The paths of a stream copy.
#[derive(Debug)]
pub struct Division<'a> {
    pub pipelines: Vec<MutexGuard<'a, RelayPipeline>>,
    /// For the direct path, then for each pipeline.
    pub shares: Vec<u64>,
    /// What times these, if they are timed.
    pub parts: Vec<Option<Part>>,
    /// Which of the GPU's paths they are.
    paths: Vec<usize>,
}

impl Division<'_> {
    /// All goes over the GPU's own link.
    pub fn direct(bytes: u64) -> Division<'static> {
        Division { pipelines: Vec::new(), shares: vec![bytes], parts: vec![None], paths: vec![0] }
    }

    /// It is about to be queued: its parts are timed from here on.
    pub fn begin(&mut self, own: &GpuDirection) {
        if self.pipelines.is_empty() {
            return;
        }
        let mut meter = own.meter.lock();
        let each = self.paths.iter().zip(&self.shares).zip(&mut self.parts);
        each.for_each(|((path, share), part)| *part = meter.part(*path, *share));
    }

    /// It was queued, or what of it was not refused.
    pub fn queued(self, own: &GpuDirection) {
        if self.pipelines.is_empty() {
            return;
        }
        let mut meter = own.meter.lock();
        let parts = self.paths.into_iter().zip(self.parts);
        parts.for_each(|(path, part)| part.into_iter().for_each(|part| meter.queued(path, part)));
    }
}

impl StreamCopies {
    /// What measures the paths to or from a GPU, which nobody has yet.
    pub(super) fn meter(
        &self,
        direction: Direction,
        target: u16,
        relays: &[u16],
    ) -> Result<Meter, CudaError> {
        let is_on_path = |gpu: &&Arc<Device>| gpu.index() == target || relays.contains(&gpu.index());
        let mut gpus: Vec<_> = self.devices.iter().filter(is_on_path).collect();
        gpus.sort_by_key(|gpu| gpu.index() != target);
        let rates = self.rates.paths(direction, target, relays);
        Meter::new(rates, &gpus, self.rates.are_fixed)
    }

    /// What each path carries by the last copies, or as it is assumed before there were any.
    pub fn path_rates(&self) -> Vec<PathRate> {
        let of = |own: &GpuDirection| {
            let over = [own.target].into_iter().chain(own.relays.iter().copied());
            let rates = over.zip(own.meter.lock().rates().collect::<Vec<_>>());
            let (gpu, direction) = (own.target, own.direction);
            let rate = |(over, (bytes_per_s, is_measured))| PathRate {
                gpu,
                direction,
                over,
                bytes_per_s,
                is_measured,
            };
            rates.map(rate).collect::<Vec<_>>()
        };
        let mut rates: Vec<PathRate> = self.gpu_directions.values().flat_map(of).collect();
        rates.sort_by_key(|rate| (rate.gpu, rate.direction as usize, rate.over != rate.gpu, rate.over));
        rates
    }

    /// Notes a copy of a GPU's own, and which GPUs copy at the same time as others.
    pub(super) fn note(&self, gpu_direction: &GpuDirection) {
        let now_us = self.now_us();
        gpu_direction.used_us.store(now_us, Ordering::Relaxed);
        let others = self.gpu_directions.values().filter(|other| {
            other.direction == gpu_direction.direction && other.target != gpu_direction.target
        });
        for other in others.filter(|other| other.was_used(now_us, AT_ONCE_US)) {
            other.crowded_us.store(now_us, Ordering::Relaxed);
            gpu_direction.crowded_us.store(now_us, Ordering::Relaxed);
        }
    }

    /// Microseconds since the stream copies were made, and one.
    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64 + 1
    }

    /// Divides a stream copy over the paths that are free. A GPU that has a stream copy of its own
    /// in that direction, or had a copy a moment ago, does not relay: its PCIe link is its own
    /// first, and what a stream copy has put on it cannot be taken back when the next copy comes.
    /// So GPUs that all copy at once leave each other alone.
    pub(super) fn divide(&self, own: &GpuDirection, stream: StreamId, bytes: u64) -> Division<'_> {
        let now_us = self.now_us();
        let mut free: Vec<_> =
            own.relays.iter().map(|relay| self.free(own, *relay, stream, now_us)).collect();
        let shares = own.meter.lock().shares(bytes, |path| free[path - 1].is_some(), now_us);
        let paths: Vec<usize> = (0..shares.len()).filter(|path| *path == 0 || shares[*path] > 0).collect();
        if paths.len() == 1 {
            return Division::direct(bytes);
        }
        let pipelines = paths[1..].iter().filter_map(|path| free[path - 1].take()).collect();
        let shares: Vec<u64> = paths.iter().map(|path| shares[*path]).collect();
        let parts = paths.iter().map(|_| None).collect();
        Division { pipelines, shares, parts, paths }
    }

    /// A relay's pipeline, if a stream copy of another GPU's may have it now.
    fn free(
        &self,
        own: &GpuDirection,
        relay: u16,
        stream: StreamId,
        now_us: u64,
    ) -> Option<MutexGuard<'_, RelayPipeline>> {
        let its = self.gpu_directions.get(&(relay, own.direction));
        let needs_it = its.is_some_and(|its| {
            let is_loading = its.was_used(now_us, LATELY_US) || its.was_crowded(now_us);
            is_loading || its.path_set.try_lock().is_none_or(|mut path_set| path_set.is_busy())
        });
        let mut pipeline = self.pipelines.get(&(relay, own.direction))?.try_lock().filter(|_| !needs_it)?;
        self.look_after(relay, &mut pipeline);
        pipeline.is_free_for(stream).then_some(pipeline)
    }
}
