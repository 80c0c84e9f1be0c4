//! Admin commands: Identify, the creation and deletion of queues, and the number of queues.

use super::data::{check, from_prps};
use super::entry::Entry;
use super::io::NAMESPACE;
use super::memory::HostMemory;
use super::queues::{CompletionQueue, Queues, Ring, SubmissionQueue};
use super::settings::{Settings, SglSetting};
use super::status::Status;

const IDENTIFY_BYTES: usize = 4096;
const INTERRUPT_VECTORS: u32 = 2048;

/// Carries out an admin command; gives dword 0 of its completion.
pub fn execute(
    memory: &impl HostMemory,
    settings: &Settings,
    queues: &mut Queues,
    entry: &Entry,
) -> Result<u32, Status> {
    // Over PCIe, admin commands have no scatter gather lists.
    check(entry.psdt() == 0, Status::INVALID_FIELD)?;
    match entry.opcode() {
        0x00 => delete_submission_queue(queues, entry),
        0x01 => create_submission_queue(memory, settings, queues, entry),
        0x04 => delete_completion_queue(queues, entry),
        0x05 => create_completion_queue(memory, settings, queues, entry),
        0x06 => identify(memory, settings, entry),
        0x09 => set_features(settings, queues, entry),
        _ => Err(Status::INVALID_OPCODE),
    }
}

fn identify(memory: &impl HostMemory, settings: &Settings, entry: &Entry) -> Result<u32, Status> {
    entry.only_uses(&[1, 6, 7, 8, 9, 10])?;
    let bytes = match (entry.dword(10), entry.namespace()) {
        (0, NAMESPACE) => namespace_bytes(settings),
        (0, _) => return Err(Status::INVALID_NAMESPACE),
        (1, 0) => controller_bytes(settings),
        _ => return Err(Status::INVALID_FIELD),
    };
    let pointer = (entry.pair(6), entry.pair(8));
    let extents = from_prps(memory, settings.page_bytes, pointer, IDENTIFY_BYTES as u64)?;
    let is_reachable = extents.iter().all(|extent| memory.contains(extent.address, extent.bytes));
    check(is_reachable, Status::DATA_TRANSFER_ERROR)?;
    let mut rest = &bytes[..];
    for extent in extents {
        let (part, after) = rest.split_at(extent.bytes as usize);
        memory.write(extent.address, part).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        rest = after;
    }
    Ok(0)
}

fn controller_bytes(settings: &Settings) -> [u8; IDENTIFY_BYTES] {
    let mut bytes = [0; IDENTIFY_BYTES];
    bytes[24..64].fill(b' ');
    bytes[24..39].copy_from_slice(b"Forebay in-proc");
    bytes[77] = settings.mdts;
    bytes[80..84].copy_from_slice(&0x0002_0000_u32.to_le_bytes());
    (bytes[512], bytes[513]) = (0x66, 0x44);
    bytes[516..520].copy_from_slice(&NAMESPACE.to_le_bytes());
    bytes[536] = match settings.sgl {
        SglSetting::Refused => 0,
        SglSetting::AnyAlignment => 1,
        SglSetting::MultiplesOf4 => 2,
    };
    bytes
}

fn namespace_bytes(settings: &Settings) -> [u8; IDENTIFY_BYTES] {
    let mut bytes = [0; IDENTIFY_BYTES];
    for size in [0, 8, 16] {
        bytes[size..size + 8].copy_from_slice(&settings.blocks.to_le_bytes());
    }
    bytes[130] = settings.block_bytes_log2;
    bytes
}

fn create_completion_queue(
    memory: &impl HostMemory,
    settings: &Settings,
    queues: &mut Queues,
    entry: &Entry,
) -> Result<u32, Status> {
    entry.only_uses(&[6, 7, 10, 11])?;
    let id = new_id(settings, entry, |id| queues.completion.contains_key(&id))?;
    let flags = entry.dword(11);
    check(flags & 1 == 1 && flags & 0xfffc == 0, Status::INVALID_FIELD)?;
    check(flags >> 16 < INTERRUPT_VECTORS, Status::INVALID_INTERRUPT_VECTOR)?;
    let ring = new_ring(memory, settings, entry, 16)?;
    queues.completion.insert(id, CompletionQueue::new(ring.address, ring.entries));
    Ok(0)
}

