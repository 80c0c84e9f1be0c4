//! The body of a client's request: whole, in time, and not too long.

use crate::refusal::Refusal;
use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::time::Duration;

/// The whole body. A body that is too long is read on, up to as much again, so that the client gets
/// to see the refusal.
pub async fn read(mut body: Incoming, max_bytes: usize, limit: Duration) -> Result<Bytes, Refusal> {
    let announced = body.size_hint().exact().map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    let mut length = 0_usize;
    let too_long = |length: usize| length > max_bytes || announced.is_some_and(|bytes| bytes > max_bytes);
    let reading = async {
        while let Some(frame) = body.frame().await {
            let Ok(bytes) = frame?.into_data() else { continue };
            length += bytes.len();
            if too_long(length) {
                first = Bytes::new();
                all = BytesMut::new();
                if length > max_bytes.saturating_mul(2) {
                    break;
                }
            } else if first.is_empty() && all.is_empty() {
                first = bytes;
            } else {
                if all.is_empty() {
                    all.reserve(announced.unwrap_or(2 * first.len()));
                    all.extend_from_slice(&first);
                }
                all.extend_from_slice(&bytes);
            }
        }
        Ok::<(), hyper::Error>(())
    };
    let read = tokio::time::timeout(limit, reading).await;
    match read {
        Err(_) => Err(Refusal::too_slow(limit)),
        Ok(Err(error)) => {
            Err(Refusal::of_client(StatusCode::BAD_REQUEST, format!("the body cannot be read: {error}")))
        }
        Ok(Ok(())) if too_long(length) => Err(Refusal::too_long(max_bytes)),
        Ok(Ok(())) if all.is_empty() => Ok(first),
        Ok(Ok(())) => Ok(all.freeze()),
    }
}
