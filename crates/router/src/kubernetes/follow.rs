//! Follows a collection of objects at the API server: lists them, and then watches what becomes of
//! them, for ever. A watch that ends goes on where it was; one that is too far behind begins anew.

use super::api::{Api, ApiError};
use super::objects::{Event, List, Metadata};
use bytes::{Bytes, BytesMut};
use forebay_transfer::Backoff;
use http::StatusCode;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// The API server ends a watch after so long, and is asked again.
const WATCH: Duration = Duration::from_secs(240);
/// After a failure.
const PAUSE: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(15));
/// One object.
const LINE_BYTES_MAX: usize = 8 << 20;

/// What has become of the collection.
#[derive(Debug)]
pub enum Change<T> {
    /// These are all.
    All(Vec<T>),
    Is(T),
    Gone(T),
    /// It could not be asked; it will be.
    Unknown(ApiError),
}

/// An object that says which of its versions it is.
pub trait Object: DeserializeOwned + Send + 'static {
    fn metadata(&self) -> &Metadata;
}

/// A collection: its path and what selects its objects.
#[derive(Debug, Clone)]
pub struct Collection {
    /// `/api/v1/namespaces/serving/pods`.
    pub path: String,
    /// A selector in a query, encoded: `labelSelector=app%3Dvllm`.
    pub query: String,
}

/// Tells of all changes until nobody listens.
pub async fn follow<T: Object>(api: Arc<Api>, of: Collection, changes: mpsc::Sender<Change<T>>) {
    let mut follower = Follower { api, of, changes, pause: PAUSE };
    while follower.list_and_watch().await.is_some() {}
}

struct Follower<T> {
    api: Arc<Api>,
    of: Collection,
    changes: mpsc::Sender<Change<T>>,
    pause: Backoff,
}

/// How a watch ended.
enum Ended {
    /// As it does now and then.
    Normally,
    /// What is to be told next is not known there any more.
    TooFarBehind,
}

impl<T: Object> Follower<T> {
    /// Lists, and watches until it has to list again. None: nobody listens.
    async fn list_and_watch(&mut self) -> Option<()> {
        let Collection { path, query } = &self.of;
        let list: List<T> = match self.api.list(&format!("{path}?{query}")).await {
            Ok(list) => list,
            Err(error) => return self.failed(error).await,
        };
        let mut version = list.metadata.resource_version;
        self.tell(Change::All(list.items)).await?;
        loop {
            match self.watch(&mut version).await? {
                Ok(Ended::Normally) => {}
                Ok(Ended::TooFarBehind) => return Some(()),
                Err(error) => self.failed(error).await?,
            }
        }
    }

    /// Watches once, from a version on.
    async fn watch(&mut self, version: &mut String) -> Option<Result<Ended, ApiError>> {
        let Collection { path, query } = &self.of;
        let seconds = WATCH.as_secs();
        let path = format!(
            "{path}?{query}&watch=true&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={seconds}"
        );
        let mut lines = match self.api.get(&path).await {
            Ok(answer) => Lines { body: answer.into_body(), read: BytesMut::new() },
            Err(error) if is_too_far_behind(&error) => return Some(Ok(Ended::TooFarBehind)),
            Err(error) => return Some(Err(error)),
        };
        loop {
            let garbage = |reason: String| ApiError::Garbage { path: path.clone(), reason };
            let line = match lines.next().await {
                Ok(Some(line)) => line,
                Ok(None) => return Some(Ok(Ended::Normally)),
                Err(reason) => return Some(Err(garbage(reason))),
            };
            match Event::<T>::read(&line) {
                Ok(Event::Bookmark(marked)) => *version = marked,
                Ok(Event::Is(object)) => {
                    version.clone_from(&object.metadata().resource_version);
                    self.tell(Change::Is(object)).await?;
                }
                Ok(Event::Gone(object)) => {
                    version.clone_from(&object.metadata().resource_version);
                    self.tell(Change::Gone(object)).await?;
                }
                Ok(Event::Failed(status)) if status.code == StatusCode::GONE.as_u16() => {
                    return Some(Ok(Ended::TooFarBehind));
                }
                Ok(Event::Failed(status)) => return Some(Err(garbage(status.message))),
                Err(error) => return Some(Err(garbage(error.to_string()))),
            }
        }
    }

    async fn tell(&mut self, change: Change<T>) -> Option<()> {
        self.pause.reset();
        self.changes.send(change).await.ok()
    }

    async fn failed(&mut self, error: ApiError) -> Option<()> {
        self.changes.send(Change::Unknown(error)).await.ok()?;
        tokio::time::sleep(self.pause.pause()).await;
        Some(())
    }
}

fn is_too_far_behind(error: &ApiError) -> bool {
    matches!(error, ApiError::Refused { status: StatusCode::GONE, .. })
}

/// The lines of an answer as they come.
struct Lines {
    body: Incoming,
    read: BytesMut,
}

impl Lines {
    /// None at the end. What comes behind the last line's end is half of a line, and nothing.
    async fn next(&mut self) -> Result<Option<Bytes>, String> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.read) {
                return Ok(Some(self.read.split_to(end + 1).freeze()));
            }
            if self.read.len() > LINE_BYTES_MAX {
                return Err(format!("an object has more than the {LINE_BYTES_MAX} bytes that are allowed"));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Ok(frame)) => self.read.extend_from_slice(&frame.into_data().unwrap_or_default()),
                Some(Err(error)) => return Err(error.to_string()),
            }
        }
    }
}
