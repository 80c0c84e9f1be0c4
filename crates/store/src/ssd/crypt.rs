//! Encryption at rest: the layers of a tenant that has a key are encrypted with AES-256-GCM before
//! they go to disk, and decrypted after they came back. Whoever forgets the key has erased all that
//! it encrypted. This file knows keys and bytes.
//!
//! ```text
//! encrypted layer = ciphertext, as long as the layer | tag, 16 bytes | nonce, 12 bytes
//! key          = keyed BLAKE3, key: the tenant's, message: the copy's name
//! also bound   = the copy's name and the layer: log, id, sequence u64, segment u32, slot u16, layer u16
//! ```
//!
//! Two messages under one key and nonce would give away both, so it matters that this cannot
//! happen. Each copy has a key of its own, and within one history of a log no two copies have one
//! name. But a log that was replaced by an older image of itself gives names again that the lost
//! part of its history had given. Nonces are therefore drawn at random for each layer that is
//! encrypted. With 96 random bits under a key that sees a few hundred layers, two equal ones are
//! not to be expected in the life of any disk.

use crate::log::ChunkCopy;
use crate::tenant::TenantId;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use std::collections::HashMap;
use std::fmt;
use thiserror::Error;
use zeroize::Zeroizing;

/// Bytes that an encrypted layer is longer than the layer.
pub const ENCRYPTION_BYTES: usize = TAG_BYTES + NONCE_LEN;

pub const KEY_BYTES: usize = 32;

const TAG_BYTES: usize = 16;

/// The keys of the tenants whose chunks are encrypted. Keys are wiped from memory when they are
/// dropped.
///
/// ```
/// use forebay_kv::ChunkId;
/// use forebay_store::TenantId;
/// use forebay_store::log::{ChunkCopy, LogUuid};
/// use forebay_store::ssd::{ENCRYPTION_BYTES, EncryptionError, TenantKeys};
///
/// let mut keys = TenantKeys::default();
/// keys.insert(TenantId(7), [42; 32]);
/// let name =
///     ChunkCopy { log: LogUuid([1; 16]), id: ChunkId::from_bytes([2; 32]), segment: 3, sequence: 4, slot: 5 };
///
/// let mut layer = b"secret".to_vec();
/// layer.resize(6 + ENCRYPTION_BYTES, 0);
/// keys.encrypt_layer(TenantId(7), &name, 0, &mut layer)?;
/// assert_ne!(&layer[..6], b"secret");
/// let mut copy = layer.clone();
/// assert_eq!(keys.decrypt_layer(TenantId(7), &name, 0, &mut copy)?, b"secret");
///
/// keys.forget(TenantId(7));
/// let erased = keys.decrypt_layer(TenantId(7), &name, 0, &mut layer);
/// assert_eq!(erased, Err(EncryptionError::NoKey { tenant: TenantId(7) }));
/// # Ok::<(), EncryptionError>(())
/// ```
#[derive(Default)]
pub struct TenantKeys {
    keys: HashMap<TenantId, Zeroizing<[u8; KEY_BYTES]>>,
}

/// Why a layer was not encrypted or not decrypted. What the buffer holds then is of no use.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EncryptionError {
    /// The tenant has no key, or has it no longer.
    #[error("tenant {} has no key", tenant.0)]
    NoKey { tenant: TenantId },
    /// The buffer has no room for tag and nonce.
    #[error("{have_bytes} bytes for an encrypted layer, which has at least {ENCRYPTION_BYTES}")]
    Short { have_bytes: usize },
    /// The layer is longer than one key and nonce may encrypt: 64 GiB.
    #[error("layer {layer} has {bytes} bytes, more than can be encrypted at once")]
    Long { layer: u16, bytes: usize },
    /// Another key, another copy, another layer, or not the bytes that were encrypted.
    #[error("layer {layer} is not what was encrypted with this key for this copy")]
    Refused { layer: u16 },
    /// The system gave no random bytes for a nonce.
    #[error("the system has no random bytes")]
    NoRandom,
}

impl TenantKeys {
    /// From now on the tenant's layers are encrypted with this key. An earlier key of the tenant is
    /// forgotten.
    pub fn insert(&mut self, tenant: TenantId, key: [u8; KEY_BYTES]) {
        self.keys.insert(tenant, Zeroizing::new(key));
    }

    /// Forgets a tenant's key, and says whether there was one. Once it is also gone from wherever
    /// it was read from, what it encrypted is erased on every disk and in every backup.
    pub fn forget(&mut self, tenant: TenantId) -> bool {
        self.keys.remove(&tenant).is_some()
    }

