//! Tests of elastic prefill: what is chosen when, and what stops a transfer.

use super::*;
use crate::engine_model::EngineModel;
use forebay_steps::Launch;
use proptest::prelude::*;

const NETWORK: KvNetwork = KvNetwork { start_us: 1_000.0, us_per_token: 4.0, layers: 48 };

fn model() -> EngineModel {
    EngineModel::new(&Profile::shipped("h20-qwen3-coder-30b-a3b").unwrap(), Launch::Graph)
}

/// An engine: in flight, of these before their first token, pending seconds, context, hit.
type Row = (u32, u32, f64, u64, u64);

fn candidate(&(in_flight, _, pending_s, context_tokens, hit_tokens): &Row) -> Candidate {
    Candidate {
        eligible: true,
        in_flight,
        pending_prefill_tokens: (pending_s * 10_000.0) as u64,
        pending_prefill_us: (pending_s * 1e6) as u64,
        context_tokens,
        pool_tokens: model().pool_tokens,
        hit_tokens,
        stored_tokens: 0,
        load_us_per_token: 2.0,
    }
}

struct Case {
    rows: Vec<Row>,
    hand_overs: Vec<u32>,
    network: KvNetwork,
    kinds: Vec<TransferKind>,
    request: Request,
    transfers: Transfers,
    barred: Vec<usize>,
}

impl Case {
    /// A prompt of 40,000 tokens whose session is at home at engine 0.
    fn new(rows: &[Row]) -> Case {
        Case {
            rows: rows.to_vec(),
            hand_overs: vec![0; rows.len()],
            network: NETWORK,
            kinds: vec![TransferKind::Pull, TransferKind::HandOver],
            request: Request { input_tokens: 40_000, output_tokens: 150, home: Some(0) },
            transfers: Transfers::default(),
            barred: Vec::new(),
        }
    }

    fn decision(&self) -> ElasticDecision {
        let candidates: Vec<Candidate> = self.rows.iter().map(candidate).collect();
        let waiting: Vec<u32> = self.rows.iter().map(|row| row.1).collect();
        let engine_model = model();
        let fleet = Fleet {
            view: View { candidates: &candidates, turn: 0, engine_model: &engine_model },
            waiting: &waiting,
            hand_overs: &self.hand_overs,
            network: self.network,
            kinds: &self.kinds,
            prefillers_pull: true,
            barred: &self.barred,
        };
        choose_elastic(&fleet, &self.request, &self.transfers, 7, 1_000_000).unwrap()
    }

    fn choice(&self) -> Choice {
        self.decision().choice
    }
}

/// Engine 0 has the prompt, and four seconds of other prompts before it; engine 1 is idle.
const QUEUED_HOME: [Row; 2] = [(3, 2, 4.0, 60_000, 38_000), (0, 0, 0.0, 0, 0)];

/// Engine 1 has little to decode and five seconds of prompts before this one; engine 2 has nothing
/// to prefill and much to decode.
const APART: [Row; 3] = [(8, 2, 6.0, 200_000, 8_000), (2, 2, 5.0, 20_000, 0), (1, 0, 0.0, 200_000, 0)];

fn apart() -> Case {
    let mut case = Case::new(&APART);
    case.request.output_tokens = 1_000;
    case
}

#[test]
fn an_engine_that_takes_part_in_no_hand_over_is_neither_of_the_two() {
    let mut case = apart();
    let Choice::HandOver { prefill, decode } = case.choice() else { panic!("{:?}", case.choice()) };
    for barred in [prefill, decode] {
        case.barred = vec![barred];
        if let Choice::HandOver { prefill, decode } = case.choice() {
            assert!(prefill != barred && decode != barred, "{:?}", case.choice());
        }
    }
}

