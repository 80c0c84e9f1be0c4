//! Between a client and its node: what both say passes as it is, but for the ring. Of that each end
//! has one of its own, and requests and answers are carried from one to the other: whole, or torn.
//! Neither end knows.

use crate::faults::{Entry, Faults};
use crate::random::Random;
use forebay_client::protocol::socket;
use forebay_ring::Layout;
use forebay_ring::memory::{self, RingMemory};
use forebay_ring::sleep::{fall_asleep, is_to_be_woken};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// How long nothing is looked for while something is under way, and while nothing is.
const SHORT_REST: Duration = Duration::from_micros(30);
const LONG_REST: Duration = Duration::from_millis(5);
/// One of so many torn entries is torn where it says whose it is.
const NAMELESS_IN: u64 = 200;
/// A word that is late comes within so many microseconds.
const LATE_US: u64 = 300;
/// Where words of a request lie, from its first one on.
const HEAD: usize = 3;
const SEQUENCE: usize = 7;
/// Those of a completion.
const COMPLETION_HEAD: usize = 1;
const COMPLETION_SEQUENCE: usize = 3;

/// Lets a client in that connects to `user`, and connects it to the node.
pub fn listen(user: &Path, node: &Path, faults: &Arc<Faults>) -> io::Result<()> {
    let (listener, node, faults) = (UnixListener::bind(user)?, socket::connect_to(node)?, Arc::clone(faults));
    spawn(move || {
        let Ok((user, _)) = listener.accept() else { return };
        let (user, node) = (Arc::new(OwnedFd::from(user)), Arc::new(node));
        let is_over = Arc::new(AtomicBool::new(false));
        let (from, to) = (Arc::clone(&user), Arc::clone(&node));
        // An end that goes shows at the other one.
        let asking = spawn(move || _ = pass(&from, &to, Ok));
        let _ = pass(&node, &user, |file| ring_of_user(file, &faults, &is_over));
        is_over.store(true, Ordering::Release);
        drop(asking);
    })
}

fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name("between".into()).spawn(run).map(drop)
}

/// Hands on what one end says until it ends.
fn pass(from: &OwnedFd, to: &OwnedFd, exchange: impl Fn(OwnedFd) -> io::Result<OwnedFd>) -> io::Result<()> {
    let mut bytes = vec![0; 64 << 10];
    let passed = loop {
        let (count, file) = match socket::receive_with(from, &mut bytes) {
            Ok((0, _)) => break Ok(()),
            Ok(received) => received,
            Err(error) => break Err(error),
        };
        let sent = match file.map(&exchange).transpose() {
            Ok(None) => socket::send_all(to, &bytes[..count]),
            Ok(Some(file)) => socket::send_with(to, &bytes[..count], file.as_fd()),
            Err(error) => Err(error),
        };
        if let Err(error) = sent {
            break Err(error);
        }
    };
    socket::disconnect(to);
    passed
}

/// What the user gets for a descriptor of the node: of a ring another one. The arena stays as it
/// is.
fn ring_of_user(file: OwnedFd, faults: &Arc<Faults>, is_over: &Arc<AtomicBool>) -> io::Result<OwnedFd> {
    let Ok((node, layout)) = RingMemory::attach(file.try_clone()?) else { return Ok(file) };
    let user = RingMemory::create(layout, node.header().epoch()).map_err(io::Error::other)?;
    let file = user.as_fd().try_clone_to_owned()?;
    let (faults, is_over) = (Arc::clone(faults), Arc::clone(is_over));
    let contexts = vec![0; layout.slots().into()];
    let between = Between { user, node, layout, faults, contexts, taken: 0, told: 0 };
    spawn(move || between.run(&is_over))?;
    Ok(file)
}

/// The two rings of a client. It posts and does not arm.
struct Between {
    user: RingMemory,
    node: RingMemory,
    layout: Layout,
    faults: Arc<Faults>,
    /// Of the request that each slot has.
    contexts: Vec<u16>,
    taken: u64,
    told: u64,
}

impl Between {
    fn run(mut self, is_over: &AtomicBool) {
        while !is_over.load(Ordering::Acquire) {
            if self.carry_request() || self.carry_answer() {
                continue;
            }
            if self.node.header().is_closed() {
                self.user.header().close();
                wake(self.user.header().producer_asleep());
            }
            self.rest();
        }
    }

    fn rest(&self) {
        if self.taken > self.told {
            return std::thread::sleep(SHORT_REST);
        }
        let asleep = self.user.header().consumer_asleep();
        if fall_asleep(asleep, || self.has_request()) {
            memory::wait(asleep, Some(LONG_REST));
        }
    }

    fn slot(&self) -> u16 {
        (self.taken % u64::from(self.layout.posted())) as u16
    }

    fn has_request(&self) -> bool {
        let sequence = self.layout.request(self.slot()) + SEQUENCE;
        self.user.words()[sequence].load(Ordering::Acquire) == self.taken + 1
    }

