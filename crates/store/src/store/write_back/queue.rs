//! What waits to be written to the disk: which chunks are let into the queue, how many are written
//! at a time, and what is given up. Sans-IO: time is an argument. This file knows ids, lengths and
//! ages.

use super::orphans::Orphans;
use super::windows::{Timing, When, Why, Windows};
use crate::absence::{Absence, AbsenceLog, REMEMBERED};
use crate::admission::{Admission, AdmissionConfig, Chunk, ChunkKey, Policy, Verdicts};
use crate::disk::{PacerLimits, WriteBackPacer};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteBackConfig {
    /// Which chunks are written at all.
    pub admission: AdmissionConfig,
    /// How many chunks are written at a time, given how long reads take meanwhile, and how long a
    /// chunk may wait.
    pub pacer: PacerLimits,
    /// When writes begin. A chunk that has waited for half of its time is due in any case.
    pub timing: Timing,
    /// So many bytes that wait make all of them due.
    pub due_bytes: u64,
    pub queue_chunks: usize,
}

impl WriteBackConfig {
    /// Up to 8 chunks at a time while reads take less than 2 ms beside 1 ms per MB; a chunk waits
    /// 10 s at most, and 65,536 chunks do. Chunks for an eighth of the memory are due. There is no
    /// endurance budget.
    pub fn new(policy: Policy, memory_bytes: u64, ssd_bytes: u64, chunk_bytes: u64) -> WriteBackConfig {
        WriteBackConfig {
            admission: AdmissionConfig {
                policy,
                memory_bytes,
                ssd_bytes,
                ssd_chunks: ssd_bytes / chunk_bytes.max(1),
                endurance_bytes_per_day: None,
            },
            pacer: PacerLimits {
                lots_min: 1,
                lots_max: 8,
                read_goal_us: 2_000,
                read_goal_bytes_per_s: 1_000_000_000,
                epoch_us: EPOCH.as_micros() as u64,
                dirty_age_max_us: 10_000_000,
            },
            timing: Timing::AtOnce,
            due_bytes: memory_bytes / 8,
            queue_chunks: 65_536,
        }
    }
}

/// How often the number of writes at a time is judged, and looked at while chunks wait.
pub(super) const EPOCH: Duration = Duration::from_millis(100);

/// A chunk that memory has and the disk has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dirty {
    pub tenant: TenantId,
    pub id: ChunkId,
    pub parent: Option<ChunkId>,
    pub bytes: u64,
}

/// What became of a chunk that left the queue to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    Stored,
    AlreadyHere,
    /// Memory had evicted it, or somebody had deleted it, before it was written.
    Gone,
    /// The disk tier has no segment free for the moment.
    NoRoom,
    /// The disk tier did not take it in.
    Refused,
    Failed,
}

impl Written {
    /// Why the chunk is not on the disk.
    fn absence(self) -> Option<Absence> {
        match self {
            Written::Stored | Written::AlreadyHere => None,
            Written::Gone => Some(Absence::GoneBefore),
            Written::NoRoom | Written::Refused => Some(Absence::NotTaken),
            Written::Failed => Some(Absence::NotWritten),
        }
    }
}

/// Writes that began, by why they did then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WritesBegun {
    pub at_once: u64,
    pub window: u64,
    pub best_effort: u64,
    pub idle: u64,
    pub due: u64,
}

impl WritesBegun {
    fn note(&mut self, why: Why) {
        let counter = match why {
            Why::AtOnce => &mut self.at_once,
            Why::Window => &mut self.window,
            Why::BestEffort => &mut self.best_effort,
            Why::Idle => &mut self.idle,
            Why::Due => &mut self.due,
        };
        *counter += 1;
    }
}

/// What became of chunks that were to be written to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteBackStat {
    /// What admission said, in bytes.
    pub verdicts: Verdicts,
    pub waiting: usize,
    pub waiting_bytes: u64,
    pub in_flight: usize,
    /// Writes by why they began when they did.
    pub begun: WritesBegun,
    /// Chunks that reads leave room for at a time.
    pub window: usize,
    pub written: u64,
    pub written_bytes: u64,
    /// From when chunks were offered until they were written: all of them together, and the
    /// longest.
    pub written_after_us: u64,
    pub written_after_us_max: u64,
    /// Chunks that were on the disk when their turn came.
    pub already_there: u64,
    /// Chunks left out because the queue was full.
    pub queue_full: u64,
    /// Chunks left out because they had waited for too long.
    pub too_old: u64,
    /// Chunks that memory had evicted or that were deleted before their turn came.
    pub gone: u64,
    pub refused: u64,
    pub failed: u64,
    /// Chunks of which it is forgotten why they were not written.
    pub absences_forgotten: u64,
}

