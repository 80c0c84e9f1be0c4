//! Tests of one hand-over: whatever the two engines do, it ends once and the client gets one answer
//! at most. Engines are scripts, and time is virtual.

use super::*;
use crate::chain::Chain;
use crate::dispatcher::{
    Assignment, Dispatcher, End, HandOverConfig, HandOverEnded, Membership, Plan, RoutingFacts,
};
use crate::elastic::KvNetwork;
use crate::engine_model::EngineModel;
use crate::health::{Failure, Thresholds};
use crate::policy::{Policy, Reason};
use crate::request::{Endpoint, PromptKind};
use crate::tokens::Length;
use forebay_steps::{Launch, Profile};
use proptest::prelude::*;

const SECOND_US: u64 = 1_000_000;
/// The ordinary limit for a first byte.
const FIRST_BYTE_US: u64 = 120 * SECOND_US;

fn routing(session: u64, tokens: usize) -> RoutingFacts {
    let bytes = tokens * 4;
    let chain = Chain::new(session, &vec![session as u8; bytes]);
    let length = Length { kind: PromptKind::Text, bytes, media: 0 };
    let endpoint = Some(Endpoint::Completions);
    RoutingFacts {
        length,
        preamble_bytes: 0,
        chain,
        session,
        endpoint,
        serving: None,
        slo: crate::slo::Slo::default(),
    }
}

/// Two engines. The first one has nothing to prefill and a long context to decode; the second has
/// prompts to prefill and little to decode, so that prompts are handed over to it.
struct Site {
    dispatcher: Dispatcher,
    loads: Vec<(RoutingFacts, Assignment)>,
}

const PREFILLER: usize = 0;
const DECODER: usize = 1;

impl Site {
    fn new(protocol: Protocol) -> Site {
        let mut profile = Profile::shipped(Profile::DEFAULT).unwrap();
        // Answers are short here, so that long contexts must be dear.
        profile.step.kv_read_ns_per_context_token *= 7.0;
        let model = EngineModel::new(&profile, Launch::Graph);
        let thresholds = Thresholds { eject_after: 3, readmit_after: 1 };
        let network = KvNetwork { layers: 1, ..KvNetwork::new(&profile, 25.0) };
        let dispatcher = Dispatcher::new(Policy::Elastic, model, thresholds);
        let dispatcher = dispatcher.with_hand_overs(HandOverConfig { protocol, network });
        let mut site = Site { dispatcher, loads: Vec::new() };
        for name in ["prefiller", "decoder"] {
            site.dispatcher.add_backend(name, None).unwrap();
        }
        site.load(101, PREFILLER, 200_000, true);
        site.load(102, DECODER, 25_000, false);
        site
    }

    fn load(&mut self, session: u64, engine: usize, tokens: usize, has_begun: bool) {
        let facts = routing(session, tokens);
        let mut assignment = self.dispatcher.assign(0, &facts, &[1 - engine as u64]).unwrap();
        if has_begun {
            self.dispatcher.first_byte(1, &mut assignment, 200);
        }
        self.loads.push((facts, assignment));
    }

    /// A prompt that is to be handed over.
    fn assign(&mut self, now_us: u64) -> (RoutingFacts, Assignment, Assignment, Plan) {
        let facts = routing(7, 40_000);
        let (decode, prefill) = self.dispatcher.assign_with_prefiller(now_us, &facts, &[], 1, true).unwrap();
        let (prefill, plan) = prefill.expect("handed over");
        assert_eq!((prefill.backend, decode.backend), (PREFILLER, DECODER));
        (facts, decode, prefill, plan)
    }

    /// Ends all other load. What is left after the lease is a leak.
    fn assert_empty(mut self, now_us: u64) {
        for (facts, assignment) in self.loads.drain(..) {
            self.dispatcher.end(0, &facts, assignment, End::Cancelled);
        }
        self.dispatcher.expire_held(now_us);
        for backend in self.dispatcher.stats(now_us).backends {
            let left = (backend.in_flight, backend.context_tokens, backend.pending_prefill_tokens);
            assert_eq!(left, (0, 0, 0), "{}", backend.name);
        }
    }
}

