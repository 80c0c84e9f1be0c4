//! The KV events of one data-parallel rank of an engine, in order: which batch comes next, what is
//! missing and has to be replayed, and whether it is still the same process that publishes. It
//! knows numbers and bytes of batches, and takes time as an argument.
//!
//! Batches are numbered from 0 without gaps, by each process anew. After a gap, and on each new
//! connection, the batch taken in last is asked for again together with those after it: if it comes
//! with the same bytes, the process is the same and nothing is missing.

use crate::kv_event_batch::{self, Change};
use crate::live_blocks::{Counted, Impossible, LiveBlocks};
use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

/// Between two replays, after the first two: it doubles from here, up to here.
const PAUSE_MIN_US: u64 = 1_000_000;
const PAUSE_MAX_US: u64 = 64_000_000;

/// Numbers are not greater: the end of a replay is the number -1.
const NUMBER_MAX: u64 = i64::MAX as u64;

/// Why events were left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// They are not what vLLM writes.
    Unreadable,
    /// A message was longer than any batch.
    Oversized,
    /// Of another topic or rank than the first that was heard.
    OtherPublisher,
    /// Of blocks of another size than the first that was stored.
    BlockSize,
    /// More was removed than was there, or more is there than can be.
    Impossible,
    /// Answers to requests say otherwise.
    Contradicted,
}

impl Dropped {
    pub const NAMES: [(Dropped, &'static str); 6] = [
        (Dropped::Unreadable, "unreadable"),
        (Dropped::Oversized, "oversized"),
        (Dropped::OtherPublisher, "other-publisher"),
        (Dropped::BlockSize, "block-size"),
        (Dropped::Impossible, "impossible"),
        (Dropped::Contradicted, "contradicted"),
    ];
}

/// Why it is not known what the rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// There is no connection.
    NotConnected,
    /// Batches are missing.
    Gap,
    /// The events go back to no moment at which the cache was empty.
    NoBeginning,
    /// A batch makes no sense.
    Nonsense,
    /// Answers to requests say otherwise.
    Contradicted,
}

impl Unknown {
    pub fn name(self) -> &'static str {
        match self {
            Unknown::NotConnected => "not-connected",
            Unknown::Gap => "gap",
            Unknown::NoBeginning => "no-beginning",
            Unknown::Nonsense => "nonsense",
            Unknown::Contradicted => "contradicted",
        }
    }
}

/// What a rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    pub blocks: u64,
    pub tokens: u64,
    /// Tokens that it holds when it is full; `None` if it has evicted nothing yet.
    pub room_tokens: Option<u64>,
}

/// What was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    pub batches: u64,
    pub gaps: u64,
    pub replays: u64,
    /// Times that the cache was emptied, or its process was another one.
    pub emptied: u64,
    /// In the order of [`Dropped::NAMES`].
    pub dropped: [u64; Dropped::NAMES.len()],
}

impl Counts {
    pub fn add(&mut self, more: &Counts) {
        self.batches += more.batches;
        self.gaps += more.gaps;
        self.replays += more.replays;
        self.emptied += more.emptied;
        self.dropped.iter_mut().zip(more.dropped).for_each(|(sum, more)| *sum += more);
    }
}

/// What is new since the report before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Everything that was cached before is gone.
    pub emptied: bool,
    /// Tokens whose KV came into the cache since, or since it was emptied.
    pub stored_tokens: u64,
    pub held: Result<Held, Unknown>,
    pub counts: Counts,
}

/// What has to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Give it the next message.
    Hear,
    /// Have everything from [`RankEvents::replay_from`] on replayed.
    Replay,
}

/// What to do in a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replaying {
    GoOn,
    /// End it, and ask anew from [`RankEvents::replay_from`] on.
    AskAnew,
    /// Nothing is missing any more.
    Over,
}

/// A batch that was taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    number: u64,
    sum: u64,
}

#[derive(Debug)]
pub struct RankEvents {
    has_replays: bool,
    live: LiveBlocks,
    /// Why `live` says nothing.
    lost: Option<Unknown>,
    /// Why batches may be missing behind `place`.
    behind: Option<Unknown>,
    place: Option<Place>,
    /// In the replay under way `place` has come again.
    is_proven: bool,
    /// The process of this connection publishes nothing up to this number on it any more.
    heard: Option<u64>,
    /// The batch with the greatest number of the process that is followed. While it is not known
    /// what is held it stays, so that the next replay shows whether the process is still the same.
    newest: Option<Place>,
    /// In the replay under way the newest batch is still to come again.
    unmet: Option<Place>,
    /// It has come, so what comes now is news.
    is_news: bool,
    /// A hash of it.
    topic: Option<u64>,
    rank: Option<u64>,
    asked_us: Option<u64>,
    pause_us: u64,
    report: Report,
}

