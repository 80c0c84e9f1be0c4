//! The gRPC services of an endpoint picker: `ext_proc`, and health checks. It knows their paths;
//! what happens on a stream is [`Exchange`]'s.

use super::api::{self, ProcessingRequest, ProcessingResponse};
use super::exchange::Exchange;
use super::health::HealthService;
use crate::state::RouterState;
use futures_util::stream::{BoxStream, StreamExt, try_unfold};
use http::{Request, Response};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::server::{Grpc, StreamingService};
use tonic::{Status, Streaming};
use tonic_health::pb::health_server::HealthServer;
use tonic_prost::ProstCodec;

/// What a message has beside the body that it carries: heads, metadata, and what frames them.
const MESSAGE_OVERHEAD_BYTES: usize = 1024 * 1024;

/// All that is served.
#[derive(Clone)]
pub struct Services {
    process: Process,
    health: HealthServer<HealthService>,
}

impl Services {
    pub fn new(router: Arc<RouterState>) -> Services {
        let health = HealthServer::new(HealthService::new(router.clone()));
        Services { process: Process(router), health }
    }
}

type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl Service<Request<Body>> for Services {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Answering {
        if request.uri().path() != api::PROCESS {
            // It also knows what to say to paths that nobody serves.
            return Box::pin(self.health.call(request));
        }
        let process = self.process.clone();
        Box::pin(async move {
            let max_bytes = process.0.limits.max_body_bytes.saturating_add(MESSAGE_OVERHEAD_BYTES);
            let codec = ProstCodec::<ProcessingResponse, ProcessingRequest>::default();
            let mut grpc = Grpc::new(codec).max_decoding_message_size(max_bytes);
            Ok(grpc.streaming(process, request).await)
        })
    }
}

/// `ExternalProcessor.Process`.
#[derive(Clone)]
struct Process(Arc<RouterState>);

impl StreamingService<ProcessingRequest> for Process {
    type Response = ProcessingResponse;
    type ResponseStream = BoxStream<'static, Result<ProcessingResponse, Status>>;
    type Future = std::future::Ready<Result<tonic::Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<ProcessingRequest>>) -> Self::Future {
        // Nobody runs it but whoever waits for its messages: it ends when Envoy does.
        let exchange = Exchange::new(self.0.clone(), request.into_inner());
        let said = try_unfold(exchange, Exchange::next).boxed();
        std::future::ready(Ok(tonic::Response::new(said)))
    }
}
