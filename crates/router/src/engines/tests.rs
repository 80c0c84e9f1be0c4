use super::*;
use crate::config::RouterConfig;
use crate::dispatcher::End;
use crate::engine_model::EngineModel;
use crate::hand_over::Ticket;
use crate::health::{Cause, Thresholds};
use crate::models::ListAnswer;
use crate::policy::Policy;
use forebay_steps::{Launch, Profile};

pub fn engines() -> Arc<Engines> {
    let profile = Profile::shipped(Profile::DEFAULT).unwrap();
    let model = EngineModel::new(&profile, Launch::Graph);
    let thresholds = Thresholds { eject_after: 3, readmit_after: 1 };
    Arc::new(Engines::new(Dispatcher::new(Policy::Lpwl, model, thresholds), None, false).0)
}

fn target(name: &str, port: u16) -> Target {
    let backends = vec![Backend::new(name, format!("http://127.0.0.1:{port}"))];
    let profile = Profile::shipped(Profile::DEFAULT).unwrap();
    let model = EngineModel::new(&profile, Launch::Graph);
    let config = RouterConfig::new(([127, 0, 0, 1], 0).into(), backends, Policy::Lpwl, model);
    config.check().unwrap().remove(0)
}

fn assign(engines: &Arc<Engines>, routing: &Arc<RoutingFacts>, tried: &[u64]) -> Result<Attempt, Unassigned> {
    engines.assign(routing, tried, tried.len() as u32 + 1, false).map(|(attempt, _)| attempt)
}

fn routing(serving: Option<EngineSet>) -> Arc<RoutingFacts> {
    let length = crate::tokens::Length { kind: crate::request::PromptKind::Text, bytes: 0, media: 0 };
    let chain = crate::chain::Chain::new(0, &[]);
    let serving = serving.map(Arc::new);
    let slo = crate::slo::Slo::default();
    Arc::new(RoutingFacts { length, preamble_bytes: 0, chain, session: 0, endpoint: None, serving, slo })
}

#[test]
fn an_engine_that_comes_and_goes_is_two_lines_a_minute() {
    let engines = engines();
    engines.add(&target("a", 1)).unwrap();
    let engine = engines.all().remove(0);
    let ejected = Change::Ejected { cause: Cause::Gone, last: Failure::Refused };
    let lines = testkit::logged(|| {
        for change in [ejected, Change::Readmitted].repeat(5) {
            engines.announce(&engines.inner.lock(), &engine, Some(change));
        }
    });
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(lines.contains("ejected") && lines.contains("used again"), "{lines}");
}

#[test]
fn what_a_prefill_said_of_an_engine_is_forgotten_when_that_is_gone() {
    let engines = engines();
    engines.add(&target("a", 1)).unwrap();
    let engine = engines.all().remove(0);
    engine.set_ticket(Some(Ticket::default()));
    let ejected = Change::Ejected { cause: Cause::Gone, last: Failure::Refused };
    engines.announce(&engines.inner.lock(), &engine, Some(ejected));
    assert_eq!(engine.ticket(), None);
}

#[test]
fn metrics_that_come_and_go_are_two_lines_a_minute() {
    let engines = engines();
    engines.add(&target("a", 1)).unwrap();
    let engine = engines.all().remove(0);
    let page = EngineMetrics { running: 0, waiting: 0, pool_tokens: None, held_tokens: None };
    let lines = testkit::logged(|| {
        for read in [Err(Unread::Missing), Ok(page), Ok(page)].repeat(5) {
            engines.noted_metrics(&engine, read, Load::default());
        }
    });
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(lines.contains("cannot be read") && lines.contains("metrics are read"), "{lines}");
}

