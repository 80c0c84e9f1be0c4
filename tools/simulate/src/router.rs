//! The simulated router: it decides with the real router's policies, by its own bookkeeping of what
//! it sent and what answers said. It knows no engine: what it believes may be late, and wrong.

use crate::arm::Arm;
use crate::prefixes::Run;
use crate::sent::{Sent, Visit};
use forebay_router::elastic::{Choice, Fleet, KvNetwork, choose_elastic};
use forebay_router::policy::{Candidate, Policy, Request, View, choose};
use forebay_router::prefill::Prefill;
use forebay_router::transfers::Transfers;
use forebay_router::{AnswerTokens, EngineModel};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::VecDeque;

/// The agentic-kv report's rule: prompts with more new tokens are handed over, so many at a time.
const HEAVY_TOKENS: u64 = 20_000;
const HAND_OVERS_MAX: u32 = 4;

/// How wrong the router's view is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ViewErrors {
    /// How late it hears of first tokens and answers.
    pub delay_us: u64,
    /// Hits are multiplied by a random factor, up to this much smaller or larger than 1.
    pub hits: f64,
}

/// How a router decides.
#[derive(Clone, Copy, Debug)]
pub struct RouterConfig {
    pub arm: Arm,
    /// What it takes all engines for.
    pub engine_model: EngineModel,
    /// What it takes the network for.
    pub network: KvNetwork,
    pub errors: ViewErrors,
    /// Whether it knows what engines have, as no router can.
    pub knows_hits: bool,
}

/// A request as the router sees it.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    pub session: u32,
    pub turn: u32,
    /// The runs of its prompt.
    pub path: &'a [Run],
    pub input_tokens: u32,
}

/// A request that was sent, as the router has it in its books.
#[derive(Clone, Copy, Debug)]
pub struct Assigned {
    pub choice: Choice,
    new_tokens: u64,
    prefill_us: u64,
    input_tokens: u64,
    /// Seconds until its first token, as predicted.
    own_s: f64,
    /// Whether its transfer is the one that is tried after many were predicted badly.
    is_tried: bool,
}

/// What the router hears of a request.
#[derive(Debug)]
enum RequestEvent {
    /// Its prompt is computed, and where it is handed over, its KV is at the other engine.
    Prefilled(Assigned),
    /// Its first token came so many seconds after it was asked.
    FirstToken(Assigned, f64),
    /// Its answer has ended.
    End { assigned: Assigned, output_tokens: u64, cached_tokens: u32, visit: Visit },
}

#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    /// The books. What is in them of a prompt is of the last request.
    candidates: Vec<Candidate>,
    /// Requests of each engine before their first token.
    waiting: Vec<u32>,
    /// Hand-overs under way from each engine.
    hand_overs: Vec<u32>,
    hits: Vec<u32>,
    sent: Sent,
    answers: AnswerTokens,
    homes: Vec<Option<u32>>,
    transfers: Transfers,
    turn: u64,
    random: StdRng,
    delayed: VecDeque<(u64, RequestEvent)>,
}

impl Router {
    pub fn new(config: RouterConfig, engines: usize, nodes: usize, sessions: usize, seed: u64) -> Router {
        let idle = Candidate {
            eligible: true,
            in_flight: 0,
            pending_prefill_tokens: 0,
            pending_prefill_us: 0,
            context_tokens: 0,
            pool_tokens: config.engine_model.pool_tokens,
            hit_tokens: 0,
            stored_tokens: 0,
            load_us_per_token: config.engine_model.load_us_per_token,
        };
        Router {
            config,
            candidates: vec![idle; engines],
            waiting: vec![0; engines],
            hand_overs: vec![0; engines],
            hits: vec![0; engines],
            sent: Sent::new(engines, nodes),
            answers: AnswerTokens::default(),
            homes: vec![None; sessions],
            transfers: Transfers::default(),
            turn: 0,
            random: StdRng::seed_from_u64(seed),
            delayed: VecDeque::new(),
        }
    }

    /// What is done with a request. `stored_tokens` says what the node of each engine has of the
    /// prompt, as its directory tells; `truth` what an engine itself has, for a router that knows
    /// it.
    pub fn choose(
        &mut self,
        now_us: u64,
        ask: &Ask,
        stored_tokens: impl Fn(usize) -> u32,
        truth: Option<&dyn Fn(usize) -> u32>,
    ) -> (Assigned, Visit) {
        self.hear(now_us);
        match truth {
            Some(truth) => self.hits.iter_mut().enumerate().for_each(|(engine, hit)| *hit = truth(engine)),
            None => self.sent.hits(ask.path, &mut self.hits),
        }
        for engine in 0..self.candidates.len() {
            let believed = [self.hits[engine], stored_tokens(engine)].map(|tokens| self.blurred(tokens));
            let [hit_tokens, stored_tokens] = believed.map(|tokens| u64::from(tokens.min(ask.input_tokens)));
            self.candidates[engine].hit_tokens = hit_tokens;
            self.candidates[engine].stored_tokens = stored_tokens;
        }
        let request = Request {
            input_tokens: u64::from(ask.input_tokens),
            output_tokens: self.answers.estimate(),
            home: self.homes[ask.session as usize].map(|home| home as usize),
        };
        let (choice, own_s) = self.decide(now_us, ask, &request);
        self.turn += 1;
        self.assign(now_us, ask, choice, own_s)
    }

