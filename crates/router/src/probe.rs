//! Asks backends whether they are well. It knows one GET on a fresh connection, so that a process
//! that accepts nothing any more is found out.

use crate::config::{Limits, Target};
use crate::engine::Engine;
use crate::health::Failure;
use crate::state::RouterState;
use crate::upstream::{Pieces, Pool, Upstream};
use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, StatusCode, header};
use std::future::poll_fn;
use std::sync::Arc;

/// Answers to a GET are read up to this size.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;

/// An answer that has been read.
#[derive(Debug)]
pub struct ShortAnswer {
    pub status: StatusCode,
    pub body: Bytes,
}

/// Gets a small document from a backend within `limits.probe_timeout`, with a key where there is
/// one.
pub async fn get(
    target: &Target,
    path: &str,
    key: Option<HeaderValue>,
    limits: &Limits,
) -> Result<ShortAnswer, Failure> {
    let exchange = async {
        let upstream = Upstream::connect(target, limits).await.map_err(|lost| lost.failure)?;
        let mut request = Request::new(Pieces::default());
        *request.uri_mut() = path.parse().unwrap_or_default();
        request.headers_mut().insert(header::HOST, target.host.clone());
        request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        if let Some(key) = key {
            request.headers_mut().insert(header::AUTHORIZATION, key);
        }
        let (head, mut answer) = upstream.exchange(request).await.map_err(|lost| lost.failure)?.into_parts();
        let mut body = BytesMut::new();
        while let Some(bytes) = poll_fn(|context| answer.poll_bytes(context)).await {
            body.extend_from_slice(&bytes?);
            if body.len() > MAX_ANSWER_BYTES {
                return Err(Failure::Garbage);
            }
        }
        Ok(ShortAnswer { status: head.status, body: body.freeze() })
    };
    tokio::time::timeout(limits.probe_timeout, exchange).await.unwrap_or(Err(Failure::FirstByteTimeout))
}

/// Probes one engine for ever. An answer below 500 counts as well: an engine that knows no such
/// path is alive.
pub async fn watch(router: Arc<RouterState>, engine: Arc<Engine>) {
    let limits = &router.limits;
    loop {
        let result = match get(&engine.target, &limits.probe_path, None, limits).await {
            Ok(answer) if answer.status.is_server_error() => Err(Failure::Unavailable),
            Ok(_) => Ok(()),
            Err(failure) => Err(failure),
        };
        let well = result.is_ok();
        router.engines.probed(&engine, result);
        tokio::time::sleep(if well { limits.probe_interval } else { limits.reprobe_interval }).await;
    }
}

/// Drops idle connections that backends have closed, for ever.
pub async fn sweep(pool: Arc<Pool>, limits: Limits) {
    loop {
        tokio::time::sleep(limits.probe_interval).await;
        pool.sweep();
    }
}