/// What an engine does with a request, so many microseconds after it can.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Answers(u64),
    /// With an error.
    Refuses(u64),
    /// The connection breaks.
    Dies(u64),
    /// Nothing, for ever: stopped, or behind a link that is gone.
    Hangs,
}

#[derive(Debug, Clone)]
struct Script {
    form: Form,
    is_stream: bool,
    prefill: Fate,
    /// The prefiller's answer says where the KV is.
    has_params: bool,
    /// What the decoder does with a prompt that is handed over.
    handed: Fate,
    /// And with one that it has to compute.
    alone: Fate,
    leaves_us: Option<u64>,
}

/// What the client saw.
#[derive(Debug, PartialEq)]
enum Saw {
    Answer,
    Failure,
    Left,
}

/// One transaction, as the driver runs it.
struct Run<'a> {
    site: &'a mut Site,
    script: &'a Script,
    machine: HandOver,
    now_us: u64,
    /// When and how the prefiller's answer ends.
    prefill: Option<(u64, Fate)>,
    /// The same for the decoder; one that waits for a prefiller has no time yet.
    decode: Option<(u64, Fate)>,
    /// Requests that the decoder began to work on.
    asked: u32,
    ends: u32,
}

fn at(now_us: u64, fate: Fate) -> (u64, Fate) {
    match fate {
        Fate::Answers(us) | Fate::Refuses(us) | Fate::Dies(us) => (now_us + us, fate),
        Fate::Hangs => (u64::MAX, fate),
    }
}

impl Run<'_> {
    fn ask_decode(&mut self, fate: Fate) {
        assert!(self.decode.is_none(), "it would run twice at once");
        self.asked += 1;
        self.decode = Some(at(self.now_us, fate));
    }

    /// The decoder that was asked at once learns what it waited for.
    fn decoder_learns(&mut self, fate: Fate) {
        if self.script.form == Form::AtOnce && self.decode.is_some_and(|(at, _)| at == u64::MAX) {
            self.decode = Some(at(self.now_us, fate));
        }
    }

    fn act(&mut self, event: Event, decode: &mut Assignment) {
        let was_over = self.machine.end().is_some();
        match self.machine.on(self.now_us, event) {
            Action::Wait => {}
            Action::AskDecode => self.ask_decode(self.script.handed),
            Action::AskPlainly => {
                (self.prefill, self.decode) = (None, None);
                self.site.dispatcher.computes_itself(decode);
                self.ask_decode(self.script.alone);
            }
        }
        self.ends += u32::from(!was_over && self.machine.end().is_some());
    }

    /// The next thing that happens; `None` when the ordinary limit has passed.
    fn next(&self) -> Option<u64> {
        let times = [
            self.prefill.map(|(at, _)| at),
            self.decode.map(|(at, _)| at),
            self.machine.deadline_us(),
            self.script.leaves_us,
        ];
        times.into_iter().flatten().min().filter(|&at| at < FIRST_BYTE_US)
    }
}

