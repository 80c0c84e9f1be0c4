//! Asks the engines for their lists of models: in the background, and once more before a model is
//! called unknown.

use crate::engine::Engine;
use crate::models::{self, ListAnswer};
use crate::probe;
use crate::slots::EngineSet;
use crate::state::RouterState;
use http::HeaderValue;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Between two readings of an engine's list.
const READ_EVERY: Duration = Duration::from_secs(10);

/// The same, until an engine has answered for the first time.
const FIRST_READ_EVERY: Duration = Duration::from_secs(1);

/// Requests for unknown models make the lists be read again, at most this often.
const READ_AGAIN_AFTER: Duration = Duration::from_secs(1);

const LIST: &str = "/v1/models";

/// Asks an engine for its list, with the client's key where there is a client.
async fn read(router: &RouterState, engine: &Engine, key: Option<HeaderValue>) -> ListAnswer {
    let open = key.is_none();
    let said = match probe::get(&engine.target, LIST, key, &router.limits).await {
        Err(_) => ListAnswer::Failed,
        Ok(answer) => match models::parse(&answer.body).filter(|_| answer.status.is_success()) {
            Some(list) => ListAnswer::List(list),
            None => ListAnswer::Other(answer),
        },
    };
    router.engines.models.note(engine, &said, open);
    said
}

/// Asks all engines that are up, each within the time of a probe.
pub async fn read_all(router: &Arc<RouterState>, key: Option<HeaderValue>) -> Vec<(Arc<Engine>, ListAnswer)> {
    let mut reading = JoinSet::new();
    for engine in router.engines.usable() {
        let (router, key) = (router.clone(), key.clone());
        reading.spawn(async move {
            let said = read(&router, &engine, key).await;
            (engine, said)
        });
    }
    let mut said = reading.join_all().await;
    said.sort_by_key(|(engine, _)| engine.slot);
    said
}

/// The engines that may serve a model. Before it is called unknown all engines are asked again: an
/// adapter may have been loaded since.
pub async fn serving(router: &Arc<RouterState>, model: &str, key: Option<&HeaderValue>) -> Arc<EngineSet> {
    let serving = router.engines.models.serving(model);
    if !serving.is_empty() {
        return serving;
    }
    let mut read_again = router.engines.models.read_again.lock().await;
    if read_again.is_none_or(|at| at.elapsed() >= READ_AGAIN_AFTER) {
        read_all(router, key.cloned()).await;
        *read_again = Some(Instant::now());
    }
    router.engines.models.serving(model)
}

/// Reads the list of one engine again and again, for ever.
pub async fn watch(router: Arc<RouterState>, engine: Arc<Engine>) {
    let mut answered = false;
    loop {
        if router.engines.is_usable(&engine) {
            let said = read(&router, &engine, None).await;
            if let (false, ListAnswer::Other(answer)) = (answered, &said) {
                models::warn_unlisted(&engine.target, answer.status);
            }
            answered |= !matches!(said, ListAnswer::Failed);
        }
        tokio::time::sleep(if answered { READ_EVERY } else { FIRST_READ_EVERY }).await;
    }
}