impl RankEvents {
    /// Nothing has been heard yet. Whether there is anybody who replays.
    pub fn new(has_replays: bool) -> RankEvents {
        let held = Err(Unknown::NotConnected);
        RankEvents {
            has_replays,
            live: LiveBlocks::default(),
            lost: Some(Unknown::NoBeginning),
            behind: Some(Unknown::NotConnected),
            place: None,
            is_proven: false,
            heard: None,
            newest: None,
            unmet: None,
            is_news: false,
            topic: None,
            rank: None,
            asked_us: None,
            pause_us: 0,
            report: Report { emptied: false, stored_tokens: 0, held, counts: Counts::default() },
        }
    }

    /// There is a new connection. What was published without one is missing.
    pub fn connected(&mut self, now_us: u64) -> Next {
        // What was taken in before was published before, so its number does not come again.
        (self.heard, self.topic) = (self.newest.map(|newest| newest.number), None);
        self.behind = Some(Unknown::Gap);
        self.ask(now_us)
    }

    pub fn disconnected(&mut self) {
        self.behind = Some(Unknown::NotConnected);
    }

    /// A message came that is longer than any batch. The connection cannot go on.
    pub fn oversized(&mut self) {
        self.drop(Dropped::Oversized);
    }

    /// Nothing has been heard for a while.
    pub fn idle(&mut self, now_us: u64) -> Next {
        if self.behind.is_some() || self.may_be_found() { self.ask(now_us) } else { Next::Hear }
    }

    /// What was said until now is not believed.
    pub fn contradicted(&mut self, now_us: u64) -> Next {
        self.lost = Some(Unknown::Contradicted);
        self.ask(now_us)
    }

    /// A message came from whoever publishes.
    pub fn hear(&mut self, now_us: u64, message: &[Bytes]) -> Next {
        let Some((number, payload)) = self.open(message) else { return Next::Hear };
        let is_old = self.place.is_some_and(|place| number <= place.number);
        let counts_anew = self.heard.is_some_and(|heard| number <= heard);
        // Without replays no batch comes twice.
        if counts_anew || (is_old && !self.has_replays) {
            self.other_process();
        } else if is_old && self.behind.is_none() {
            self.heard = Some(number);
            return Next::Hear;
        }
        self.heard = Some(number);
        if !self.is_next(number) {
            return self.missing(now_us, number, payload);
        }
        if self.place.is_none() {
            (self.live, self.lost) = (LiveBlocks::default(), None);
        }
        self.behind = None;
        self.take(number, payload, true);
        if self.may_be_found() { self.ask(now_us) } else { Next::Hear }
    }

    fn is_next(&self, number: u64) -> bool {
        let is_proven = self.behind.is_none() || !self.has_replays;
        self.place.map_or(number == 0, |place| number == place.number + 1 && is_proven)
    }

    /// There are batches between `place` and this one.
    fn missing(&mut self, now_us: u64, number: u64, payload: &[u8]) -> Next {
        if self.place.is_some() {
            self.report.counts.gaps += u64::from(self.behind.is_none());
            self.behind = Some(Unknown::Gap);
            if self.has_replays {
                return self.ask(now_us);
            }
            self.lost = Some(Unknown::Gap);
        } else if self.ask(now_us) == Next::Replay {
            return Next::Replay;
        }
        // All that can be heard now is that the cache is emptied.
        self.lost =
            Some(if self.has_replays { Unknown::Gap } else { self.lost.unwrap_or(Unknown::NoBeginning) });
        self.behind = None;
        self.take(number, payload, true);
        Next::Hear
    }

    fn ask(&mut self, now_us: u64) -> Next {
        let since_us = self.asked_us.map(|asked_us| now_us.saturating_sub(asked_us));
        if !self.has_replays || since_us.is_some_and(|since_us| since_us < self.pause_us) {
            return Next::Hear;
        }
        self.pause_us = match since_us {
            Some(since_us) if since_us <= 2 * PAUSE_MAX_US => {
                (2 * self.pause_us).clamp(PAUSE_MIN_US, PAUSE_MAX_US)
            }
            _ => 0,
        };
        self.asked_us = Some(now_us);
        self.report.counts.replays += 1;
        (self.is_proven, self.unmet, self.is_news) = (false, self.newest, false);
        if self.may_be_found() {
            self.place = None;
        }
        Next::Replay
    }

    /// It is not known what is held, and may be if everything is replayed.
    fn may_be_found(&self) -> bool {
        self.lost.is_some_and(|why| why != Unknown::NoBeginning)
    }

    /// The first batch that is to be replayed.
    pub fn replay_from(&self) -> u64 {
        self.place.map_or(0, |place| place.number)
    }

