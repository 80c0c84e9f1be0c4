//! HTTP to etcd: one exchange, or one watch, at a time and within limits.

use super::EtcdError;
use super::wire::{Failure, Message, Request, Response};
use bytes::BytesMut;
use forebay_otlp::endpoint::{self, Poster};
use http_body_util::{BodyExt, Limited};
use hyper::Uri;
use hyper::body::Incoming;
use std::time::Duration;
use tokio::time::timeout;

/// Bytes of an answer, or of one line of a watch, at most.
const BODY_BYTES_MAX: usize = 16 << 20;

/// The etcds that may be asked, one of them now.
#[derive(Debug, Clone)]
pub(super) struct Client {
    poster: Poster,
    endpoints: Vec<Uri>,
    at: usize,
    limit: Duration,
}

impl Client {
    pub fn new(endpoints: &[String], limit: Duration) -> Result<Client, EtcdError> {
        let endpoints = endpoints
            .iter()
            .map(|text| endpoint::parse(text).ok_or_else(|| EtcdError::Endpoint { value: text.clone() }))
            .collect::<Result<Vec<_>, _>>()?;
        if endpoints.is_empty() {
            return Err(EtcdError::Endpoint { value: String::new() });
        }
        Ok(Client { poster: Poster::new(limit), endpoints, at: 0, limit })
    }

    pub fn endpoint(&self) -> String {
        self.endpoints[self.at].to_string()
    }

    /// Whom to ask instead of who was asked last.
    pub fn turn(&mut self) {
        self.at = (self.at + 1) % self.endpoints.len();
    }

    /// Asks, and waits for the whole answer.
    pub async fn ask(&self, request: &Request) -> Result<Response, Failure> {
        let exchange = async {
            let response = self.post(request.path(), request.body()).await?;
            let status = response.status().as_u16();
            let body = Limited::new(response.into_body(), BODY_BYTES_MAX).collect().await;
            let body = body.map_err(|error| Failure::Unreachable(error.to_string()))?;
            request.answer(status, &body.to_bytes())
        };
        let late = || Failure::Unreachable(format!("nothing within {} ms", self.limit.as_millis()));
        timeout(self.limit, exchange).await.unwrap_or_else(|_| Err(late()))
    }

    /// Opens a watch. Its first message has no limit; its answer's head has.
    pub async fn watch(&self, body: String) -> Option<Watching> {
        let response = timeout(self.limit, self.post("/v3/watch", body)).await.ok()?.ok()?;
        let is_open = response.status().as_u16() == 200;
        is_open.then(|| Watching { body: response.into_body(), unread: BytesMut::new(), searched: 0 })
    }

    async fn post(&self, path: &'static str, body: String) -> Result<http::Response<Incoming>, Failure> {
        // A watch on an etcd that is cut off from the others must end instead of being silent.
        let header = Some(("grpc-metadata-hasleader", "true"));
        let answer = self.poster.post(&self.endpoints[self.at], path, header, body).await;
        answer.map_err(Failure::Unreachable)
    }
}

/// A watch that is open.
#[derive(Debug)]
pub(super) struct Watching {
    body: Incoming,
    unread: BytesMut,
    /// Bytes of `unread` that hold no end of a line.
    searched: usize,
}

impl Watching {
    /// The next message; [`Message::Ended`] is the last.
    pub async fn next(&mut self) -> Message {
        loop {
            if let Some(end) = self.unread[self.searched..].iter().position(|&byte| byte == b'\n') {
                let line = self.unread.split_to(self.searched + end + 1);
                self.searched = 0;
                return Message::read(&line);
            }
            self.searched = self.unread.len();
            if self.unread.len() > BODY_BYTES_MAX {
                return Message::Ended;
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.unread.extend(frame.into_data().unwrap_or_default()),
                Some(Err(_)) | None => return Message::Ended,
            }
        }
    }
}