    /// Whether the tenant's layers are encrypted.
    pub fn has(&self, tenant: TenantId) -> bool {
        self.keys.contains_key(&tenant)
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Encrypts a layer of a copy in place. `buffer` holds the layer and [`ENCRYPTION_BYTES`] more,
    /// of any value.
    pub fn encrypt_layer(
        &self,
        tenant: TenantId,
        copy: &ChunkCopy,
        layer: u16,
        buffer: &mut [u8],
    ) -> Result<(), EncryptionError> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(|_| EncryptionError::NoRandom)?;
        self.encrypt_with(nonce, tenant, copy, layer, buffer)
    }

    /// Decrypts a layer of a copy in place, and returns the layer.
    pub fn decrypt_layer<'a>(
        &self,
        tenant: TenantId,
        copy: &ChunkCopy,
        layer: u16,
        buffer: &'a mut [u8],
    ) -> Result<&'a mut [u8], EncryptionError> {
        let key = self.key(tenant, copy)?;
        let short = EncryptionError::Short { have_bytes: buffer.len() };
        let (encrypted, nonce) = buffer.split_last_chunk_mut::<NONCE_LEN>().ok_or(short.clone())?;
        if encrypted.len() < TAG_BYTES {
            return Err(short);
        }
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let decrypted = key.open_in_place(nonce, Aad::from(bound_to(copy, layer)), encrypted);
        decrypted.map_err(|_| EncryptionError::Refused { layer })
    }

    fn encrypt_with(
        &self,
        nonce: [u8; NONCE_LEN],
        tenant: TenantId,
        copy: &ChunkCopy,
        layer: u16,
        buffer: &mut [u8],
    ) -> Result<(), EncryptionError> {
        let key = self.key(tenant, copy)?;
        let short = EncryptionError::Short { have_bytes: buffer.len() };
        let (rest, nonce_place) = buffer.split_last_chunk_mut::<NONCE_LEN>().ok_or(short.clone())?;
        let (plain, tag_place) = rest.split_last_chunk_mut::<TAG_BYTES>().ok_or(short)?;
        let long = EncryptionError::Long { layer, bytes: plain.len() };
        let also_bound = Aad::from(bound_to(copy, layer));
        let tag = key
            .seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), also_bound, plain)
            .map_err(|_| long)?;
        tag_place.copy_from_slice(tag.as_ref());
        *nonce_place = nonce;
        Ok(())
    }

    fn key(&self, tenant: TenantId, copy: &ChunkCopy) -> Result<LessSafeKey, EncryptionError> {
        let no_key = EncryptionError::NoKey { tenant };
        let tenant_key = self.keys.get(&tenant).ok_or(no_key.clone())?;
        let derived = blake3::keyed_hash(tenant_key, &bound_to(copy, 0)[..NAME_BYTES]);
        let key = Zeroizing::new(*derived.as_bytes());
        Ok(LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &*key).map_err(|_| no_key)?))
    }
}

impl fmt::Debug for TenantKeys {
    /// Tells tenants, and no keys.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tenants: Vec<u16> = self.keys.keys().map(|tenant| tenant.0).collect();
        tenants.sort_unstable();
        out.debug_struct("TenantKeys").field("tenants", &tenants).finish_non_exhaustive()
    }
}

const NAME_BYTES: usize = 62;

