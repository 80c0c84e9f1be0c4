//! Where a request goes: read, prepared and assigned as the router does it, and put into Envoy's
//! words. What is booked for it comes back as a [`Booking`].

use super::booking::Booking;
use super::messages::Destination;
use super::stream::{Asked, Decision};
use crate::attempts;
use crate::engine::Engine;
use crate::local;
use crate::prepare;
use crate::refusal::Refusal;
use crate::relay::Reply;
use crate::respond;
use crate::routes::{self, Group, OwnPage, Rule};
use crate::slots::Serving;
use crate::state::{Permit, RouterState};
use bytes::Bytes;
use http::Response;
use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Decides what comes of a request. What is refused is counted.
pub async fn decide(router: &Arc<RouterState>, asked: Asked, permit: Permit) -> (Decision, Option<Booking>) {
    let path = asked.head.uri.path();
    let group = routes::find(path);
    let own = match group.map(|group| group.rule) {
        Some(Rule::Own(own @ (OwnPage::Health | OwnPage::Models | OwnPage::Model))) => {
            Some(local::answer(router, own, group, &asked.head).await)
        }
        // They are on a port of their own, which clients need not reach.
        Some(Rule::Own(OwnPage::Metrics | OwnPage::Decisions) | Rule::Admin(_)) => {
            Some(Err(Refusal::of_path(path)))
        }
        Some(Rule::Cache(_) | Rule::Load | Rule::Refuse(..)) | None => None,
    };
    let refusal = match own {
        Some(Ok(answer)) => return (Decision::Answer(answer.map(Reply::into_whole)), None),
        Some(Err(refusal)) => refusal,
        None => match send(router, group, asked, permit).await {
            Ok((decision, booking)) => return (decision, Some(booking)),
            Err(refusal) => refusal,
        },
    };
    (Decision::Answer(refused(router, &refusal)), None)
}

/// A refusal as an answer; it is counted.
pub fn refused(router: &RouterState, refusal: &Refusal) -> Response<Bytes> {
    router.counters.refused(refusal);
    respond::refuse(refusal).map(Reply::into_whole)
}

async fn send(
    router: &Arc<RouterState>,
    group: Option<&Group>,
    asked: Asked,
    permit: Permit,
) -> Result<(Decision, Booking), Refusal> {
    let Asked { mut head, body, subset, may_change } = asked;
    let span = router.tracing.begin(&mut head.headers);
    // Without its body a request goes by load alone.
    let endpoint = prepare::endpoint(group, &head.method, head.uri.path())?.filter(|_| body.is_some());
    let body = body.unwrap_or_default();
    let read = prepare::read(endpoint, &head.headers, &body)?;
    let serving = match read.model(&body) {
        None => None,
        Some(model) => prepare::serving(router, &model, &head.headers).await?,
    };
    let serving = match subset {
        None => serving,
        Some(subset) => within(router, serving, &subset),
    };
    let prepared = read.prepare(router, &head.headers, &body, serving);
    let assigned = attempts::assign(router, &prepared, &[], 1, span.as_deref());
    let (attempt, hand_over) = assigned.map_err(|none| attempts::unassigned(router, &prepared, &none))?;
    let fallback = attempt.runner_up();
    let endpoints = [Some(&attempt.engine), fallback.as_ref()].into_iter().flatten();
    let endpoints: Vec<String> = endpoints.filter_map(|engine| address(engine)).collect();
    let destination = Destination {
        endpoints: endpoints.join(","),
        prefiller: hand_over.as_ref().and_then(|open| address(&open.prefiller)),
        traceparent: attempt.traceparent(),
    };
    let edit = prepared.ask_for_usage.filter(|_| may_change);
    let hide_usage = edit.is_some();
    let body = edit.map_or(body.clone(), |edit| edit.apply(&body).concat().into());
    let booking =
        Booking::new(router.clone(), attempt, hand_over, prepared.stream, hide_usage, (span, permit));
    Ok((Decision::Send { destination, body }, booking))
}

/// Of the engines that may serve a request, those of a subset: addresses with a port, or without.
fn within(router: &RouterState, serving: Serving, subset: &[String]) -> Serving {
    let addresses: HashSet<SocketAddr> = subset.iter().filter_map(|part| part.parse().ok()).collect();
    let hosts: HashSet<IpAddr> = subset.iter().filter_map(|part| part.parse().ok()).collect();
    let is_wanted = |address: SocketAddr| addresses.contains(&address) || hosts.contains(&address.ip());
    Some(router.engines.serving_at(serving, is_wanted))
}

fn address(engine: &Engine) -> Option<String> {
    engine.target.address.map(|address| address.to_string())
}
