//! Jobs whose prompts are still parsed, hashed and tokenised. This file knows when each one is
//! done.

use crate::job::{Job, JobId};
use std::time::Instant;

/// Few at any time, so they are in no order.
#[derive(Default)]
pub struct Arrivals(Vec<(Instant, Job)>);

impl Arrivals {
    pub fn push(&mut self, due: Instant, job: Job) {
        self.0.push((due, job));
    }

    /// Those that are done, by the time at which they were.
    pub fn take_due(&mut self, now: Instant) -> Vec<Job> {
        let mut due: Vec<_> = self.0.extract_if(.., |(due, _)| *due <= now).collect();
        due.sort_by_key(|(due, _)| *due);
        due.into_iter().map(|(_, job)| job).collect()
    }

    /// When the next one is done.
    pub fn next_due(&self) -> Option<Instant> {
        self.0.iter().map(|(due, _)| *due).min()
    }

    pub fn remove(&mut self, id: JobId) -> Option<Job> {
        let place = self.0.iter().position(|(_, job)| job.id == id)?;
        Some(self.0.swap_remove(place).1)
    }

    pub fn take_all(&mut self) -> Vec<Job> {
        std::mem::take(&mut self.0).into_iter().map(|(_, job)| job).collect()
    }
}
