//! What a member of the directory does next: join, stay, say what it has, read what others have,
//! and begin anew where that was lost. Sans-IO: time, answers and events are passed in; questions
//! come out.
//!
//! One question is asked at a time; beside them at most one watch is open. The rules that make the
//! copy correct:
//!
//! * A watch begins at the copy's own revision, whose changes it says once more. Where history up
//!   to the one after it has been compacted,
//!   a watch that began there would lack what that one deleted (etcd of before August 2024,
//!   etcd-io/etcd#18089); this one is refused.
//! * A watch that broke is opened again there only after the lease was found alive at no lower
//!   revision: a lease does
//!   not outlive the data, so the history is the same. Otherwise, and after compaction, everything
//!   is read anew; until that is complete the old copy answers.
//! * A new lease means that everything is said again.
//! * A watch that is silent is tested by writing our own record: the event has to arrive.
//! * A record of ours that another instance wrote after we did is another live node with our name:
//!   both write one key, and each
//!   hides the other. Each writes its own again after as long as a watch may be silent, so that
//!   both know as long as both live.

use super::keys::{Key, Keys};
use super::ledger::{Ledger, Saying};
use super::mirror::Mirror;
use super::wire::{Change, Event, Failure, Message, Request, Response};
use crate::directory::{DirectoryFaults, DirectoryStat, NodeRecord};

/// Changes in one transaction: etcd allows 128.
const CHANGES_MAX: usize = 128;
/// Keys in one answer of a list.
const PAGE_KEYS: usize = 2000;
/// After the first failure the member rests this long; twice as long after the next.
const REST_FIRST_US: u64 = 50_000;
/// It never rests longer than this while it has a lease that would end meanwhile,
const REST_MAX_US: u64 = 1_000_000;
/// nor longer than this where nobody answers,
const REST_UNANSWERED_MAX_US: u64 = 5_000_000;
/// nor longer than this where it is refused: that takes somebody to change something.
const REST_REFUSED_MAX_US: u64 = 30_000_000;

#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// How long etcd keeps what we said when we are silent.
    pub ttl_s: u32,
    pub chunks_max: usize,
    /// Pairs of chunk and node in the copy.
    pub holdings_max: usize,
    /// A watch silent for this long is tested.
    pub quiet_us: u64,
    /// A watch under test that is silent for this long has ended.
    pub test_us: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Ask, and pass the answer in.
    Ask(Request),
    /// Nothing, until then or until something happens.
    Rest { until_us: u64 },
}

/// The watch that has to be open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Watch {
    /// Tells it from those before.
    pub number: u64,
    /// It begins here.
    pub revision: i64,
}

/// A member of the directory.
#[derive(Debug)]
pub(super) struct Membership {
    keys: Keys,
    me: NodeRecord,
    limits: Limits,
    lease: Option<Lease>,
    /// Our record is there, under this lease.
    is_known: bool,
    /// It was heard of.
    is_seen: bool,
    /// The lease of an earlier start of this node: what is under it is not true any more.
    predecessor: Option<i64>,
    ledger: Ledger,
    mirror: Mirror,
    reading: Reading,
    watches: u64,
    asked: Asked,
    /// Of all questions but those about the lease, which go on where the others are refused.
    failures_in_row: u32,
    lease_failures: u32,
    lease_rest_until_us: u64,
    /// Watches in a row that ended soon.
    short_watches: u32,
    /// Another node with our name, and until when that is believed.
    namesake: Option<(NodeRecord, u64)>,
    /// When our record, over which that one wrote, is written again.
    reclaim_at_us: Option<u64>,
    rest_until_us: u64,
    stale_since_us: Option<u64>,
    stat: DirectoryStat,
}

#[derive(Debug, Clone, Copy)]
struct Lease {
    id: i64,
    ttl_us: u64,
    renew_at_us: u64,
}

/// How the copy is kept.
#[derive(Debug)]
enum Reading {
    /// The copy is not, or not any more, a state that etcd was in.
    List { from: Vec<u8>, revision: i64, copy: Mirror },
    /// The copy is one, and the lease has to be found alive before the watch goes on.
    Resume,
    /// The copy follows.
    Follow { watch: Watch, since_us: u64, is_open: bool, heard_us: u64, tested_us: Option<u64> },
}