    fn carry_request(&mut self) -> bool {
        if !self.has_request() {
            return false;
        }
        let (slot, at) = (self.slot(), self.layout.request(self.slot()));
        let count = (self.user.words()[at + HEAD].load(Ordering::Relaxed) >> 16) as u16;
        let count = count.min(self.layout.contexts());
        self.contexts[usize::from(slot)] = count;
        let contexts = self.layout.context(slot, 0)..self.layout.context(slot, count);
        self.taken += 1;
        let (sequence, number) = (at + SEQUENCE, self.taken);
        let words =
            Words { all: (at..sequence).chain(contexts).collect(), name: at..at + 1, sequence, number };
        carry(self.user.words(), self.node.words(), &words, self.faults.torn(Entry::Request));
        wake(self.node.header().consumer_asleep());
        true
    }

    fn carry_answer(&mut self) -> bool {
        let at = self.layout.completion(self.told);
        if self.node.words()[at + COMPLETION_SEQUENCE].load(Ordering::Acquire) != self.told + 1 {
            return false;
        }
        let slot = (self.node.words()[at + COMPLETION_HEAD].load(Ordering::Relaxed) >> 16) as u16;
        let count = self.contexts.get(usize::from(slot)).copied().unwrap_or(0);
        let results = self.layout.result(slot, 0)..self.layout.result(slot, count);
        self.told += 1;
        let (sequence, number) = (at + COMPLETION_SEQUENCE, self.told);
        let words = Words { all: results.chain(at..sequence).collect(), name: at..at + 2, sequence, number };
        carry(self.node.words(), self.user.words(), &words, self.faults.torn(Entry::Answer));
        wake(self.user.header().producer_asleep());
        true
    }
}

/// Words that are published together.
struct Words {
    all: Vec<usize>,
    /// Those by which the other end finds what it is about. An end that finds something else closes
    /// the ring, and then no word matters any more: so they are seldom torn.
    name: Range<usize>,
    sequence: usize,
    number: u64,
}

/// Copies the words of an entry, then its sequence word. Of one that is torn, some of those that
/// have changed come late, or never.
fn carry(from: &[AtomicU64], to: &[AtomicU64], words: &Words, torn: Option<Random>) {
    let read = |word: usize| from[word].load(Ordering::Relaxed);
    let copy = |word: usize| to[word].store(read(word), Ordering::Relaxed);
    let mut random = torn;
    let missing = random.as_mut().map_or_else(Vec::new, |random| {
        let (percent, keeps_name) = ([20, 60, 100][random.below(3) as usize], random.below(NAMELESS_IN) > 0);
        let has_changed = |word: &usize| read(*word) != to[*word].load(Ordering::Relaxed);
        let is_torn = |word: &usize| has_changed(word) && !(keeps_name && words.name.contains(word));
        words.all.iter().copied().filter(is_torn).filter(|_| random.chance(percent)).collect()
    });
    words.all.iter().copied().filter(|word| !missing.contains(word)).for_each(copy);
    to[words.sequence].store(words.number, Ordering::Release);
    if let Some(mut random) = random.filter(|_| !missing.is_empty())
        && random.chance(50)
    {
        std::thread::sleep(Duration::from_micros(random.below(LATE_US)));
        missing.into_iter().for_each(copy);
    }
}

fn wake(asleep: &AtomicU64) {
    if is_to_be_woken(asleep) {
        memory::wake(asleep);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(value: u64) -> Vec<AtomicU64> {
        (0..8).map(|_| AtomicU64::new(value)).collect()
    }

    fn entry() -> Words {
        Words { all: (0..7).collect(), name: 0..1, sequence: 7, number: 9 }
    }

    #[test]
    fn an_entry_is_carried_whole_unless_it_is_torn() {
        let (from, to) = (memory(2), memory(1));
        carry(&from, &to, &entry(), None);
        assert!(to[..7].iter().all(|word| word.load(Ordering::Relaxed) == 2));
        assert_eq!(to[7].load(Ordering::Relaxed), 9);
    }

    #[test]
    fn a_torn_entry_is_published_with_words_of_the_one_before() {
        let (mut torn, mut nameless) = (0, 0);
        for seed in 0..2_000 {
            let (from, to) = (memory(2), memory(1));
            carry(&from, &to, &entry(), Some(Random::new(seed)));
            assert_eq!(to[7].load(Ordering::Relaxed), 9);
            torn += usize::from(to[1..7].iter().any(|word| word.load(Ordering::Relaxed) == 1));
            nameless += usize::from(to[0].load(Ordering::Relaxed) == 1);
        }
        // The others came late.
        assert!(
            (600..1_400).contains(&torn) && (1..30).contains(&nameless),
            "{torn} torn, {nameless} nameless"
        );
    }
}
