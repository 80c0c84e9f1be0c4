//! Hand-overs over HTTP: what a request's part in one makes of its job and its answer, and the
//! blocks that a decoder reads.

use super::app::App;
use super::error::ApiError;
use super::prompt::Prompt;
use crate::hand_over::{Fault, PrefillParams, Role, WAIT};
use crate::job::Handed;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use std::future::pending;
use std::sync::Arc;

/// What a job is told of a hand-over, and what its answer tells.
pub type Part = (Option<Handed>, Option<PrefillParams>);

/// The part of a request with this id.
pub async fn part(app: &App, role: Option<Role>, id: &str, prompts: &[Prompt]) -> Result<Part, ApiError> {
    let Some(role) = role else { return Ok((None, None)) };
    let [prompt] = prompts else {
        let message = format_args!("{} prompts are given; one can be handed over", prompts.len());
        return Err(ApiError::field("kv_transfer_params", message));
    };
    let fault = app.offers.fault();
    let key = match role {
        Role::Decode(_) if fault == Some(Fault::RefuseDecode) => {
            return Err(ApiError::failed("it refuses what others have computed".into()));
        }
        // KV of another kind is computed.
        Role::Decode(source) if source.identity.as_ref().is_some_and(|other| *other != app.identity) => {
            return Ok((None, None));
        }
        Role::Decode(source) => return Ok((Some(Handed::Here(source)), None)),
        Role::Prefill { key } => key.unwrap_or_else(|| format!("{id}-key")),
    };
    match fault {
        Some(Fault::RefusePrefill) => return Err(ApiError::failed("it refuses to prefill".into())),
        Some(Fault::HangPrefill) => pending().await,
        _ => {}
    }
    let tokens = prompt.tokens.len();
    let params = PrefillParams::new(app.address, &app.identity, id, &key, tokens, app.block_tokens);
    let keys = [key, id.to_owned()];
    let kept = (fault != Some(Fault::ForgetBlocks)).then_some(Handed::Away { keys });
    Ok((kept, (fault != Some(Fault::NoParams)).then_some(params)))
}

/// `GET /kv/{key}`: the blocks that are kept under a key, once.
pub async fn kv(State(app): State<Arc<App>>, Path(key): Path<String>) -> Response {
    if app.offers.fault() == Some(Fault::HangReads) {
        pending::<()>().await;
    }
    let Some(offer) = app.offers.take(&key, WAIT).await else {
        return ApiError::not_found(format!("no blocks are kept under the key {key}")).into_response();
    };
    let bytes = app.device.read_blocks(&offer.blocks);
    app.intake.let_go(offer.blocks);
    bytes.into_response()
}
