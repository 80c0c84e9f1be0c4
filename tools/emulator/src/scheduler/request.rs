//! One request as the scheduler sees it: its tokens, the names of their blocks and chunks, and how
//! far it has come.

use super::blocks::BlockId;
use crate::truth::{BlockHash, BlockHasher};
use forebay_kv::{ChunkId, NamespaceKey};

/// Names a request of a scheduler. Ids are never reused, and later requests have greater ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Prompt tokens that needed no computation when the request first ran, by where their KV was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheHit {
    /// In the engine's own blocks.
    pub gpu_tokens: usize,
    pub store_tokens: usize,
    /// Of these, the ones that the store had on disk.
    pub disk_tokens: usize,
    /// Of those from the store, the ones that its peers had.
    pub peer_tokens: usize,
}

impl CacheHit {
    /// From both together.
    pub fn tokens(&self) -> usize {
        self.gpu_tokens + self.store_tokens
    }
}

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// In the queue. It holds blocks if chunks were loaded for it.
    Waiting,
    /// In the queue while the chunks from `first_chunk` on come from the store: vLLM's
    /// WAITING_FOR_REMOTE_KVS.
    Loading { first_chunk: usize, aborted: bool },
    /// In the queue while another engine's KV comes into its blocks.
    Reading,
    /// Has a share in every step.
    Running,
}

/// What gives names to a request's blocks and chunks.
#[derive(Clone, Debug)]
pub(super) struct Namer {
    pub hasher: BlockHasher,
    pub namespace: NamespaceKey,
    /// `None` without a store.
    pub chunk_tokens: Option<usize>,
}

/// A request and its progress.
#[derive(Debug)]
pub struct Request {
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_tokens: usize,
    pub(crate) max_tokens: usize,
    /// Names of the whole blocks and chunks of `tokens`.
    pub(crate) block_names: Vec<BlockHash>,
    pub(crate) chunk_ids: Vec<ChunkId>,
    /// Blocks in token order; more than `computed` needs while a load is on its way.
    pub(crate) blocks: Vec<BlockId>,
    /// Tokens whose KV is in `blocks`.
    pub(crate) computed: usize,
    /// Of `blocks`, how many the prefix cache has been told about.
    pub(crate) named: usize,
    pub(crate) stored_chunks: usize,
    pub(crate) phase: Phase,
    pub(crate) hit: CacheHit,
    pub(crate) started: bool,
    /// The store did not deliver all once, or was not let, and is not asked again: asking for ever
    /// would never end.
    pub(crate) load_failed: bool,
    /// Another engine has the KV of its prompt, and it has not been read yet.
    pub(crate) is_handed: bool,
}

impl Request {
    pub(super) fn new(prompt: Vec<u32>, max_tokens: usize, namer: &Namer) -> Request {
        let mut request = Request {
            prompt_tokens: prompt.len(),
            tokens: prompt,
            max_tokens,
            block_names: Vec::new(),
            chunk_ids: Vec::new(),
            blocks: Vec::new(),
            computed: 0,
            named: 0,
            stored_chunks: 0,
            phase: Phase::Waiting,
            hit: CacheHit::default(),
            started: false,
            load_failed: false,
            is_handed: false,
        };
        request.extend_names(namer);
        request
    }

    /// Tokens of output so far.
    pub fn output_tokens(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }

    pub(super) fn push_output(&mut self, token: u32, namer: &Namer) {
        self.tokens.push(token);
        self.extend_names(namer);
    }

    fn extend_names(&mut self, namer: &Namer) {
        namer.hasher.extend(&mut self.block_names, &self.tokens);
        let Some(chunk_tokens) = namer.chunk_tokens else { return };
        let known = self.chunk_ids.len() * chunk_tokens;
        for chunk in self.tokens[known..].chunks_exact(chunk_tokens) {
            self.chunk_ids.push(ChunkId::derive(&namer.namespace, self.chunk_ids.last(), chunk));
        }
    }
}
