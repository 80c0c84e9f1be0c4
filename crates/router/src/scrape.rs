//! Reads the engines' own metrics, again and again. It knows one GET on a fresh connection; what
//! the page means is others' business.

use crate::config::Limits;
use crate::engine::Engine;
use crate::engine_metrics::{self, BadPage, EngineMetrics};
use crate::probe;
use crate::reported_load::Unread;
use crate::state::RouterState;
use std::sync::Arc;

const PAGE: &str = "/metrics";

/// Reads the metrics of one engine for ever, while it may get requests.
pub async fn watch(router: Arc<RouterState>, engine: Arc<Engine>) {
    loop {
        if router.engines.is_usable(&engine) {
            let asked = router.engines.own_load(&engine);
            let read = read(&engine, &router.limits).await;
            router.engines.noted_metrics(&engine, read, asked);
        }
        tokio::time::sleep(router.limits.metrics_interval).await;
    }
}

async fn read(engine: &Engine, limits: &Limits) -> Result<EngineMetrics, Unread> {
    let page = probe::get(&engine.target, PAGE, None, limits).await.map_err(|_| Unread::NoPage)?;
    if !page.status.is_success() {
        return Err(Unread::NoPage);
    }
    engine_metrics::read(&page.body).map_err(|bad| {
        tracing::debug!(engine = engine.name(), %bad, "engine's metrics");
        match bad {
            BadPage::Missing(_) => Unread::Missing,
            BadPage::Nonsense { .. } => Unread::Nonsense,
        }
    })
}