    /// A batch of a replay came.
    pub fn replayed(&mut self, number: u64, payload: &[u8]) -> Replaying {
        let batch = Place { number, sum: xxh3_64(payload) };
        let is_other = |known: Place| known.number == number && known != batch;
        if self.place.is_some_and(is_other) || self.unmet.is_some_and(is_other) {
            self.other_process();
            return Replaying::AskAnew;
        }
        match self.place {
            Some(place) if number < place.number => return Replaying::GoOn,
            // ZeroMQ drops what a socket has no room for.
            Some(place) if self.is_proven && number > place.number + 1 => {
                self.is_proven = false;
                return Replaying::AskAnew;
            }
            // It is replayed no more.
            Some(place) if !self.is_proven && number > place.number => self.place = None,
            _ => {}
        }
        if self.unmet.is_some_and(|unmet| number > unmet.number) {
            (self.unmet, self.is_news) = (None, true);
        }
        if self.place.is_none() {
            (self.live, self.lost) = (LiveBlocks::default(), (number > 0).then_some(Unknown::NoBeginning));
        }
        if self.place != Some(batch) {
            self.take(number, payload, self.is_news);
        }
        self.is_proven = true;
        if self.unmet == Some(batch) {
            (self.unmet, self.is_news) = (None, true);
        }
        Replaying::GoOn
    }

    /// A replay came to its end.
    pub fn replay_ended(&mut self) -> Replaying {
        if self.unmet.is_some() || (self.place.is_some() && !self.is_proven) {
            self.other_process();
            return Replaying::AskAnew;
        }
        if self.place.is_none() {
            (self.live, self.lost) = (LiveBlocks::default(), None);
        }
        self.behind = None;
        Replaying::Over
    }

    /// A replay did not come to its end.
    pub fn replay_failed(&mut self) {
        (self.lost, self.place) = (Some(Unknown::Gap), None);
    }

    /// Another process publishes, whose cache was empty when it began.
    fn other_process(&mut self) {
        (self.place, self.heard, self.rank) = (None, None, None);
        (self.newest, self.unmet, self.is_news) = (None, None, false);
        self.lost = Some(Unknown::Gap);
        self.empty();
    }

    fn empty(&mut self) {
        (self.report.emptied, self.report.stored_tokens) = (true, 0);
        self.report.counts.emptied += 1;
    }

    /// The number and the payload of a message.
    fn open<'a>(&mut self, message: &'a [Bytes]) -> Option<(u64, &'a Bytes)> {
        let opened = match message {
            [topic, number, payload] => number_of(number).map(|number| (topic, number, payload)),
            _ => None,
        };
        let Some((topic, number, payload)) = opened.filter(|(_, number, _)| *number <= NUMBER_MAX) else {
            self.drop(Dropped::Unreadable);
            return None;
        };
        let topic = xxh3_64(topic);
        if *self.topic.get_or_insert(topic) != topic {
            self.drop(Dropped::OtherPublisher);
            return None;
        }
        Some((number, payload))
    }

    fn take(&mut self, number: u64, payload: &[u8], is_news: bool) {
        self.place = Some(Place { number, sum: xxh3_64(payload) });
        self.report.counts.batches += 1;
        match self.count(payload) {
            Ok(counted) if is_news => {
                if counted.cleared {
                    self.empty();
                }
                let stored_tokens = &mut self.report.stored_tokens;
                *stored_tokens = stored_tokens.saturating_add(counted.stored_tokens);
            }
            Ok(_) => {}
            Err(Dropped::OtherPublisher) => self.drop(Dropped::OtherPublisher),
            Err(dropped) => {
                self.drop(dropped);
                self.lost = Some(Unknown::Nonsense);
            }
        }
        if self.newest.is_none_or(|newest| newest.number <= number && !self.may_be_found()) {
            self.newest = self.place;
        }
    }

    fn count(&mut self, payload: &[u8]) -> Result<Counted, Dropped> {
        let mut batch = kv_event_batch::read(payload).map_err(|bad| {
            tracing::debug!(%bad, "KV events");
            Dropped::Unreadable
        })?;
        if *self.rank.get_or_insert(batch.rank) != batch.rank {
            return Err(Dropped::OtherPublisher);
        }
        if self.lost.is_some() {
            let cleared = batch.changes.iter().rposition(|change| *change == Change::Cleared);
            let Some(cleared) = cleared else { return Ok(Counted::default()) };
            batch.changes.drain(..cleared);
            self.lost = None;
        }
        let counted = self.live.count(&batch).map_err(|Impossible| Dropped::Impossible)?;
        self.report.counts.dropped[Dropped::BlockSize as usize] += counted.of_other_size;
        Ok(counted)
    }

    fn drop(&mut self, dropped: Dropped) {
        self.report.counts.dropped[dropped as usize] += 1;
    }

    /// What is new since it was asked last.
    pub fn report(&mut self) -> Report {
        let held = match self.behind.or(self.lost) {
            Some(unknown) => Err(unknown),
            None => Ok(Held {
                blocks: self.live.blocks(),
                tokens: self.live.tokens(),
                room_tokens: self.live.room_tokens(),
            }),
        };
        let nothing = Report { emptied: false, stored_tokens: 0, held, counts: Counts::default() };
        Report { held, ..std::mem::replace(&mut self.report, nothing) }
    }
}

/// A number as ZeroMQ frames have it here.
pub fn number_of(frame: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(frame.try_into().ok()?))
}

#[cfg(test)]
mod tests;
