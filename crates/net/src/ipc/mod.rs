//! Memory of GPUs of two agents on one host: the asking end's GPU copies, and no byte passes a
//! connection. The owner exports what its memory lies in, and grants each operation the right to
//! touch it, which the asking end gives back when its copies are over
//! (`docs/decisions/027-gpus-of-one-host-copy-by-themselves.md`).
//!
//! `messages` are the bytes, `grants` the owner's end, `opened` what the asking end has open,
//! `asker` how it is opened, and `link` one operation of the mover. What is CUDA's is behind
//! [`Ipc`](forebay_transfer::Ipc).

pub(crate) mod asker;
pub(crate) mod grants;
pub(crate) mod link;
mod messages;
pub(crate) mod opened;
