//! Members against an etcd that is a model: answers get lost, watches break, leases expire, history
//! is compacted, data are lost. Whatever happened, once it is calm the copy is what etcd has and
//! etcd has what is here.

use super::keys::{Key, Keys};
use super::membership::{Limits, Membership, Step};
use super::wire::{Change, Entry, Event, Failure, Message, Request, Response};
use crate::directory::NodeRecord;
use forebay_kv::ChunkId;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const ME: [u8; 16] = [1; 16];
const OTHER: [u8; 16] = [2; 16];

/// Etcd, as far as a member can tell.
#[derive(Default)]
struct Etcd {
    revision: i64,
    compacted: i64,
    kv: BTreeMap<Vec<u8>, Entry>,
    log: Vec<Event>,
    leases: BTreeSet<i64>,
    leases_given: i64,
}

impl Etcd {
    fn put(&mut self, key: Vec<u8>, value: Vec<u8>, lease: i64) -> Option<Entry> {
        let entry = Entry { key: key.clone(), value, mod_revision: self.revision, lease };
        self.log.push(Event { entry: entry.clone(), is_delete: false });
        self.kv.insert(key, entry)
    }

    fn delete(&mut self, key: &[u8]) {
        if self.kv.remove(key).is_some() {
            let entry = Entry { key: key.to_vec(), mod_revision: self.revision, ..Entry::default() };
            self.log.push(Event { entry, is_delete: true });
        }
    }

    fn end_lease(&mut self, lease: i64) {
        self.leases.remove(&lease);
        self.revision += 1;
        let keys: Vec<_> = self.kv.values().filter(|entry| entry.lease == lease).cloned().collect();
        keys.iter().for_each(|entry| self.delete(&entry.key));
    }

    fn answer(&mut self, request: &Request) -> Result<Response, Failure> {
        match request {
            Request::Grant { .. } => {
                self.leases_given += 1;
                self.leases.insert(self.leases_given);
                Ok(Response::Granted { lease: self.leases_given, ttl_s: 9 })
            }
            Request::KeepAlive { lease } => {
                let is_alive = self.leases.contains(lease);
                is_alive.then_some(Response::Alive { revision: self.revision }).ok_or(Failure::LeaseGone)
            }
            Request::Revoke { lease } => {
                let is_alive = self.leases.contains(lease);
                self.end_lease(*lease);
                is_alive.then_some(Response::Revoked).ok_or(Failure::LeaseGone)
            }
            Request::List { from, end, revision, .. } => self.list(from, end, *revision),
            Request::Write { changes } => self.write(changes),
        }
    }

    /// Pages of two keys; an old revision is told from the log.
    fn list(&self, from: &[u8], end: &[u8], revision: i64) -> Result<Response, Failure> {
        let at = if revision == 0 { self.revision } else { revision };
        if revision != 0 && revision < self.compacted {
            return Err(Failure::Compacted);
        }
        let mut kv: BTreeMap<&[u8], &Entry> = BTreeMap::new();
        for event in self.log.iter().filter(|event| event.entry.mod_revision <= at) {
            if event.is_delete {
                kv.remove(&event.entry.key[..]);
            } else {
                kv.insert(&event.entry.key, &event.entry);
            }
        }
        let mut entries: Vec<Entry> = kv.range(from..end).map(|(_, &entry)| entry.clone()).collect();
        let more = entries.len() > 2;
        entries.truncate(2);
        Ok(Response::Listed { entries, more, revision: self.revision })
    }

    fn write(&mut self, changes: &[Change]) -> Result<Response, Failure> {
        let is_known = |change: &Change| match change {
            Change::Put { lease, .. } => *lease == 0 || self.leases.contains(lease),
            Change::Delete { .. } => true,
        };
        if !changes.iter().all(is_known) {
            return Err(Failure::LeaseGone);
        }
        self.revision += 1;
        let mut replaced_leases = Vec::new();
        for change in changes {
            match change {
                Change::Put { key, value, lease } => {
                    let before = self.put(key.clone(), value.clone(), *lease);
                    replaced_leases.extend(before.map(|entry| entry.lease).filter(|&lease| lease != 0));
                }
                Change::Delete { key } => self.delete(key),
            }
        }
        Ok(Response::Written { replaced_leases })
    }
}

/// A member, its watch, and the etcd it speaks to.
struct World {
    etcd: Etcd,
    keys: Keys,
    member: Membership,
    here: BTreeSet<ChunkId>,
    now_us: u64,
    watch: Option<OpenWatch>,
}

