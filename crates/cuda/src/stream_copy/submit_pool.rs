//! Threads that queue the work of a batch's relays, each beside the others and beside the thread
//! that queues the direct path. The driver wants close to a microsecond for each page, so one
//! thread queues 64 MiB of 64 KiB pages at 79 GB/s, which is less than two links carry. Nobody's
//! stream waits for them: whoever sends a batch comes back when all of it is queued.

use crate::driver::CudaError;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Threads that wait for work.
#[derive(Debug)]
pub struct SubmitPool(ThreadPool);

impl SubmitPool {
    /// So many of them; `None` where the system gives none.
    pub fn new(count: usize) -> Option<SubmitPool> {
        let name = |nth| format!("forebay-queue-{nth}");
        ThreadPoolBuilder::new().num_threads(count).thread_name(name).build().ok().map(SubmitPool)
    }

    /// Does `each` with each of these, by a thread of the pool, and `own` on this thread meanwhile.
    /// Comes back when all of it was done: what `own` returned, and the first error of the others.
    pub fn beside<T: Send, R>(
        &self,
        work: Vec<T>,
        each: impl Fn(T) -> Result<(), CudaError> + Sync,
        own: impl FnOnce() -> R,
    ) -> (R, Result<(), CudaError>) {
        let mut ended = vec![Ok(()); work.len()];
        let own = self.0.in_place_scope(|scope| {
            let each = &each;
            for (work, ended) in work.into_iter().zip(&mut ended) {
                scope.spawn(move |_| *ended = each(work));
            }
            own()
        });
        (own, ended.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn all_is_done_at_the_same_time_and_over_when_it_comes_back() {
        // All three have to be there before one goes on.
        let (submit_pool, meet) = (SubmitPool::new(2).unwrap(), Barrier::new(3));
        let mut places = [0; 2];
        let work = places.iter_mut().collect();
        let each = |place: &mut i32| {
            meet.wait();
            *place = 1;
            Ok(())
        };
        let own = || _ = meet.wait();
        assert_eq!(submit_pool.beside(work, each, own), ((), Ok(())));
        assert_eq!(places, [1, 1]);
    }

    #[test]
    fn an_error_of_one_stops_none_of_the_others() {
        let submit_pool = SubmitPool::new(1).unwrap();
        let mut places = [0; 3];
        let work = places.iter_mut().enumerate().collect();
        let each = |(nth, place): (usize, &mut i32)| {
            *place = 1;
            if nth == 1 { Err(CudaError::full("place")) } else { Ok(()) }
        };
        assert_eq!(submit_pool.beside(work, each, || 7), (7, Err(CudaError::full("place"))));
        assert_eq!(places, [1, 1, 1]);
    }
}
