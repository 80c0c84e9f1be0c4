//! Elastic prefill: whether a request is computed where its KV is, elsewhere behind KV that is
//! pulled there, or prefilled at one engine and handed over to another. It weighs the options in
//! seconds that all requests together wait longer. It knows numbers, and moves nothing.
//!
//! Without transfers it is `added-latency`: a transfer is chosen only where that policy's best
//! engine is dearer by a margin, and where nothing speaks against it. `docs/elastic.md` has the
//! formulas.

use crate::added_latency::{added_latency_s, answer_latency_us, prefill_latency_us, room_us};
use crate::policy::{Decision, Policy, choose};
use crate::prefill::Prefill;
use crate::transfers::{TransferKind, Transfers};
use crate::view::{Candidate, Request, View};
use forebay_steps::Profile;

/// The least that a transfer must save, and the least share of what is saved from.
const LEAST_SAVED_S: f64 = 0.25;
const LEAST_SAVED_SHARE: f64 = 0.1;
/// An engine that has so many requests before their first token computes nothing for others.
const WAITING_MAX: u32 = 2;
/// Longer transfers are not worth a prediction.
const LONGEST_TRANSFER_US: f64 = 2e6;
/// Hand-overs under way at one prefiller, and for how many engines there may be one.
const HAND_OVERS_PER_PREFILLER: u32 = 1;
const ENGINES_PER_HAND_OVER: u32 = 2;
/// Engines that are weighed as decoders beside the session's own.
const DECODERS: usize = 3;
/// Engines that are weighed as prefillers.
const PREFILLERS: usize = 16;

/// What is done with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Choice {
    /// One engine computes all of it.
    Place { engine: usize },
    /// The session's KV is pulled from its engine to another, which computes the rest.
    Pull { from: usize, engine: usize },
    /// One engine computes the prompt, and hands it over to another, which says the answer.
    HandOver { prefill: usize, decode: usize },
}

impl Choice {
    /// The engine that says the answer and has the session's KV then.
    pub fn home(self) -> usize {
        match self {
            Choice::Place { engine } | Choice::Pull { engine, .. } => engine,
            Choice::HandOver { decode, .. } => decode,
        }
    }

    /// The engine that computes the prompt.
    pub fn prefill(self) -> usize {
        match self {
            Choice::HandOver { prefill, .. } => prefill,
            other => other.home(),
        }
    }

    pub fn transfer(self) -> Option<TransferKind> {
        match self {
            Choice::Place { .. } => None,
            Choice::Pull { .. } => Some(TransferKind::Pull),
            Choice::HandOver { .. } => Some(TransferKind::HandOver),
        }
    }
}

/// What it takes to move KV from one engine to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvNetwork {
    /// Before the first byte.
    pub start_us: f64,
    pub us_per_token: f64,
    /// Layers, each of which can go as soon as it is computed.
    pub layers: u32,
}

impl KvNetwork {
    /// Before the first byte of a transfer between hosts.
    const START_US: f64 = 1_000.0;

    /// A network of 10^9 bytes per second for the KV of a profile's model.
    pub fn new(profile: &Profile, gb_per_s: f64) -> KvNetwork {
        let model = &profile.model;
        KvNetwork {
            start_us: KvNetwork::START_US,
            us_per_token: model.kv_bytes_per_token as f64 / (gb_per_s * 1e3),
            layers: model.layers as u32,
        }
    }

    fn move_us(&self, tokens: u64) -> f64 {
        if tokens == 0 { 0.0 } else { self.start_us + tokens as f64 * self.us_per_token }
    }

    /// How long a prefill's KV still goes after its last layer was computed.
    fn tail_us(&self, tokens: u64, prefill_us: f64) -> f64 {
        let move_us = self.move_us(tokens);
        (move_us - prefill_us).max(move_us / f64::from(self.layers.max(1)))
    }
}

/// What is known of the engines for transfers.
#[derive(Debug, Clone, Copy)]
pub struct Fleet<'a> {
    pub view: View<'a>,
    /// Requests of each engine before their first token.
    pub waiting: &'a [u32],
    /// Hand-overs under way from each engine.
    pub hand_overs: &'a [u32],
    pub network: KvNetwork,
    /// The transfers that engines can do.
    pub kinds: &'a [TransferKind],
    /// What the decoder has of a prompt can be pulled to the prefiller.
    pub prefillers_pull: bool,
    /// Engines that take part in no hand-over.
    pub barred: &'a [usize],
}

impl Fleet<'_> {
    /// An engine as it will be when all that another one has of the prompt is in its host's memory
    /// too, and how long that takes.
    fn pulled(&self, to: &Candidate, from: &Candidate) -> (Candidate, f64) {
        let tokens = held_tokens(from).max(held_tokens(to));
        let move_us = self.network.move_us(tokens - held_tokens(to));
        (Candidate { stored_tokens: tokens, ..*to }, move_us)
    }
}

