//! A host for tests: memory, the controller, and a driver that brings it up with the encoders and
//! runs reads and writes through one queue until each has succeeded, whatever goes wrong.

use forebay_ring::controller::{
    AdminQueues, Controller, DoorbellError, Faults, HostMemory, Settings, WordMemory,
};
use forebay_ring::nvme::{
    Capabilities, Command, ControllerIdentity, DataPointer, Ended, Fault, Format, ListPage,
    NamespaceIdentity, Outcome, Polled, Prp, QueuePair, Segment, Submitted,
};
use forebay_ring::nvme::{prp, sgl};

pub const PAGE: u64 = 4096;
pub const MEMORY: u64 = 0x1000_0000;
pub const ADMIN_SQ: u64 = MEMORY;
pub const ADMIN_CQ: u64 = MEMORY + PAGE;
pub const IDENTIFY: u64 = MEMORY + 2 * PAGE;
pub const SQ: u64 = MEMORY + 16 * PAGE;
pub const CQ: u64 = SQ + 1024 * 64;
/// A page for the list of each place, and then four for its data.
pub const PLACES: u64 = CQ + 1024 * 16;
pub const PLACE_PAGES: u64 = 5;
const ADMIN_ENTRIES: u32 = 8;
const QUEUE: u16 = 1;
/// CAP of the controller's default settings.
pub const CAPABILITIES: u64 = 1 << 37 | 10 << 24 | 1023;

/// Memory and the controller over it.
pub struct Machine<'m> {
    pub memory: &'m WordMemory,
    pub controller: Controller<&'m WordMemory>,
    pub capabilities: Capabilities,
    admin: QueuePair<()>,
}

pub fn memory(places: u64) -> WordMemory {
    WordMemory::new(MEMORY, (PLACES - MEMORY + places * PLACE_PAGES * PAGE) as usize)
}

impl<'m> Machine<'m> {
    pub fn new(memory: &'m WordMemory, settings: Settings, faults: Faults) -> Machine<'m> {
        let admin = QueuePair::new(0, ADMIN_ENTRIES, ADMIN_ENTRIES).unwrap();
        let controller = Controller::new(memory, settings, faults);
        Machine { memory, controller, capabilities: Capabilities::decode(CAPABILITIES), admin }
    }

    /// Disables the controller, if it was enabled, and enables it with empty admin queues.
    pub fn enable(&mut self) {
        self.controller.disable();
        assert!(self.admin.reset().is_empty());
        self.memory.write(ADMIN_CQ, &[0; ADMIN_ENTRIES as usize * 16]).unwrap();
        let (sq_entries, cq_entries) = (ADMIN_ENTRIES, ADMIN_ENTRIES);
        let queues = AdminQueues { sq_address: ADMIN_SQ, sq_entries, cq_address: ADMIN_CQ, cq_entries };
        self.controller.enable(queues).unwrap();
    }

    /// Runs an admin command to its end.
    pub fn admin(&mut self, command: Command) -> Outcome {
        let submitted = self.admin.submit(&command, ()).unwrap();
        self.memory.write(ADMIN_SQ + u64::from(submitted.slot) * 64, &submitted.entry).unwrap();
        self.controller.write_doorbell(self.capabilities.tail_doorbell(0), self.admin.sq_tail());
        for _ in 0..100 {
            self.controller.step();
            match self.admin.poll(|slot, word| load(self.memory, ADMIN_CQ, slot, word)) {
                Polled::Nothing => continue,
                Polled::Fault(fault) => panic!("{fault}"),
                Polled::Ended(ended) => {
                    let head = self.admin.cq_head();
                    self.controller.write_doorbell(self.capabilities.head_doorbell(0), head);
                    return ended.outcome;
                }
            }
        }
        panic!("{command:?} did not end");
    }

    pub fn identify(&mut self) -> (ControllerIdentity, NamespaceIdentity) {
        let data = Prp { prp1: IDENTIFY, prp2: 0 };
        let mut bytes = [0; 4096];
        let mut read = |command, machine: &mut Self| {
            assert_eq!(machine.admin(command), Outcome::Done(0));
            machine.memory.read(IDENTIFY, &mut bytes).unwrap();
            bytes
        };
        let controller = read(Command::IdentifyController { data }, self);
        let namespace = read(Command::IdentifyNamespace { namespace: 1, data }, self);
        let controller = ControllerIdentity::decode(&controller, self.capabilities.min_page_bytes);
        (controller.unwrap(), NamespaceIdentity::decode(&namespace).unwrap())
    }

    /// Creates queue 1 with so many entries.
    pub fn create_queues(&mut self, entries: u32) {
        self.memory.write(CQ, &vec![0; entries as usize * 16]).unwrap();
        let numbers = Command::SetNumberOfQueues { submission: 4, completion: 4 };
        assert_eq!(self.admin(numbers), Outcome::Done(3 << 16 | 3));
        let (queue, interrupt) = (QUEUE, None);
        let cq = Command::CreateCompletionQueue { queue, entries, address: CQ, interrupt };
        assert_eq!(self.admin(cq), Outcome::Done(0));
        let sq = Command::CreateSubmissionQueue { queue, entries, address: SQ, completion_queue: queue };
        assert_eq!(self.admin(sq), Outcome::Done(0));
    }

    /// Writes an entry into queue 1, without its doorbell.
    pub fn write_entry(&self, submitted: &Submitted) {
        self.memory.write(SQ + u64::from(submitted.slot) * 64, &submitted.entry).unwrap();
    }
}

/// So many steps, whether anything is under way or not.
pub fn steps(controller: &mut Controller<&WordMemory>, count: u32) {
    for _ in 0..count {
        controller.step();
    }
}

/// A word of a completion queue.
pub fn load(memory: &WordMemory, queue: u64, slot: u32, word: usize) -> u32 {
    memory.load(queue + u64::from(slot) * 16 + word as u64 * 4).unwrap()
}

/// A number below a bound, from a seed that moves on.
pub fn random(seed: &mut u64, below: u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) % below
}