#[test]
fn an_engine_that_drains_keeps_its_requests_and_gets_no_more_until_it_is_added_again() {
    let engines = engines();
    engines.add(&target("a", 1)).unwrap();
    let running = assign(&engines, &routing(None), &[]).unwrap();
    engines.drain("a").unwrap();
    assert!(assign(&engines, &routing(None), &[]).is_err() && engines.usable().is_empty());
    assert_eq!(engines.stats().backends[0].membership, "draining");
    drop(running);
    assert_eq!(engines.all().len(), 1, "drained is not removed");
    engines.add(&target("a", 1)).unwrap();
    assert!(assign(&engines, &routing(None), &[]).is_ok());
    assert_eq!(engines.drain("b"), Err(MembershipError::Unknown("b".into())));
}

#[test]
fn a_removed_engine_is_gone_when_its_last_request_has_ended() {
    let engines = engines();
    engines.add(&target("a", 1)).unwrap();
    let mut running = assign(&engines, &routing(None), &[]).unwrap();
    engines.remove("a").unwrap();
    assert!(assign(&engines, &routing(None), &[]).is_err());
    assert_eq!(engines.all().len(), 1);
    assert_eq!(engines.add(&target("a", 2)), Err(MembershipError::Leaving("a".into())));
    running.end(End::Answered { status: 200, usage: None });
    assert!(engines.all().is_empty() && engines.stats().backends.is_empty());
    assert_eq!(engines.remove("a"), Err(MembershipError::Unknown("a".into())));
}

#[test]
fn one_that_comes_to_a_slot_has_nothing_of_the_one_before() {
    let engines = engines();
    engines.add(&target("a", 1)).unwrap();
    let former = engines.all().remove(0);
    (0..3).for_each(|_| engines.probed(&former, Err(Failure::Refused)));
    assert!(!engines.stats().backends[0].up);
    engines.remove("a").unwrap();
    engines.add(&target("b", 2)).unwrap();
    let engine = engines.all().remove(0);
    assert_eq!((engine.slot, former.slot), (0, 0));
    engines.probed(&former, Err(Failure::Refused));
    assert!(engines.is_usable(&engine) && !engines.is_usable(&former), "a late probe of the former");
    assert_eq!(engines.stats().backends[0].name, "b");
}

#[test]
fn a_request_that_knew_the_one_before_does_not_go_to_whoever_has_its_slot() {
    let engines = engines();
    engines.add(&target("a", 1)).unwrap();
    let former = engines.all().remove(0);
    let list = ListAnswer::List(crate::models::parse(br#"{"data":[{"id":"m"}]}"#).unwrap());
    engines.models.note(&former, &list, true);
    let serving = engines.models.serving("m");
    engines.remove("a").unwrap();
    engines.add(&target("b", 2)).unwrap();
    assert_eq!(engines.all().remove(0).slot, former.slot);
    let knew = routing(Some((*serving).clone()));
    assert!(assign(&engines, &knew, &[]).is_err() && !engines.has_other(Some(&serving), &[]));
    let tried = assign(&engines, &routing(None), &[former.id]).unwrap();
    assert_eq!(tried.engine.name(), "b", "only the former one was tried");
}

#[test]
fn a_name_belongs_to_one_address_at_a_time() {
    let engines = engines();
    engines.add(&target("a", 1)).unwrap();
    engines.add(&target("a", 1)).unwrap();
    assert_eq!(engines.add(&target("a", 2)), Err(MembershipError::Other("a".into())));
    assert_eq!(engines.all().len(), 1);
}

#[test]
fn there_may_be_hundreds_and_each_can_be_chosen() {
    let engines = engines();
    for number in 0..300 {
        engines.add(&target(&format!("e{number}"), 1 + number)).unwrap();
    }
    for slot in [0, 63, 64, 299] {
        let only = EngineSet { slots: [slot].into_iter().collect(), newest_id: 299 };
        let attempt = assign(&engines, &routing(Some(only.clone())), &[]).unwrap();
        assert_eq!(attempt.engine.slot, slot);
        assert!(
            !engines.has_other(Some(&only), &[attempt.engine.id])
                && engines.has_other(None, &[attempt.engine.id])
        );
    }
}
