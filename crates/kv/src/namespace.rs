//! What makes KV of one engine unusable in another.
//!
//! Knows the facts that a KV byte depends on besides the tokens, and the one encoding of them that
//! is digested into a [`NamespaceKey`].
//!
//! # Encoding, version 1
//!
//! The key is `blake3::derive_key(CONTEXT, bytes)`. `bytes` holds the fields in the order of
//! [`Namespace`], each as
//!
//! ```text
//! field number  u8          from 1
//! length        u64 LE      of the value in bytes
//! value
//! ```
//!
//! Numbers are 4 bytes little-endian, a rank is rank then size, text is UTF-8. A map is its entries
//! in the order of their names, each name and each value with its own `length` before it. An absent
//! LoRA adapter writes no field. Every field is delimited, so two different namespaces never encode
//! alike.

use std::collections::BTreeMap;
use std::fmt;

use crate::digest::{Digest, write_hex};
use crate::dtype::KvDtype;
use crate::order::AxisOrder;
use crate::rank::Rank;

/// Separates Forebay's keys from every other use of BLAKE3, and one version of the encodings (this
/// one and that of `chunk_id`) from the next. A change to either encoding changes this text.
const CONTEXT: &str = "forebay 2026-11 kv namespace v1";

/// Everything besides the tokens that a chunk's bytes depend on.
///
/// Two engines may share KV exactly when their namespaces are equal. When in doubt, differ: that
/// costs a miss, while a false match costs a wrong answer.
///
/// ```
/// use forebay_kv::{AxisOrder, Digest, KvDtype, Namespace, Rank};
///
/// let engine = Namespace {
///     weights: Digest::of(b"the weights"),
///     dtype: KvDtype::Bfloat16,
///     order: AxisOrder::Lbhnc,
///     block_tokens: 16,
///     tensor_parallel: Rank::ONLY,
///     pipeline_parallel: Rank::ONLY,
///     attention: [("rope_theta".to_owned(), "500000.0".to_owned())].into(),
///     lora: None,
///     tenant_salt: Vec::new(),
/// };
/// let quantized = Namespace { dtype: KvDtype::Fp8E4m3, ..engine.clone() };
/// assert_ne!(engine.key(), quantized.key());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Digest of the weights themselves. Never of the served name, which says nothing about them.
    pub weights: Digest,
    /// Format of the stored elements.
    pub dtype: KvDtype,
    /// Order of the engine's axes, which is the order of the bytes inside a block.
    pub order: AxisOrder,
    /// Tokens in one of the engine's blocks.
    pub block_tokens: u32,
    /// Which share of the heads.
    pub tensor_parallel: Rank,
    /// Which share of the layers.
    pub pipeline_parallel: Rank,
    /// Rotary embedding and attention parameters as the engine runs them, by name. Values are
    /// compared as text.
    pub attention: BTreeMap<String, String>,
    /// Digest of the LoRA adapter, if one is applied.
    pub lora: Option<Digest>,
    /// The tenant's secret, empty where there is only one tenant. Without it nobody can name a
    /// tenant's chunks.
    pub tenant_salt: Vec<u8>,
}

impl Namespace {
    /// The digest of the whole namespace.
    pub fn key(&self) -> NamespaceKey {
        let mut encoder = Encoder(blake3::Hasher::new_derive_key(CONTEXT));
        encoder.field(1, self.weights.as_bytes());
        encoder.field(2, self.dtype.name().as_bytes());
        encoder.field(3, self.order.name().as_bytes());
        encoder.field(4, &self.block_tokens.to_le_bytes());
        encoder.field(5, &rank_bytes(self.tensor_parallel));
        encoder.field(6, &rank_bytes(self.pipeline_parallel));
        encoder.field(7, &map_bytes(&self.attention));
        if let Some(lora) = &self.lora {
            encoder.field(8, lora.as_bytes());
        }
        encoder.field(9, &self.tenant_salt);
        NamespaceKey(*encoder.0.finalize().as_bytes())
    }

    /// Each field as text, for people who compare namespaces. Of the salt it has a digest, so that
    /// nobody can name a tenant's chunks by it.
    pub fn facts(&self) -> BTreeMap<String, String> {
        let salt = blake3::derive_key("forebay salt shown", &self.tenant_salt);
        let salt = if self.tenant_salt.is_empty() { "none".into() } else { shown(&salt) };
        let mut facts = BTreeMap::from([
            ("weights".into(), shown(self.weights.as_bytes())),
            ("dtype".into(), self.dtype.name().into()),
            ("order".into(), self.order.name().into()),
            ("block_tokens".into(), self.block_tokens.to_string()),
            ("tp".into(), self.tensor_parallel.to_string()),
            ("pp".into(), self.pipeline_parallel.to_string()),
            ("lora".into(), self.lora.map_or("none".into(), |lora| shown(lora.as_bytes()))),
            ("salt".into(), salt),
        ]);
        facts.extend(self.attention.iter().map(|(name, value)| (format!("attention.{name}"), value.clone())));
        facts
    }
}

/// The first bytes of a digest.
fn shown(digest: &[u8]) -> String {
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes delimited fields into the digest.
struct Encoder(blake3::Hasher);

impl Encoder {
    fn field(&mut self, number: u8, value: &[u8]) {
        self.0.update(&[number]);
        self.0.update(&length_bytes(value));
        self.0.update(value);
    }
}

fn length_bytes(value: &[u8]) -> [u8; 8] {
    (value.len() as u64).to_le_bytes()
}

fn rank_bytes(rank: Rank) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&rank.rank().to_le_bytes());
    bytes[4..].copy_from_slice(&rank.size().to_le_bytes());
    bytes
}

fn map_bytes(map: &BTreeMap<String, String>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for text in map.iter().flat_map(|(name, value)| [name, value]) {
        bytes.extend_from_slice(&length_bytes(text.as_bytes()));
        bytes.extend_from_slice(text.as_bytes());
    }
    bytes
}

/// The digest of a [`Namespace`], and the key under which its chunk ids are made.
///
/// With a tenant salt in it the key is a secret of the tenant: `Debug` shows only its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct NamespaceKey([u8; 32]);

impl NamespaceKey {
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// A key made by [`Namespace::key`] elsewhere, in another process say.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for NamespaceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NamespaceKey(")?;
        write_hex(&self.0[..4], f)?;
        f.write_str("..)")
    }
}
