//! Valid conversations that were tampered with, for either end: frames lost, doubled, moved, with
//! other numbers and lengths and with right CRCs for all of it. A fixed number of mutations from
//! fixed seeds, so that every run is the same.

use super::super::frame::{CRC_BYTES, HEADER_BYTES, Header, crc32c_of};
use super::*;

const MUTATIONS: u64 = 4_000;
/// More than a conversation has. An end that asks for it grows on the word of its peer.
const ROOM: usize = 4 << 20;

/// A frame in parts, CRCs aside.
#[derive(Clone)]
struct Parts {
    header: [u8; HEADER_BYTES],
    body: Vec<u8>,
    payload: Vec<u8>,
}

impl Parts {
    /// The frames of a valid stream.
    fn split(mut bytes: &[u8]) -> Vec<Parts> {
        let mut frames = Vec::new();
        let mut take = |len: usize| {
            let (taken, rest) = bytes.split_at_checked(len)?;
            bytes = rest;
            Some(taken.to_vec())
        };
        while let Some(header) = take(HEADER_BYTES) {
            let header: [u8; HEADER_BYTES] = header.try_into().unwrap();
            let Header { body, payload, .. } = Header::parse(&header).unwrap();
            let mut part = |len: usize| match len {
                0 => Vec::new(),
                _ => {
                    let mut part = take(len).unwrap();
                    part.truncate(len - CRC_BYTES);
                    part
                }
            };
            let body = part(body as usize);
            let payload = part(if payload == 0 { 0 } else { payload as usize + CRC_BYTES });
            frames.push(Parts { header, body, payload });
        }
        frames
    }

    /// Appends the frame with right CRCs. Lengths are what the header says, which may be a lie.
    fn put(&self, out: &mut Vec<u8>) {
        out.extend(&self.header[..HEADER_BYTES - CRC_BYTES]);
        out.extend(crc32c_of(&self.header[..HEADER_BYTES - CRC_BYTES]).to_le_bytes());
        for part in [&self.body, &self.payload] {
            if !part.is_empty() {
                out.extend(part);
                out.extend(crc32c_of(part).to_le_bytes());
            }
        }
    }

    fn set_lengths(&mut self) {
        let body = if self.body.is_empty() { 0 } else { self.body.len() + CRC_BYTES };
        self.header[4..8].copy_from_slice(&(body as u32).to_le_bytes());
        self.header[16..20].copy_from_slice(&(self.payload.len() as u32).to_le_bytes());
    }
}

/// Numbers at which arithmetic goes wrong.
fn odd_number(dice: &mut SplitMix) -> u64 {
    let numbers = [0, 1, 2, 64, 65, 0xffff, 1 << 20, u64::from(u32::MAX), 1 << 63, u64::MAX - 1, u64::MAX];
    numbers[dice.below(numbers.len() as u64) as usize]
}

/// Overwrites a number somewhere in the bytes.
fn tamper(bytes: &mut [u8], dice: &mut SplitMix) {
    let number = if dice.below(2) == 0 { odd_number(dice) } else { dice.draw() }.to_le_bytes();
    let len = [1, 2, 4, 8][dice.below(4) as usize].min(bytes.len());
    if len > 0 {
        let at = dice.below((bytes.len() - len) as u64 + 1) as usize;
        bytes[at..at + len].copy_from_slice(&number[..len]);
    }
}

fn mutated(frames: &[Parts], dice: &mut SplitMix) -> Vec<u8> {
    let mut frames = frames.to_vec();
    for _ in 0..=dice.below(3) {
        let (at, other) =
            (dice.below(frames.len() as u64) as usize, dice.below(frames.len() as u64) as usize);
        match dice.below(7) {
            0 if frames.len() > 2 => drop(frames.remove(at)),
            1 => frames.insert(other, frames[at].clone()),
            2 => frames.swap(at, other),
            3 => tamper(&mut frames[at].header[..HEADER_BYTES - CRC_BYTES], dice),
            4 => tamper(&mut frames[at].body, dice),
            5 => {
                let len = dice.below(2 * frames[at].body.len() as u64 + 1) as usize;
                frames[at].body.resize(len, 0xff);
                frames[at].set_lengths();
            }
            _ => {
                let len = dice.below(2 * frames[at].payload.len() as u64 + 1) as usize;
                frames[at].payload.resize(len, 0xff);
                frames[at].set_lengths();
            }
        }
    }
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.put(&mut bytes));
    if dice.below(8) == 0 {
        tamper(&mut bytes, dice);
    }
    bytes
}

