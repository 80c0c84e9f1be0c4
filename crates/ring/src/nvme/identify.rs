//! What a drive says of itself: the two structures of Identify, each 4,096 bytes. The bytes are not
//! trusted; what Forebay cannot use is refused with the field, its value and what is allowed.

use thiserror::Error;

/// Bytes of an Identify structure.
pub const IDENTIFY_BYTES: usize = 4096;

const SUBMISSION_ENTRY_LOG2: u8 = 6;
const COMPLETION_ENTRY_LOG2: u8 = 4;
const MIN_BLOCK_LOG2: u8 = 9;
const MAX_BLOCK_LOG2: u8 = 16;
/// From here on MDTS limits nothing: the most blocks of the largest size are as many bytes.
const UNLIMITED_BYTES: u64 = 1 << 32;

/// How the drive takes scatter gather lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SglSupport {
    None,
    /// Any address and length.
    Bytes,
    /// Addresses and lengths are multiples of four.
    Dwords,
}

/// Identify Controller, as far as transfers need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControllerIdentity {
    /// The most bytes of a command's data, 4 GiB where the drive sets no limit.
    pub max_transfer_bytes: u64,
    pub sgl: SglSupport,
    /// How many descriptors the drive recommends at most; none if it says nothing.
    pub sgl_descriptor_threshold: Option<u8>,
    /// A list may be longer than the transfer.
    pub sgl_may_be_longer: bool,
    /// Namespaces are numbered up to this.
    pub namespaces: u32,
}

/// Identify Namespace, as far as transfers need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceIdentity {
    pub blocks: u64,
    pub block_bytes: u64,
}

/// Why a drive cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum IdentifyError {
    #[error("SQES is {0:#x}; its low four bits must be at most 6 and its high four at least 6")]
    SubmissionEntrySize(u8),
    #[error("CQES is {0:#x}; its low four bits must be at most 4 and its high four at least 4")]
    CompletionEntrySize(u8),
    #[error("SGLS has {0} in bits 1:0; 0 to 2 are allowed")]
    SglSupport(u8),
    #[error("CAP.MPSMIN gives pages of {0} bytes; powers of two from 4,096 to 134,217,728 are allowed")]
    PageBytes(u64),
    #[error("NSZE is 0; a namespace that is not there has no blocks")]
    NoBlocks,
    #[error("FLBAS names format {format}; NLBAF allows 0 to {last}")]
    Format { format: u8, last: u8 },
    #[error("LBADS is {0}; 9 to 16 are allowed")]
    BlockSize(u8),
    #[error("the format has {0} bytes of metadata a block; only 0 is allowed")]
    Metadata(u16),
    #[error("NSZE is {blocks} blocks of {block_bytes} bytes; that is more than 64 bits of bytes")]
    Size { blocks: u64, block_bytes: u64 },
}

impl ControllerIdentity {
    /// `min_page_bytes` is the page of CAP.MPSMIN, in which MDTS counts.
    pub fn decode(
        bytes: &[u8; IDENTIFY_BYTES],
        min_page_bytes: u64,
    ) -> Result<ControllerIdentity, IdentifyError> {
        if !min_page_bytes.is_power_of_two() || !(4096..=4096 << 15).contains(&min_page_bytes) {
            return Err(IdentifyError::PageBytes(min_page_bytes));
        }
        let fits = |sizes: u8, log2: u8| sizes & 0xf <= log2 && sizes >> 4 >= log2;
        if !fits(bytes[512], SUBMISSION_ENTRY_LOG2) {
            return Err(IdentifyError::SubmissionEntrySize(bytes[512]));
        }
        if !fits(bytes[513], COMPLETION_ENTRY_LOG2) {
            return Err(IdentifyError::CompletionEntrySize(bytes[513]));
        }
        let sgls = word(bytes, 536);
        let sgl = match sgls & 3 {
            0 => SglSupport::None,
            1 => SglSupport::Bytes,
            2 => SglSupport::Dwords,
            other => return Err(IdentifyError::SglSupport(other as u8)),
        };
        let threshold = (sgls >> 8) as u8;
        Ok(ControllerIdentity {
            max_transfer_bytes: max_transfer(bytes[77], min_page_bytes),
            sgl,
            sgl_descriptor_threshold: (threshold > 0).then_some(threshold),
            sgl_may_be_longer: sgls >> 18 & 1 == 1,
            namespaces: word(bytes, 516),
        })
    }
}

/// 2^MDTS pages; 0 means no limit.
fn max_transfer(mdts: u8, min_page_bytes: u64) -> u64 {
    let log2 = u32::from(mdts) + min_page_bytes.trailing_zeros();
    match mdts {
        0 => UNLIMITED_BYTES,
        _ => 1_u64.checked_shl(log2).map_or(UNLIMITED_BYTES, |bytes| bytes.min(UNLIMITED_BYTES)),
    }
}

impl NamespaceIdentity {
    pub fn decode(bytes: &[u8; IDENTIFY_BYTES]) -> Result<NamespaceIdentity, IdentifyError> {
        let blocks = u64::from(word(bytes, 4)) << 32 | u64::from(word(bytes, 0));
        if blocks == 0 {
            return Err(IdentifyError::NoBlocks);
        }
        let (last, flbas) = (bytes[25], bytes[26]);
        // Bits 6:5 extend the index, and count only where there are more than sixteen formats.
        let high = if last > 15 { flbas >> 5 & 3 } else { 0 };
        let format = high << 4 | flbas & 0xf;
        if format > last {
            return Err(IdentifyError::Format { format, last });
        }
        let format = word(bytes, 128 + 4 * usize::from(format));
        let (metadata, log2) = (format as u16, (format >> 16) as u8);
        if !(MIN_BLOCK_LOG2..=MAX_BLOCK_LOG2).contains(&log2) {
            return Err(IdentifyError::BlockSize(log2));
        }
        if metadata != 0 {
            return Err(IdentifyError::Metadata(metadata));
        }
        let block_bytes = 1 << log2;
        match blocks.checked_mul(block_bytes) {
            Some(_) => Ok(NamespaceIdentity { blocks, block_bytes }),
            None => Err(IdentifyError::Size { blocks, block_bytes }),
        }
    }
}

fn word(bytes: &[u8; IDENTIFY_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
