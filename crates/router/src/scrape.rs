//! Reads the engines' own metrics, again and again. It knows one GET on a fresh connection; what the
//! page means is others' business.

use crate::engine_metrics::{self, BadPage};
use crate::probe;
use crate::reported_load::Unread;
use crate::state::RouterState;
use std::sync::Arc;

const PAGE: &str = "/metrics";

/// Reads the metrics of one engine for ever, while it may get requests.
pub async fn watch(router: Arc<RouterState>, backend: usize) {
    loop {
        if router.engines.is_usable(backend) {
            let asked = router.engines.own_load(backend);
            let got = probe::get(&router.engines.targets[backend], PAGE, None, &router.limits).await;
            let read = match got {
                Ok(answer) if answer.status.is_success() => {
                    engine_metrics::read(&answer.body).map_err(|bad| {
                        let engine = &router.engines.targets[backend].name;
                        tracing::debug!(engine, %bad, "engine's metrics");
                        match bad {
                            BadPage::Missing(_) => Unread::Missing,
                            BadPage::Nonsense { .. } => Unread::Nonsense,
                        }
                    })
                }
                Ok(_) | Err(_) => Err(Unread::NoPage),
            };
            router.engines.noted_metrics(backend, read, asked);
        }
        tokio::time::sleep(router.limits.metrics_interval).await;
    }
}