fn run(site: &mut Site, script: &Script) -> (Saw, u64) {
    let (facts, mut decode, mut prefill, plan) = site.assign(0);
    let machine = HandOver::new(script.form, script.is_stream, plan.expected, 0, FIRST_BYTE_US);
    let prefilling = Some(at(0, script.prefill));
    let mut run =
        Run { site, script, machine, now_us: 0, prefill: prefilling, decode: None, asked: 0, ends: 0 };
    if script.form == Form::AtOnce {
        run.ask_decode(Fate::Hangs);
    }
    let mut prefill_end = End::Cancelled;
    let (saw, end) = loop {
        let Some(next_us) = run.next() else {
            break (Saw::Failure, End::Failed(Failure::FirstByteTimeout));
        };
        run.now_us = next_us;
        let at_now = |it: Option<(u64, Fate)>| it.filter(|(at, _)| *at == next_us).map(|(_, fate)| fate);
        if script.leaves_us == Some(next_us) {
            break (Saw::Left, End::Cancelled);
        } else if let Some(fate) = at_now(run.decode) {
            let has_begun = matches!(fate, Fate::Answers(_));
            if matches!(fate, Fate::Refuses(_)) && !run.machine.is_asked_plainly() {
                run.decode = None;
                run.act(Event::DecodeRefused, &mut decode);
                continue;
            }
            run.act(if has_begun { Event::Began } else { Event::DecodeLost }, &mut decode);
            run.decode = None;
            if has_begun {
                run.site.dispatcher.first_byte(run.now_us, &mut decode, 200);
                break (Saw::Answer, End::Answered { status: 200, usage: None });
            }
            break (Saw::Failure, End::Failed(Failure::Closed));
        } else if let Some(fate) = at_now(run.prefill) {
            run.prefill = None;
            let (status, event) = match fate {
                Fate::Answers(_) if script.has_params => (Some(200), Event::Prefilled),
                Fate::Answers(_) => (Some(200), Event::PrefillFailed(HandOverEnd::NoParameters)),
                Fate::Refuses(_) => (Some(500), Event::PrefillFailed(HandOverEnd::PrefillRefused)),
                Fate::Dies(_) | Fate::Hangs => (None, Event::PrefillFailed(HandOverEnd::PrefillLost)),
            };
            prefill_end = match status {
                Some(status) => {
                    run.site.dispatcher.first_byte(run.now_us, &mut prefill, status);
                    End::Answered { status, usage: None }
                }
                None => End::Failed(Failure::Closed),
            };
            match event {
                Event::Prefilled => run.decoder_learns(script.handed),
                // A connection that breaks is all that it learns of.
                Event::PrefillFailed(HandOverEnd::PrefillLost) => run.decoder_learns(script.alone),
                _ => {}
            }
            run.act(event, &mut decode);
        } else {
            run.act(Event::Tick, &mut decode);
        }
    };
    let (now_us, asked) = (run.now_us, run.asked);
    let handed = run.machine.end().unwrap_or(HandOverEnd::Cancelled);
    assert!(run.ends <= 1, "it ended {} times", run.ends);
    assert!(asked <= 2, "the decoder was asked {asked} times");
    let first_byte_s = (saw == Saw::Answer).then_some(now_us as f64 / 1e6);
    // What is dropped in the order in which it is dropped: the prefiller's part comes first.
    site.dispatcher.end(0, &facts, prefill, prefill_end);
    site.dispatcher.hand_over_ended(now_us, &plan, handed, first_byte_s);
    site.dispatcher.end(0, &facts, decode, end);
    (saw, now_us)
}

fn fate() -> impl Strategy<Value = Fate> {
    let after = prop_oneof![0..2 * SECOND_US, 0..60 * SECOND_US];
    (0..8, after).prop_map(|(kind, us)| match kind {
        0..=3 => Fate::Answers(us),
        4 => Fate::Refuses(us),
        5..=6 => Fate::Dies(us),
        _ => Fate::Hangs,
    })
}

