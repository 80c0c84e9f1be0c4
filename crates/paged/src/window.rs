//! How much the node is asked for at a time: it refuses what is beyond its own limits. This file knows order and numbers; it must
//! never know what is asked for.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

type Begin = Box<dyn FnOnce(Vec<Place>) + Send>;

/// What begins together at most: as many chunks go well into one message to the node.
const TOGETHER_MAX: usize = 128;

/// So much at a time; what comes beyond waits in its order.
pub struct Window {
    places: usize,
    state: Mutex<State>,
}

struct State {
    taken: usize,
    /// When a place was last left.
    left: Instant,
    /// Each with the places that it needs.
    waiting: VecDeque<(usize, Begin)>,
    /// A thread begins what waits. Places that are free meanwhile are given by that thread: what ends while it is begun would
    /// otherwise begin the next from within, without end.
    is_beginning: bool,
}

/// A place in the window, until this is dropped.
pub struct Place(Arc<Window>);

impl Window {
    /// With so many places, one at least.
    pub fn new(places: usize) -> Arc<Window> {
        let state = State { taken: 0, left: Instant::now(), waiting: VecDeque::new(), is_beginning: false };
        Arc::new(Window { places: places.max(1), state: Mutex::new(state) })
    }

    /// When a place was last left; before that, when there was none taken yet. As long as this moves, what waits comes nearer.
    pub fn last_left(&self) -> Instant {
        self.state.lock().left
    }

    /// Calls `begin` as soon as there is a place: on this thread, or on one that leaves its place or comes later.
    #[cfg(test)]
    pub fn enter(self: &Arc<Self>, begin: impl FnOnce(Place) + Send + 'static) {
        self.enter_together(1, move |mut places| places.pop().map_or((), begin));
    }

    /// The same for what begins together: as soon as there are `places` places, of which there are that many.
    pub fn enter_together(self: &Arc<Self>, places: usize, begin: impl FnOnce(Vec<Place>) + Send + 'static) {
        self.state.lock().waiting.push_back((places.min(self.places), Box::new(begin)));
        self.go_on();
    }

    /// How many are best begun together: a quarter of all, so that others go on meanwhile.
    pub fn together(&self) -> usize {
        (self.places / 4).clamp(1, TOGETHER_MAX)
    }

    fn go_on(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if state.is_beginning {
            return;
        }
        while let Some((places, begin)) = state.next(self.places) {
            state.taken += places;
            state.is_beginning = true;
            drop(state);
            begin((0..places).map(|_| Place(Arc::clone(self))).collect());
            state = self.state.lock();
            state.is_beginning = false;
        }
    }
}

impl State {
    /// What waits first, if there are the places for it.
    fn next(&mut self, places: usize) -> Option<(usize, Begin)> {
        let (needed, _) = self.waiting.front()?;
        (self.taken + needed <= places).then(|| self.waiting.pop_front())?
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.taken -= 1;
        state.left = Instant::now();
        drop(state);
        self.0.go_on();
    }
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window").field("places", &self.places).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_beyond_the_places_begins_in_its_order_when_others_have_ended() {
        let (window, begun) = (Window::new(2), Arc::new(Mutex::new(Vec::new())));
        for number in 0..5 {
            let begun = Arc::clone(&begun);
            window.enter(move |place| begun.lock().push((number, place)));
        }
        let numbers = || begun.lock().iter().map(|(number, _)| *number).collect::<Vec<_>>();
        assert_eq!(numbers(), [0, 1]);
        let before = window.last_left();
        let leave = |at| {
            let (_, place) = begun.lock().remove(at);
            drop(place);
        };
        assert_eq!(window.last_left(), before, "nobody has left");
        std::thread::sleep(std::time::Duration::from_millis(2));
        leave(1);
        assert!(window.last_left() > before);
        assert_eq!(numbers(), [0, 2]);
        leave(0);
        leave(0);
        assert_eq!(numbers(), [3, 4]);
    }

    #[test]
    fn what_begins_together_waits_for_all_its_places_and_holds_up_what_comes_behind_it() {
        let (window, begun) = (Window::new(4), Arc::new(Mutex::new(Vec::new())));
        for (number, places) in [(0, 3), (1, 2), (2, 1), (3, 9)] {
            let begun = Arc::clone(&begun);
            window.enter_together(places, move |places| begun.lock().push((number, places)));
        }
        let counts =
            || begun.lock().iter().map(|(number, places)| (*number, places.len())).collect::<Vec<_>>();
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
        let window = Window::new(1);
        let (first, many) = (Arc::new(Mutex::new(None)), 200_000);
        let held = Arc::clone(&first);
        window.enter(move |place| *held.lock() = Some(place));
        let ended = Arc::new(Mutex::new(0));
        for _ in 0..many {
            let ended = Arc::clone(&ended);
            window.enter(move |place| {
                *ended.lock() += 1;
                drop(place);
            });
        }
        let place = first.lock().take();
        drop(place);
        assert_eq!(*ended.lock(), many);
    }
}
