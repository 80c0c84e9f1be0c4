//! Keeps the router's engines as an `InferencePool` has them: follows the pool, and the pods that
//! its selector finds.

use super::api::Api;
use super::follow::{Change, Collection, Object, follow};
use super::objects::{Metadata, Pod, Pool};
use super::pool::PoolView;
use super::{Discovery, PoolName};
use crate::engines::Engines;
use crate::sources::Keeper;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// An engine that could not be added is tried again.
const AGAIN_EVERY: Duration = Duration::from_secs(1);
/// Changes that wait at most; the API server waits with more.
const CHANGES_MAX: usize = 64;

impl Object for Pool {
    fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

impl Object for Pod {
    fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

/// Keeps the engines as the pool has them, for ever. While the API server cannot be asked, they
/// stay as they are.
pub async fn watch_pool(engines: Arc<Engines>, discovery: Discovery, api: Api) {
    let api = Arc::new(api);
    let mut pools = Followed::new(&api, pool_itself(&discovery.pool));
    let mut pods: Option<Followed<Pod>> = None;
    let mut watched = Watched { view: PoolView::default(), keeper: Keeper::new(engines), discovery };
    let mut again = tokio::time::interval(AGAIN_EVERY);
    loop {
        tokio::select! {
            // Not before it is known whether there is a pool.
            _ = again.tick(), if pods.is_some() => watched.apply(),
            Some(change) = pools.changes.recv() => if watched.take_pool(change) {
                let selector = watched.view.selector();
                let of = |selector: String| pods_of(&watched.discovery.pool, &selector);
                pods = selector.map(|selector| Followed::new(&api, of(selector)));
            },
            Some(change) = next_of(&mut pods) => watched.take_pods(change),
        }
    }
}

/// A collection that is followed as long as this lives.
struct Followed<T> {
    changes: mpsc::Receiver<Change<T>>,
    _task: JoinSet<()>,
}

impl<T: Object> Followed<T> {
    fn new(api: &Arc<Api>, of: Collection) -> Followed<T> {
        let (sender, changes) = mpsc::channel(CHANGES_MAX);
        let mut task = JoinSet::new();
        task.spawn(follow(api.clone(), of, sender));
        Followed { changes, _task: task }
    }
}

/// The next change of what is followed; never if nothing is.
async fn next_of<T>(followed: &mut Option<Followed<T>>) -> Option<Change<T>> {
    match followed {
        Some(followed) => followed.changes.recv().await,
        None => std::future::pending().await,
    }
}

struct Watched {
    view: PoolView,
    keeper: Keeper,
    discovery: Discovery,
}

impl Watched {
    /// Returns whether other pods are to be watched.
    fn take_pool(&mut self, change: Change<Pool>) -> bool {
        let pool = match change {
            Change::All(pools) => pools.into_iter().next(),
            Change::Is(pool) => Some(pool),
            Change::Gone(_) => None,
            Change::Unknown(error) => {
                self.cannot("pool", error.to_string());
                return false;
            }
        };
        match &pool {
            None => self.cannot("pool", "there is no such pool".into()),
            Some(_) => self.keeper.lines.forget("pool"),
        }
        let differs = self.view.set_pool(pool);
        self.apply();
        differs
    }

    fn take_pods(&mut self, change: Change<Pod>) {
        match change {
            Change::All(pods) => self.view.set_pods(pods),
            Change::Is(pod) => self.view.set_pod(pod),
            Change::Gone(pod) => self.view.remove_pod(&pod),
            Change::Unknown(error) => return self.cannot("pods", error.to_string()),
        }
        self.keeper.lines.forget("pods");
        self.apply();
    }

    fn apply(&mut self) {
        if let Some(engines) = self.view.engines(&self.discovery) {
            self.keeper.set(engines);
        }
    }

    fn cannot(&mut self, of: &str, reason: String) {
        let pool = &self.discovery.pool;
        self.keeper.lines.tell(of, reason, |reason| {
            tracing::warn!(pool = %pool, reason, "engines of the pool are not known");
        });
    }
}

fn pool_itself(pool: &PoolName) -> Collection {
    let PoolName { namespace, name } = pool;
    let path = format!("/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools");
    Collection { path, query: format!("fieldSelector=metadata.name%3D{name}") }
}

fn pods_of(pool: &PoolName, selector: &str) -> Collection {
    let path = format!("/api/v1/namespaces/{}/pods", pool.namespace);
    Collection { path, query: format!("labelSelector={}", encoded(selector)) }
}

/// Labels in a query. Beside letters and digits they have `-`, `_`, `.` and `/`.
fn encoded(selector: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let encode = |byte: u8| match is_plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    selector.bytes().map(encode).collect()
}