/// Blocks of the drive that belong to a place.
pub const PLACE_BLOCKS: u64 = 16;
const BLOCK: usize = 512;
/// What data memory holds before a read.
const UNTOUCHED: u8 = 0xa5;

/// A read or write of a place's blocks.
#[derive(Clone)]
struct Operation {
    place: usize,
    is_write: bool,
    block: u64,
    blocks: u64,
    memory: Vec<Segment>,
    /// Which submission this is.
    serial: usize,
}

/// What came of a run.
#[derive(Default, Debug)]
pub struct Report {
    pub succeeded: u64,
    pub failed: u64,
    pub ended_by_reset: u64,
    pub resets: u64,
    pub duplicates: u64,
    pub rounds: u64,
    pub wrong_bytes: u64,
    pub not_ended_once: usize,
}

/// Reads and writes through one queue.
pub struct Driver<'m> {
    machine: Machine<'m>,
    queue: QueuePair<Operation>,
    entries: u32,
    format: Format,
    seed: u64,
    /// What the drive must hold, by place.
    model: Vec<Vec<u8>>,
    idle: Vec<usize>,
    again: Vec<Operation>,
    /// How often each submission ended.
    ends: Vec<u8>,
    report: Report,
    steps_without_end: u64,
    completions: u64,
}