    fn view(&self) -> View<'_> {
        let engine_model = &self.config.engine_model;
        View { candidates: &self.candidates, turn: self.turn, engine_model }
    }

    /// The choice, and after how many seconds it should say its first token.
    fn decide(&self, now_us: u64, ask: &Ask, request: &Request) -> (Choice, f64) {
        // All engines are eligible, so one is chosen.
        let placed = |policy| choose(policy, &self.view(), request).map_or(0, |decision| decision.chosen);
        let choice = match self.config.arm {
            Arm::Policy(policy) => Choice::Place { engine: placed(policy) },
            Arm::Threshold => self.by_threshold(request, placed(Policy::Lpwl)),
            Arm::Migrate(turns) => match request.home.filter(|_| ask.turn.is_multiple_of(turns)) {
                Some(from) => self.moved(from, placed(Policy::LeastLoaded)),
                None => Choice::Place { engine: placed(Policy::SessionSticky) },
            },
            Arm::Elastic(kinds) => {
                let fleet = Fleet {
                    view: self.view(),
                    waiting: &self.waiting,
                    hand_overs: &self.hand_overs,
                    network: self.config.network,
                    kinds: kinds.kinds(),
                    prefillers_pull: true,
                    barred: &[],
                };
                let session = u64::from(ask.session);
                let decision = choose_elastic(&fleet, request, &self.transfers, session, now_us);
                return decision.map_or((Choice::Place { engine: 0 }, 0.0), |it| (it.choice, it.own_s));
            }
        };
        (choice, 0.0)
    }

    fn by_threshold(&self, request: &Request, engine: usize) -> Choice {
        let pending = |engine: &usize| self.candidates[*engine].pending_prefill_tokens;
        let others = (0..self.candidates.len()).filter(|&other| other != engine);
        let new_tokens =
            Prefill::new(&self.config.engine_model, &self.candidates[engine], request.input_tokens).tokens;
        let under_way: u32 = self.hand_overs.iter().sum();
        match others.min_by_key(pending) {
            Some(prefill) if new_tokens > HEAVY_TOKENS && under_way < HAND_OVERS_MAX => {
                Choice::HandOver { prefill, decode: engine }
            }
            _ => Choice::Place { engine },
        }
    }

    fn moved(&self, from: usize, engine: usize) -> Choice {
        if from == engine { Choice::Place { engine } } else { Choice::Pull { from, engine } }
    }

    /// Enters a request into the books.
    fn assign(&mut self, now_us: u64, ask: &Ask, choice: Choice, own_s: f64) -> (Assigned, Visit) {
        let (prefill, home) = (choice.prefill(), choice.home());
        let input_tokens = u64::from(ask.input_tokens);
        let held = |engine: usize| {
            let candidate = &self.candidates[engine];
            candidate.hit_tokens.max(candidate.stored_tokens)
        };
        let stored_tokens = match choice {
            Choice::Place { engine } => self.candidates[engine].stored_tokens,
            Choice::Pull { from, engine } => held(engine).max(held(from)),
            Choice::HandOver { prefill, decode } => held(prefill).max(held(decode)),
        };
        let behind = Candidate { stored_tokens, ..self.candidates[prefill] };
        let work = Prefill::new(&self.config.engine_model, &behind, input_tokens);
        let (new_tokens, prefill_us) = (work.tokens, work.us().round() as u64);
        self.candidates[prefill].pending_prefill_tokens += new_tokens;
        self.candidates[prefill].pending_prefill_us += prefill_us;
        self.waiting[prefill] += 1;
        self.add_in_flight(home, input_tokens);
        if prefill != home {
            self.add_in_flight(prefill, input_tokens);
            self.hand_overs[prefill] += 1;
        }
        let is_tried = choice.transfer().is_some_and(|kind| self.transfers.started(kind));
        let former = self.homes[ask.session as usize].replace(home as u32);
        if let Some(former) = former.filter(|&former| former != home as u32) {
            self.transfers.moved(u64::from(ask.session), former as usize, now_us);
        }
        if prefill != home {
            self.sent.send(home as u32, ask.path, self.candidates[home].hit_tokens as u32);
        }
        // The answer says what was cached where the prompt was computed.
        let visit = self.sent.send(prefill as u32, ask.path, self.candidates[prefill].hit_tokens as u32);
        (Assigned { choice, new_tokens, prefill_us, input_tokens, own_s, is_tried }, visit)
    }

    fn add_in_flight(&mut self, engine: usize, input_tokens: u64) {
        self.candidates[engine].in_flight += 1;
        self.candidates[engine].context_tokens += input_tokens;
    }

    fn end_in_flight(&mut self, engine: usize, input_tokens: u64) {
        self.candidates[engine].in_flight -= 1;
        self.candidates[engine].context_tokens -= input_tokens;
    }

    /// A prompt is computed, and its KV is where the answer is said.
    pub fn prefilled(&mut self, now_us: u64, assigned: Assigned) {
        self.tell(now_us, RequestEvent::Prefilled(assigned));
    }

    /// A first token has come so many seconds after the request was asked.
    pub fn first_token(&mut self, now_us: u64, assigned: Assigned, ttft_s: f64) {
        self.tell(now_us, RequestEvent::FirstToken(assigned, ttft_s));
    }

    /// An answer has ended, and says how many tokens of its prompt the engine that computed it had.
    pub fn end(
        &mut self,
        now_us: u64,
        (assigned, visit): (Assigned, Visit),
        output_tokens: u32,
        cached_tokens: u32,
    ) {
        let output_tokens = u64::from(output_tokens);
        self.tell(now_us, RequestEvent::End { assigned, output_tokens, cached_tokens, visit });
    }

    /// Whether the books are empty once all is heard.
    pub fn is_idle(&mut self) -> bool {
        self.hear(u64::MAX);
        let idle = |it: &Candidate| it.in_flight == 0 && it.context_tokens == 0 && it.pending_prefill_us == 0;
        self.candidates.iter().all(idle)
            && self.waiting.iter().chain(&self.hand_overs).all(|&count| count == 0)
    }

    fn tell(&mut self, now_us: u64, event: RequestEvent) {
        match self.config.errors.delay_us {
            0 => self.note(now_us, event),
            delay_us => self.delayed.push_back((now_us + delay_us, event)),
        }
    }

    /// Hears what has come by now.
    fn hear(&mut self, now_us: u64) {
        while self.delayed.front().is_some_and(|(at_us, _)| *at_us <= now_us)
            && let Some((at_us, event)) = self.delayed.pop_front()
        {
            self.note(at_us, event);
        }
    }

    fn note(&mut self, now_us: u64, event: RequestEvent) {
        match event {
            RequestEvent::Prefilled(Assigned { choice, new_tokens, prefill_us, input_tokens, .. }) => {
                let prefill = choice.prefill();
                self.candidates[prefill].pending_prefill_tokens -= new_tokens;
                self.candidates[prefill].pending_prefill_us -= prefill_us;
                self.waiting[prefill] -= 1;
                if prefill != choice.home() {
                    self.end_in_flight(prefill, input_tokens);
                    self.hand_overs[prefill] -= 1;
                }
            }
            RequestEvent::FirstToken(Assigned { choice, own_s, is_tried, .. }, ttft_s) => {
                if let Some(kind) = choice.transfer() {
                    self.transfers.ended(kind, is_tried, own_s, ttft_s, now_us);
                }
            }
            RequestEvent::End {
                assigned: Assigned { choice, input_tokens, .. },
                output_tokens,
                cached_tokens,
                visit,
            } => {
                self.end_in_flight(choice.home(), input_tokens);
                self.answers.learn(output_tokens);
                self.sent.learn(choice.prefill() as u32, &visit, cached_tokens);
            }
        }
    }

    /// A number of tokens as wrong as the view is.
    fn blurred(&mut self, tokens: u32) -> u32 {
        if self.config.errors.hits == 0.0 || tokens == 0 {
            return tokens;
        }
        let error = (self.random.random::<f64>() * 2.0 - 1.0) * self.config.errors.hits;
        (f64::from(tokens) * (1.0 + error)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefixes::NodeId;
    use forebay_steps::{Launch, Profile};

    fn router(arm: Arm) -> Router {
        let profile = Profile::shipped(Profile::DEFAULT).unwrap();
        let engine_model = EngineModel::new(&profile, Launch::Graph);
        let network = KvNetwork { start_us: 0.0, us_per_token: 1.0, layers: 32 };
        let errors = ViewErrors::default();
        let config = RouterConfig { arm, engine_model, network, errors, knows_hits: false };
        Router::new(config, 2, 1, 1, 1)
    }

    #[test]
    fn what_a_prefiller_had_cached_says_nothing_of_the_engine_that_says_the_answer() {
        let mut router = router(Arm::Threshold);
        let mut ask = |turn, tokens| {
            let path = [Run { node: NodeId(0), start: 0, end: tokens }];
            let ask = Ask { session: 0, turn, path: &path, input_tokens: tokens };
            let (assigned, visit) = router.choose(0, &ask, |_| 0, None);
            router.prefilled(0, assigned);
            router.end(0, (assigned, visit), 1, 0);
            let mut hits = [0; 2];
            router.sent.hits(&path, &mut hits);
            (assigned.choice, hits)
        };
        let (first, _) = ask(0, 8_000);
        let home = first.home();
        let (second, hits) = ask(1, 40_000);
        assert_eq!(second, Choice::HandOver { prefill: 1 - home, decode: home });
        assert_eq!(hits, [40_000; 2], "both have the prompt, the decoder all of it");
        assert!(router.is_idle());
    }
}