fn create_submission_queue(
    memory: &impl HostMemory,
    settings: &Settings,
    queues: &mut Queues,
    entry: &Entry,
) -> Result<u32, Status> {
    entry.only_uses(&[6, 7, 10, 11])?;
    let id = new_id(settings, entry, |id| queues.submission.contains_key(&id))?;
    let flags = entry.dword(11);
    check(flags & 0xffff == 1, Status::INVALID_FIELD)?;
    let completion_queue = (flags >> 16) as u16;
    let is_there = completion_queue != 0 && queues.completion.contains_key(&completion_queue);
    check(is_there, Status::INVALID_COMPLETION_QUEUE)?;
    let ring = new_ring(memory, settings, entry, 64)?;
    queues.submission.insert(id, SubmissionQueue { ring, completion_queue });
    Ok(0)
}

fn new_id(settings: &Settings, entry: &Entry, is_taken: impl Fn(u16) -> bool) -> Result<u16, Status> {
    let id = entry.dword(10) as u16;
    let is_free = (1..=settings.max_queues).contains(&id) && !is_taken(id);
    check(is_free, Status::INVALID_QUEUE_ID)?;
    Ok(id)
}

fn new_ring(
    memory: &impl HostMemory,
    settings: &Settings,
    entry: &Entry,
    entry_bytes: u64,
) -> Result<Ring, Status> {
    let (entries, address) = ((entry.dword(10) >> 16) + 1, entry.pair(6));
    check((2..=settings.max_queue_entries).contains(&entries), Status::INVALID_QUEUE_SIZE)?;
    check(address.is_multiple_of(settings.page_bytes), Status::PRP_OFFSET_INVALID)?;
    check(memory.contains(address, u64::from(entries) * entry_bytes), Status::INVALID_FIELD)?;
    Ok(Ring::new(address, entries))
}

fn delete_submission_queue(queues: &mut Queues, entry: &Entry) -> Result<u32, Status> {
    entry.only_uses(&[10])?;
    let id = old_id(entry)?;
    queues.submission.remove(&id).map(|_| 0).ok_or(Status::INVALID_QUEUE_ID)
}

fn delete_completion_queue(queues: &mut Queues, entry: &Entry) -> Result<u32, Status> {
    entry.only_uses(&[10])?;
    let id = old_id(entry)?;
    check(queues.completion.contains_key(&id), Status::INVALID_QUEUE_ID)?;
    let is_used = queues.submission.values().any(|queue| queue.completion_queue == id);
    check(!is_used, Status::INVALID_QUEUE_DELETION)?;
    queues.completion.remove(&id);
    Ok(0)
}

fn old_id(entry: &Entry) -> Result<u16, Status> {
    check(entry.dword(10) >> 16 == 0, Status::INVALID_FIELD)?;
    check(entry.dword(10) != 0, Status::INVALID_QUEUE_ID)?;
    Ok(entry.dword(10) as u16)
}

fn set_features(settings: &Settings, queues: &Queues, entry: &Entry) -> Result<u32, Status> {
    entry.only_uses(&[10, 11])?;
    check(entry.dword(10) == 7, Status::INVALID_FIELD)?;
    // The number may be set once, before there are queues for I/O.
    let is_early = queues.submission.len() == 1 && queues.completion.len() == 1;
    check(is_early, Status::COMMAND_SEQUENCE_ERROR)?;
    let (submission, completion) = (entry.dword(11) & 0xffff, entry.dword(11) >> 16);
    check(submission != 0xffff && completion != 0xffff, Status::INVALID_FIELD)?;
    let most = u32::from(settings.max_queues) - 1;
    Ok(completion.min(most) << 16 | submission.min(most))
}
