//! The SSD tier.

mod crypt;
mod key_file;

pub use crypt::{KEY_BYTES, SEAL_BYTES, SealError, TenantKeys};
pub use key_file::{KeysNotRead, LineProblem};
