//! The admin API: engines are added, drained, removed and listed by whoever shows the router's
//! admin token. It knows requests and answers; what becomes of engines is `engines`' business.

use crate::admin_token::AdminToken;
use crate::body;
use crate::config::Backend;
use crate::engines::{AddError, MembershipError};
use crate::event_address::{EventAddress, EventTarget};
use crate::refusal::Refusal;
use crate::relay::Reply;
use crate::respond;
use crate::routes::{self, AdminPage, Group};
use crate::state::RouterState;
use http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A description of an engine is not longer: it may have an address of events for each of 1,024
/// ranks.
const MAX_BODY_BYTES: usize = 128 << 10;

/// Where an engine is, as a client of this API says it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    url: String,
    #[serde(default)]
    store: Option<String>,
    #[serde(default)]
    events: Vec<EventAddress>,
}

#[derive(Serialize)]
struct Listed {
    name: String,
    url: String,
    store: Option<String>,
    events: Vec<EventAddress>,
    state: &'static str,
    up: bool,
    in_flight: u32,
}

/// Answers a request to the admin API.
pub async fn answer(
    router: &Arc<RouterState>,
    page: AdminPage,
    group: Option<&Group>,
    request: Request<Incoming>,
) -> Result<Response<Reply>, Refusal> {
    // A browser asks before it sends the token.
    if let Some(group) = group.filter(|_| request.method() == Method::OPTIONS) {
        return Ok(respond::options(group));
    }
    if let Some(answer) = stranger(router.admin_token.as_ref(), request.headers()) {
        return answer.map_or_else(Err, Ok);
    }
    let (head, body) = request.into_parts();
    let path = head.uri.path();
    if let Some(group) = group.filter(|group| !group.takes(&head.method)) {
        return Err(Refusal::of_method(path, group));
    }
    let engines = &router.engines;
    let name = |known| routes::named(known, path).unwrap_or_default();
    match page {
        AdminPage::Engines => return Ok(list(router)),
        AdminPage::Drain => {
            engines.drain(name("/admin/engines/{name}/drain")).map_err(|error| of_membership(&error))?;
        }
        AdminPage::Engine if head.method == Method::DELETE => {
            engines.remove(name("/admin/engines/{name}")).map_err(|error| of_membership(&error))?;
        }
        AdminPage::Engine => {
            let body = body::read(body, MAX_BODY_BYTES, router.limits.client_stall).await?;
            let backend = described(name("/admin/engines/{name}"), &body)?;
            engines.add_backend(&backend).map_err(|error| match error {
                AddError::Bad(bad) => Refusal::of_client(StatusCode::BAD_REQUEST, bad.to_string()),
                AddError::Membership(error) => of_membership(&error),
            })?;
        }
    }
    Ok(list(router))
}

/// The answer to whoever may not do this; `None` for the one with the token.
fn stranger(token: Option<&AdminToken>, headers: &HeaderMap) -> Option<Result<Response<Reply>, Refusal>> {
    let Some(token) = token else {
        let message = "the router was started without --admin-token-file";
        return Some(Err(Refusal::of_client(StatusCode::FORBIDDEN, message.into())));
    };
    let shown = headers.get(AUTHORIZATION).and_then(|shown| shown.as_bytes().strip_prefix(b"Bearer "));
    if shown.is_some_and(|shown| token.is(shown)) {
        return None;
    }
    let message = "the admin token is needed: authorization: Bearer TOKEN";
    let mut answer = respond::refuse(&Refusal::of_client(StatusCode::UNAUTHORIZED, message.into()));
    answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    Some(Ok(answer))
}

fn described(name: &str, body: &[u8]) -> Result<Backend, Refusal> {
    let Described { url, store, events } = serde_json::from_slice(body).map_err(|error| {
        let message =
            format!("the body must be like {{\"url\":\"http://HOST:PORT\",\"store\":\"NAME\"}}: {error}");
        Refusal::of_client(StatusCode::BAD_REQUEST, message)
    })?;
    Ok(Backend { name: name.to_owned(), url, store, events })
}

fn of_membership(error: &MembershipError) -> Refusal {
    let status = match error {
        MembershipError::Unknown(_) => StatusCode::NOT_FOUND,
        MembershipError::HostName { .. } => StatusCode::BAD_REQUEST,
        MembershipError::Other(_) | MembershipError::Leaving(_) | MembershipError::Full => {
            StatusCode::CONFLICT
        }
    };
    Refusal::of_client(status, error.to_string())
}

fn list(router: &RouterState) -> Response<Reply> {
    let stats = router.engines.stats();
    let all = router.engines.all();
    let listed = stats.backends.into_iter().filter_map(|backend| {
        let target = &all.iter().find(|engine| engine.name() == backend.name)?.target;
        Some(Listed {
            url: format!("http://{}", target.authority),
            store: target.store.clone(),
            events: target.events.iter().map(EventTarget::to_address).collect(),
            name: backend.name,
            state: backend.membership,
            up: backend.up,
            in_flight: backend.in_flight,
        })
    });
    // Strings and numbers: nothing in it can fail.
    respond::json(serde_json::to_vec(&listed.collect::<Vec<_>>()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_opens() {
        let may = |token: Option<&str>, shown: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            if let Some(shown) = shown {
                headers.insert(AUTHORIZATION, HeaderValue::from_static(shown));
            }
            match stranger(token.map(|token| AdminToken::new(token.into())).as_ref(), &headers) {
                None => 200,
                Some(Ok(answer)) => answer.status().as_u16(),
                Some(Err(refusal)) => refusal.status.as_u16(),
            }
        };
        assert_eq!(may(Some("secret"), Some("Bearer secret")), 200);
        for wrong in ["Bearer secre", "Bearer secrets", "Bearer Secret", "Bearer ", "secret", "Basic secret"]
        {
            assert_eq!(may(Some("secret"), Some(wrong)), 401, "{wrong}");
        }
        assert_eq!(may(Some("secret"), None), 401);
        assert_eq!(may(None, Some("Bearer secret")), 403, "without a token of its own nobody may");
    }
}