/// Small operations of both kinds, and calls.
fn small_plans() -> Vec<Plan> {
    let plan = |number: u64| {
        let op_kind = if number.is_multiple_of(2) { OpKind::Read } else { OpKind::Write };
        let span = |part: u64| {
            let at = number * 10_000 + part * 2_000;
            (at + 100, at, 1 + (number * 7 + part * 131) % 600)
        };
        Plan { op_kind, spans: (0..3).map(span).collect() }
    };
    (0..6).map(plan).collect()
}

fn ask_all(world: &mut World, plans: &[Plan]) {
    for plan in plans {
        world.submit(plan, u64::MAX);
        world.asking.role.call(world.now_us, vec![0; 50], u64::MAX);
    }
}

/// A world and what its two ends said to each other.
fn conversation(plans: &[Plan]) -> (World, Vec<Parts>, Vec<Parts>) {
    let mut world = World::new(21);
    let pipes = [Arc::clone(&world.asking_end.out), Arc::clone(&world.asking_end.back)];
    pipes.iter().for_each(|pipe| pipe.lock().log = Some(Vec::new()));
    ask_all(&mut world, plans);
    world.run(plans.len());
    (0..100).for_each(|_| world.step());
    assert_eq!((moved(&world), world.replies.len()), (plans.len(), plans.len()));
    let said = pipes.map(|pipe| Parts::split(&pipe.lock().log.take().unwrap()));
    let [there, back] = said;
    (world, there, back)
}

/// New ends over the memory of before, and a wire with room for everything.
fn begin_again(world: &mut World) {
    world.asking.role.fail_all(&Broken::Closed);
    (world.asking, world.owning) = (asking(hello()), owning(&world.exports, &world.mirror));
    (world.asking_broken, world.owning_broken) = (None, None);
    (world.ended, world.replies) = (HashMap::new(), HashMap::new());
    world.mirror.kept.lock().clear();
    world.mirror.called.lock().clear();
    for pipe in [&world.asking_end.out, &world.asking_end.back] {
        *pipe.lock() = Pipe { room: ROOM, ..Pipe::default() };
    }
}

#[test]
fn an_owner_survives_conversations_that_were_tampered_with() {
    let (mut world, there, _) = conversation(&small_plans());
    let (mut dice, mut broken) = (SplitMix(5), 0);
    for _ in 0..MUTATIONS {
        begin_again(&mut world);
        world.asking_end.out.lock().bytes = mutated(&there, &mut dice).into();
        for _ in 0..30 {
            world.now_us += 10;
            world.step_owning();
        }
        broken += u64::from(world.owning_broken.is_some());
        let said = world.owning_end.out.lock().bytes.len();
        assert!(said < ROOM / 2, "{said} bytes were said to a few frames");
    }
    // Most are noticed at once. A READ of other spans, say, is as good as the one it was.
    assert!((MUTATIONS / 4..MUTATIONS).contains(&broken), "{broken} of {MUTATIONS} were refused");
}

#[test]
fn an_asker_survives_conversations_that_were_tampered_with_and_only_its_targets_change() {
    let plans = small_plans();
    let (mut world, _, back) = conversation(&plans);
    let mut greeting = Vec::new();
    back[..2].iter().for_each(|frame| frame.put(&mut greeting));
    let greeting_bytes = greeting.len();
    let (mut dice, mut broken, mut whole) = (SplitMix(6), 0, 0);
    for _ in 0..MUTATIONS / 4 {
        begin_again(&mut world);
        ask_all(&mut world, &plans);
        let before = bytes(&world.ours);
        // The greeting comes first, or nothing would have been asked when the answers come.
        let said = mutated(&back, &mut dice);
        let (greeting, rest) = said.split_at(greeting_bytes.min(said.len()));
        for part in [greeting, rest] {
            world.asking_end.back.lock().bytes.extend(part);
            for _ in 0..30 {
                world.now_us += 10;
                world.step_asking();
            }
        }
        broken += u64::from(world.asking_broken.is_some());
        whole += usize::from(moved(&world) > plans.len() / 2);
        let mut after = bytes(&world.ours);
        for (ours, _, len) in
            plans.iter().filter(|plan| plan.op_kind == OpKind::Read).flat_map(|plan| &plan.spans)
        {
            let target = *ours as usize..(ours + len) as usize;
            after[target.clone()].copy_from_slice(&before[target]);
        }
        assert!(after == before, "bytes changed that nobody asked for");
        if world.asking_broken.is_some() {
            assert_eq!(
                (world.ended.len(), world.replies.len()),
                (plans.len(), plans.len()),
                "an end is missing"
            );
        }
    }
    assert!(broken > MUTATIONS / 16, "{broken} were refused");
    assert!(whole > 100, "{whole} came far");
}