/// What is done with a request, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct ElasticDecision {
    pub choice: Choice,
    /// Seconds that all requests wait longer.
    pub cost_s: f64,
    /// Seconds until its first token.
    pub own_s: f64,
    /// What `added-latency` chose among the engines.
    pub placed: Decision,
    /// What that costs, and the cheapest transfer of each kind that the guards allow.
    pub options: Vec<WeighedOption>,
}

/// An option and what it costs, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeighedOption {
    pub choice: Choice,
    /// That all requests wait longer.
    pub cost_s: f64,
    /// Until its first token.
    pub own_s: f64,
}

/// An option and what it costs.
#[derive(Debug, Clone, Copy)]
struct Weighed {
    choice: Choice,
    cost_us: f64,
    own_us: f64,
}

/// Chooses what is done with a request of a session, or `None` when no engine is eligible.
pub fn choose_elastic(
    fleet: &Fleet,
    request: &Request,
    transfers: &Transfers,
    session: u64,
    now_us: u64,
) -> Option<ElasticDecision> {
    let placed = choose(Policy::AddedLatency, &fleet.view, request)?;
    let candidate = &fleet.view.candidates[placed.chosen];
    let place = Weighed {
        choice: Choice::Place { engine: placed.chosen },
        cost_us: added_latency_s(fleet.view.engine_model, candidate, request) * 1e6,
        own_us: own_us(&fleet.view, candidate, request),
    };
    // The engine that keeps a request need not be the cheapest one: a transfer must beat that too.
    let cheapest_us = placed.scores.iter().flatten().copied().fold(f64::INFINITY, f64::min) * 1e6;
    let pays = |option: &Weighed| {
        let Some(kind) = option.choice.transfer() else { return false };
        let factor = transfers.margin_factor(session, request.home, option.choice.home(), now_us);
        let least_saved_us = (LEAST_SAVED_S * 1e6)
            .max(LEAST_SAVED_SHARE * cheapest_us)
            .max(2e6 * transfers.usual_error_s(kind));
        transfers.may_start(kind, now_us)
            && factor.is_some_and(|factor| cheapest_us - option.cost_us > factor * least_saved_us)
    };
    let mut best = place;
    let mut options = vec![place];
    let is_done = |option: &Weighed| option.choice.transfer().is_none_or(|kind| fleet.kinds.contains(&kind));
    for option in pulls(fleet, request).chain(hand_overs(fleet, request)).filter(is_done) {
        keep_cheapest(&mut options, option);
        if option.cost_us < best.cost_us && pays(&option) {
            best = option;
        }
    }
    let api_us = fleet.view.engine_model.steps.api_us(request.input_tokens as usize);
    let in_seconds = |Weighed { choice, cost_us, own_us }| WeighedOption {
        choice,
        cost_s: cost_us / 1e6,
        own_s: (api_us + own_us) / 1e6,
    };
    let WeighedOption { choice, cost_s, own_s } = in_seconds(best);
    let options = options.into_iter().map(in_seconds).collect();
    Some(ElasticDecision { choice, cost_s, own_s, placed, options })
}

/// Puts an option into the place of a dearer one of its kind.
fn keep_cheapest(options: &mut Vec<Weighed>, option: Weighed) {
    let kind = option.choice.transfer();
    match options.iter_mut().find(|other| other.choice.transfer() == kind) {
        Some(other) if option.cost_us < other.cost_us => *other = option,
        Some(_) => {}
        None => options.push(option),
    }
}

/// The session's KV goes to another engine, which has time.
fn pulls<'a>(fleet: &'a Fleet, request: &'a Request) -> impl Iterator<Item = Weighed> + 'a {
    let View { candidates, engine_model, .. } = fleet.view;
    let home = request.home.filter(|&home| home < candidates.len());
    home.into_iter().flat_map(move |from| {
        let others = (0..candidates.len()).filter(move |&engine| engine != from);
        others.filter_map(move |engine| {
            let (behind, move_us) = fleet.pulled(&candidates[engine], &candidates[from]);
            if move_us == 0.0 || move_us > LONGEST_TRANSFER_US || !may_compute(fleet, engine, request) {
                return None;
            }
            Some(Weighed {
                choice: Choice::Pull { from, engine },
                cost_us: move_us + added_latency_s(engine_model, &behind, request) * 1e6,
                own_us: move_us + own_us(&fleet.view, &behind, request),
            })
        })
    })
}

/// Microseconds until its first token, if it goes to the candidate.
fn own_us(view: &View, candidate: &Candidate, request: &Request) -> f64 {
    let prefill = Prefill::new(view.engine_model, candidate, request.input_tokens);
    candidate.pending_prefill_us as f64 + prefill.us()
}

