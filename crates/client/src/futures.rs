//! The client for those who await. This file turns answers and ends into futures; it must never do anything that the client
//! itself does not do. Dropping a future before its end changes nothing of what was begun.

use super::promise::promise;
use super::{Client, Lease, NodeStat, NotLoaded, NotStored};
use forebay_kv::ChunkId;
use forebay_store::{NotVerified, StoreEnd};
use forebay_transfer::{Class, End, Span};

/// A [`Client`] whose calls are futures. They run on no particular runtime, and time out with the connection.
#[derive(Debug, Clone)]
pub struct AsyncClient(Client);

impl From<Client> for AsyncClient {
    fn from(client: Client) -> AsyncClient {
        AsyncClient(client)
    }
}

impl AsyncClient {
    /// The client below.
    pub fn blocking(&self) -> &Client {
        &self.0
    }

    /// See [`Client::lookup`].
    pub async fn lookup(&self, ids: &[ChunkId]) -> usize {
        self.0.shared.lookup(ids).await.unwrap_or(0)
    }

    /// See [`Client::lease`].
    pub async fn lease(&self, ids: &[ChunkId], ttl_us: u64) -> Lease {
        self.0.shared.lease(ids, ttl_us).await.unwrap_or_else(Lease::none)
    }

    /// See [`Client::load_chunk`].
    pub async fn load_chunk(
        &self,
        lease: &Lease,
        chunk: usize,
        targets: &[Vec<Span>],
        class: Class,
        deadline_us: Option<u64>,
    ) -> Result<End, NotLoaded> {
        let (kept, ended) = promise();
        self.0.load_chunk(lease, chunk, targets, class, deadline_us, move |end| kept.keep(end))?;
        Ok(ended.await.unwrap_or_else(|| super::load::failed("the mover has ended".into())))
    }

    /// See [`Client::verify`].
    pub fn verify(
        &self,
        lease: &Lease,
        chunk: usize,
        layer: usize,
        pieces: &[&[u8]],
    ) -> Result<(), NotVerified> {
        self.0.verify(lease, chunk, layer, pieces)
    }

    /// See [`Client::store_chunk`].
    pub async fn store_chunk(
        &self,
        id: ChunkId,
        parent: Option<ChunkId>,
        layers: &[Vec<Span>],
        class: Class,
    ) -> Result<StoreEnd, NotStored> {
        let (kept, ended) = promise();
        self.0.store_chunk(id, parent, layers, class, move |end| kept.keep(end))?;
        let lost = || StoreEnd::Failed(super::load::failed("the mover has ended".into()));
        Ok(ended.await.unwrap_or_else(lost))
    }

    /// See [`Client::stat`].
    pub async fn stat(&self) -> Option<NodeStat> {
        self.0.shared.stat()?.await
    }
}