/// The name of a copy, and a layer.
fn bound_to(copy: &ChunkCopy, layer: u16) -> [u8; NAME_BYTES + 2] {
    let mut bytes = [0; NAME_BYTES + 2];
    bytes[..16].copy_from_slice(&copy.log.0);
    bytes[16..48].copy_from_slice(copy.id.as_bytes());
    bytes[48..56].copy_from_slice(&copy.sequence.to_le_bytes());
    bytes[56..60].copy_from_slice(&copy.segment.to_le_bytes());
    bytes[60..62].copy_from_slice(&copy.slot.to_le_bytes());
    bytes[62..].copy_from_slice(&layer.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::LogUuid;
    use forebay_kv::ChunkId;
    use proptest::prelude::*;

    const TENANT: TenantId = TenantId(7);

    fn keys() -> TenantKeys {
        let mut keys = TenantKeys::default();
        keys.insert(TENANT, [42; KEY_BYTES]);
        keys
    }

    fn encrypted(copy: &ChunkCopy, layer: u16, plain: &[u8]) -> Vec<u8> {
        let mut buffer = plain.to_vec();
        buffer.resize(plain.len() + ENCRYPTION_BYTES, 0);
        keys().encrypt_layer(TENANT, copy, layer, &mut buffer).unwrap();
        buffer
    }

    fn decrypted(
        keys: &TenantKeys,
        copy: &ChunkCopy,
        layer: u16,
        encrypted: &[u8],
    ) -> Result<Vec<u8>, EncryptionError> {
        keys.decrypt_layer(TENANT, copy, layer, &mut encrypted.to_vec()).map(|plain| plain.to_vec())
    }

    /// Sealed by other implementations of BLAKE3 and AES-GCM (the Python packages blake3 and
    /// cryptography).
    #[test]
    fn the_bytes_are_those_of_the_standards() {
        let expected = "620a1f83e64c31de63c0d241bdda27b0e105aad3ccd7337553224b191b079b36840863\
                        000102030405060708090a0b";
        let nonce = std::array::from_fn(|byte| byte as u8);
        let mut buffer = b"sixteen bytes or so".to_vec();
        buffer.resize(19 + ENCRYPTION_BYTES, 0xff);
        keys().encrypt_with(nonce, TENANT, &ChunkCopy::sample(), 6, &mut buffer).unwrap();
        let hex: String = buffer.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected);
        assert_eq!(decrypted(&keys(), &ChunkCopy::sample(), 6, &buffer).unwrap(), b"sixteen bytes or so");
    }

    #[test]
    fn every_flipped_bit_is_refused() {
        let good = encrypted(&ChunkCopy::sample(), 6, b"sixteen bytes or so");
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(
                decrypted(&keys(), &ChunkCopy::sample(), 6, &bad),
                Err(EncryptionError::Refused { layer: 6 }),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn a_layer_opens_as_itself_only() {
        let good = encrypted(&ChunkCopy::sample(), 6, b"layer");
        let others = [
            ChunkCopy { log: LogUuid([0; 16]), ..ChunkCopy::sample() },
            ChunkCopy { id: ChunkId::from_bytes([0; 32]), ..ChunkCopy::sample() },
            ChunkCopy { segment: 0, ..ChunkCopy::sample() },
            ChunkCopy { sequence: 0, ..ChunkCopy::sample() },
            ChunkCopy { slot: 0, ..ChunkCopy::sample() },
        ];
        for other in others {
            assert_eq!(
                decrypted(&keys(), &other, 6, &good),
                Err(EncryptionError::Refused { layer: 6 }),
                "{other:?}"
            );
        }
        assert_eq!(
            decrypted(&keys(), &ChunkCopy::sample(), 7, &good),
            Err(EncryptionError::Refused { layer: 7 })
        );
        let mut other_key = TenantKeys::default();
        other_key.insert(TENANT, [43; KEY_BYTES]);
        assert_eq!(
            decrypted(&other_key, &ChunkCopy::sample(), 6, &good),
            Err(EncryptionError::Refused { layer: 6 })
        );
    }

    #[test]
    fn two_copies_of_a_chunk_have_different_bytes_even_under_one_name() {
        let plain = [0; 64];
        let first = encrypted(&ChunkCopy::sample(), 0, &plain);
        let relocated = encrypted(&ChunkCopy { segment: 9, sequence: 10, ..ChunkCopy::sample() }, 0, &plain);
        let again = encrypted(&ChunkCopy::sample(), 0, &plain);
        for other in [relocated, again] {
            assert!(first.chunks(16).zip(other.chunks(16)).all(|(one, other)| one != other));
        }
    }

    #[test]
    fn a_forgotten_key_has_erased_what_it_encrypted() {
        let good = encrypted(&ChunkCopy::sample(), 6, b"layer");
        let mut keys = keys();
        assert!(keys.forget(TENANT) && !keys.forget(TENANT) && !keys.has(TENANT));
        assert_eq!(
            decrypted(&keys, &ChunkCopy::sample(), 6, &good),
            Err(EncryptionError::NoKey { tenant: TENANT })
        );
        let encrypted = keys.encrypt_layer(TENANT, &ChunkCopy::sample(), 6, &mut [0; 64]);
        assert_eq!(encrypted, Err(EncryptionError::NoKey { tenant: TENANT }));
    }

    #[test]
    fn a_buffer_without_room_is_refused() {
        for have_bytes in 0..ENCRYPTION_BYTES {
            let mut buffer = vec![0; have_bytes];
            let short = Err(EncryptionError::Short { have_bytes });
            assert_eq!(keys().encrypt_layer(TENANT, &ChunkCopy::sample(), 0, &mut buffer), short);
            assert_eq!(keys().decrypt_layer(TENANT, &ChunkCopy::sample(), 0, &mut buffer).map(|_| ()), short);
        }
        assert_eq!(
            decrypted(&keys(), &ChunkCopy::sample(), 0, &encrypted(&ChunkCopy::sample(), 0, b"")).unwrap(),
            b""
        );
    }

    #[test]
    fn no_key_is_ever_shown() {
        assert_eq!(format!("{:?}", keys()), "TenantKeys { tenants: [7], .. }");
    }

    proptest! {
        #[test]
        fn what_was_encrypted_decrypts_to_the_same_bytes(plain in prop::collection::vec(any::<u8>(), 0..500), layer: u16) {
            prop_assert_eq!(decrypted(&keys(), &ChunkCopy::sample(), layer, &encrypted(&ChunkCopy::sample(), layer, &plain)), Ok(plain));
        }
    }
}
