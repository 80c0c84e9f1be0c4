//! A mover in virtual time: simulated links with rates, latency and faults move real bytes between
//! simulated regions. It checks what no caller could: that windows hold and that nothing writes to
//! a span after its transfer ended.
#![allow(dead_code, reason = "each test binary uses a part")]

use forebay_transfer::{
    Class, End, Event, Limits, LinkId, LinkSpec, Mover, Outcome, Place, Refused, RegionId, Span, SpanPair,
    SplitMix, Start, Transfer, TransferId,
};
use std::collections::{BTreeMap, HashMap};

/// How a simulated link behaves. Probabilities are per operation.
#[derive(Debug, Clone, Default)]
pub struct SimLink {
    /// Bytes per second, one operation after another.
    pub rate_bytes_per_s: u64,
    /// From the end of an operation on the link until its completion is seen; operations overlap in
    /// it.
    pub latency_us: u64,
    /// Added to the latency at random, from 0 to this: completions arrive out of order.
    pub jitter_us: u64,
    /// Probability that the link stalls before an operation, and for how long.
    pub stall: (f64, u64),
    /// Probability that only a random part of an operation is done.
    pub short: f64,
    /// Probability that an operation fails, with garbage in its targets.
    pub error: f64,
    /// Probability that an operation reports corrupt bytes.
    pub corrupt: f64,
    /// Probability that an operation completes only after this long.
    pub lost: (f64, u64),
    /// From then on every operation fails at once, and the mover is told that the link is down.
    pub dies_at_us: Option<u64>,
}

impl SimLink {
    /// A link without latency and faults.
    pub fn of_rate(rate_bytes_per_s: u64) -> SimLink {
        SimLink { rate_bytes_per_s, ..SimLink::default() }
    }
}

/// One operation, as it went.
#[derive(Debug, Clone)]
pub struct Ran {
    pub link: LinkId,
    /// When the mover started it.
    pub started_us: u64,
    pub completed_us: u64,
    /// What it was to copy.
    pub pairs: Vec<SpanPair>,
}

/// A transfer that ended.
#[derive(Debug, Clone)]
pub struct Ended {
    pub id: TransferId,
    pub at_us: u64,
    pub end: End,
}

/// A mover, its links and its memory in virtual time.
#[derive(Debug)]
pub struct Sim {
    /// The schedule under simulation.
    pub mover: Mover,
    /// Every operation, in order of completion.
    pub ran: Vec<Ran>,
    /// Every transfer's end, in order.
    pub ended: Vec<Ended>,
    /// Refusals of submissions.
    pub refused: Vec<Refused>,
    /// Broken promises of the schedule. Empty is what every test wants.
    pub violations: Vec<String>,
    now_us: u64,
    links: Vec<LinkRun>,
    memory: HashMap<RegionId, Vec<u8>>,
    agenda: BTreeMap<(u64, u64), Happening>,
    next_happening: u64,
    submitted: HashMap<TransferId, Transfer>,
    /// Accepted, in order.
    accepted: Vec<TransferId>,
    random: SplitMix,
}

#[derive(Debug)]
struct LinkRun {
    spec: LinkSpec,
    model: SimLink,
    busy_until_us: u64,
    lots: u32,
    bytes: u64,
}

#[derive(Debug)]
enum Happening {
    Submit(Transfer),
    CancelNth(usize),
    RaiseNth(usize, Class),
    Completes { start: Start, started_us: u64, outcome: Outcome },
    LinkDies(LinkId),
    Wake,
}

impl Sim {
    /// An empty simulation; equal seeds give equal runs.
    pub fn new(seed: u64) -> Sim {
        Sim::with_limits(seed, Limits::default())
    }

