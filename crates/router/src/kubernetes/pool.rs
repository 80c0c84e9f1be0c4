//! Which engines an `InferencePool` of a Kubernetes cluster stands for: the pods that its selector
//! finds and that are ready, at each of its ports. It takes objects as they come and does no I/O.

use super::objects::{Pod, Pool};
use super::{Discovery, SharedStore};
use crate::config::Backend;
use crate::event_address::EventAddress;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

/// A pool and its pods, as they were last told.
#[derive(Debug, Default)]
pub struct PoolView {
    /// None: there is no such pool.
    pool: Option<Pool>,
    /// By name. None: nobody has told yet which there are.
    pods: Option<BTreeMap<String, Pod>>,
}

impl PoolView {
    /// The pool is this now; none: it is gone. Returns whether other pods are to be watched.
    pub fn set_pool(&mut self, pool: Option<Pool>) -> bool {
        let selector = |pool: &Option<Pool>| pool.as_ref().map(Pool::selector);
        let differs = selector(&self.pool) != selector(&pool);
        self.pool = pool;
        if differs {
            self.pods = None;
        }
        differs
    }

    /// The pods are these.
    pub fn set_pods(&mut self, pods: Vec<Pod>) {
        self.pods = Some(pods.into_iter().map(|pod| (pod.metadata.name.clone(), pod)).collect());
    }

    pub fn set_pod(&mut self, pod: Pod) {
        self.pods.get_or_insert_default().insert(pod.metadata.name.clone(), pod);
    }

    pub fn remove_pod(&mut self, pod: &Pod) {
        self.pods.get_or_insert_default().remove(&pod.metadata.name);
    }

    /// By which labels pods are found; none if there is no pool.
    pub fn selector(&self) -> Option<String> {
        self.pool.as_ref().map(Pool::selector)
    }

    /// The engines that there are, if it is known.
    pub fn engines(&self, discovery: &Discovery) -> Option<Vec<Backend>> {
        let Some(pool) = &self.pool else { return Some(Vec::new()) };
        let ports = pool.ports();
        let pods = self.pods.as_ref()?.values();
        let ready = pods.filter_map(|pod| Some((pod, pod.ready_at()?)));
        let at_ports =
            ready.flat_map(|(pod, address)| (0..ports.len()).map(move |index| (pod, address, index)));
        Some(at_ports.map(|(pod, address, index)| engine(discovery, pod, address, index, &ports)).collect())
    }
}

/// The engine at one port of a pod. A pod with several ports has a data-parallel rank at each.
fn engine(discovery: &Discovery, pod: &Pod, address: IpAddr, index: usize, ports: &[u16]) -> Backend {
    let port = ports[index];
    let name = match ports {
        [_] => pod.metadata.name.clone(),
        _ => format!("{}-{port}", pod.metadata.name),
    };
    let store = match discovery.store {
        None => None,
        Some(SharedStore::Host) => pod.spec.node_name.clone(),
        Some(SharedStore::Pool) => Some(discovery.pool.name.clone()),
    };
    // vLLM's rank N publishes N ports behind the first one.
    let rank = u16::try_from(index).unwrap_or_default();
    let events = discovery.events_port.and_then(|first| first.checked_add(rank));
    let publish = |port| format!("tcp://{}", SocketAddr::new(address, port));
    let events = events.map(|port| EventAddress { publish: publish(port), replay: None });
    Backend {
        name,
        url: format!("http://{}", SocketAddr::new(address, port)),
        store,
        events: events.into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn discovery() -> Discovery {
        Discovery::new("kubernetes://serving/pool".parse().unwrap())
    }

    fn pool(labels: serde_json::Value, ports: &[u16]) -> Pool {
        let ports: Vec<_> = ports.iter().map(|port| json!({"number": port})).collect();
        serde_json::from_value(json!({
            "metadata": {"name": "pool"},
            "spec": {"selector": {"matchLabels": labels}, "targetPorts": ports},
        }))
        .unwrap()
    }

    fn pod(name: &str, ip: &str, ready: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {"nodeName": "host-1"},
            "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]},
        }))
        .unwrap()
    }

    fn names(view: &PoolView) -> Vec<String> {
        view.engines(&discovery()).unwrap().into_iter().map(|engine| engine.name).collect()
    }

    #[test]
    fn only_pods_that_are_ready_and_stay_are_engines() {
        let mut view = PoolView::default();
        assert_eq!(names(&view), [""; 0], "there is no pool");
        assert!(view.set_pool(Some(pool(json!({"app": "vllm"}), &[8000]))));
        let mut leaving = pod("d", "10.0.0.4", "True");
        leaving.metadata.deletion_timestamp = Some("2026-11-28T00:00:00Z".into());
        let pods = [("a", "10.0.0.1", "True"), ("b", "10.0.0.2", "False"), ("c", "", "True")];
        view.set_pods(pods.map(|(name, ip, ready)| pod(name, ip, ready)).into_iter().collect());
        view.set_pod(leaving);
        assert_eq!(names(&view), ["a"]);
        view.set_pod(pod("b", "10.0.0.2", "True"));
        view.remove_pod(&pod("a", "10.0.0.1", "True"));
        assert_eq!(names(&view), ["b"]);
        assert!(view.set_pool(None));
        assert_eq!((names(&view), view.selector()), (Vec::new(), None));
    }

    #[test]
    fn pods_are_asked_for_anew_only_when_other_labels_select_them() {
        let mut view = PoolView::default();
        view.set_pool(Some(pool(json!({"app": "vllm"}), &[8000])));
        assert_eq!(view.engines(&discovery()), None, "no pod is told of yet");
        view.set_pod(pod("a", "10.0.0.1", "True"));
        assert!(!view.set_pool(Some(pool(json!({"app": "vllm"}), &[8000, 8001]))), "only ports");
        assert_eq!(names(&view), ["a-8000", "a-8001"]);
        assert!(view.set_pool(Some(pool(json!({"app": "vllm", "tier": "x"}), &[8000]))));
        assert_eq!(view.selector().unwrap(), "app=vllm,tier=x");
        assert_eq!(view.engines(&discovery()), None, "these are not the pods of the labels before");
    }

    #[test]
    fn each_port_of_a_pod_is_an_engine_with_events_and_a_store_of_its_own() {
        let mut view = PoolView::default();
        view.set_pool(Some(pool(json!({"app": "vllm"}), &[8000, 8001])));
        view.set_pod(pod("a", "fd00::1", "True"));
        let with = |store| Discovery { events_port: Some(5557), store: Some(store), ..discovery() };
        let engines = view.engines(&with(SharedStore::Host)).unwrap();
        assert_eq!((&*engines[1].name, &*engines[1].url), ("a-8001", "http://[fd00::1]:8001"));
        assert_eq!(engines[1].events[0].publish, "tcp://[fd00::1]:5558");
        assert_eq!(engines[1].store.as_deref(), Some("host-1"));
        let of_pool = view.engines(&with(SharedStore::Pool)).unwrap();
        assert_eq!(of_pool[0].store.as_deref(), Some("pool"));
        assert!(crate::config::check_backends(&engines).is_ok());
    }
}