impl<'m> Driver<'m> {
    pub fn new(memory: &'m WordMemory, entries: u32, format: Format, faults: Faults) -> Driver<'m> {
        let places = entries as usize - 1;
        let mut machine = Machine::new(memory, Settings::default(), faults);
        machine.enable();
        machine.create_queues(entries);
        Driver {
            machine,
            queue: QueuePair::new(QUEUE, entries, entries).unwrap(),
            entries,
            format,
            seed: faults.seed,
            model: vec![vec![0; PLACE_BLOCKS as usize * BLOCK]; places],
            idle: (0..places).collect(),
            again: Vec::new(),
            ends: Vec::new(),
            report: Report::default(),
            steps_without_end: 0,
            completions: 0,
        }
    }

    /// Runs until so many operations have succeeded and none is outstanding.
    pub fn run(mut self, operations: u64, reset_every: Option<u64>) -> Report {
        let mut steps = 0_u64;
        while self.is_unfinished(operations) {
            steps += 1;
            if self.random(4) > 0 {
                self.submit(operations);
            }
            self.machine.controller.step();
            self.poll();
            let is_stuck = self.steps_without_end > 40 * u64::from(self.entries) + 400;
            if is_stuck || reset_every.is_some_and(|every| steps.is_multiple_of(every)) {
                self.reset();
            }
        }
        self.report.wrong_bytes += self.wrong_bytes_of_drive();
        self.report.duplicates = self.queue.faults().not_outstanding;
        self.report.rounds = self.completions / u64::from(self.entries);
        self.report.not_ended_once = self.ends.iter().filter(|ends| **ends != 1).count();
        assert_eq!(self.queue.faults().other_queue + self.queue.faults().sq_head, 0);
        assert_eq!(self.machine.controller.doorbell_errors(), [] as [DoorbellError; 0]);
        self.report
    }

    /// A write that failed is sent again, since the drive may have what it wrote.
    fn is_unfinished(&self, operations: u64) -> bool {
        self.report.succeeded < operations || self.queue.outstanding() > 0 || !self.again.is_empty()
    }

    fn random(&mut self, below: u64) -> u64 {
        random(&mut self.seed, below)
    }

    /// Submits up to as many commands as there are places, and rings once.
    fn submit(&mut self, operations: u64) {
        let tail = self.queue.sq_tail();
        for _ in 0..=self.random(4) {
            let new = |driver: &mut Self| {
                if driver.report.succeeded < operations { driver.new_operation() } else { None }
            };
            let Some(operation) = self.again.pop().or_else(|| new(self)) else { break };
            let command = self.prepare(&operation);
            self.ends.push(0);
            match self.queue.submit(&command, Operation { serial: self.ends.len() - 1, ..operation }) {
                Ok(submitted) => self.machine.write_entry(&submitted),
                Err(refused) => {
                    // Entries of the queue that the drive has not said it has read.
                    self.ends.pop();
                    self.again.push(refused.purpose);
                    break;
                }
            }
        }
        if self.queue.sq_tail() != tail {
            let doorbell = self.machine.capabilities.tail_doorbell(QUEUE);
            self.machine.controller.write_doorbell(doorbell, self.queue.sq_tail());
        }
    }

    fn new_operation(&mut self) -> Option<Operation> {
        let place = self.idle.pop()?;
        let block = self.random(PLACE_BLOCKS);
        let blocks = self.random(PLACE_BLOCKS - block) + 1;
        let is_write = self.random(2) == 0;
        let memory = match self.format {
            Format::Prp => {
                let offset = self.random(PAGE / 4) * 4;
                vec![Segment { address: data_of(place) + offset, bytes: blocks * BLOCK as u64 }]
            }
            Format::Sgl => self.scattered(place, blocks * BLOCK as u64),
        };
        Some(Operation { place, is_write, block, blocks, memory, serial: 0 })
    }

    /// Pieces of a place's memory, the first ones last, with gaps between them.
    fn scattered(&mut self, place: usize, bytes: u64) -> Vec<Segment> {
        let mut segments = Vec::new();
        let (mut left, mut address) = (bytes, data_of(place));
        while left > 0 {
            let bytes = (self.random(1500) + 1).min(left);
            segments.push(Segment { address, bytes });
            address += bytes + self.random(20);
            left -= bytes;
        }
        segments.reverse();
        segments
    }

    /// Fills the memory of an operation and encodes it, with its list in the place's page.
    fn prepare(&mut self, operation: &Operation) -> Command {
        let memory = self.machine.memory;
        let data = data_of(operation.place);
        memory.write(data, &[UNTOUCHED; 4 * PAGE as usize]).unwrap();
        if operation.is_write {
            for segment in &operation.memory {
                let bytes: Vec<u8> = (0..segment.bytes).map(|_| self.random(256) as u8).collect();
                memory.write(segment.address, &bytes).unwrap();
            }
        }
        let (list, mut bytes) = (data - PAGE, [0; PAGE as usize]);
        let pages = &mut [ListPage { address: list, bytes: &mut bytes }];
        let data = match self.format {
            Format::Prp => DataPointer::Prp(prp::encode(&operation.memory, PAGE, pages).unwrap().0),
            Format::Sgl => DataPointer::Sgl(sgl::encode(&operation.memory, false, pages).unwrap().0),
        };
        memory.write(list, &bytes).unwrap();
        let first_block = operation.place as u64 * PLACE_BLOCKS + operation.block;
        let (namespace, blocks) = (1, operation.blocks as u32);
        match operation.is_write {
            true => Command::Write { namespace, first_block, blocks, data, is_durable: false },
            false => Command::Read { namespace, first_block, blocks, data },
        }
    }

    /// Takes completions. The controller goes on between any two words that are read, and the
    /// doorbell is rung only sometimes, so that the queue fills up.
    fn poll(&mut self) {
        let before = self.queue.cq_head();
        loop {
            let Machine { memory, controller, .. } = &mut self.machine;
            let polled = self.queue.poll(|slot, word| {
                let loaded = load(memory, CQ, slot, word);
                controller.step();
                loaded
            });
            match polled {
                Polled::Nothing => break,
                Polled::Fault(fault) => assert!(matches!(fault, Fault::NotOutstanding(_)), "{fault}"),
                Polled::Ended(ended) => self.end(ended),
            }
            self.completions += 1;
            self.steps_without_end = 0;
            if self.random(8) == 0 {
                break;
            }
        }
        self.steps_without_end += 1;
        if self.queue.cq_head() != before {
            let doorbell = self.machine.capabilities.head_doorbell(QUEUE);
            self.machine.controller.write_doorbell(doorbell, self.queue.cq_head());
        }
    }

    fn end(&mut self, ended: Ended<Operation>) {
        let operation = ended.purpose;
        self.ends[operation.serial] += 1;
        match ended.outcome {
            Outcome::Done(_) => {
                self.report.succeeded += 1;
                self.idle.push(operation.place);
                self.check(&operation);
                return;
            }
            Outcome::Failed(_) => self.report.failed += 1,
            Outcome::Reset => self.report.ended_by_reset += 1,
        }
        self.again.push(operation);
    }

    /// Compares a read's memory, and all around it, or notes what was written.
    fn check(&mut self, operation: &Operation) {
        let mut bytes = vec![0; 4 * PAGE as usize];
        let data = data_of(operation.place);
        self.machine.memory.read(data, &mut bytes).unwrap();
        let mut expected = vec![UNTOUCHED; bytes.len()];
        let from = operation.block as usize * BLOCK;
        let mut model = &mut self.model[operation.place][from..from + operation.blocks as usize * BLOCK];
        for segment in &operation.memory {
            let start = (segment.address - data) as usize;
            let range = start..start + segment.bytes as usize;
            let (part, rest) = model.split_at_mut(range.len());
            if operation.is_write {
                part.copy_from_slice(&bytes[range.clone()]);
            }
            expected[range].copy_from_slice(part);
            model = rest;
        }
        self.report.wrong_bytes += differing(&bytes, &expected);
    }

    fn wrong_bytes_of_drive(&self) -> u64 {
        let image = self.machine.controller.image().chunks(PLACE_BLOCKS as usize * BLOCK);
        image.zip(&self.model).map(|(image, model)| differing(image, model)).sum()
    }

    /// What a driver does when commands are stuck: nothing is outstanding afterwards.
    fn reset(&mut self) {
        self.machine.enable();
        let ended = self.queue.reset();
        ended.into_iter().for_each(|ended| self.end(ended));
        assert_eq!(self.queue.outstanding(), 0);
        self.machine.create_queues(self.entries);
        self.report.resets += 1;
        self.steps_without_end = 0;
    }
}

fn differing(bytes: &[u8], expected: &[u8]) -> u64 {
    bytes.iter().zip(expected).filter(|(byte, expected)| byte != expected).count() as u64
}

fn data_of(place: usize) -> u64 {
    PLACES + place as u64 * PLACE_PAGES * PAGE + PAGE
}