#[derive(Clone, Copy)]
struct OpenWatch {
    number: u64,
    /// It goes on here.
    from: i64,
    /// Deletions up to this revision had been compacted when it was opened: etcd of before August
    /// 2024 takes those of that revision too, and lets a watch begin there (etcd-io/etcd#18089).
    compacted: i64,
}

#[derive(Debug, Clone)]
enum Act {
    Announce(u8, bool),
    /// Another node, or somebody who lies, writes.
    Other(u8, bool),
    Step,
    FailedStep,
    StepWithLostAnswer,
    Hear(usize),
    HearHalf,
    BreakWatch,
    Compact,
    ExpireLeases,
    LoseData,
    Later(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0u8..8, any::<bool>()).prop_map(|(chunk, here)| Act::Announce(chunk, here)),
        3 => (0u8..8, any::<bool>()).prop_map(|(chunk, here)| Act::Other(chunk, here)),
        8 => Just(Act::Step),
        1 => Just(Act::FailedStep),
        1 => Just(Act::StepWithLostAnswer),
        4 => (1usize..4).prop_map(Act::Hear),
        1 => Just(Act::HearHalf),
        1 => Just(Act::BreakWatch),
        1 => Just(Act::Compact),
        1 => Just(Act::ExpireLeases),
        1 => Just(Act::LoseData),
        2 => (1u64..40_000_000).prop_map(Act::Later),
    ]
}

impl World {
    fn new() -> World {
        let address = "127.0.0.1:7000".parse().unwrap();
        let me = NodeRecord { node: ME, instance: [3; 16], name: "me".into(), address };
        let limits =
            Limits { ttl_s: 9, chunks_max: 100, holdings_max: 100, quiet_us: 30_000_000, test_us: 2_000_000 };
        let member = Membership::new("/f", me, limits, 0);
        let etcd = Etcd { revision: 1, ..Etcd::default() };
        World { etcd, keys: Keys::new("/f"), member, here: BTreeSet::new(), now_us: 0, watch: None }
    }

    fn act(&mut self, act: &Act) {
        match *act {
            Act::Announce(chunk, is_here) => self.announce(chunk, is_here),
            Act::Other(chunk, is_here) => self.write_as_other(chunk, is_here),
            Act::Step => drop(self.step(|etcd, request| etcd.answer(request))),
            Act::FailedStep => drop(self.step(|_, _| Err(Failure::Unreachable(String::new())))),
            Act::StepWithLostAnswer => drop(self.step(|etcd, request| {
                let _ = etcd.answer(request);
                Err(Failure::Unreachable(String::new()))
            })),
            Act::Hear(revisions) => self.hear(revisions, false),
            Act::HearHalf => self.hear(1, true),
            Act::BreakWatch => self.end_watch(Message::Ended),
            Act::Compact => self.etcd.compacted = self.etcd.revision,
            Act::ExpireLeases => self.etcd.leases.clone().into_iter().for_each(|id| self.etcd.end_lease(id)),
            Act::LoseData => self.lose_data(),
            Act::Later(us) => self.now_us += us,
        }
        self.follow_wish();
    }

    fn announce(&mut self, chunk: u8, is_here: bool) {
        let id = [ChunkId::from_bytes([chunk; 32])];
        if is_here {
            self.here.insert(id[0]);
            self.member.announce(&id, &[]);
        } else {
            self.here.remove(&id[0]);
            self.member.announce(&[], &id);
        }
    }

    fn write_as_other(&mut self, chunk: u8, is_here: bool) {
        let key = match chunk {
            0 => self.keys.write(Key::Node(OTHER)),
            _ => self.keys.write(Key::Holding(ChunkId::from_bytes([chunk; 32]), OTHER)),
        };
        let address = "127.0.0.1:7001".parse().unwrap();
        let record = NodeRecord { node: OTHER, instance: [4; 16], name: "other".into(), address };
        let value = record.to_json().into_bytes();
        let change = if is_here { Change::Put { key, value, lease: 0 } } else { Change::Delete { key } };
        self.etcd.write(&[change]).unwrap();
    }

    /// One question with its answer; whether there was one.
    fn step(&mut self, answer: impl FnOnce(&mut Etcd, &Request) -> Result<Response, Failure>) -> bool {
        self.now_us += 1_000;
        match self.member.step(self.now_us) {
            Step::Ask(request) => {
                let answer = answer(&mut self.etcd, &request);
                self.member.answered(answer, self.now_us);
                true
            }
            Step::Rest { until_us } => {
                assert!(until_us > self.now_us, "a rest that is over is a loop that burns a core");
                false
            }
        }
    }

    /// Etcd begins anew with nothing: its watches end, its leases and revisions are gone.
    fn lose_data(&mut self) {
        let leases_given = self.etcd.leases_given;
        self.etcd = Etcd { revision: 1, leases_given, ..Etcd::default() };
        self.end_watch(Message::Ended);
    }