/// One engine computes the prompt and another says the answer.
fn hand_overs<'a>(fleet: &'a Fleet, request: &'a Request) -> impl Iterator<Item = Weighed> + 'a {
    let engines = fleet.view.candidates.iter().filter(|candidate| candidate.eligible).count();
    let under_way: u32 = fleet.hand_overs.iter().sum();
    let allowed = engines as u32 > under_way * ENGINES_PER_HAND_OVER;
    let pairs = allowed.then(|| (decoders(fleet, request), prefillers(fleet, request)));
    pairs.into_iter().flat_map(move |(decoders, prefillers)| {
        decoders.into_iter().flat_map(move |decode| {
            let others = prefillers.clone().into_iter().filter(move |&prefill| prefill != decode);
            others.filter_map(move |prefill| hand_over(fleet, request, prefill, decode))
        })
    })
}

fn hand_over(fleet: &Fleet, request: &Request, prefill: usize, decode: usize) -> Option<Weighed> {
    let View { candidates, engine_model, .. } = fleet.view;
    let (at, to) = (&candidates[prefill], &candidates[decode]);
    let (behind, pull_us) = if fleet.prefillers_pull { fleet.pulled(at, to) } else { (*at, 0.0) };
    let compute = Prefill::new(engine_model, &behind, request.input_tokens);
    let moved_tokens = request.input_tokens.saturating_sub(held_tokens(to));
    let tail_us = fleet.network.tail_us(moved_tokens, compute.compute_us);
    if pull_us > LONGEST_TRANSFER_US || tail_us > LONGEST_TRANSFER_US {
        return None;
    }
    // All that the other engine's GPU lacks then is in its host's memory.
    let loaded_tokens = request.input_tokens.saturating_sub(to.hit_tokens);
    let transfer_us = pull_us + tail_us + loaded_tokens as f64 * to.load_us_per_token;
    let handed_us = transfer_us + at.pending_prefill_us as f64 + compute.us();
    // It is the last in the queue of the engine that says the answer.
    let queue_us = (to.pending_prefill_us as f64 - handed_us).max(0.0);
    Some(Weighed {
        choice: Choice::HandOver { prefill, decode },
        cost_us: transfer_us
            + prefill_latency_us(engine_model, &behind, request)
            + queue_us
            + answer_latency_us(engine_model, to, request),
        own_us: handed_us + queue_us,
    })
}

/// Tokens of the prompt that an engine or its store has.
fn held_tokens(candidate: &Candidate) -> u64 {
    candidate.hit_tokens.max(candidate.stored_tokens)
}

/// Engines that could say the answer: the session's own, and those where it costs least.
fn decoders(fleet: &Fleet, request: &Request) -> Vec<usize> {
    let View { candidates, engine_model, .. } = fleet.view;
    let has_room = |&engine: &usize| {
        candidates[engine].eligible
            && !fleet.barred.contains(&engine)
            && room_us(engine_model, &candidates[engine], request) == 0.0
    };
    let cost = |engine: usize| answer_latency_us(engine_model, &candidates[engine], request);
    let mut engines: Vec<usize> = (0..candidates.len()).filter(has_room).collect();
    lowest(&mut engines, DECODERS, cost);
    if let Some(home) = request.home
        && home < candidates.len()
        && has_room(&home)
        && !engines.contains(&home)
    {
        engines.push(home);
    }
    engines
}

/// Engines that have time for a prompt of others.
fn prefillers(fleet: &Fleet, request: &Request) -> Vec<usize> {
    let View { candidates, engine_model, .. } = fleet.view;
    let is_free = |engine: &usize| {
        fleet.hand_overs[*engine] < HAND_OVERS_PER_PREFILLER
            && !fleet.barred.contains(engine)
            && may_compute(fleet, *engine, request)
    };
    let mut engines: Vec<usize> = (0..candidates.len()).filter(is_free).collect();
    let cost = |engine: usize| prefill_latency_us(engine_model, &candidates[engine], request);
    lowest(&mut engines, PREFILLERS, cost);
    engines
}

/// Whether an engine has time and room for a prompt that is not its own.
fn may_compute(fleet: &Fleet, engine: usize, request: &Request) -> bool {
    let candidate = &fleet.view.candidates[engine];
    candidate.eligible
        && fleet.waiting[engine] < WAITING_MAX
        && room_us(fleet.view.engine_model, candidate, request) == 0.0
}

/// Keeps the `most` that cost least.
fn lowest(engines: &mut Vec<usize>, most: usize, cost: impl Fn(usize) -> f64) {
    engines.sort_by(|&a, &b| cost(a).total_cmp(&cost(b)));
    engines.truncate(most);
}

#[cfg(test)]
mod tests;
