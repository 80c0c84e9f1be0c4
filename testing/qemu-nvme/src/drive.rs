//! QEMU's controller brought up as a driver does it: admin queue, identify, I/O queues, reset. It
//! knows which admin commands there are, and hands out guest memory.

use crate::{AdminQueues, Error, GuestMemory, Qemu, Queue, Settings};
use forebay_ring::nvme::{
    Capabilities, Command, ControllerIdentity, DataPointer, NamespaceIdentity, Outcome, Prp, identify,
};
use std::sync::Arc;

/// Pages of the guest.
pub(crate) const PAGE_BYTES: u64 = 4096;
const ADMIN_ENTRIES: u16 = 16;
/// The only namespace of the controller.
const NAMESPACE: u32 = 1;

/// A controller that is enabled, and what it says of itself.
#[derive(Debug)]
pub struct Drive {
    qemu: Arc<Qemu>,
    admin: Queue<()>,
    /// From here on, guest memory was not handed out.
    free: u64,
    queues: u16,
    /// What the controller said.
    pub controller: ControllerIdentity,
    /// What the controller said of its namespace.
    pub namespace: NamespaceIdentity,
}

impl Drive {
    /// Starts QEMU and enables its controller.
    ///
    /// # Panics
    /// Where the controller refuses an admin command, or says of itself what we do not understand.
    pub fn start(settings: &Settings) -> Result<Drive, Error> {
        let qemu = Arc::new(Qemu::start(settings)?);
        let mut free = GuestMemory::FIRST_FREE;
        let mut admin = queue(&qemu, &mut free, 0, ADMIN_ENTRIES);
        let data = take(&qemu, &mut free, identify::IDENTIFY_BYTES as u64);
        enable(&qemu, &mut admin);

        let prp = Prp { prp1: data, prp2: 0 };
        let page = Capabilities::decode(qemu.read64(0)).min_page_bytes;
        let bytes = identify(&qemu, &mut admin, &Command::IdentifyController { data: prp }, data);
        let controller = ControllerIdentity::decode(&bytes, page).expect("Identify Controller of QEMU");
        let command = Command::IdentifyNamespace { namespace: NAMESPACE, data: prp };
        let bytes = identify(&qemu, &mut admin, &command, data);
        let namespace = NamespaceIdentity::decode(&bytes).expect("Identify Namespace of QEMU");
        Ok(Drive { qemu, admin, free, queues: 0, controller, namespace })
    }

    /// The memory that the controller reaches.
    pub fn memory(&self) -> &GuestMemory {
        self.qemu.memory()
    }

    /// Which QEMU this is, as it says itself.
    pub fn version(&self) -> Result<String, Error> {
        self.qemu.version()
    }

    /// Guest memory of whole pages that nobody else has.
    ///
    /// # Panics
    /// Where there is none left.
    pub fn take(&mut self, bytes: u64) -> u64 {
        take(&self.qemu, &mut self.free, bytes)
    }

    /// Creates the next pair of I/O queues, each of so many entries.
    ///
    /// # Panics
    /// Where the controller refuses to.
    pub fn add_queue<T>(&mut self, entries: u16) -> Queue<T> {
        self.queues += 1;
        let queue = queue(&self.qemu, &mut self.free, self.queues, entries);
        self.create(&queue);
        queue
    }

    /// Creates the queues in the controller, again after [`Drive::enable`].
    ///
    /// # Panics
    /// Where the controller refuses to.
    pub fn create<T>(&mut self, queue: &Queue<T>) {
        let (id, entries) = (queue.id, queue.entries.into());
        let completion =
            Command::CreateCompletionQueue { queue: id, entries, address: queue.completion, interrupt: None };
        let submission = Command::CreateSubmissionQueue {
            queue: id,
            entries,
            address: queue.submission,
            completion_queue: id,
        };
        for command in [completion, submission] {
            assert_eq!(outcome(&mut self.admin, &command), Outcome::Done(0), "{command:?}");
        }
    }

    /// Resets the controller: it is disabled and quiet when this returns.
    pub fn disable(&self) {
        self.qemu.disable();
    }

    /// Enables the controller again. It has no I/O queues.
    pub fn enable(&mut self) {
        enable(&self.qemu, &mut self.admin);
    }

    /// A read of blocks.
    pub fn read(first_block: u64, blocks: u32, data: DataPointer) -> Command {
        Command::Read { namespace: NAMESPACE, first_block, blocks, data }
    }

    /// A write of blocks.
    pub fn write(first_block: u64, blocks: u32, data: DataPointer) -> Command {
        Command::Write { namespace: NAMESPACE, first_block, blocks, data, is_durable: false }
    }
}

fn take(qemu: &Qemu, free: &mut u64, bytes: u64) -> u64 {
    let address = *free;
    *free = (address + bytes).next_multiple_of(PAGE_BYTES);
    let all = qemu.memory().bytes();
    assert!(*free <= all, "guest memory of {all} bytes is all handed out");
    address
}

fn queue<T>(qemu: &Arc<Qemu>, free: &mut u64, id: u16, entries: u16) -> Queue<T> {
    let bytes = Queue::<T>::bytes(entries) as u64;
    let (submission, completion) = (take(qemu, free, bytes), take(qemu, free, bytes));
    Queue::new(qemu.clone(), id, entries, submission, completion)
}

fn enable(qemu: &Qemu, admin: &mut Queue<()>) {
    admin.reset();
    let (submission, completion, entries) = (admin.submission, admin.completion, admin.entries);
    qemu.enable(AdminQueues { submission, completion, entries });
}

fn outcome(admin: &mut Queue<()>, command: &Command) -> Outcome {
    let taken = admin.submit(command, ());
    assert!(taken.is_ok(), "{taken:?}");
    admin.ring();
    admin.wait().outcome
}

fn identify(
    qemu: &Qemu,
    admin: &mut Queue<()>,
    command: &Command,
    data: u64,
) -> [u8; identify::IDENTIFY_BYTES] {
    assert_eq!(outcome(admin, command), Outcome::Done(0), "{command:?}");
    let mut bytes = [0; identify::IDENTIFY_BYTES];
    qemu.memory().read(data, &mut bytes);
    bytes
}
