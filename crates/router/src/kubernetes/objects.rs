//! Kubernetes' objects, as far as they matter here, and what a watch says of them. The fields are
//! those of the core API `v1` and of `inference.networking.k8s.io/v1`.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::IpAddr;

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    pub name: String,
    pub resource_version: String,
    /// Set from when it is to be deleted.
    pub deletion_timestamp: Option<String>,
}

/// An `InferencePool`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Pool {
    pub metadata: Metadata,
    spec: PoolSpec,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PoolSpec {
    selector: Selector,
    target_ports: Vec<Port>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Selector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Port {
    number: u16,
}

impl Pool {
    /// Its pods, as requests name them: `app=vllm,role=decode`.
    pub fn selector(&self) -> String {
        let labels = &self.spec.selector.match_labels;
        labels.iter().map(|(label, value)| format!("{label}={value}")).collect::<Vec<_>>().join(",")
    }

    pub fn ports(&self) -> Vec<u16> {
        self.spec.target_ports.iter().map(|port| port.number).collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Pod {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// The host that it runs on.
    pub node_name: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct PodStatus {
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    conditions: Vec<Condition>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Condition {
    r#type: String,
    status: String,
}

impl Pod {
    /// Its address, if it is ready and is not about to go.
    pub fn ready_at(&self) -> Option<IpAddr> {
        let is_ready = |condition: &Condition| condition.r#type == "Ready" && condition.status == "True";
        let stays = self.metadata.deletion_timestamp.is_none();
        let is_engine = stays && self.status.conditions.iter().any(is_ready);
        self.status.pod_ip.as_deref().filter(|_| is_engine)?.parse().ok()
    }
}

/// All objects of a kind, and from where on a watch tells what becomes of them.
#[derive(Debug, Deserialize)]
pub struct List<T> {
    pub metadata: Metadata,
    #[serde(default = "Vec::new")]
    pub items: Vec<T>,
}

/// A line of a watch.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<T> {
    /// It has come, or is this now.
    Is(T),
    Gone(T),
    /// All up to this resource version is told.
    Bookmark(String),
    /// The watch cannot go on; with code 410 it is too far behind.
    Failed(Status),
}

/// What the API server says of a request that failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Status {
    pub code: u16,
    pub message: String,
}

#[derive(Deserialize)]
struct Line {
    r#type: String,
    object: serde_json::Value,
}

#[derive(Deserialize)]
struct Marked {
    metadata: Metadata,
}

impl<T: serde::de::DeserializeOwned> Event<T> {
    /// Reads a line.
    pub fn read(line: &[u8]) -> Result<Event<T>, serde_json::Error> {
        let Line { r#type, object } = serde_json::from_slice(line)?;
        Ok(match &*r#type {
            "DELETED" => Event::Gone(serde_json::from_value(object)?),
            "BOOKMARK" => {
                let marked: Marked = serde_json::from_value(object)?;
                Event::Bookmark(marked.metadata.resource_version)
            }
            "ERROR" => Event::Failed(serde_json::from_value(object)?),
            _ => Event::Is(serde_json::from_value(object)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_watch_are_read() {
        let read = |line: &str| Event::<Pod>::read(line.as_bytes());
        let pod = r#"{"metadata":{"name":"a","resourceVersion":"7"},"status":{"podIP":"10.0.0.1"}}"#;
        let is = read(&format!(r#"{{"type":"ADDED","object":{pod}}}"#)).unwrap();
        assert!(matches!(&is, Event::Is(pod) if pod.metadata.resource_version == "7"));
        assert_eq!(read(&format!(r#"{{"type":"MODIFIED","object":{pod}}}"#)).unwrap(), is);
        let gone = read(&format!(r#"{{"type":"DELETED","object":{pod}}}"#)).unwrap();
        assert!(matches!(gone, Event::Gone(pod) if pod.metadata.name == "a"));
        let mark = r#"{"type":"BOOKMARK","object":{"kind":"Pod","metadata":{"resourceVersion":"9"}}}"#;
        assert_eq!(read(mark).unwrap(), Event::Bookmark("9".into()));
        let error = r#"{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old"}}"#;
        assert_eq!(read(error).unwrap(), Event::Failed(Status { code: 410, message: "too old".into() }));
        assert!(read("{").is_err() && read(r#"{"type":"ADDED","object":{}}"#).is_err());
    }
}
