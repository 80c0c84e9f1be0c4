//! The mailbox of the firmware: it reads and writes the guest's physical memory and I/O ports, one
//! access at a time, and copies doorbells to the controller. It knows the words of `mailbox.S`.

use crate::GuestMemory;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const MAILBOX: u64 = 0x1000;
const REQUEST: u64 = MAILBOX;
const ADDRESS: u64 = MAILBOX + 0x04;
const VALUE: u64 = MAILBOX + 0x08;
const ALIVE: u64 = MAILBOX + 0x0c;
const DOORBELLS: u64 = MAILBOX + 0x10;
const DOORBELL_COUNT: u64 = MAILBOX + 0x14;
const WANTED: u64 = MAILBOX + 0x100;
const WRITTEN: u64 = MAILBOX + 0x200;

/// As many as there is room for between `WANTED` and `WRITTEN`.
const MOST_DOORBELLS: u32 = 64;
const ALIVE_MARK: u32 = 0x4e56_4d65;
/// What the firmware does at once, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// The numbers of `mailbox.S`.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
enum Request {
    WriteMemory = 1,
    ReadMemory = 2,
    WritePort = 3,
    ReadPort = 4,
}

/// The host's side of the mailbox.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    /// There is one place for a request.
    turn: Mutex<()>,
}

impl Mailbox {
    /// The firmware has begun to serve.
    pub(crate) fn is_alive(memory: &GuestMemory) -> bool {
        memory.word(ALIVE).load(Ordering::Acquire) == ALIVE_MARK
    }

    pub(crate) fn read_memory(&self, memory: &GuestMemory, address: u32) -> u32 {
        self.ask(memory, Request::ReadMemory, address, 0)
    }

    pub(crate) fn write_memory(&self, memory: &GuestMemory, address: u32, value: u32) {
        self.ask(memory, Request::WriteMemory, address, value);
    }

    pub(crate) fn read_port(&self, memory: &GuestMemory, port: u16) -> u32 {
        self.ask(memory, Request::ReadPort, port.into(), 0)
    }

    pub(crate) fn write_port(&self, memory: &GuestMemory, port: u16, value: u32) {
        self.ask(memory, Request::WritePort, port.into(), value);
    }

    fn ask(&self, memory: &GuestMemory, request: Request, address: u32, value: u32) -> u32 {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        memory.word(ADDRESS).store(address, Ordering::Relaxed);
        memory.word(VALUE).store(value, Ordering::Relaxed);
        memory.word(REQUEST).store(request as u32, Ordering::Release);
        let since = Instant::now();
        while memory.word(REQUEST).load(Ordering::Acquire) != 0 {
            assert!(since.elapsed() < LIMIT, "the firmware does not answer {request:?} at {address:#x}");
            std::thread::yield_now();
        }
        memory.word(VALUE).load(Ordering::Relaxed)
    }

    /// Forgets all doorbells and copies `count` of them from now on, which lie at `address`. The
    /// controller has just been reset: all of its doorbells are 0.
    pub(crate) fn mirror_doorbells(&self, memory: &GuestMemory, address: u32, count: u32) {
        assert!(count <= MOST_DOORBELLS, "{count} doorbells; the mailbox has room for {MOST_DOORBELLS}");
        memory.word(DOORBELL_COUNT).store(0, Ordering::Release);
        // Once it has answered, the firmware has left the loop that copies the old ones.
        self.read_memory(memory, ALIVE as u32);
        for each in 0..u64::from(MOST_DOORBELLS) {
            memory.word(WANTED + 4 * each).store(0, Ordering::Relaxed);
            memory.word(WRITTEN + 4 * each).store(0, Ordering::Relaxed);
        }
        memory.word(DOORBELLS).store(address, Ordering::Relaxed);
        memory.word(DOORBELL_COUNT).store(count, Ordering::Release);
    }

    /// The word that is relayed to a doorbell.
    pub(crate) fn doorbell(number: u32) -> u64 {
        WANTED + 4 * u64::from(number)
    }

    /// Sets a doorbell. What was stored to memory before is there when the controller learns of it.
    pub(crate) fn ring(memory: &GuestMemory, doorbell: u32, value: u32) {
        let count = memory.word(DOORBELL_COUNT).load(Ordering::Relaxed);
        assert!(doorbell < count, "doorbell {doorbell} of {count}");
        memory.word(Mailbox::doorbell(doorbell)).store(value, Ordering::Release);
    }
}