/// What the question under way is about.
#[derive(Debug, Default)]
enum Asked {
    #[default]
    Nothing,
    Lease,
    Page,
    Predecessor,
    /// Our record, and chunks.
    Join(Vec<Saying>),
    Chunks(Vec<Saying>),
    /// Our record again, to hear of it.
    Test,
}

impl Membership {
    pub fn new(prefix: &str, me: NodeRecord, limits: Limits, now_us: u64) -> Membership {
        let keys = Keys::new(prefix);
        let reading = Reading::anew(&keys);
        Membership {
            keys,
            me,
            limits,
            lease: None,
            is_known: false,
            is_seen: false,
            predecessor: None,
            ledger: Ledger::new(limits.chunks_max),
            mirror: Mirror::default(),
            reading,
            watches: 0,
            asked: Asked::Nothing,
            failures_in_row: 0,
            lease_failures: 0,
            lease_rest_until_us: 0,
            short_watches: 0,
            namesake: None,
            reclaim_at_us: None,
            rest_until_us: 0,
            stale_since_us: Some(now_us),
            stat: DirectoryStat::default(),
        }
    }

    /// What others should know of our chunks.
    pub fn announce(&mut self, added: &[forebay_kv::ChunkId], removed: &[forebay_kv::ChunkId]) {
        self.ledger.announce(added, removed);
    }

    /// What others should know of our chunks, and nothing else of before.
    pub fn announce_all(&mut self, here: &[forebay_kv::ChunkId]) {
        self.ledger.replace(here);
    }

    /// The copy, once there was one.
    pub fn mirror(&self) -> Option<&Mirror> {
        (self.stat.lists > 0).then_some(&self.mirror)
    }

    /// The lease that everything of ours is under.
    pub fn lease(&self) -> Option<i64> {
        self.lease.map(|lease| lease.id)
    }

    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// The watch that has to be open now; any other has to be closed.
    pub fn watch(&self) -> Option<Watch> {
        match self.reading {
            Reading::Follow { watch, .. } => Some(watch),
            Reading::List { .. } | Reading::Resume => None,
        }
    }

    /// What to do now. After [`Step::Ask`], not to be called before the answer was passed in.
    pub fn step(&mut self, now_us: u64) -> Step {
        if now_us >= self.rest_until_us {
            self.end_silent_watch(now_us);
        }
        let Some(lease) = self.lease else {
            if now_us < self.lease_rest_until_us {
                return Step::Rest { until_us: self.lease_rest_until_us };
            }
            self.asked = Asked::Lease;
            return Step::Ask(Request::Grant { ttl_s: self.limits.ttl_s });
        };
        let lease = Lease { renew_at_us: lease.renew_at_us.max(self.lease_rest_until_us), ..lease };
        if now_us >= lease.renew_at_us {
            self.asked = Asked::Lease;
            return Step::Ask(Request::KeepAlive { lease: lease.id });
        }
        if now_us < self.rest_until_us {
            return Step::Rest { until_us: self.rest_until_us.min(lease.renew_at_us) };
        }
        if let Reading::List { from, revision, .. } = &self.reading {
            self.asked = Asked::Page;
            let (from, end) = (from.clone(), self.keys.end());
            return Step::Ask(Request::List { from, end, revision: *revision, limit: PAGE_KEYS });
        }
        if let Some(lease) = self.predecessor {
            self.asked = Asked::Predecessor;
            return Step::Ask(Request::Revoke { lease });
        }
        self.say(lease.id).unwrap_or_else(|| self.test_watch(lease, now_us))
    }

    /// Our record where it is not known yet, and what is to be said of our chunks.
    fn say(&mut self, lease: i64) -> Option<Step> {
        if self.is_known && !self.ledger.is_due() {
            return None;
        }
        let records = usize::from(!self.is_known);
        let sayings = self.ledger.take(CHANGES_MAX - records);
        if self.is_known && sayings.is_empty() {
            return None;
        }
        let chunks = sayings.iter().map(|&(chunk, here)| {
            let key = self.keys.write(Key::Holding(chunk, self.me.node));
            if here { Change::Put { key, value: Vec::new(), lease } } else { Change::Delete { key } }
        });
        let record = (!self.is_known).then(|| self.record(lease));
        let changes = record.into_iter().chain(chunks).collect();
        self.asked = if self.is_known { Asked::Chunks(sayings) } else { Asked::Join(sayings) };
        Some(Step::Ask(Request::Write { changes }))
    }

