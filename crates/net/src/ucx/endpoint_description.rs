//! What an end tells the other before they can speak over UCX: its worker's address, what messages
//! to it must carry, and which process it is. It travels over a connection on which the two already
//! know each other.
//!
//! ```text
//! little endian:
//!  0  magic    8 bytes  "FBUCX\0\0\1", the last is the version
//!  8  release  2 x u16  of UCX, major and minor
//! 12  fabric   u32
//! 16  secret   16 bytes
//! 32  pid      u64      of the process
//! 40  started  u64      when, in clock ticks since boot
//! 48  address  the rest
//! ```
//!
//! UCX believes an address, so a description must come from a peer that was let in, over a
//! connection that it cannot be changed on.

use super::error::UcxError;
use super::fabric::Fabric;
use crate::bytes::{Field, Reader};
use crate::host_process::HostProcess;

const MAGIC: [u8; 8] = *b"FBUCX\0\0\x01";
const HEAD_BYTES: usize = 48;
/// Bytes of a worker's address at most.
const ADDRESS_BYTES_MAX: usize = 16 << 10;

/// What messages to an end must carry.
pub(super) type Secret = [u8; 16];

/// What an end says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EndpointDescription {
    pub release: (u16, u16),
    pub fabric: Fabric,
    pub secret: Secret,
    pub process: HostProcess,
    pub address: Vec<u8>,
}

impl EndpointDescription {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES + self.address.len());
        let HostProcess { pid, started } = self.process;
        (MAGIC, self.release, self.fabric.code(), self.secret, pid, started).put(&mut out);
        out.extend(&self.address);
        out
    }

    /// The description of an end that this end, with its own, can speak to.
    pub fn parse(bytes: &[u8], own: &EndpointDescription) -> Result<EndpointDescription, UcxError> {
        let bad = |why: String| UcxError::BadDescription { why };
        let mut reader = Reader(bytes);
        let head = reader.get();
        let Some((magic, release, code, secret, pid, started)): Option<([u8; 8], _, u32, _, _, _)> = head
        else {
            return Err(bad(format!("{} bytes; at least {HEAD_BYTES} are needed", bytes.len())));
        };
        let address = reader.0;
        if magic != MAGIC {
            return Err(bad("it does not begin as one of this version does".into()));
        }
        if address.is_empty() || address.len() > ADDRESS_BYTES_MAX {
            return Err(bad(format!("{} bytes; allowed: 1 to {ADDRESS_BYTES_MAX}", address.len())));
        }
        if release != own.release {
            let ((major, minor), (own_major, own_minor)) = (release, own.release);
            return Err(bad(format!("it has UCX {major}.{minor}, this end {own_major}.{own_minor}")));
        }
        if code != own.fabric.code() {
            return Err(bad(format!("it is of fabric {code}, this end of {}", own.fabric.code())));
        }
        let process = HostProcess { pid, started };
        Ok(EndpointDescription { release, fabric: own.fabric, secret, process, address: address.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn description(address: Vec<u8>) -> EndpointDescription {
        let process = HostProcess { pid: 77, started: 1 << 40 };
        EndpointDescription { release: (1, 13), fabric: Fabric::Memory, secret: [5; 16], process, address }
    }

    proptest! {
        #[test]
        fn a_description_comes_back_as_it_was(address in prop::collection::vec(any::<u8>(), 1..300)) {
            let description = description(address);
            prop_assert_eq!(EndpointDescription::parse(&description.to_bytes(), &description), Ok(description));
        }

        #[test]
        fn any_bytes_are_a_description_or_a_reason(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = EndpointDescription::parse(&bytes, &description(vec![1]));
        }
    }

    #[test]
    fn ends_that_cannot_speak_to_each_other_say_why() {
        let own = description(vec![1]);
        let why = |description: EndpointDescription| {
            EndpointDescription::parse(&description.to_bytes(), &own).unwrap_err().to_string()
        };
        assert!(
            why(EndpointDescription { release: (1, 18), ..own.clone() }).contains("UCX 1.18, this end 1.13")
        );
        assert!(why(EndpointDescription { fabric: Fabric::Tcp, ..own.clone() }).contains("fabric"));
        assert!(why(EndpointDescription { address: Vec::new(), ..own.clone() }).contains("0 bytes"));
        assert!(
            why(EndpointDescription { address: vec![0; ADDRESS_BYTES_MAX + 1], ..own.clone() })
                .contains("16385 bytes")
        );
    }
}