prop_compose! {
    fn script()(
        at_once: bool,
        is_stream: bool,
        prefill in fate(),
        has_params in prop::bool::weighted(0.8),
        handed in fate(),
        alone in fate(),
        leaves_us in prop::option::weighted(0.2, 0..70 * SECOND_US),
    ) -> Script {
        let form = if at_once { Form::AtOnce } else { Form::InTurn };
        Script { form, is_stream, prefill, has_params, handed, alone, leaves_us }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn it_ends_once_and_leaves_nothing_behind_whatever_engines_and_client_do(script in script()) {
        let mut site = Site::new(Protocol::Forebay);
        let (saw, now_us) = run(&mut site, &script);
        prop_assert!(now_us <= FIRST_BYTE_US);
        prop_assert_eq!(saw == Saw::Left, script.leaves_us.is_some_and(|at| at == now_us));
        let counted: u64 = site.dispatcher.stats(now_us).backends[PREFILLER].hand_overs.iter().sum();
        prop_assert_eq!(counted, 1);
        site.assert_empty(now_us + Protocol::Forebay.lease().as_micros() as u64);
    }

    #[test]
    fn a_prefiller_that_fails_costs_the_client_time_and_never_the_answer(
        script in script(),
        alone_us in 0..10 * SECOND_US,
    ) {
        // A late error of an answer that comes as a whole is for the ordinary retry.
        let is_well = matches!(script.handed, Fate::Answers(_))
            || (script.is_stream && matches!(script.handed, Fate::Refuses(_)));
        prop_assume!(is_well);
        let script = Script { alone: Fate::Answers(alone_us), leaves_us: None, ..script };
        let mut site = Site::new(Protocol::Nixl);
        let (saw, _) = run(&mut site, &script);
        prop_assert_eq!(saw, Saw::Answer);
    }
}

fn script_of(form: Form, prefill: Fate, handed: Fate) -> Script {
    let alone = Fate::Answers(SECOND_US);
    Script { form, is_stream: true, prefill, has_params: true, handed, alone, leaves_us: None }
}

#[test]
fn a_prompt_is_handed_over_in_both_forms() {
    for form in [Form::InTurn, Form::AtOnce] {
        let mut site = Site::new(Protocol::Forebay);
        let script = script_of(form, Fate::Answers(SECOND_US), Fate::Answers(SECOND_US / 10));
        assert_eq!(run(&mut site, &script), (Saw::Answer, 1_100_000));
        let stats = site.dispatcher.stats(0);
        assert_eq!(stats.backends[PREFILLER].hand_overs[HandOverEnd::Handed as usize], 1);
        assert_eq!(stats.reasons[Reason::HandOver as usize], 1);
        let first_bytes = |backend: usize| stats.backends[backend].first_byte_seconds.count();
        assert_eq!(
            (first_bytes(PREFILLER), first_bytes(DECODER)),
            (1, 1),
            "one of its load, and the client's"
        );
        let decision = site.dispatcher.decisions().pop().unwrap().record();
        let hand_over = decision.hand_over.unwrap();
        assert_eq!(hand_over.prefill_backend, "prefiller");
        assert_eq!(hand_over.handed.unwrap().end, HandOverEnd::Handed);
        assert_eq!(hand_over.prefilled.unwrap().after_us, SECOND_US);
        let [place, handed] = &decision.options[..] else { panic!("{:?}", decision.options) };
        assert!(place.added_s > handed.added_s && place.prefill_backend.is_none());
    }
}

#[test]
fn a_late_prefiller_is_given_up_after_three_times_its_prediction_and_a_second() {
    for form in [Form::InTurn, Form::AtOnce] {
        let expected = Expected { prefill_us: 2 * SECOND_US, hand_us: 0 };
        let mut machine = HandOver::new(form, true, expected, 5, u64::MAX);
        let deadline_us = 5 + 7 * SECOND_US;
        assert_eq!(machine.deadline_us(), Some(deadline_us));
        assert_eq!(machine.on(deadline_us - 1, Event::Tick), Action::Wait);
        assert_eq!(machine.on(deadline_us, Event::Tick), Action::AskPlainly);
        assert_eq!(machine.end(), Some(HandOverEnd::PrefillLate));
        assert_eq!(machine.on(deadline_us + 1, Event::Prefilled), Action::Wait, "it is over");
    }
}

#[test]
fn blocks_that_wait_at_a_prefiller_are_used_room_until_they_are_read_or_their_lease_ends() {
    for (handed, until_us) in [(Fate::Answers(SECOND_US), 0), (Fate::Dies(SECOND_US), 30 * SECOND_US)] {
        let mut site = Site::new(Protocol::Forebay);
        let context = |site: &mut Site, now_us| {
            site.dispatcher.expire_held(now_us);
            site.dispatcher.stats(now_us).backends[PREFILLER].context_tokens
        };
        let before = context(&mut site, 0);
        run(&mut site, &script_of(Form::InTurn, Fate::Answers(SECOND_US), handed));
        let computed_us = SECOND_US;
        let held = context(&mut site, computed_us + until_us.max(1) - 1) - before;
        assert_eq!(held, if until_us == 0 { 0 } else { 40_000 });
        assert_eq!(context(&mut site, computed_us + until_us), before);
    }
}

#[test]
fn a_prompt_that_is_not_handed_over_after_all_is_work_for_the_engine_that_says_the_answer() {
    let mut site = Site::new(Protocol::Nixl);
    let pending = |site: &mut Site| site.dispatcher.stats(0).backends[DECODER].pending_prefill_tokens;
    let before = pending(&mut site);
    let (facts, mut decode, prefill, plan) = site.assign(0);
    assert_eq!(pending(&mut site), before, "the other one computes it");
    site.dispatcher.end(0, &facts, prefill, End::Failed(Failure::Refused));
    site.dispatcher.hand_over_ended(1, &plan, HandOverEnd::PrefillLost, None);
    site.dispatcher.computes_itself(&mut decode);
    assert_eq!(pending(&mut site), before + 40_000);
    site.dispatcher.first_byte(2, &mut decode, 200);
    assert_eq!(pending(&mut site), before);
    site.dispatcher.end(0, &facts, decode, End::Cancelled);
    site.assert_empty(3);
}

#[test]
fn a_request_that_is_refused_without_a_hand_over_too_is_nobodys_fault() {
    let expected = Expected { prefill_us: SECOND_US, hand_us: SECOND_US };
    let refusals = [
        (Form::InTurn, Event::PrefillFailed(HandOverEnd::PrefillRefused), HandOverEnd::PrefillRefused),
        (Form::AtOnce, Event::DecodeRefused, HandOverEnd::DecodeRefused),
    ];
    for (form, refusal, end) in refusals {
        for (event, expected_end) in [(Event::ClientError, HandOverEnd::ClientError), (Event::Began, end)] {
            let mut machine = HandOver::new(form, true, expected, 0, FIRST_BYTE_US);
            assert_eq!(machine.on(1, refusal), Action::AskPlainly);
            assert_eq!((machine.end(), machine.deadline_us()), (None, None), "it is not known yet");
            assert_eq!(machine.on(2, event), Action::Wait);
            assert_eq!(machine.end(), Some(expected_end));
        }
    }
    assert_eq!(HandOverEnd::ClientError.fault(), None);
}

#[test]
fn half_of_the_time_for_a_first_byte_is_left_to_the_decoder() {
    let expected = Expected { prefill_us: 60 * SECOND_US, hand_us: SECOND_US };
    let machine = HandOver::new(Form::InTurn, true, expected, SECOND_US, 21 * SECOND_US);
    assert_eq!(machine.deadline_us(), Some(11 * SECOND_US));
}

#[test]
fn an_answer_that_comes_as_a_whole_proves_no_engine() {
    let expected = Expected { prefill_us: SECOND_US, hand_us: SECOND_US };
    let mut machine = HandOver::new(Form::InTurn, false, expected, 0, FIRST_BYTE_US);
    machine.on(1, Event::Prefilled);
    machine.on(10 * SECOND_US, Event::Tick);
    assert_eq!(machine.end(), Some(HandOverEnd::Unseen));
}

#[test]
fn a_prefiller_that_is_to_leave_stays_until_its_prompt_is_handed_over() {
    let mut site = Site::new(Protocol::Nixl);
    let (facts, decode, mut prefill, plan) = site.assign(0);
    for (facts, assignment) in site.loads.drain(..) {
        site.dispatcher.end(0, &facts, assignment, End::Cancelled);
    }
    assert!(!site.dispatcher.set_membership(PREFILLER, Membership::Leaving));
    site.dispatcher.first_byte(1, &mut prefill, 200);
    assert!(!site.dispatcher.end(0, &facts, prefill, End::Answered { status: 200, usage: None }).is_gone);
    let ended = site.dispatcher.hand_over_ended(2, &plan, HandOverEnd::Handed, Some(1.0));
    assert_eq!(ended, HandOverEnded { barred: None, is_gone: true });
    site.dispatcher.end(0, &facts, decode, End::Cancelled);
}