    fn record(&self, lease: i64) -> Change {
        let key = self.keys.write(Key::Node(self.me.node));
        Change::Put { key, value: self.me.to_json().into_bytes(), lease }
    }

    /// Writes our record where the watch has been silent for long, or rests until something is due.
    fn test_watch(&mut self, lease: Lease, now_us: u64) -> Step {
        let due_us = match self.reading {
            Reading::Follow { heard_us, tested_us: None, .. } => heard_us + self.limits.quiet_us,
            Reading::Follow { tested_us: Some(tested_us), .. } => tested_us + self.limits.test_us,
            Reading::List { .. } | Reading::Resume => lease.renew_at_us,
        };
        let reclaim_at_us = self.reclaim_at_us.unwrap_or(u64::MAX);
        if due_us.min(reclaim_at_us) > now_us {
            return Step::Rest { until_us: due_us.min(lease.renew_at_us).min(reclaim_at_us) };
        }
        if now_us >= reclaim_at_us {
            self.reclaim_at_us = Some(now_us + self.limits.quiet_us);
        } else if let Reading::Follow { tested_us, .. } = &mut self.reading {
            *tested_us = Some(now_us);
        }
        self.asked = Asked::Test;
        Step::Ask(Request::Write { changes: vec![self.record(lease.id)] })
    }

    fn end_silent_watch(&mut self, now_us: u64) {
        let Reading::Follow { tested_us: Some(tested_us), .. } = self.reading else { return };
        if now_us >= tested_us + self.limits.test_us {
            self.stat.faults.unreachable += 1;
            self.resume(now_us);
            self.note_freshness(now_us);
        }
    }

    pub fn answered(&mut self, answer: Result<Response, Failure>, now_us: u64) {
        let asked = std::mem::take(&mut self.asked);
        match answer {
            Ok(response) => {
                match asked {
                    Asked::Lease => self.lease_failures = 0,
                    _ => self.failures_in_row = 0,
                }
                self.take_answer(asked, response, now_us);
            }
            Err(failure) => self.take_failure(asked, &failure, now_us),
        }
        self.note_freshness(now_us);
    }

    fn take_answer(&mut self, asked: Asked, response: Response, now_us: u64) {
        match (asked, response) {
            (Asked::Lease, Response::Granted { lease, ttl_s }) => self.join(lease, ttl_s, now_us),
            (Asked::Lease, Response::Alive { revision }) => self.stay(revision, now_us),
            (Asked::Page, Response::Listed { entries, more, revision }) => {
                self.take_page(&entries, more, revision, now_us);
            }
            (Asked::Join(sayings), Response::Written { replaced_leases }) => {
                self.is_known = true;
                self.ledger.said(&sayings);
                // Only at the start: two nodes of one id would otherwise drive each other out for
                // ever.
                if self.stat.joins == 1 {
                    self.predecessor = replaced_leases.into_iter().find(|&lease| Some(lease) != self.lease());
                }
            }
            (Asked::Chunks(sayings), Response::Written { .. }) => self.ledger.said(&sayings),
            // The event may have been here before the answer; if not, it has its time from now.
            (Asked::Test, Response::Written { .. }) => {
                if let Reading::Follow { tested_us: Some(tested_us), .. } = &mut self.reading {
                    *tested_us = now_us;
                }
            }
            (Asked::Predecessor, _) => self.predecessor = None,
            (asked, _) => self.take_failure(asked, &Failure::Refused("another answer".into()), now_us),
        }
    }

    fn take_failure(&mut self, asked: Asked, failure: &Failure, now_us: u64) {
        match (&asked, failure) {
            // What it is about is over: that is all that was wanted.
            (Asked::Predecessor, Failure::LeaseGone) => return self.predecessor = None,
            (_, Failure::LeaseGone) => self.leave(),
            (_, Failure::Compacted) => self.reading = Reading::anew(&self.keys),
            (_, Failure::Unreachable(_)) => self.stat.faults.unreachable += 1,
            (_, Failure::Refused(_)) => self.stat.faults.refused += 1,
        }
        let is_of_lease = matches!(asked, Asked::Lease);
        match asked {
            Asked::Join(sayings) | Asked::Chunks(sayings) => self.ledger.lost(&sayings),
            Asked::Test => self.end_test(),
            Asked::Nothing | Asked::Lease | Asked::Page | Asked::Predecessor => {}
        }
        self.rest(is_of_lease, failure, now_us);
    }

