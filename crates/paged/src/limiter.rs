//! A limit of chunks that the node is asked for at a time: a node refuses what is beyond its own
//! limits. Whoever wants a permit is called back when there is one, in the order of coming; no
//! thread waits.

use forebay_transfer::lock::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

type Begin = Box<dyn FnOnce(Vec<Permit>) + Send>;

/// What begins together at most: as many chunks go well into one message to the node.
const TOGETHER_MAX: usize = 128;

/// So much at a time; what comes beyond waits in its order.
pub struct Limiter {
    permits: usize,
    state: Mutex<State>,
}

struct State {
    taken: usize,
    /// When a permit was last given back.
    released: Instant,
    /// Each with the permits that it needs.
    waiting: VecDeque<(usize, Begin)>,
    /// A thread begins what waits. Permits that are free meanwhile are given by that thread: what
    /// ends while it is begun would otherwise begin the next from within, without end.
    is_beginning: bool,
}

/// A permit, until this is dropped.
pub struct Permit(Arc<Limiter>);

impl Limiter {
    /// With so many permits, one at least.
    pub fn new(permits: usize) -> Arc<Limiter> {
        let state =
            State { taken: 0, released: Instant::now(), waiting: VecDeque::new(), is_beginning: false };
        Arc::new(Limiter { permits: permits.max(1), state: Mutex::new(state) })
    }

    /// When a permit was last given back; before that, when none was taken yet. As long as this
    /// moves, what waits comes nearer.
    pub fn last_released(&self) -> Instant {
        self.state.lock().released
    }

    /// Calls `begin` as soon as there is a permit: on this thread, or on one that gives a permit
    /// back or comes later.
    #[cfg(test)]
    pub fn acquire(self: &Arc<Self>, begin: impl FnOnce(Permit) + Send + 'static) {
        self.acquire_many(1, move |mut permits| permits.pop().map_or((), begin));
    }

    /// The same for what begins together: as soon as there are so many permits, of all permits at
    /// most.
    pub fn acquire_many(self: &Arc<Self>, permits: usize, begin: impl FnOnce(Vec<Permit>) + Send + 'static) {
        self.state.lock().waiting.push_back((permits.min(self.permits), Box::new(begin)));
        self.go_on();
    }

    /// How many are best begun together: a quarter of all, so that others go on meanwhile.
    pub fn together(&self) -> usize {
        (self.permits / 4).clamp(1, TOGETHER_MAX)
    }

    fn go_on(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if state.is_beginning {
            return;
        }
        while let Some((permits, begin)) = state.next(self.permits) {
            state.taken += permits;
            state.is_beginning = true;
            drop(state);
            begin((0..permits).map(|_| Permit(Arc::clone(self))).collect());
            state = self.state.lock();
            state.is_beginning = false;
        }
    }
}

impl State {
    /// What waits first, if there are the permits for it.
    fn next(&mut self, permits: usize) -> Option<(usize, Begin)> {
        let (needed, _) = self.waiting.front()?;
        (self.taken + needed <= permits).then(|| self.waiting.pop_front())?
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.taken -= 1;
        state.released = Instant::now();
        drop(state);
        self.0.go_on();
    }
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Limiter").field("permits", &self.permits).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_beyond_the_places_begins_in_its_order_when_others_have_ended() {
        let (limiter, begun) = (Limiter::new(2), Arc::new(Mutex::new(Vec::new())));
        for number in 0..5 {
            let begun = Arc::clone(&begun);
            limiter.acquire(move |permit| begun.lock().push((number, permit)));
        }
        let numbers = || begun.lock().iter().map(|(number, _)| *number).collect::<Vec<_>>();
        assert_eq!(numbers(), [0, 1]);
        let before = limiter.last_released();
        let leave = |at| {
            let (_, permit) = begun.lock().remove(at);
            drop(permit);
        };
        assert_eq!(limiter.last_released(), before, "nobody has left");
        std::thread::sleep(std::time::Duration::from_millis(2));
        leave(1);
        assert!(limiter.last_released() > before);
        assert_eq!(numbers(), [0, 2]);
        leave(0);
        leave(0);
        assert_eq!(numbers(), [3, 4]);
    }

    #[test]
    fn what_begins_together_waits_for_all_its_places_and_holds_up_what_comes_behind_it() {
        let (limiter, begun) = (Limiter::new(4), Arc::new(Mutex::new(Vec::new())));
        for (number, permits) in [(0, 3), (1, 2), (2, 1), (3, 9)] {
            let begun = Arc::clone(&begun);
            limiter.acquire_many(permits, move |permits| begun.lock().push((number, permits)));
        }
        let counts =
            || begun.lock().iter().map(|(number, permits)| (*number, permits.len())).collect::<Vec<_>>();
        assert_eq!(counts(), [(0, 3)]);
        let leave = || drop(begun.lock().remove(0));
        let first = begun.lock()[0].1.pop();
        drop(first);
        assert_eq!(counts(), [(0, 2), (1, 2)]);
        let first = begun.lock()[0].1.pop();
        drop(first);
        assert_eq!(counts(), [(0, 1), (1, 2), (2, 1)]);
        let all = std::mem::take(&mut *begun.lock());
        drop(all);
        assert_eq!(counts(), [(3, 4)], "more than there are is all of them");
        leave();
    }

    #[test]
    fn what_ends_while_it_is_begun_has_the_next_begin_on_the_same_level() {
        let limiter = Limiter::new(1);
        let (first, many) = (Arc::new(Mutex::new(None)), 200_000);
        let held = Arc::clone(&first);
        limiter.acquire(move |permit| *held.lock() = Some(permit));
        let ended = Arc::new(Mutex::new(0));
        for _ in 0..many {
            let ended = Arc::clone(&ended);
            limiter.acquire(move |permit| {
                *ended.lock() += 1;
                drop(permit);
            });
        }
        let permit = first.lock().take();
        drop(permit);
        assert_eq!(*ended.lock(), many);
    }
}