/// Chunks that write-back lost since the last log line: those that were to be written to the disk
/// and are not there.
#[derive(Debug, Clone, Copy, Default)]
pub struct Losses {
    gone: u64,
    too_old: u64,
    queue_full: u64,
    refused: u64,
    failed: u64,
}

impl Losses {
    fn chunks(&self) -> u64 {
        self.gone + self.too_old + self.queue_full + self.refused + self.failed
    }

    /// Says in the log what was lost.
    pub fn tell(&self) {
        let Losses { gone, too_old, queue_full, refused, failed } = *self;
        let chunks = self.chunks();
        tracing::warn!(chunks, gone, too_old, queue_full, refused, failed, "chunks were not written to SSD");
    }
}

/// How long nothing is tried after the disk had no room: about what it takes to make it durable
/// that a segment is free.
const NO_ROOM_BACKOFF_US: u64 = 20_000;

#[derive(Debug)]
pub struct Queue {
    admission: Admission,
    pacer: WriteBackPacer,
    windows: Windows,
    due_bytes: u64,
    dirty_age_max_us: u64,
    limit: usize,
    /// With the time since when each waits, the oldest first.
    waiting: VecDeque<(u64, Dirty)>,
    waiting_bytes: u64,
    /// With the time since when each waited.
    writing: HashMap<ChunkId, u64>,
    writing_bytes: u64,
    /// When to ask for the next chunk again.
    wakes_at_us: u64,
    /// Whether somebody waits for all of it.
    hurried: bool,
    /// When something may be written again.
    backs_off_until_us: u64,
    /// Ids of all that wait or are being written.
    known: HashSet<ChunkId>,
    /// Chunks that were offered while they were being written. What is written may be what somebody
    /// has deleted, and stored again since: they have another turn.
    again: HashMap<ChunkId, Dirty>,
    /// Chunks that were refused because they came before their parents: as many as may wait.
    orphans: Orphans<Dirty>,
    /// Why chunks are not on the disk.
    absences: AbsenceLog,
    stat: WriteBackStat,
    /// What no log line has told yet.
    losses: Losses,
}

impl Queue {
    pub fn new(config: &WriteBackConfig) -> Queue {
        Queue {
            admission: Admission::new(config.admission),
            pacer: WriteBackPacer::new(config.pacer),
            windows: Windows::new(config.timing),
            due_bytes: config.due_bytes,
            dirty_age_max_us: config.pacer.dirty_age_max_us,
            limit: config.queue_chunks,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            writing: HashMap::new(),
            writing_bytes: 0,
            wakes_at_us: u64::MAX,
            hurried: false,
            backs_off_until_us: 0,
            known: HashSet::new(),
            again: HashMap::new(),
            orphans: Orphans::new(config.queue_chunks),
            absences: AbsenceLog::new(REMEMBERED),
            stat: WriteBackStat::default(),
            losses: Losses::default(),
        }
    }

    /// Notes that a request used a chain of chunks, wherever they were.
    pub fn used(&mut self, chain: &[Chunk]) {
        self.admission.used(chain);
    }

    /// Offers a chunk that memory has and the disk has not. Says whether it waits now.
    pub fn offer(&mut self, now_us: u64, dirty: Dirty) -> bool {
        if !self.has_place(now_us, &dirty) {
            return false;
        }
        let chunk = Chunk { key: ChunkKey::from(&dirty.id), bytes: dirty.bytes };
        if let Some(why) = Absence::of_verdict(self.admission.admit(chunk, now_us)) {
            self.absences.note(now_us, &dirty.id, why);
            return false;
        }
        self.wait(now_us, dirty);
        true
    }

    /// The same of one that somebody wants to be on the disk: nobody asks how often it was used.
    pub fn offer_admitted(&mut self, now_us: u64, dirty: Dirty) {
        if self.has_place(now_us, &dirty) {
            self.wait(now_us, dirty);
        }
    }

    /// Whether a chunk that is offered is to wait, if it is let in.
    fn has_place(&mut self, now_us: u64, dirty: &Dirty) -> bool {
        if self.writing.contains_key(&dirty.id) {
            self.again.insert(dirty.id, *dirty);
        }
        if self.known.contains(&dirty.id) {
            return false;
        }
        if self.waiting.len() >= self.limit {
            self.stat.queue_full += 1;
            self.losses.queue_full += 1;
            self.absences.note(now_us, &dirty.id, Absence::QueueFull);
            return false;
        }
        true
    }

