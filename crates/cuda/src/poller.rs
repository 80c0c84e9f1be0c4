//! The control thread: one for all GPUs of a process. It watches an event, or something else that
//! shows the end, for each operation in flight, and calls its owner when that has passed. It sleeps
//! while nothing is in flight.

use crate::device::{Event, Stream};
use crate::driver::{CudaError, Driver, Relaxed};
use forebay_transfer::lock::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the thread looks for new work before it sleeps. Longer than the gap between two lots of
/// a transfer, so that a transfer pays for one wake-up; short enough that an idle process costs
/// nothing.
const LINGER: Duration = Duration::from_micros(100);

/// Called once an operation is over, on the control thread.
pub type OnPassed = Box<dyn FnOnce(Result<(), CudaError>) + Send>;

/// The control thread. Dropping it waits until nothing is in flight.
#[derive(Debug)]
pub struct Poller {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What shows that an operation is over where that is no event of this process.
pub trait Watch: Send {
    /// Whether it is over. Asked again and again, on the control thread, until it is.
    fn passed(&self) -> bool;
}

/// Gives tracks of a control thread to those who come later. It does not keep the thread.
#[derive(Debug, Clone)]
pub struct Tracks(Arc<Shared>);

/// A row of operations with a [`Watch`] each. They end in the order in which they were put in.
#[derive(Debug)]
pub struct WatchTrack {
    index: usize,
    shared: Arc<Shared>,
}

/// A stream whose operations are watched. They end in the order in which they were put in.
#[derive(Debug)]
pub struct Track {
    index: usize,
    stream: Stream,
    shared: Arc<Shared>,
    /// Events to be used again.
    spare: Arc<Mutex<Vec<Event>>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    posted: Condvar,
    /// Whether the state holds something new; spares the polling thread the lock.
    fresh: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    inbox: Vec<(usize, InFlight)>,
    tracks: usize,
    asleep: bool,
    closed: bool,
}

struct InFlight {
    mark: Mark,
    on_passed: OnPassed,
}

/// What shows the end of an operation.
enum Mark {
    /// The event, and where it goes to be used again.
    Event(Event, Arc<Mutex<Vec<Event>>>),
    Watch(Box<dyn Watch>),
}

impl std::fmt::Debug for InFlight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InFlight").finish_non_exhaustive()
    }
}

impl Poller {
    pub fn spawn(driver: &'static Driver) -> std::io::Result<Poller> {
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("forebay-cuda".into()).spawn(move || {
            let _relaxed = Relaxed::enter(driver);
            own.run();
        })?;
        Ok(Poller { shared, thread: Some(thread) })
    }

    /// What gives further tracks.
    pub fn tracks(&self) -> Tracks {
        Tracks(Arc::clone(&self.shared))
    }
}

impl Tracks {
    /// Has the thread watch a stream from now on.
    pub fn track(&self, stream: Stream) -> Track {
        Track { index: self.next(), stream, shared: Arc::clone(&self.0), spare: Arc::default() }
    }

    /// Has the thread watch a row of operations from now on.
    pub fn watch_track(&self) -> WatchTrack {
        WatchTrack { index: self.next(), shared: Arc::clone(&self.0) }
    }

    fn next(&self) -> usize {
        let mut state = self.0.state.lock();
        let index = state.tracks;
        state.tracks += 1;
        index
    }
}

impl WatchTrack {
    /// Has `on_passed` called when `watch`, and those that were put in before it, have passed.
    pub fn when_passed(&self, watch: Box<dyn Watch>, on_passed: OnPassed) {
        self.shared.post(self.index, InFlight { mark: Mark::Watch(watch), on_passed });
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.fresh.store(true, Ordering::Release);
        self.shared.posted.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

impl Track {
    /// The stream. Its device must be entered before something is put into it.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Has `on_passed` called when everything that is in the stream now is over. When marking that
    /// point fails it is given back: the caller then knows no end of what it put in before.
    pub fn when_passed(&self, on_passed: OnPassed) -> Result<(), (CudaError, OnPassed)> {
        let spare = self.spare.lock().pop();
        let event = match spare.map_or_else(|| Event::new(self.stream.device()), Ok) {
            Ok(event) => event,
            Err(error) => return Err((error, on_passed)),
        };
        if let Err(error) = event.record(&self.stream) {
            return Err((error, on_passed));
        }
        let mark = Mark::Event(event, Arc::clone(&self.spare));
        self.shared.post(self.index, InFlight { mark, on_passed });
        Ok(())
    }
}

impl Shared {
    fn post(&self, track: usize, in_flight: InFlight) {
        let mut state = self.state.lock();
        state.inbox.push((track, in_flight));
        self.fresh.store(true, Ordering::Release);
        let asleep = state.asleep;
        drop(state);
        if asleep {
            self.posted.notify_one();
        }
    }

    fn run(&self) {
        let mut tracks = Vec::new();
        let mut in_flight = 0;
        let mut idle_since = Instant::now();
        loop {
            if self.fresh.swap(false, Ordering::Acquire) {
                in_flight += self.take_in(&mut tracks);
            }
            let passed = tracks.iter_mut().map(end_passed).sum::<usize>();
            in_flight -= passed;
            if in_flight > 0 || passed > 0 {
                idle_since = Instant::now();
                std::hint::spin_loop();
            } else if idle_since.elapsed() < LINGER {
                std::hint::spin_loop();
            } else if !self.sleep() {
                return;
            }
        }
    }

    /// Sorts what was posted by track; says how much it was.
    fn take_in(&self, tracks: &mut Vec<VecDeque<InFlight>>) -> usize {
        let mut state = self.state.lock();
        tracks.resize_with(state.tracks, VecDeque::new);
        let posted = state.inbox.len();
        for (track, in_flight) in state.inbox.drain(..) {
            tracks[track].push_back(in_flight);
        }
        posted
    }

    /// Sleeps until something is posted; false when nothing ever will be.
    fn sleep(&self) -> bool {
        let mut state = self.state.lock();
        while state.inbox.is_empty() {
            if state.closed {
                return false;
            }
            state.asleep = true;
            self.posted.wait(&mut state);
            state.asleep = false;
        }
        true
    }
}

impl Mark {
    fn is_passed(&self) -> Result<bool, CudaError> {
        match self {
            Mark::Event(event, _) => event.is_passed(),
            Mark::Watch(watch) => Ok(watch.passed()),
        }
    }

    fn give_back(self) {
        if let Mark::Event(event, spare) = self {
            spare.lock().push(event);
        }
    }
}

/// Ends what has passed at the front of a track; says how much it was.
fn end_passed(track: &mut VecDeque<InFlight>) -> usize {
    let mut ended = 0;
    while let Some(front) = track.front() {
        let result = match front.mark.is_passed() {
            Ok(false) => break,
            Ok(true) => Ok(()),
            Err(error) => Err(error),
        };
        if let Some(InFlight { mark, on_passed }) = track.pop_front() {
            mark.give_back();
            on_passed(result);
        }
        ended += 1;
    }
    ended
}
