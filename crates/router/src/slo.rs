//! What a request says of how long it may take: its service-level objectives (SLOs). It knows the
//! headers that say it, and which engines are expected to keep to it. `docs/routing.md` has the
//! rules.

use crate::added_latency::room_us;
use crate::policy::{Decision, Policy, Reason, choose};
use crate::prediction::predict;
use crate::view::{Candidate, Request, View};
use http::{HeaderMap, HeaderValue};
use serde::{Deserialize, Serialize};

pub const TTFT_HEADER: &str = "x-llm-d-slo-ttft-ms";
const TPOT_HEADER: &str = "x-llm-d-slo-tpot-ms";
/// From a microsecond to a day.
const ALLOWED_MS: std::ops::RangeInclusive<f64> = 0.001..=86_400_000.0;

/// How long a request may take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slo {
    /// Time to first token.
    pub ttft_us: Option<u64>,
    /// Time per token after it.
    pub tpot_us: Option<u64>,
}

/// A header that says no time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{header}: {value}; one number of milliseconds from 0.001 to 86400000 is allowed")]
pub struct BadSlo {
    pub header: &'static str,
    value: String,
}

/// Why a request is refused that an engine could serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalReason {
    /// No engine is expected to begin its answer in time, and all are full.
    TtftSlo,
}

/// A decision about a request with SLOs.
#[derive(Debug, Clone, PartialEq)]
pub struct Within {
    pub decision: Decision,
    /// Without hope: when its first token would come at the earliest, in microseconds.
    pub too_late_us: Option<u64>,
}

impl Slo {
    /// What the headers of a request say; nothing where there are none.
    pub fn read(headers: &HeaderMap) -> Result<Slo, BadSlo> {
        Ok(Slo { ttft_us: read_us(headers, TTFT_HEADER)?, tpot_us: read_us(headers, TPOT_HEADER)? })
    }

    pub fn is_empty(&self) -> bool {
        *self == Slo::default()
    }
}

fn read_us(headers: &HeaderMap, header: &'static str) -> Result<Option<u64>, BadSlo> {
    let mut values = headers.get_all(header).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let bad = |value: String| BadSlo { header, value };
    let shown = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    if values.next().is_some() {
        return Err(bad("it is there more than once".into()));
    }
    let ms = value.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok());
    let ms = ms.filter(|ms| ALLOWED_MS.contains(ms)).ok_or_else(|| bad(format!("'{}'", shown(value))))?;
    Ok(Some((ms * 1e3).round() as u64))
}

/// Chooses an engine as [`choose`] does, among those that are expected to keep to the SLOs if there
/// are any. `None` when no candidate is eligible.
pub fn choose_within(policy: Policy, view: &View, request: &Request, slo: Slo) -> Option<Within> {
    let decision = choose(policy, view, request)?;
    if slo.is_empty() {
        return Some(Within { decision, too_late_us: None });
    }
    let keeps =
        |candidate: &Candidate| candidate.eligible && Times::of(view, candidate, request).keep_to(slo);
    if keeps(&view.candidates[decision.chosen]) {
        return Some(Within { decision, too_late_us: None });
    }
    let keeping: Vec<Candidate> = view
        .candidates
        .iter()
        .map(|candidate| Candidate { eligible: keeps(candidate), ..*candidate })
        .collect();
    let among_these = choose(policy, &View { candidates: &keeping, ..*view }, request);
    Some(match among_these {
        Some(Decision { chosen, .. }) => {
            // The scores are those of all that could be chosen.
            Within { decision: Decision { chosen, reason: Reason::Slo, ..decision }, too_late_us: None }
        }
        None => Within { decision, too_late_us: too_late_us(view, request, slo) },
    })
}

