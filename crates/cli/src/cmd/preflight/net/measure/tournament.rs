//! Measures all pairs of some hosts, in rounds in which each host is in one pair at most, so that
//! no pair has a share of another's link. The rounds are pure; one host tells the others which pair
//! they are.

use super::pair::{self, cases};
use crate::cmd::preflight::net::line::{Credentials, Line};
use crate::cmd::preflight::net::questions::{PairFigures, Plan, Question};
use forebay_cuda::topology::Root;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// All pairs are measured within this time; what remains of a minute is for everything else.
const BUDGET: Duration = Duration::from_secs(40);
/// A case is no longer, since nothing is gained, and no shorter, since the start of a connection
/// would be what is measured.
const CASE_MS_MAX: u64 = 250;
const CASE_MS_MIN: u64 = 20;
/// And moves no more than this.
const CASE_BYTES_MAX: u64 = 256 << 20;
/// A pair takes longer than its cases: connections come about, and a case ends with its last
/// transfer.
const ROOM: f64 = 0.6;
/// How long a host may take beyond what was planned.
const ANSWER_ROOM: Duration = Duration::from_secs(5);

/// A host that takes part. Without a line it is this one.
pub struct Player<'a> {
    pub address: SocketAddr,
    pub line: Option<&'a Line>,
}

/// What came of a pair.
#[derive(Debug, Clone, PartialEq)]
pub struct Played {
    /// The host that measured, and the other one.
    pub hosts: (usize, usize),
    pub figures: Result<PairFigures, String>,
}

/// Pairs of each round: all pairs once, each host at most once in a round.
pub fn rounds(hosts: usize) -> Vec<Vec<(usize, usize)>> {
    // The first host keeps its place, the others go around; where their number is odd, one rests.
    let seats = hosts.next_multiple_of(2);
    if hosts < 2 {
        return Vec::new();
    }
    let seat =
        |round: usize, place: usize| if place == 0 { 0 } else { 1 + (place - 1 + round) % (seats - 1) };
    let pairs_of = |round: usize| {
        let pairs = (0..seats / 2).map(|place| (seat(round, place), seat(round, seats - 1 - place)));
        pairs.filter(|(one, other)| *one < hosts && *other < hosts).collect()
    };
    (0..seats - 1).map(pairs_of).collect()
}

/// How long and how much each case of so many rounds is.
pub fn plan(rounds: usize) -> Plan {
    let each = BUDGET.as_millis() as f64 * ROOM / (rounds.max(1) * cases().len()) as f64;
    Plan { case_ms: (each as u64).clamp(CASE_MS_MIN, CASE_MS_MAX), case_bytes: CASE_BYTES_MAX }
}

/// Bytes that all pairs together move at most.
pub fn bytes_max(pairs: usize, plan: &Plan) -> u64 {
    // What was begun before the limit is moved to its end.
    (pairs * cases().len()) as u64 * (plan.case_bytes + pair::REGION_BYTES as u64)
}

/// Measures, and says what came of each pair. Rounds that do not begin in time are left out.
pub fn play(players: &[Player<'_>], credentials: &Credentials, root: &Root) -> Vec<Played> {
    let rounds = rounds(players.len());
    let (plan, begin) = (&plan(rounds.len()), Instant::now());
    let mut played = Vec::new();
    for pairs in rounds {
        if begin.elapsed() > BUDGET {
            let late = |hosts| Played { hosts, figures: Err("there was no time left for it".into()) };
            played.extend(pairs.into_iter().map(late));
            continue;
        }
        let ended: Vec<Played> = std::thread::scope(|scope| {
            let begun: Vec<_> = pairs
                .into_iter()
                .map(|pair| turned(players, pair))
                .map(|hosts| scope.spawn(move || play_pair(players, hosts, plan, credentials, root)))
                .collect();
            begun.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        played.extend(ended);
    }
    played
}

/// This host, if it is one of the two, measures.
fn turned(players: &[Player<'_>], (one, other): (usize, usize)) -> (usize, usize) {
    if players[other].line.is_none() { (other, one) } else { (one, other) }
}

fn play_pair(
    players: &[Player<'_>],
    hosts: (usize, usize),
    plan: &Plan,
    credentials: &Credentials,
    root: &Root,
) -> Played {
    let with = players[hosts.1].address;
    let figures = match players[hosts.0].line {
        None => pair::measure(with, credentials, plan, root),
        Some(line) => {
            let planned = Duration::from_millis(plan.case_ms) * cases().len() as u32;
            line.ask(&Question::Measure { with, plan: plan.clone() }, planned * 4 + ANSWER_ROOM)
        }
    };
    Played { hosts, figures }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn all_pairs_meet_once_and_no_host_is_in_two_of_a_round(hosts in 0usize..70) {
            let rounds = rounds(hosts);
            prop_assert!(rounds.len() <= hosts.next_multiple_of(2).saturating_sub(1));
            let mut met = HashSet::new();
            for pairs in &rounds {
                let mut busy = HashSet::new();
                for (one, other) in pairs {
                    prop_assert!(one != other && busy.insert(*one) && busy.insert(*other));
                    prop_assert!(met.insert((*one.min(other), *one.max(other))));
                }
            }
            prop_assert_eq!(met.len(), hosts * hosts.saturating_sub(1) / 2);
        }
    }

    #[test]
    fn all_rounds_together_fit_into_their_time_and_bytes_are_bounded() {
        for hosts in [2, 3, 8, 32, 150] {
            let rounds = rounds(hosts).len();
            let plan = plan(rounds);
            let cases = (rounds * cases().len()) as u64;
            assert!(cases * plan.case_ms <= BUDGET.as_millis() as u64, "{hosts}: {plan:?}");
            assert!(plan.case_ms >= CASE_MS_MIN && plan.case_ms <= CASE_MS_MAX);
        }
        assert_eq!(bytes_max(3, &plan(3)), 3 * 8 * ((256 << 20) + (16 << 20)));
    }
}