    /// The chunk to write next, if one may be written now; else it is to be asked again when a read
    /// or a write ends, and at [`wakes_at_us`](Queue::wakes_at_us). What has waited for too long is
    /// given up.
    ///
    /// The order is that in which chunks came, so that a chunk's parent is written before it.
    pub fn next(&mut self, now_us: u64) -> Option<Dirty> {
        self.wakes_at_us = u64::MAX;
        while let Some((since_us, dirty)) = self.waiting.front().copied() {
            if self.pacer.is_too_old(now_us, since_us) {
                self.pop();
                self.known.remove(&dirty.id);
                self.stat.too_old += 1;
                self.losses.too_old += 1;
                self.absences.note(now_us, &dirty.id, Absence::TooOld);
                continue;
            }
            let window = self.pacer.window_lots(now_us, Some(since_us));
            if self.writing.len() >= window as usize || now_us < self.backs_off_until_us {
                return None;
            }
            return match self.when(now_us, since_us, dirty.bytes) {
                When::Later(at_us) => {
                    self.wakes_at_us = at_us;
                    None
                }
                When::Now(why) => {
                    self.stat.begun.note(why);
                    self.begin(now_us)
                }
            };
        }
        None
    }

    /// When [`next`](Queue::next) is to be asked again, if nothing ends before.
    pub fn wakes_at_us(&self) -> u64 {
        self.wakes_at_us
    }

    /// From now on nothing waits for a better time, or again it does.
    pub fn set_hurried(&mut self, hurried: bool) {
        self.hurried = hurried;
    }

    fn when(&self, now_us: u64, since_us: u64, bytes: u64) -> When {
        let due_at_us = since_us.saturating_add(self.dirty_age_max_us / 2);
        match self.windows.ask(now_us, bytes, self.writing_bytes) {
            When::Now(why) => When::Now(why),
            _ if self.hurried || self.waiting_bytes >= self.due_bytes || due_at_us <= now_us => {
                When::Now(Why::Due)
            }
            When::Later(at_us) => When::Later(at_us.min(due_at_us)),
        }
    }

    fn begin(&mut self, now_us: u64) -> Option<Dirty> {
        let (since_us, dirty) = self.pop()?;
        self.windows.write_began(now_us);
        self.writing.insert(dirty.id, since_us);
        self.writing_bytes += dirty.bytes;
        Some(dirty)
    }

    fn pop(&mut self) -> Option<(u64, Dirty)> {
        let first = self.waiting.pop_front()?;
        self.waiting_bytes -= first.1.bytes;
        Some(first)
    }

    /// A chunk that [`next`](Queue::next) gave is written, or is not. Those that could not be
    /// written before it wait again. One for which there was no room is the next again, as long as
    /// it is not too old: what continues it comes behind it.
    pub fn ended(&mut self, now_us: u64, dirty: &Dirty, written: Written) {
        let since_us = self.writing.remove(&dirty.id);
        debug_assert!(since_us.is_some(), "a write ends once");
        self.writing_bytes = self.writing_bytes.saturating_sub(dirty.bytes);
        self.windows.write_ended(now_us, if written == Written::Stored { dirty.bytes } else { 0 });
        if let (Written::NoRoom, Some(since_us)) = (written, since_us) {
            let dirty = self.again.remove(&dirty.id).unwrap_or(*dirty);
            self.waiting.push_front((since_us, dirty));
            self.waiting_bytes += dirty.bytes;
            self.backs_off_until_us = now_us + NO_ROOM_BACKOFF_US;
            return;
        }
        self.known.remove(&dirty.id);
        let counter = match written {
            Written::Stored => {
                let after_us = now_us.saturating_sub(since_us.unwrap_or(now_us));
                self.stat.written_after_us += after_us;
                self.stat.written_after_us_max = self.stat.written_after_us_max.max(after_us);
                self.stat.written_bytes += dirty.bytes;
                &mut self.stat.written
            }
            Written::AlreadyHere => &mut self.stat.already_there,
            Written::Gone => &mut self.stat.gone,
            Written::NoRoom | Written::Refused => &mut self.stat.refused,
            Written::Failed => &mut self.stat.failed,
        };
        *counter += 1;
        if let Some(why) = written.absence() {
            self.absences.note(now_us, &dirty.id, why);
        }
        let again = self.again.remove(&dirty.id);
        if let Some(again) = again {
            self.wait(now_us, again);
        }
        match written {
            Written::Stored | Written::AlreadyHere => self.adopt(now_us, dirty.id),
            // What has another turn is not lost.
            _ if again.is_some() => {}
            Written::Gone => self.losses.gone += 1,
            Written::Refused if let Some(parent) = dirty.parent => {
                self.losses.refused += self.orphans.add(parent, *dirty) as u64;
            }
            Written::NoRoom | Written::Refused => self.losses.refused += 1,
            Written::Failed => self.losses.failed += 1,
        }
    }