    /// An empty simulation of a mover with the given limits.
    pub fn with_limits(seed: u64, limits: Limits) -> Sim {
        Sim {
            mover: Mover::new(limits),
            ran: Vec::new(),
            ended: Vec::new(),
            refused: Vec::new(),
            violations: Vec::new(),
            now_us: 0,
            links: Vec::new(),
            memory: HashMap::new(),
            agenda: BTreeMap::new(),
            next_happening: 0,
            submitted: HashMap::new(),
            accepted: Vec::new(),
            random: SplitMix(seed),
        }
    }

    /// A region of random bytes.
    pub fn add_region(&mut self, place: Place, len: usize) -> RegionId {
        let region = self.mover.add_region(place, len as u64);
        let mut bytes = vec![0; len];
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.random.draw().to_le_bytes()[..word.len()]);
        }
        self.memory.insert(region, bytes);
        region
    }

    pub fn add_link(&mut self, spec: LinkSpec, model: SimLink) -> LinkId {
        let link = self.mover.add_link(spec.clone());
        if let Some(dies_at_us) = model.dies_at_us {
            self.plan(dies_at_us, Happening::LinkDies(link));
        }
        self.links.push(LinkRun { spec, model, busy_until_us: 0, lots: 0, bytes: 0 });
        link
    }

    /// Submits a transfer at a time.
    pub fn submit_at(&mut self, at_us: u64, transfer: Transfer) {
        self.plan(at_us, Happening::Submit(transfer));
    }

    /// Cancels the `nth` accepted transfer at a time.
    pub fn cancel_at(&mut self, at_us: u64, nth: usize) {
        self.plan(at_us, Happening::CancelNth(nth));
    }

    /// Makes the `nth` accepted transfer more urgent at a time.
    pub fn raise_at(&mut self, at_us: u64, nth: usize, class: Class) {
        self.plan(at_us, Happening::RaiseNth(nth, class));
    }

    /// A region's bytes now.
    pub fn bytes(&self, region: RegionId) -> &[u8] {
        self.memory.get(&region).map_or(&[], Vec::as_slice)
    }

    /// The transfer that was submitted under this id.
    pub fn transfer(&self, id: TransferId) -> Option<&Transfer> {
        self.submitted.get(&id)
    }

    /// Runs until nothing is left to happen.
    pub fn run(&mut self) {
        while let Some(((at_us, _), happening)) = self.agenda.pop_first() {
            self.now_us = at_us;
            self.happen(happening);
            self.mover.expire(at_us);
            while let Some(start) = self.mover.poll(at_us) {
                self.start(start);
            }
            self.note_events();
            if let Some(timeout_us) = self.mover.next_timeout_us() {
                self.plan(timeout_us.max(at_us + 1), Happening::Wake);
            }
        }
    }

    fn plan(&mut self, at_us: u64, happening: Happening) {
        self.next_happening += 1;
        let duplicate = matches!(happening, Happening::Wake)
            && self
                .agenda
                .range((at_us, 0)..(at_us + 1, 0))
                .any(|(_, planned)| matches!(planned, Happening::Wake));
        if !duplicate {
            self.agenda.insert((at_us, self.next_happening), happening);
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Submit(transfer) => match self.mover.submit(self.now_us, transfer.clone()) {
                Ok(id) => {
                    self.submitted.insert(id, transfer);
                    self.accepted.push(id);
                }
                Err(refused) => self.refused.push(refused),
            },
            Happening::CancelNth(nth) => {
                if let Some(id) = self.accepted.get(nth) {
                    self.mover.cancel(self.now_us, *id);
                }
            }
            Happening::RaiseNth(nth, class) => {
                if let Some(id) = self.accepted.get(nth) {
                    self.mover.raise(*id, class);
                }
            }
            Happening::Completes { start, started_us, outcome } => self.complete(start, started_us, outcome),
            Happening::LinkDies(link) => self.mover.link_down(self.now_us, link),
            Happening::Wake => {}
        }
    }

    /// Puts an operation on its link and decides how it will end.
    fn start(&mut self, start: Start) {
        let run = &mut self.links[start.link.index()];
        run.lots += 1;
        run.bytes += start.bytes;
        if run.lots > run.spec.window_lots || run.bytes > run.spec.window_bytes {
            let (lots, bytes) = (run.lots, run.bytes);
            self.violations.push(format!("{} has {lots} lots and {bytes} bytes in flight", run.spec.name));
        }
        let model = &run.model;
        let dead = model.dies_at_us.is_some_and(|dies_at_us| dies_at_us <= self.now_us);
        let stall_us = if self.random.chance(model.stall.0) { model.stall.1 } else { 0 };
        let outcome = if dead || self.random.chance(model.error) {
            Outcome::Failed { error: "simulated".into() }
        } else if self.random.chance(model.corrupt) {
            Outcome::Corrupt
        } else if self.random.chance(model.short) {
            Outcome::Moved { bytes: self.random.below(start.bytes + 1) }
        } else {
            Outcome::Moved { bytes: start.bytes }
        };
        let service_us = (start.bytes * 1_000_000).div_ceil(model.rate_bytes_per_s.max(1));
        run.busy_until_us = run.busy_until_us.max(self.now_us) + if dead { 0 } else { stall_us + service_us };
        let lost_us = if self.random.chance(model.lost.0) { model.lost.1 } else { 0 };
        let seen_us = run.busy_until_us + model.latency_us + self.random.below(model.jitter_us + 1) + lost_us;
        self.plan(seen_us, Happening::Completes { start, started_us: self.now_us, outcome });
    }

    fn complete(&mut self, start: Start, started_us: u64, outcome: Outcome) {
        let run = &mut self.links[start.link.index()];
        run.lots -= 1;
        run.bytes -= start.bytes;
        match &outcome {
            Outcome::Moved { bytes } => self.copy(&start.pairs, *bytes, false),
            Outcome::Failed { .. } | Outcome::Denied { .. } | Outcome::Corrupt => {
                self.copy(&start.pairs, start.bytes, true)
            }
        }
        let Start { op, link, pairs, .. } = start;
        self.ran.push(Ran { link, started_us, completed_us: self.now_us, pairs });
        self.mover.complete(self.now_us, op, outcome);
    }

    /// Copies the first `budget` bytes of the pairs, or writes garbage there.
    fn copy(&mut self, pairs: &[SpanPair], mut budget: u64, garbage: bool) {
        for pair in pairs {
            let len = pair.from.len.min(budget);
            budget -= len;
            self.check_ownership(&pair.to);
            let from = pair.from.offset as usize;
            let mut bytes = self.memory[&pair.from.region][from..from + len as usize].to_vec();
            if garbage {
                bytes.iter_mut().for_each(|byte| *byte ^= 0xA5);
            }
            let to = pair.to.offset as usize;
            if let Some(target) = self.memory.get_mut(&pair.to.region) {
                target[to..to + bytes.len()].copy_from_slice(&bytes);
            }
        }
    }

    /// Nothing may write to a target whose transfer ended, unless the end listed it as quarantined.
    fn check_ownership(&mut self, target: &Span) {
        for Ended { id, end, at_us } in &self.ended {
            let quarantined: &[Span] = match end {
                End::Done { .. } => &[],
                End::Failed(failure) => &failure.quarantined,
                End::Cancelled { quarantined, .. } => quarantined,
            };
            let was_target = self.submitted[id].pairs.iter().any(|pair| overlap(&pair.to, target));
            if was_target && !quarantined.iter().any(|span| overlap(span, target)) {
                self.violations
                    .push(format!("{target:?} was written after its transfer ended at {at_us} us"));
            }
        }
    }

    fn note_events(&mut self) {
        while let Some(event) = self.mover.next_event() {
            match event {
                Event::Ended(id, end) => self.ended.push(Ended { id, at_us: self.now_us, end }),
                Event::Quiet(..) => {}
            }
        }
    }
}

fn overlap(a: &Span, b: &Span) -> bool {
    a.region == b.region && a.offset < b.offset + b.len && b.offset < a.offset + a.len
}
