//! Our own controller over the same kind of memory, with its doorbells in memory too: whoever
//! drives QEMU's queues by memory alone drives these without a change. It knows what relays
//! doorbells, and nothing of what commands do.

use crate::{Error, GuestMemory, QueuePlaces};
use forebay_ring::controller::{
    AdminQueues, Controller, Faults, HostMemory, OutsideMemory, Settings as ControllerSettings,
};
use forebay_ring::nvme::{Command, QueuePair};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

const PAGE_BYTES: u64 = 4096;
const ADMIN_ENTRIES: u32 = 16;
const ADMIN_SUBMISSION: u64 = GuestMemory::FIRST_FREE;
const ADMIN_COMPLETION: u64 = ADMIN_SUBMISSION + PAGE_BYTES;
const DOORBELLS: u64 = ADMIN_COMPLETION + PAGE_BYTES;
const SUBMISSION: u64 = DOORBELLS + PAGE_BYTES;
/// What nobody has, from here on.
const FREE: u64 = SUBMISSION + 32 * PAGE_BYTES;
const QUEUE: u16 = 1;

/// A controller of ours with one pair of I/O queues, and the thread that it runs on.
#[derive(Debug)]
pub struct SoftDrive {
    memory: Arc<GuestMemory>,
    places: QueuePlaces,
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl SoftDrive {
    /// Starts it, with queues of so many entries, 512 at most.
    ///
    /// # Panics
    /// Where it refuses to make its queues.
    pub fn start(memory_bytes: usize, blocks: u64, entries: u16) -> Result<SoftDrive, Error> {
        let memory = Arc::new(GuestMemory::new(memory_bytes)?);
        let settings = ControllerSettings { blocks, ..ControllerSettings::default() };
        let mut controller = Controller::new(Shared(Arc::clone(&memory)), settings, Faults::default());
        let completion = SUBMISSION + (u64::from(entries) * 64).next_multiple_of(PAGE_BYTES);
        add_queues(&mut controller, &memory, u32::from(entries), completion);
        let places = QueuePlaces {
            entries,
            submission: SUBMISSION,
            completion,
            tail_doorbell: DOORBELLS,
            head_doorbell: DOORBELLS + 4,
        };
        let is_stopped = Arc::new(AtomicBool::new(false));
        let (own, stop) = (Arc::clone(&memory), Arc::clone(&is_stopped));
        let thread = std::thread::Builder::new().name("controller".into());
        let thread = thread.spawn(move || run(controller, &own, &stop)).map_err(Error::io("a thread"))?;
        Ok(SoftDrive { memory, places, is_stopped, thread: Some(thread) })
    }

    /// The memory that the controller reaches.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The pair of queues.
    pub fn queues(&self) -> QueuePlaces {
        self.places
    }

    /// The first byte of the memory that nobody has.
    pub fn free(&self) -> u64 {
        FREE
    }
}

impl Drop for SoftDrive {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        // A panic of the thread has been printed, and a test sees that nothing ends any more.
        self.thread.take().map(JoinHandle::join);
    }
}

/// Relays doorbells and lets time pass.
fn run(mut controller: Controller<Shared>, memory: &GuestMemory, stop: &AtomicBool) {
    let mut known = [0; 2];
    while !stop.load(Ordering::Relaxed) {
        for (number, known) in (0..).zip(&mut known) {
            let wanted = memory.word(DOORBELLS + 4 * number).load(Ordering::Acquire);
            if wanted != *known {
                *known = wanted;
                controller.write_doorbell(0x1000 + 4 * (2 * u64::from(QUEUE) + number), wanted);
                assert_eq!(controller.doorbell_errors(), [], "doorbell {number}");
            }
        }
        if !controller.step() {
            std::thread::yield_now();
        }
    }
}

/// Makes the pair of queues, by admin commands.
fn add_queues(controller: &mut Controller<Shared>, memory: &GuestMemory, entries: u32, completion: u64) {
    let admin = AdminQueues {
        sq_address: ADMIN_SUBMISSION,
        sq_entries: ADMIN_ENTRIES,
        cq_address: ADMIN_COMPLETION,
        cq_entries: ADMIN_ENTRIES,
    };
    controller.enable(admin).expect("admin queues that are allowed");
    let mut pair = QueuePair::new(0, ADMIN_ENTRIES, ADMIN_ENTRIES).expect("a size that is allowed");
    let commands = [
        Command::CreateCompletionQueue { queue: QUEUE, entries, address: completion, interrupt: None },
        Command::CreateSubmissionQueue {
            queue: QUEUE,
            entries,
            address: SUBMISSION,
            completion_queue: QUEUE,
        },
    ];
    for command in commands {
        let submitted = pair.submit(&command, ()).expect("room in the admin queue");
        memory.write(ADMIN_SUBMISSION + u64::from(submitted.slot) * 64, &submitted.entry);
        controller.write_doorbell(0x1000, pair.sq_tail());
    }
    while controller.step() {}
    // Both have ended well: the status and the phase bit are in the last word.
    let ends = [0, 1].map(|at| memory.word(ADMIN_COMPLETION + 16 * at + 12).load(Ordering::Acquire) >> 16);
    assert_eq!(ends, [1, 1], "creating queues");
}

/// Guest memory as a controller has it.
#[derive(Debug)]
struct Shared(Arc<GuestMemory>);

impl Shared {
    fn inside(&self, address: u64, bytes: usize) -> Result<(), OutsideMemory> {
        if self.contains(address, bytes as u64) { Ok(()) } else { Err(OutsideMemory { address, bytes }) }
    }
}

impl HostMemory for Shared {
    fn contains(&self, address: u64, bytes: u64) -> bool {
        address.checked_add(bytes).is_some_and(|end| end <= self.0.bytes())
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), OutsideMemory> {
        self.inside(address, into.len())?;
        self.0.read(address, into);
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), OutsideMemory> {
        self.inside(address, from.len())?;
        self.0.write(address, from);
        Ok(())
    }

    fn publish(&self, address: u64, word: u32) -> Result<(), OutsideMemory> {
        self.inside(address, 4)?;
        self.0.word(address).store(word, Ordering::Release);
        Ok(())
    }
}
