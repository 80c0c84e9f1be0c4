//! Requests for the pages that the router answers itself: its own ones, and those of its admin API.

use crate::admin;
use crate::local;
use crate::relay::Reply;
use crate::respond;
use crate::routes::{Group, Rule};
use crate::state::RouterState;
use http::{Request, Response};
use hyper::body::Incoming;
use std::sync::Arc;

/// Answers a request whose path is in `group`, or gives it back where it is not for the router.
pub async fn answer(
    router: &Arc<RouterState>,
    group: Option<&Group>,
    request: Request<Incoming>,
) -> Result<Response<Reply>, Request<Incoming>> {
    let answer = match group.map(|group| group.rule) {
        Some(Rule::Own(own)) => local::answer(router, own, group, &request.into_parts().0).await,
        Some(Rule::Admin(page)) => admin::answer(router, page, group, request).await,
        Some(Rule::Cache(_) | Rule::Load | Rule::Refuse(..)) | None => return Err(request),
    };
    Ok(answer.unwrap_or_else(|refusal| respond::refuse(&refusal)))
}