    fn end_watch(&mut self, message: Message) {
        if let Some(watch) = self.watch.take() {
            self.member.watched(watch.number, message, self.now_us);
        }
    }

    /// Opens or closes the watch as the member wishes.
    fn follow_wish(&mut self) {
        let wish = self.member.watch();
        if wish.map(|wish| wish.number) == self.watch.map(|watch| watch.number) {
            return;
        }
        let compacted = self.etcd.compacted;
        self.watch = wish.map(|wish| OpenWatch { number: wish.number, from: wish.revision, compacted });
        if let Some(OpenWatch { number, from, .. }) = self.watch {
            self.member.watched(number, Message::Created, self.now_us);
            if from < compacted {
                self.end_watch(Message::Compacted);
                self.follow_wish();
            }
        }
    }

    /// The watch says the next revisions; or half of one, and breaks.
    fn hear(&mut self, revisions: usize, is_half: bool) {
        for _ in 0..revisions {
            let Some(OpenWatch { number, from, compacted }) = self.watch else { return };
            let is_there = |event: &&Event| !event.is_delete || event.entry.mod_revision > compacted;
            let mut later = self.etcd.log.iter().filter(is_there).map(|event| event.entry.mod_revision);
            let Some(revision) = later.find(|&revision| revision >= from) else { return };
            let of_it = self.etcd.log.iter().filter(is_there);
            let of_it = of_it.filter(|event| event.entry.mod_revision == revision);
            let mut events: Vec<Event> = of_it.cloned().collect();
            if is_half {
                events.truncate(events.len().div_ceil(2));
            }
            self.member.watched(number, Message::Events { events, is_fragment: is_half }, self.now_us);
            self.watch = Some(OpenWatch { number, from: revision + 1, compacted });
            if is_half {
                self.end_watch(Message::Ended);
            }
        }
    }

    /// Nothing goes wrong any more, for longer than any rest and than a third of the lease.
    fn calm_down(&mut self) {
        let calm_us = self.now_us + 60_000_000;
        while self.now_us < calm_us {
            let has_asked = self.step(|etcd, request| etcd.answer(request));
            self.follow_wish();
            self.hear(usize::MAX, false);
            self.follow_wish();
            self.now_us += if has_asked { 0 } else { 200_000 };
        }
        let stat = self.member.stat(self.now_us);
        assert_eq!((stat.stale_us, stat.waiting), (None, 0), "calm means fresh");
    }

    fn check(&self) {
        let written: BTreeSet<_> = self.etcd.kv.keys().filter_map(|key| self.keys.read(key)).collect_keys();
        let mine: BTreeSet<_> = self.here.iter().map(|&chunk| (chunk, ME)).collect();
        let mine_there: BTreeSet<_> = written.iter().filter(|holding| holding.1 == ME).copied().collect();
        assert_eq!(mine_there, mine, "etcd has what is here");
        assert!(self.etcd.kv.contains_key(&self.keys.write(Key::Node(ME))), "the others know me");
        let lease = self.member.lease().unwrap();
        let is_mine = |entry: &&Entry| entry.lease != 0;
        assert!(self.etcd.kv.values().filter(is_mine).all(|entry| entry.lease == lease), "under my lease");
        let mirror = self.member.mirror().unwrap();
        let other_is_known = self.etcd.kv.contains_key(&self.keys.write(Key::Node(OTHER)));
        assert_eq!(mirror.nodes_but(ME).count(), usize::from(other_is_known));
        assert_eq!(mirror.holdings(), written.len(), "the copy has what etcd has");
        for chunk in (0..8).map(|chunk| ChunkId::from_bytes([chunk; 32])) {
            let is_held = other_is_known && written.contains(&(chunk, OTHER));
            assert_eq!(mirror.holders_but(chunk, ME).len(), usize::from(is_held));
        }
    }
}

trait CollectKeys {
    fn collect_keys(self) -> BTreeSet<(ChunkId, [u8; 16])>;
}

