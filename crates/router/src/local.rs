//! The pages that the router answers itself: health, metrics, decisions and the models of all
//! engines.

use crate::listing;
use crate::models::{self, ListAnswer};
use crate::refusal::Refusal;
use crate::relay::Reply;
use crate::respond::{self, BACKEND_HEADER};
use crate::routes::{Group, OwnPage};
use crate::state::{Phase, RouterState};
use http::request::Parts as Head;
use http::{Method, Response, header};
use std::sync::Arc;

/// Answers a request for one of the router's own pages, which `group` lists.
pub async fn answer(
    router: &Arc<RouterState>,
    own: OwnPage,
    group: Option<&Group>,
    request: &Head,
) -> Result<Response<Reply>, Refusal> {
    let path = request.uri.path();
    if let Some(group) = group.filter(|group| !group.takes(&request.method)) {
        if request.method == Method::OPTIONS {
            return Ok(respond::options(group));
        }
        return Err(Refusal::of_method(path, group));
    }
    match own {
        OwnPage::Health => {
            if router.phase() != Phase::Serving {
                return Err(Refusal::shutting_down());
            }
            let up = router.engines.usable().len();
            if up == 0 {
                return Err(Refusal::no_backend());
            }
            Ok(respond::json(format!(r#"{{"status":"ok","backends_up":{up}}}"#)))
        }
        OwnPage::Metrics => Ok(respond::text(router.metrics())),
        OwnPage::Decisions => {
            Ok(respond::json(serde_json::to_vec(&router.engines.decisions()).unwrap_or_default()))
        }
        OwnPage::Models => models(router, request, None).await,
        OwnPage::Model => {
            let name = path.strip_prefix("/v1/models/").unwrap_or_default();
            models(router, request, Some(&percent_decoded(name))).await
        }
    }
}

/// The models of all engines that are up, or one of them. The engines are asked now, with the
/// client's own key: what it may not see it does not see here.
async fn models(
    router: &Arc<RouterState>,
    request: &Head,
    name: Option<&str>,
) -> Result<Response<Reply>, Refusal> {
    let key = request.headers.get(header::AUTHORIZATION).cloned();
    let mut lists = Vec::new();
    let mut other = None;
    for (engine, said) in listing::read_all(router, key).await {
        match said {
            ListAnswer::List(list) => lists.push(list),
            // One that is slow to say it now has said it before.
            ListAnswer::Failed => lists.extend(router.engines.models.open_list(&engine)),
            ListAnswer::Other(answer) => other = other.or(Some((engine, answer))),
        }
    }
    if lists.is_empty() {
        // All of them refuse to say, or have no list: the client sees what the first one says.
        let (engine, answer) = other.ok_or_else(Refusal::no_backend)?;
        let mut response = respond::json(answer.body);
        *response.status_mut() = answer.status;
        response.headers_mut().insert(BACKEND_HEADER, engine.target.header.clone());
        return Ok(response);
    }
    let models = models::union(lists);
    let Some(name) = name else { return Ok(respond::json(models::json(&models))) };
    let model = models.into_iter().find(|model| model.id == name);
    let object: Box<str> = model.ok_or_else(|| Refusal::of_model(name))?.object.into();
    Ok(respond::json(object.into_string()))
}

/// A part of a path as text: names of models have slashes, which some clients escape.
fn percent_decoded(part: &str) -> String {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let code = (first == b'%').then(|| after.get(..2)).flatten();
        let code = code.and_then(|code| u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok());
        bytes.push(code.unwrap_or(first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded_and_stray_percent_signs_stay() {
        let table = [
            ("m", "m"),
            ("Qwen%2FQwen3", "Qwen/Qwen3"),
            ("100%", "100%"),
            ("%zz%41", "%zzA"),
            ("%c3%a4", "\u{e4}"),
        ];
        for (part, text) in table {
            assert_eq!(percent_decoded(part), text);
        }
    }
}