    pub fn absences(&self) -> &AbsenceLog {
        &self.absences
    }

    pub fn window(&self) -> u32 {
        self.pacer.judged_lots()
    }

    /// Whether something was lost since the last [`take_losses`](Queue::take_losses).
    pub fn has_losses(&self) -> bool {
        self.losses.chunks() > 0
    }

    /// What was lost since the last call.
    pub fn take_losses(&mut self) -> Option<Losses> {
        let losses = std::mem::take(&mut self.losses);
        (losses.chunks() > 0).then_some(losses)
    }

    /// A chunk is on the disk or on its way there: those behind it that were refused have their
    /// turn again.
    pub fn adopt(&mut self, now_us: u64, parent: ChunkId) {
        self.orphans.take(parent).into_iter().for_each(|child| self.wait(now_us, child));
    }

    /// Lets in what was let in before.
    fn wait(&mut self, now_us: u64, dirty: Dirty) {
        if self.known.insert(dirty.id) {
            self.waiting_bytes += dirty.bytes;
            self.waiting.push_back((now_us, dirty));
        }
    }

    /// A read from the disk began.
    pub fn read_began(&mut self, now_us: u64) {
        self.windows.read_began(now_us);
    }

    /// A read from the disk that began has ended. Writes make way for slow ones.
    pub fn read_ended(&mut self, now_us: u64, took_us: u64, bytes: u64) {
        self.windows.read_ended(now_us, bytes);
        self.pacer.read_ended(now_us, took_us, bytes);
    }