impl<I: Iterator<Item = Key>> CollectKeys for I {
    fn collect_keys(self) -> BTreeSet<(ChunkId, [u8; 16])> {
        self.filter_map(|key| match key {
            Key::Holding(chunk, node) => Some((chunk, node)),
            Key::Node(_) => None,
        })
        .collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_copy_ends_as_what_etcd_has(acts in prop::collection::vec(act(), 0..120)) {
        let mut world = World::new();
        for act in &acts {
            world.act(act);
        }
        world.calm_down();
        world.check();
    }
}

#[test]
fn a_new_start_of_a_node_ends_what_the_old_one_said() {
    let mut world = World::new();
    world.announce(5, true);
    world.calm_down();
    let etcd = std::mem::take(&mut world.etcd);
    let mut again = World { etcd, ..World::new() };
    again.announce(6, true);
    again.calm_down();
    again.check();
}

#[test]
fn a_silent_watch_is_tested_and_one_that_stays_silent_is_opened_again() {
    let mut world = World::new();
    world.calm_down();
    let first = world.member.watch().unwrap().number;
    let stat = world.member.stat(world.now_us);
    // The watch hears nothing, not even what the test writes; etcd answers all the time.
    for _ in 0..400 {
        world.step(|etcd, request| etcd.answer(request));
        world.now_us += 100_000;
    }
    let again = world.member.watch().unwrap();
    assert!(again.number > first);
    assert_eq!(world.member.stat(world.now_us).lists, stat.lists, "it goes on where it was");
    world.follow_wish();
    world.calm_down();
    world.check();
}

#[test]
fn a_watch_whose_test_is_heard_goes_on() {
    let mut world = World::new();
    world.calm_down();
    let first = world.member.watch().unwrap().number;
    for _ in 0..1_000 {
        world.step(|etcd, request| etcd.answer(request));
        world.hear(usize::MAX, false);
        world.now_us += 100_000;
    }
    assert_eq!(world.member.watch().unwrap().number, first);
    assert!(world.etcd.revision < 10, "a test every half minute, not more");
}

/// Another node of our name writes its record, as `instance`.
fn write_as_namesake(world: &mut World, instance: u8) {
    let address = "127.0.0.1:7009".parse().unwrap();
    let record = NodeRecord { node: ME, instance: [instance; 16], name: "me".into(), address };
    let (key, value) = (world.keys.write(Key::Node(ME)), record.to_json().into_bytes());
    world.etcd.write(&[Change::Put { key, value, lease: 0 }]).unwrap();
}

#[test]
fn another_live_node_of_our_name_is_known_as_long_as_it_lives_and_an_earlier_start_is_none() {
    let mut world = World::new();
    write_as_namesake(&mut world, 8);
    world.calm_down();
    assert_eq!(world.member.namesake(world.now_us), None, "it was there before us");
    for _ in 0..4 {
        write_as_namesake(&mut world, 9);
        // It is heard of, and we write ours again.
        world.calm_down();
        let namesake = world.member.namesake(world.now_us).map(|record| record.instance);
        assert_eq!(namesake, Some([9; 16]));
        assert!(world.member.stat(world.now_us).name_conflict);
        let ours = world.etcd.kv[&world.keys.write(Key::Node(ME))].value.clone();
        assert_eq!(NodeRecord::from_json(&ours).unwrap().instance, [3; 16]);
    }
    (0..2).for_each(|_| world.calm_down());
    assert_eq!(world.member.namesake(world.now_us), None, "it is gone");
}

#[test]
fn an_etcd_that_gives_a_lease_and_refuses_all_else_is_asked_less_and_less_and_keeps_the_lease() {
    let mut world = World::new();
    let (mut refused, mut lease) = (0, None);
    while world.now_us < 600_000_000 {
        let mut is_of_lease = false;
        world.step(|etcd, request| {
            is_of_lease = matches!(request, Request::Grant { .. } | Request::KeepAlive { .. });
            refused += usize::from(!is_of_lease);
            if is_of_lease { etcd.answer(request) } else { Err(Failure::Refused("no user".into())) }
        });
        lease = lease.or(world.member.lease());
        assert!(world.member.lease() == lease && (is_of_lease || lease.is_some() || world.now_us < 100_000));
        world.now_us += 20_000;
    }
    assert!((15..=35).contains(&refused), "{refused} times in ten minutes");
    assert!(world.member.is_failing());
    assert!(world.member.stat(world.now_us).stale_us.is_some());
}

#[test]
fn an_etcd_that_refuses_is_asked_less_and_less_and_one_that_does_not_answer_too() {
    for (failure, most) in
        [(Failure::Refused("no user".into()), 30), (Failure::Unreachable("refused".into()), 140)]
    {
        let mut world = World::new();
        let mut asked = 0;
        while world.now_us < 600_000_000 {
            asked += usize::from(world.step(|_, _| Err(failure.clone())));
            world.now_us += 20_000;
        }
        assert!((15..=most).contains(&asked), "{failure}: {asked} times in ten minutes");
        let answers_us = world.now_us;
        while world.member.lease().is_none() {
            world.step(|etcd, request| etcd.answer(request));
            world.now_us += 20_000;
        }
        assert!(world.now_us - answers_us <= 31_000_000, "it is asked again soon enough");
    }
}
