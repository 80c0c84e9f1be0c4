//! Hand-overs from one emulated engine to another, through a router over real sockets. Answers can
//! be checked: an engine says tokens that follow from the bytes of the KV that it read.

mod hand_over_site;

use forebay_emulator::hand_over::Fault;
use forebay_router::{HandOverEnd, Protocol};
use hand_over_site::{Asked, DECODER, PREFILLER, Site};
use std::time::Duration;

/// How a case goes, and what comes of its hand-over.
struct Case {
    name: &'static str,
    protocol: Protocol,
    /// Which engine does what wrong.
    fault: Option<(usize, Fault)>,
    end: HandOverEnd,
}

fn case(name: &'static str, protocol: Protocol, fault: Option<(usize, Fault)>, end: HandOverEnd) -> Case {
    Case { name, protocol, fault, end }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_handed_over_and_the_answer_is_right_with_either_connector() {
    let ways = [Protocol::Nixl, Protocol::Forebay].into_iter().flat_map(|way| [(way, true), (way, false)]);
    together(ways.map(|(protocol, is_stream)| {
        async move {
            let site = Site::start(protocol).await;
            // With Forebay's connector the second one is asked at once.
            for turn in 0..2 {
                let got = site.ask(&Asked { is_stream, ..site.new_prompt(turn) }).await;
                got.assert_right(&format!("{protocol:?} {is_stream} {turn}"));
                assert_eq!((got.backend(), got.prefiller()), ("e1", Some("e0")));
            }
            let decisions = site.hand_overs();
            assert!(
                decisions.iter().all(|of| of.handed.unwrap().end == HandOverEnd::Handed),
                "{decisions:?}"
            );
            assert_eq!(site.finished(PREFILLER), 2, "it computes each prompt once");
            assert_eq!(site.finished(DECODER), 2);
            site.assert_quiet().await;
            site.assert_nothing_kept();
        }
    }))
    .await;
}

/// Runs cases beside each other: they mostly wait.
async fn together(cases: impl Iterator<Item = impl Future<Output = ()> + Send + 'static>) {
    let running: Vec<_> = cases.map(tokio::spawn).collect();
    for case in running {
        case.await.expect("no panic");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_an_engine_does_wrong_the_answer_is_right_and_comes_once() {
    use Fault::{ForgetBlocks, HangPrefill, HangReads, NoParams, RefuseDecode, RefusePrefill};
    use Protocol::{Forebay, Nixl};
    let cases = [Nixl, Forebay].into_iter().flat_map(|protocol| {
        let fault = |fault| Some((PREFILLER, fault));
        [
            case("refuses", protocol, fault(RefusePrefill), HandOverEnd::PrefillRefused),
            case("says nothing", protocol, fault(NoParams), HandOverEnd::NoParameters),
            case("is too slow", protocol, fault(HangPrefill), HandOverEnd::PrefillLate),
            case("does not know the keys", protocol, fault(ForgetBlocks), HandOverEnd::DecodeLate),
            case("gives nothing", protocol, fault(HangReads), HandOverEnd::DecodeLate),
            case(
                "refuses what it is handed",
                protocol,
                Some((DECODER, RefuseDecode)),
                HandOverEnd::DecodeRefused,
            ),
        ]
    });
    together(cases.map(|case| async move {
        for at_once in [false, true] {
            if at_once && case.protocol == Nixl {
                continue;
            }
            let site = Site::start(case.protocol).await;
            if at_once {
                site.ask(&site.new_prompt(0)).await.assert_right("the first one");
            }
            let before = site.finished(DECODER);
            if let Some((engine, fault)) = case.fault {
                site.engine(engine).set_fault(Some(fault));
            }
            let got = site.ask(&site.new_prompt(1)).await;
            let name = format!("{} {:?} {at_once}", case.name, case.protocol);
            got.assert_right(&name);
            assert_eq!((got.backend(), got.prefiller()), ("e1", None), "{name}");
            let decision = site.hand_overs().pop().unwrap();
            assert_eq!(decision.handed.unwrap().end, case.end, "{name}");
            assert_eq!(site.finished(DECODER) - before, 1, "{name}");
            [PREFILLER, DECODER].iter().for_each(|&engine| site.engine(engine).set_fault(None));
            site.assert_quiet().await;
        }
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_killed_costs_no_answer() {
    let mut cases = Vec::new();
    for protocol in [Protocol::Nixl, Protocol::Forebay] {
        for engine in [PREFILLER, DECODER] {
            // Before it is asked, while the prompt is computed, and about when it is handed over.
            cases.extend([0, 200, 700].map(|after_ms| (protocol, engine, after_ms)));
        }
    }
    together(cases.into_iter().map(|(protocol, engine, after_ms)| async move {
        let mut site = Site::start(protocol).await;
        site.ask(&site.new_prompt(0)).await.assert_right("the first one");
        if after_ms == 0 {
            site.kill(engine);
        }
        let ask = site.ask_task(&site.new_prompt(1));
        if after_ms > 0 {
            tokio::time::sleep(Duration::from_millis(after_ms)).await;
            site.kill(engine);
        }
        let (got, name) = (ask.await.expect("no panic"), format!("{protocol:?} {engine} {after_ms}"));
        if engine == DECODER && after_ms == 700 {
            // It may have said a part of it.
            got.assert_right_or_broken(&name);
        } else {
            got.assert_right(&name);
        }
        site.assert_quiet().await;
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_takes_both_requests_with_it() {
    let ways = [Protocol::Nixl, Protocol::Forebay].into_iter();
    together(ways.flat_map(|way| [100, 300, 600, 900].map(|after_ms| (way, after_ms))).map(
        |(protocol, after_ms)| async move {
            let site = Site::start(protocol).await;
            site.ask(&site.new_prompt(0)).await.assert_right("the first one");
            let ask = site.ask_task(&Asked { max_tokens: 3_000, ..site.new_prompt(1) });
            tokio::time::sleep(Duration::from_millis(after_ms)).await;
            ask.abort();
            site.until("the router knows", |site| site.hand_overs()[1].handed.is_some()).await;
            if after_ms <= 300 {
                assert_eq!(site.hand_overs()[1].handed.unwrap().end, HandOverEnd::Cancelled);
                assert_eq!(site.cancelled(), [1, 1], "both are told");
            }
            site.assert_quiet().await;
            site.ask(&site.new_prompt(2)).await.assert_right("the next one");
        },
    ))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_handed_over_is_answered_as_ever() {
    let site = Site::start(Protocol::Nixl).await;
    for (name, more) in [
        ("parameters of its own", r#","kv_transfer_params":{"do_remote_decode":false}"#),
        ("one answer, said", r#","n":1"#),
    ] {
        let got = site.ask(&Asked { more: more.to_owned(), ..site.new_prompt(name.len() as u32) }).await;
        got.assert_right(name);
        assert_eq!(got.prefiller().is_some(), name.starts_with("one"), "{name}");
    }
    site.assert_quiet().await;
}
