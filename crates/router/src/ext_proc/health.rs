//! gRPC health checks, as Envoy and Kubernetes ask for them. The answer is how the picker is at
//! that moment.

use super::api;
use crate::state::{Phase, RouterState};
use futures_util::stream::Empty;
use std::sync::Arc;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

pub struct HealthService {
    router: Arc<RouterState>,
}

impl HealthService {
    pub fn new(router: Arc<RouterState>) -> HealthService {
        HealthService { router }
    }

    /// It takes requests, and knows engines that could have them. That one of them is up is not
    /// asked for: where none is, a request gets an answer that says so.
    fn is_ready(&self) -> bool {
        self.router.phase() == Phase::Serving && !self.router.engines.is_empty()
    }
}

#[tonic::async_trait]
impl Health for HealthService {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        let is_well = match &service[..] {
            "liveness" => true,
            "" | "readiness" | api::SERVICE => self.is_ready(),
            other => return Err(Status::not_found(format!("no service is named '{other}'"))),
        };
        let status = if is_well { ServingStatus::Serving } else { ServingStatus::NotServing };
        Ok(Response::new(HealthCheckResponse { status: status.into() }))
    }

    type WatchStream = Empty<Result<HealthCheckResponse, Status>>;

    async fn watch(&self, _: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("health is checked, not watched"))
    }
}