    fn end_test(&mut self) {
        if let Reading::Follow { tested_us, .. } = &mut self.reading {
            *tested_us = None;
        }
    }

    /// Rests longer after each failure, but, where etcd may be back at any time, not so long that
    /// the lease ends meanwhile.
    fn rest(&mut self, is_of_lease: bool, failure: &Failure, now_us: u64) {
        let most_us = match (failure, self.lease) {
            (Failure::Refused(_), _) => REST_REFUSED_MAX_US,
            (_, Some(lease)) => REST_MAX_US.min(lease.ttl_us / 8),
            (_, None) => REST_UNANSWERED_MAX_US,
        };
        let failures = if is_of_lease { self.lease_failures } else { self.failures_in_row };
        let until_us = now_us + self.rest_us(failures).min(most_us);
        // Without the lease there is nothing else to ask.
        self.rest_until_us = until_us.max(self.rest_until_us);
        if is_of_lease {
            (self.lease_rest_until_us, self.lease_failures) = (until_us, failures + 1);
        } else {
            self.failures_in_row += 1;
        }
    }

    /// Whether what was asked last failed, of the lease or of all else.
    pub fn is_failing(&self) -> bool {
        self.failures_in_row + self.lease_failures > 0
    }

    /// Twice as long after each failure, and not the same for all nodes, so that they do not ask in
    /// step.
    fn rest_us(&self, failures: u32) -> u64 {
        let rest_us = REST_FIRST_US << failures.min(10);
        rest_us - rest_us / 4 * u64::from(self.me.instance[0]) / 256
    }

    /// Another live node with our name.
    pub fn namesake(&self, now_us: u64) -> Option<&NodeRecord> {
        self.namesake.as_ref().filter(|(_, until_us)| now_us < *until_us).map(|(record, _)| record)
    }

    /// What is said of our own record, now that we have written it once.
    fn heard_of_us(&mut self, entry: &super::wire::Entry, now_us: u64) {
        if self.stat.joins == 0 || self.keys.read(&entry.key) != Some(Key::Node(self.me.node)) {
            return;
        }
        let Ok(record) = NodeRecord::from_json(&entry.value) else { return };
        let is_other = record.node == self.me.node && record.instance != self.me.instance;
        // What is heard of before our own record was there is an earlier start of this node.
        if is_other && self.is_seen {
            let lasts_us =
                2 * self.limits.quiet_us + self.limits.test_us + u64::from(self.limits.ttl_s) * 1_000_000;
            self.namesake = Some((record, now_us + lasts_us));
            self.reclaim_at_us = Some(now_us + self.limits.quiet_us);
        } else if !is_other {
            self.is_seen = true;
            self.reclaim_at_us = None;
        }
    }

    fn join(&mut self, id: i64, ttl_s: i64, now_us: u64) {
        let ttl_us = ttl_s.unsigned_abs().saturating_mul(1_000_000);
        self.lease = Some(Lease { id, ttl_us, renew_at_us: now_us + ttl_us / 3 });
        self.stat.joins += 1;
    }

    fn stay(&mut self, revision: i64, now_us: u64) {
        if let Some(lease) = &mut self.lease {
            lease.renew_at_us = now_us + lease.ttl_us / 3;
        }
        if matches!(self.reading, Reading::Resume) {
            if revision >= self.mirror.revision {
                self.follow(now_us);
            } else {
                self.reading = Reading::anew(&self.keys);
            }
        }
    }

    /// The lease is gone, and all that we said with it. Perhaps etcd's data too.
    fn leave(&mut self) {
        self.lease = None;
        self.is_known = false;
        self.predecessor = None;
        self.ledger.begin_anew();
        self.reading = Reading::anew(&self.keys);
    }

    fn take_page(&mut self, entries: &[super::wire::Entry], more: bool, at: i64, now_us: u64) {
        entries.iter().for_each(|entry| self.heard_of_us(entry, now_us));
        let Reading::List { from, revision, copy } = &mut self.reading else { return };
        if entries.last().is_some_and(|last| last.key < *from) {
            return self.take_failure(Asked::Page, &Failure::Refused("keys of another page".into()), now_us);
        }
        if *revision == 0 {
            *revision = at;
        }
        for entry in entries {
            copy.put(&self.keys, entry, self.limits.holdings_max, &mut self.stat.faults);
        }
        match entries.last() {
            Some(last) if more => {
                from.clone_from(&last.key);
                // The first key after it.
                from.push(0);
            }
            _ => {
                copy.revision = *revision;
                self.mirror = std::mem::take(copy);
                self.stat.lists += 1;
                self.follow(now_us);
            }
        }
    }

