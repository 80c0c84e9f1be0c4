//! Where a node shows itself, and which values are allowed.

use super::{ConfigError, address, count_in, or};
use forebay_otlp::endpoint;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Requests for `/metrics` at a time; seconds between pushes; how long an answer may take; and of
/// how many pulls and requests one is traced, where they are not said.
const REQUESTS_MAX: u16 = 16;
const EVERY_S: u16 = 15;
const LIMIT_MS: u16 = 2000;
const TRACE_ONE_OF: u16 = 100;

/// Where a node shows itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetricsConfig {
    /// Where `GET /metrics`, `/healthz` and `/readyz` are answered; nowhere unless it is said.
    #[serde(default, deserialize_with = "address::deserialize", skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// Requests for `/metrics` that are answered at a time; health is answered in any case.
    #[serde(default = "or::<usize, REQUESTS_MAX>")]
    pub requests_max: usize,
    /// Whom it tells by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub push: Option<CollectorConfig>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectorConfig {
    /// `http://host:port` where it takes OTLP over HTTP.
    pub endpoint: String,
    #[serde(default = "or::<u32, EVERY_S>")]
    pub every_s: u32,
    #[serde(default = "or::<u64, LIMIT_MS>")]
    pub limit_ms: u64,
    /// Of so many pulls and requests of clients one is traced; 0: none.
    #[serde(default = "or::<u32, TRACE_ONE_OF>")]
    pub trace_one_of: u32,
}

impl MetricsConfig {
    /// Answers here, and tells nobody by itself.
    pub fn new(listen: SocketAddr) -> MetricsConfig {
        MetricsConfig { listen: Some(listen), requests_max: REQUESTS_MAX.into(), push: None }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        count_in("metrics.requests_max", self.requests_max as u64, 1, 1024)?;
        self.push.as_ref().map_or(Ok(()), CollectorConfig::check)
    }
}

impl CollectorConfig {
    /// A collector, told every 15 seconds of all numbers and of one trace in a hundred.
    pub fn new(endpoint: impl Into<String>) -> CollectorConfig {
        let (every_s, limit_ms, trace_one_of) = (EVERY_S.into(), LIMIT_MS.into(), TRACE_ONE_OF.into());
        CollectorConfig { endpoint: endpoint.into(), every_s, limit_ms, trace_one_of }
    }

    fn check(&self) -> Result<(), ConfigError> {
        count_in("metrics.push.every_s", self.every_s.into(), 1, 3600)?;
        count_in("metrics.push.limit_ms", self.limit_ms, 10, 60_000)?;
        let refused =
            || ConfigError::value("metrics.push.endpoint", format!("{:?}", self.endpoint), endpoint::ALLOWED);
        endpoint::parse(&self.endpoint).map(drop).ok_or_else(refused)
    }
}