    /// Whether something waits that reads held back, and hold back no longer.
    pub fn may_go_on(&self) -> bool {
        !self.is_empty() && self.windows.may_go_on()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn is_idle(&self) -> bool {
        self.is_empty() && self.writing.is_empty()
    }

    pub fn stat(&self) -> WriteBackStat {
        let (waiting, in_flight) = (self.waiting.len(), self.writing.len());
        let window = self.pacer.judged_lots() as usize;
        let (verdicts, absences_forgotten) = (self.admission.verdicts(), self.absences.forgotten());
        let waiting_bytes = self.waiting_bytes;
        WriteBackStat { verdicts, waiting, waiting_bytes, in_flight, window, absences_forgotten, ..self.stat }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGE_MAX_US: u64 = 1_000_000;

    fn queue(policy: Policy) -> Queue {
        let mut config = WriteBackConfig::new(policy, 1 << 20, 1 << 24, 64 << 10);
        config.queue_chunks = 3;
        config.pacer.lots_max = 2;
        config.pacer.dirty_age_max_us = AGE_MAX_US;
        Queue::new(&config)
    }

    fn dirty(number: u8) -> Dirty {
        Dirty { tenant: TenantId(0), id: ChunkId::from_bytes([number; 32]), parent: None, bytes: 10 }
    }

    #[test]
    fn chunks_leave_in_the_order_in_which_they_came_and_no_more_than_the_window_at_a_time() {
        let mut queue = queue(Policy::All);
        assert!((0..3).all(|number| queue.offer(0, dirty(number))));
        assert_eq!((queue.next(1), queue.next(1)), (Some(dirty(0)), Some(dirty(1))));
        assert_eq!(queue.next(1), None);
        queue.ended(1, &dirty(1), Written::Stored);
        assert_eq!((queue.next(1), queue.next(1)), (Some(dirty(2)), None));
        queue.ended(1, &dirty(0), Written::Failed);
        queue.ended(1, &dirty(2), Written::Refused);
        let stat = queue.stat();
        assert_eq!((stat.written, stat.written_bytes, stat.failed, stat.refused), (1, 10, 1, 1));
        assert!(queue.is_idle());
    }

    #[test]
    fn a_full_queue_leaves_chunks_out_and_counts_them() {
        let mut queue = queue(Policy::All);
        assert_eq!((0..5).filter(|number| queue.offer(0, dirty(*number))).count(), 3);
        assert_eq!((queue.stat().queue_full, queue.stat().waiting), (2, 3));
    }

    #[test]
    fn a_chunk_waits_once_until_it_has_been_written() {
        let mut queue = queue(Policy::All);
        assert!(queue.offer(0, dirty(1)) && !queue.offer(0, dirty(1)));
        queue.next(0).unwrap();
        queue.ended(1, &dirty(1), Written::Failed);
        assert!(queue.offer(0, dirty(1)));
    }

    #[test]
    fn a_chunk_that_is_stored_again_while_it_is_written_is_written_again() {
        for written in [Written::Gone, Written::Stored, Written::Refused] {
            let mut queue = queue(Policy::All);
            queue.offer(0, dirty(1));
            queue.next(0).unwrap();
            assert!(!queue.offer(0, dirty(1)) && !queue.offer(0, dirty(1)), "it is being written");
            queue.ended(1, &dirty(1), written);
            assert_eq!((queue.next(1), queue.next(1)), (Some(dirty(1)), None));
            queue.ended(2, &dirty(1), Written::AlreadyHere);
            assert!(queue.is_idle());
        }
    }

    #[test]
    fn a_chunk_that_comes_before_its_parent_is_written_behind_it() {
        let mut queue = queue(Policy::All);
        let child = |number, parent| Dirty { parent: Some(dirty(parent).id), ..dirty(number) };
        for orphan in [child(3, 2), child(2, 1)] {
            queue.offer(0, orphan);
            assert_eq!(queue.next(0), Some(orphan));
            queue.ended(0, &orphan, Written::Refused);
        }
        assert!(queue.is_idle());
        queue.offer(0, dirty(1));
        for expected in [dirty(1), child(2, 1), child(3, 2)] {
            assert_eq!(queue.next(5), Some(expected));
            queue.ended(5, &expected, Written::Stored);
        }
        assert!(queue.is_idle());
    }

    #[test]
    fn a_chunk_without_room_is_tried_again_before_those_behind_it_until_it_is_too_old() {
        let mut queue = queue(Policy::All);
        let child = Dirty { parent: Some(dirty(1).id), ..dirty(2) };
        assert!(queue.offer(0, dirty(1)) && queue.offer(5, child));
        for now_us in [10, 10 + NO_ROOM_BACKOFF_US, AGE_MAX_US] {
            assert_eq!(queue.next(now_us), Some(dirty(1)));
            queue.ended(now_us, &dirty(1), Written::NoRoom);
            assert_eq!(queue.next(now_us), None, "not at once");
        }
        assert_eq!((queue.stat().waiting, queue.stat().in_flight, queue.stat().refused), (2, 0, 0));
        assert_eq!(queue.next(AGE_MAX_US + NO_ROOM_BACKOFF_US), None);
        assert_eq!(queue.stat().too_old, 2);
        assert!(queue.is_idle() && queue.offer(AGE_MAX_US, dirty(1)));
    }

    #[test]
    fn what_waited_for_too_long_is_given_up() {
        let mut queue = queue(Policy::All);
        queue.offer(0, dirty(1));
        queue.offer(AGE_MAX_US, dirty(2));
        assert_eq!(queue.next(AGE_MAX_US + 1), Some(dirty(2)));
        assert_eq!(queue.stat().too_old, 1);
    }

    #[test]
    fn who_waits_for_all_of_it_waits_for_no_window() {
        let mut config = WriteBackConfig::new(Policy::All, 1 << 20, 1 << 24, 64 << 10);
        config.timing = Timing::InWindows;
        let mut queue = Queue::new(&config);
        queue.read_began(0);
        queue.offer(0, dirty(1));
        let due_us = config.pacer.dirty_age_max_us / 2;
        assert_eq!((queue.next(0), queue.wakes_at_us()), (None, due_us));
        queue.set_hurried(true);
        assert_eq!((queue.next(0), queue.stat().begun.due), (Some(dirty(1)), 1));
    }

    #[test]
    fn what_admission_does_not_want_is_offered_again_with_its_next_use() {
        let mut queue = queue(Policy::SecondHit);
        let chain = [Chunk { key: ChunkKey::from(&dirty(1).id), bytes: 10 }];
        queue.used(&chain);
        assert!(!queue.offer(0, dirty(1)));
        queue.used(&chain);
        assert!(queue.offer(0, dirty(1)));
        assert_eq!(queue.stat().verdicts.write_bytes, 10);
    }
}