    fn follow(&mut self, now_us: u64) {
        self.watches += 1;
        let watch = Watch { number: self.watches, revision: self.mirror.revision };
        let (since_us, heard_us) = (now_us, now_us);
        self.reading = Reading::Follow { watch, since_us, is_open: false, heard_us, tested_us: None };
    }

    /// The watch is over; it goes on when the lease was found alive.
    fn resume(&mut self, now_us: u64) {
        self.reading = Reading::Resume;
        if let Some(lease) = &mut self.lease {
            lease.renew_at_us = lease.renew_at_us.min(now_us.max(self.rest_until_us));
        }
    }

    /// What the watch with this number says.
    pub fn watched(&mut self, number: u64, message: Message, now_us: u64) {
        let Reading::Follow { watch, since_us, is_open, heard_us, tested_us } = &mut self.reading else {
            return;
        };
        if watch.number != number {
            return;
        }
        (*heard_us, *tested_us) = (now_us, None);
        match message {
            Message::Created => *is_open = true,
            Message::Events { events, is_fragment } => self.take_events(&events, is_fragment, now_us),
            Message::Progress { revision } => self.mirror.revision = revision.max(self.mirror.revision),
            Message::Compacted => self.reading = Reading::anew(&self.keys),
            Message::Ended => {
                // One that does not live long is not opened again at once, and later each time.
                let is_short = now_us - *since_us < REST_MAX_US;
                self.stat.faults.unreachable += 1;
                self.short_watches = if is_short { self.short_watches + 1 } else { 0 };
                let rest_us = match self.short_watches {
                    0 => REST_FIRST_US,
                    ended => self.rest_us(ended + 3).clamp(REST_MAX_US, REST_REFUSED_MAX_US),
                };
                let lease_us = self.lease.map_or(u64::MAX, |lease| lease.ttl_us / 8);
                self.rest_until_us = now_us + rest_us.min(lease_us.max(REST_MAX_US));
                self.resume(now_us);
            }
        }
        self.note_freshness(now_us);
    }

    fn take_events(&mut self, events: &[Event], is_fragment: bool, now_us: u64) {
        for event in events {
            self.heard_of_us(&event.entry, now_us);
            if event.is_delete {
                self.mirror.delete(&self.keys, &event.entry.key);
            } else {
                let faults = &mut self.stat.faults;
                self.mirror.put(&self.keys, &event.entry, self.limits.holdings_max, faults);
            }
        }
        // A watch that breaks between fragments has to say the whole revision again.
        if let Some(last) = events.last()
            && !is_fragment
        {
            self.mirror.revision = last.entry.mod_revision.max(self.mirror.revision);
        }
    }

    /// The copy is fresh while the watch is open and etcd answers.
    fn note_freshness(&mut self, now_us: u64) {
        let is_open = matches!(self.reading, Reading::Follow { is_open: true, .. });
        self.stale_since_us = match self.stale_since_us {
            _ if is_open && !self.is_failing() => None,
            None => Some(now_us),
            since => since,
        };
    }

    pub fn stat(&self, now_us: u64) -> DirectoryStat {
        let over_limit = self.stat.faults.over_limit + self.ledger.over_limit;
        DirectoryStat {
            nodes: self.mirror.nodes_but(self.me.node).count(),
            holdings: self.mirror.holdings(),
            announced: self.ledger.announced(),
            waiting: self.ledger.waiting(),
            name_conflict: self.namesake(now_us).is_some(),
            stale_us: self.stale_since_us.map(|since_us| now_us.saturating_sub(since_us)),
            faults: DirectoryFaults { over_limit, ..self.stat.faults },
            ..self.stat
        }
    }

    pub fn me(&self) -> [u8; 16] {
        self.me.node
    }
}

impl Reading {
    fn anew(keys: &Keys) -> Reading {
        Reading::List { from: keys.first(), revision: 0, copy: Mirror::default() }
    }
}