/// When the first token would come at the earliest, if that is too late at every engine and all of
/// them are full. Where one has room the prediction may be wrong, and an engine that is idle is
/// worth a try.
fn too_late_us(view: &View, request: &Request, slo: Slo) -> Option<u64> {
    let eligible = || view.candidates.iter().filter(|candidate| candidate.eligible);
    let is_saturated = eligible().all(|candidate| room_us(view.engine_model, candidate, request) > 0.0);
    let earliest_us = eligible().map(|candidate| Times::of(view, candidate, request).ttft_us).min()?;
    (is_saturated && slo.ttft_us.is_some_and(|ttft_us| earliest_us > ttft_us)).then_some(earliest_us)
}

/// How long a request is expected to take at a candidate.
struct Times {
    ttft_us: u64,
    tpot_us: u64,
}

impl Times {
    fn of(view: &View, candidate: &Candidate, request: &Request) -> Times {
        let predicted = predict(view.engine_model, candidate, request);
        let room_us = room_us(view.engine_model, candidate, request).round() as u64;
        Times {
            ttft_us: predicted.first_byte_us.saturating_add(room_us),
            tpot_us: predicted.output_us / request.output_tokens.max(1),
        }
    }

    fn keep_to(&self, slo: Slo) -> bool {
        slo.ttft_us.is_none_or(|most_us| self.ttft_us <= most_us)
            && slo.tpot_us.is_none_or(|most_us| self.tpot_us <= most_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_model::EngineModel;
    use forebay_steps::{Launch, Profile};
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000;

    fn model() -> EngineModel {
        EngineModel::new(&Profile::shipped("h100-llama-3.1-8b").unwrap(), Launch::Graph)
    }

    /// A prompt of 8,000 tokens takes an idle engine 0.22 s.
    const REQUEST: Request = Request { input_tokens: 8_000, output_tokens: 100, home: None };

    fn idle() -> Candidate {
        Candidate {
            eligible: true,
            in_flight: 0,
            pending_prefill_tokens: 0,
            pending_prefill_us: 0,
            context_tokens: 0,
            pool_tokens: 200_000,
            hit_tokens: 0,
            stored_tokens: 0,
            load_us_per_token: 0.0,
        }
    }

    /// One with so many seconds of prompts before it.
    fn queue(seconds: u64) -> Candidate {
        Candidate { in_flight: 1, pending_prefill_us: seconds * SECOND, pending_prefill_tokens: 1, ..idle() }
    }

    /// The same without any room.
    fn full(seconds: u64) -> Candidate {
        Candidate { in_flight: 20, context_tokens: 200_000, ..queue(seconds) }
    }

    fn within(candidates: &[Candidate], ttft_ms: Option<u64>, tpot_ms: Option<u64>) -> Option<Within> {
        let slo = Slo { ttft_us: ttft_ms.map(|ms| ms * 1_000), tpot_us: tpot_ms.map(|ms| ms * 1_000) };
        let view = View { candidates, turn: 0, engine_model: &model() };
        choose_within(Policy::LeastLoaded, &view, &REQUEST, slo)
    }

    #[test]
    fn a_request_goes_where_its_slos_are_kept_and_is_refused_where_that_is_hopeless() {
        // The least loaded is the first, which has three seconds to compute before it begins.
        let slow = Candidate { in_flight: 0, ..queue(3) };
        let crowded = Candidate { in_flight: 150, context_tokens: 150_000, ..idle() };
        let away = |candidate| Candidate { eligible: false, ..candidate };
        let cases = [
            ("without SLOs nobody is refused", vec![full(9), full(9)], None, None, Some((0, false))),
            ("the policy's choice keeps to it", vec![slow, queue(0)], Some(5_000), None, Some((0, false))),
            ("another one does", vec![slow, queue(0)], Some(500), None, Some((1, false))),
            ("of several the policy's", vec![slow, queue(1), queue(0)], Some(2_000), None, Some((1, false))),
            ("nobody does, but there is room", vec![slow, queue(9)], Some(500), None, Some((0, false))),
            ("one is full, the other late", vec![full(3), queue(9)], Some(500), None, Some((1, false))),
            ("all are full and too late", vec![full(3), full(4)], Some(500), None, Some((0, true))),
            ("all are full and in time", vec![full(3), full(4)], Some(60_000), None, Some((0, false))),
            ("full and too slow is no reason", vec![full(3)], None, Some(1), Some((0, false))),
            ("tokens come fast enough elsewhere", vec![crowded, queue(9)], None, Some(9), Some((1, false))),
            ("both must be kept", vec![slow, crowded], Some(500), Some(9), Some((0, false))),
            (
                "who cannot be chosen is no way out",
                vec![full(3), away(idle())],
                Some(500),
                None,
                Some((0, true)),
            ),
            ("nobody is there", vec![away(idle())], Some(500), None, None),
        ];
        for (case, candidates, ttft_ms, tpot_ms, wanted) in cases {
            let got = within(&candidates, ttft_ms, tpot_ms);
            let got = got.map(|within| (within.decision.chosen, within.too_late_us.is_some()));
            assert_eq!(got, wanted, "{case}");
        }
    }

    #[test]
    fn the_decision_says_that_the_slo_settled_it_and_keeps_all_scores() {
        let moved = within(&[Candidate { in_flight: 0, ..queue(3) }, queue(0)], Some(500), None).unwrap();
        assert_eq!((moved.decision.reason, moved.decision.scores), (Reason::Slo, vec![Some(0.0), Some(1.0)]));
        let earliest_us = within(&[full(3), full(4)], Some(500), None).unwrap().too_late_us.unwrap();
        assert!((3 * SECOND..5 * SECOND).contains(&earliest_us), "{earliest_us}");
    }

    #[test]
    fn headers_say_milliseconds_and_mistakes_are_named() {
        let read = |header: &'static str, values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header, HeaderValue::from_str(value).unwrap());
            }
            Slo::read(&headers).map_err(|bad| bad.to_string())
        };
        let ttft = |ttft_us| Ok(Slo { ttft_us, tpot_us: None });
        assert_eq!(read(TTFT_HEADER, &[]), ttft(None));
        assert_eq!(read(TTFT_HEADER, &["1500"]), ttft(Some(1_500_000)));
        assert_eq!(read(TTFT_HEADER, &["0.25"]), ttft(Some(250)));
        assert_eq!(read(TPOT_HEADER, &["30"]), Ok(Slo { ttft_us: None, tpot_us: Some(30_000) }));
        for bad in ["", "0", "-5", "fast", "10ms", "inf", "NaN", "86400001"] {
            let allowed = "one number of milliseconds from 0.001 to 86400000 is allowed";
            assert_eq!(read(TPOT_HEADER, &[bad]), Err(format!("{TPOT_HEADER}: '{bad}'; {allowed}")));
        }
        assert!(read(TTFT_HEADER, &["1", "2"]).unwrap_err().contains("more than once"));
    }

    proptest! {
        #[test]
        fn numbers_of_any_size_do_not_panic_and_an_slo_never_hides_an_engine(
            numbers in prop::collection::vec((any::<bool>(), any::<u32>(), any::<u64>()), 1..6),
            slo in any::<(Option<u64>, Option<u64>)>(),
            (input_tokens, output_tokens) in any::<(u64, u64)>(),
        ) {
            let candidate = |&(eligible, in_flight, large): &(bool, u32, u64)| Candidate {
                eligible,
                in_flight,
                pending_prefill_us: large,
                context_tokens: large,
                pool_tokens: large,
                ..idle()
            };
            let candidates: Vec<Candidate> = numbers.iter().map(candidate).collect();
            let view = View { candidates: &candidates, turn: 0, engine_model: &model() };
            let request = Request { input_tokens, output_tokens, home: None };
            let slo = Slo { ttft_us: slo.0, tpot_us: slo.1 };
            let within = choose_within(Policy::AddedLatency, &view, &request, slo);
            prop_assert_eq!(within.is_some(), candidates.iter().any(|candidate| candidate.eligible));
            prop_assert!(within.is_none_or(|within| candidates[within.decision.chosen].eligible));
        }
    }
}