#[test]
fn the_cheapest_option_is_chosen() {
    let idle = Case::new(&[(0, 0, 0.0, 0, 38_000), (0, 0, 0.0, 0, 0)]);
    let short = Case::new(&[(1, 0, 0.0, 20_000, 39_500), (0, 0, 0.0, 0, 0)]);
    let table = [
        ("idle engines", idle, Choice::Place { engine: 0 }),
        ("a short append", short, Choice::Place { engine: 0 }),
        ("a queue at home", Case::new(&QUEUED_HOME), Choice::Pull { from: 0, engine: 1 }),
        ("time and room at two engines", apart(), Choice::HandOver { prefill: 2, decode: 1 }),
    ];
    for (name, case, expected) in table {
        let decision = case.decision();
        assert_eq!(decision.choice, expected, "{name}: {decision:?}");
    }
}

#[test]
fn each_guard_stops_a_transfer() {
    assert_eq!(Case::new(&QUEUED_HOME).choice().transfer(), Some(TransferKind::Pull));
    let mut waiting = Case::new(&QUEUED_HOME);
    waiting.rows[1].1 = 2;
    let mut full = Case::new(&QUEUED_HOME);
    (full.rows[1].0, full.rows[1].3) = (1, 281_000);
    let mut slow = Case::new(&QUEUED_HOME);
    slow.network.us_per_token = 60.0;
    let mut moved = Case::new(&QUEUED_HOME);
    moved.transfers.moved(7, 1, 0);
    let mut stopped = Case::new(&QUEUED_HOME);
    (0..20).for_each(|_| stopped.transfers.ended(TransferKind::Pull, false, 0.1, 1.0, 0));
    let mut unable = Case::new(&QUEUED_HOME);
    unable.kinds = vec![TransferKind::HandOver];
    let cases = [
        ("waiting", waiting),
        ("full", full),
        ("slow", slow),
        ("moved", moved),
        ("stopped", stopped),
        ("unable", unable),
    ];
    for (name, case) in cases {
        assert_ne!(case.choice().transfer(), Some(TransferKind::Pull), "{name}");
    }
}

#[test]
fn hand_overs_are_limited_by_engine_and_in_all() {
    let mut case = apart();
    assert_eq!(case.choice().transfer(), Some(TransferKind::HandOver));
    case.hand_overs = vec![0, 0, 1];
    assert_ne!(case.choice().transfer(), Some(TransferKind::HandOver), "one at a prefiller");
    case.hand_overs = vec![1, 1, 0];
    assert_ne!(case.choice().transfer(), Some(TransferKind::HandOver), "one for two engines");
}

#[test]
fn a_small_saving_moves_nothing() {
    let mut case = Case::new(&QUEUED_HOME);
    case.rows[0] = (0, 0, 0.4, 0, 38_000);
    let decision = case.decision();
    assert_eq!(decision.choice.transfer(), None, "{decision:?}");
}

proptest! {
    #[test]
    fn without_a_network_it_is_added_latency(
        rows in prop::collection::vec((0..30_u32, 0..4_u32, 0.0..9.0_f64, 0..300_000_u64, 0..40_000_u64), 1..9),
        home in prop::option::of(0..9_usize),
    ) {
        let mut case = Case::new(&rows);
        case.network = KvNetwork { start_us: f64::INFINITY, us_per_token: 0.0, layers: 1 };
        case.request.home = home;
        let decision = case.decision();
        prop_assert_eq!(decision.choice, Choice::Place { engine: decision.placed.chosen });
    }

    #[test]
    fn a_transfer_is_cheaper_than_every_place_by_the_margin(
        rows in prop::collection::vec((0..30_u32, 0..4_u32, 0.0..9.0_f64, 0..300_000_u64, 0..40_000_u64), 1..9),
        home in 0..9_usize,
    ) {
        let mut case = Case::new(&rows);
        case.request.home = Some(home);
        let decision = case.decision();
        let lowest = decision.placed.scores[decision.placed.chosen].unwrap();
        if decision.choice.transfer().is_some() {
            prop_assert!(decision.cost_s < 0.9 * lowest && decision.cost_s < lowest - 0.25);
            // Times in the API are one's own and no others'.
            prop_assert!(decision.own_s <= decision.cost_s + 0.1);
        } else {
            prop_assert!((decision.cost_s - lowest).abs() < 1e-9);
        }
    }
}
