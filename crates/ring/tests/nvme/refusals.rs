//! What the strict controller refuses, and with which status. Commands are bytes here, as a wrong
//! driver might write them.

use crate::host::{ADMIN_CQ, ADMIN_SQ, CQ, IDENTIFY, Machine, PAGE, PLACES, SQ, memory, steps};
use crate::lists::{LISTS, Lists};
use forebay_ring::controller::WordMemory;
use forebay_ring::controller::{
    AdminQueues, DoorbellError, EnableError, Faults, HostMemory, Settings, SglSetting, Status, from_prps,
    from_sgl,
};
use forebay_ring::nvme::{Command, Completion, DataPointer, Outcome, Prp};

const DATA: u64 = PLACES + PAGE;

/// A read of eight blocks into a page, as sixteen words, with some of them changed.
fn read_with(changes: &[(usize, u32)]) -> [u32; 16] {
    let data = DataPointer::Prp(Prp { prp1: DATA, prp2: 0 });
    let command = Command::Read { namespace: 1, first_block: 0, blocks: 8, data };
    changed(words_of(&command), changes)
}

fn words_of(command: &Command) -> [u32; 16] {
    let bytes = command.encode(5).unwrap();
    std::array::from_fn(|at| u32::from_le_bytes(bytes[at * 4..at * 4 + 4].try_into().unwrap()))
}

fn changed(mut words: [u32; 16], changes: &[(usize, u32)]) -> [u32; 16] {
    changes.iter().for_each(|(at, word)| words[*at] = *word);
    words
}

/// Sends commands to a queue one by one; gives the status of each.
struct Sender<'m> {
    machine: Machine<'m>,
    queue: u16,
    sq: u64,
    cq: u64,
    entries: u32,
    sent: u32,
}

impl Sender<'_> {
    fn io(memory: &WordMemory, settings: Settings) -> Sender<'_> {
        let mut machine = Machine::new(memory, settings, Faults::default());
        machine.enable();
        machine.create_queues(4);
        Sender { machine, queue: 1, sq: SQ, cq: CQ, entries: 4, sent: 0 }
    }

    fn admin(memory: &WordMemory) -> Sender<'_> {
        let mut machine = Machine::new(memory, Settings::default(), Faults::default());
        machine.enable();
        let (sq, cq) = (ADMIN_SQ, ADMIN_CQ);
        Sender { machine, queue: 0, sq, cq, entries: 8, sent: 0 }
    }

    fn send(&mut self, words: [u32; 16]) -> Status {
        let slot = u64::from(self.sent % self.entries);
        self.sent += 1;
        let Machine { memory, controller, capabilities, .. } = &mut self.machine;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.write(self.sq + slot * 64, &bytes).unwrap();
        let next = self.sent % self.entries;
        controller.write_doorbell(capabilities.tail_doorbell(self.queue), next);
        while controller.step() {}
        let mut entry = [0; 16];
        memory.read(self.cq + slot * 16, &mut entry).unwrap();
        let completion = Completion::decode(&entry);
        assert_eq!(u32::from(completion.cid), words[0] >> 16);
        assert_eq!(completion.phase, ((self.sent - 1) / self.entries).is_multiple_of(2));
        controller.write_doorbell(capabilities.head_doorbell(self.queue), next);
        Status((u32::from_le_bytes(entry[12..].try_into().unwrap()) >> 17) as u16)
    }
}

#[test]
fn an_io_command_with_a_field_that_is_not_allowed_is_refused_with_its_status() {
    let memory = memory(8);
    let mut sender = Sender::io(&memory, Settings::default());
    assert_eq!(sender.send(read_with(&[])), Status::SUCCESS);
    assert_eq!(sender.send(read_with(&[(12, 7 | 3 << 30)])), Status::SUCCESS);
    let field = Status::INVALID_FIELD;
    let flags = |flags: u32| [(0, 5 << 16 | flags | 2)];
    for (changes, status) in [
        (flags(0x7f & !2), Status::INVALID_OPCODE),
        (flags(1 << 8), field),
        (flags(1 << 10), field),
        (flags(1 << 13), field),
        (flags(2 << 14), field),
        (flags(3 << 14), field),
        ([(1, 0)], Status::INVALID_NAMESPACE),
        ([(1, 2)], Status::INVALID_NAMESPACE),
        ([(1, u32::MAX)], Status::INVALID_NAMESPACE),
        ([(2, 1)], field),
        ([(3, 1)], field),
        ([(4, 1)], field),
        ([(13, 1)], field),
        ([(14, 1)], field),
        ([(15, 1)], field),
        ([(12, 7 | 1 << 16)], field),
        ([(12, 7 | 1 << 29)], field),
        ([(12, 1024)], field),
        ([(10, 32_761)], Status::LBA_OUT_OF_RANGE),
        ([(11, 1)], Status::LBA_OUT_OF_RANGE),
        ([(6, DATA as u32 | 2)], Status::PRP_OFFSET_INVALID),
        ([(8, PAGE as u32)], field),
        ([(7, 1)], Status::DATA_TRANSFER_ERROR),
    ] {
        assert_eq!(sender.send(read_with(&changes)), status, "{changes:?}");
    }
    let beyond = read_with(&[(10, u32::MAX), (11, u32::MAX)]);
    assert_eq!(sender.send(beyond), Status::LBA_OUT_OF_RANGE);
    let flush = words_of(&Command::Flush { namespace: 1 });
    assert_eq!(sender.send(flush), Status::SUCCESS);
    assert_eq!(sender.send(changed(flush, &[(6, 4)])), field);
    assert_eq!(sender.send(changed(flush, &[(1, 2)])), Status::INVALID_NAMESPACE);
    assert_eq!(sender.machine.controller.doorbell_errors(), []);
}

#[test]
fn a_refused_command_moves_no_byte() {
    let memory = memory(8);
    let mut sender = Sender::io(&memory, Settings::default());
    memory.write(DATA, &[7; PAGE as usize]).unwrap();
    // Two pages, of which the second one is not there.
    let outside = read_with(&[(12, 15), (8, 0), (9, 1)]);
    assert_eq!(sender.send(outside), Status::DATA_TRANSFER_ERROR);
    let mut bytes = [0; PAGE as usize];
    memory.read(DATA, &mut bytes).unwrap();
    assert_eq!(bytes, [7; PAGE as usize]);
    assert_eq!(sender.send(changed(outside, &[(0, 5 << 16 | 1)])), Status::DATA_TRANSFER_ERROR);
    assert!(sender.machine.controller.image().iter().all(|byte| *byte == 0));
}

#[test]
fn prps_that_break_a_rule_are_refused() {
    let mut lists = Lists::of_pages(PAGE, 0, 1);
    let entry = |value: u64| value.to_le_bytes();
    lists.0[0].1[..8].copy_from_slice(&entry(DATA));
    lists.0[0].1[8..16].copy_from_slice(&entry(DATA + 4));
    let decode = |first, second, bytes| from_prps(&lists, PAGE, (first, second), bytes).map(|_| ());
    let offset = Err(Status::PRP_OFFSET_INVALID);
    assert_eq!(decode(DATA + 1, 0, 512), offset);
    assert_eq!(decode(DATA + 2, 0, 512), offset);
    assert_eq!(decode(DATA, 4, 512), Err(Status::INVALID_FIELD), "the second is reserved");
    assert_eq!(decode(DATA, DATA + 512, 2 * PAGE), offset, "the second page begins at 0");
    assert_eq!(decode(DATA, DATA, 2 * PAGE), Ok(()));
    assert_eq!(decode(DATA, LISTS + 4, 3 * PAGE), offset, "a list begins at a multiple of 8");
    assert_eq!(decode(DATA, LISTS, 3 * PAGE), offset, "an entry of the list has an offset");
    assert_eq!(decode(DATA, DATA, 3 * PAGE), Err(Status::DATA_TRANSFER_ERROR), "no list there");
}

#[test]
fn scatter_gather_lists_that_break_a_rule_are_refused() {
    const BLOCK: u64 = 0;
    const SEGMENT: u64 = 2 << 60;
    const LAST: u64 = 3 << 60;
    let decode_with = |setting, first: (u64, u64), list: &[(u64, u64)]| {
        let mut lists = Lists::of_pages(PAGE, 0, 1);
        for (to, (low, high)) in lists.0[0].1.chunks_exact_mut(16).zip(list) {
            to[..8].copy_from_slice(&low.to_le_bytes());
            to[8..].copy_from_slice(&high.to_le_bytes());
        }
        from_sgl(&lists, setting, first, 1024).map(|_| ())
    };
    let decode = |first, list: &[_]| decode_with(SglSetting::AnyAlignment, first, list);
    let half = (DATA, BLOCK | 512);
    assert_eq!(decode((DATA, BLOCK | 1024), &[]), Ok(()));
    assert_eq!(decode((LISTS, LAST | 32), &[half, half]), Ok(()));
    let length = Err(Status::SGL_LENGTH_INVALID);
    assert_eq!(decode((DATA, BLOCK | 1023), &[]), length);
    assert_eq!(decode((DATA, BLOCK | 1025), &[]), length);
    assert_eq!(decode((LISTS, LAST | 16), &[half]), length);
    assert_eq!(decode((LISTS, LAST | 48), &[half, half, half]), length);
    let kind = Err(Status::SGL_TYPE_INVALID);
    for other in [1_u64, 4, 5, 15] {
        assert_eq!(decode((DATA, other << 60 | 1024), &[]), kind, "type {other}");
        assert_eq!(decode((LISTS, LAST | 32), &[half, (DATA, other << 60 | 512)]), kind);
    }
    assert_eq!(decode((DATA, BLOCK | 1 << 56 | 1024), &[]), kind, "subtype");
    assert_eq!(decode((DATA, BLOCK | 1 << 32 | 1024), &[]), Err(Status::INVALID_FIELD), "reserved");
    let segment = Err(Status::INVALID_SGL_SEGMENT);
    assert_eq!(decode((LISTS, LAST), &[half, half]), segment, "no length");
    assert_eq!(decode((LISTS, LAST | 33), &[half, half]), segment, "not whole descriptors");
    assert_eq!(decode((LISTS + 4, LAST | 32), &[half, half]), segment, "not at a multiple of 8");
    assert_eq!(decode((LISTS, LAST | 32), &[half, (LISTS, LAST | 16)]), segment, "in a last segment");
    assert_eq!(decode((LISTS, SEGMENT | 32), &[half, half]), segment, "leads nowhere");
    let count = Err(Status::INVALID_SGL_COUNT);
    assert_eq!(decode((LISTS, SEGMENT | 32), &[(LISTS, LAST | 16), half]), count, "not at the end");
    assert_eq!(decode((LISTS, SEGMENT | 16), &[(LISTS, SEGMENT | 16)]), count, "in a circle");
    assert_eq!(decode((DATA, LAST | 32), &[]), Err(Status::DATA_TRANSFER_ERROR), "no list there");
    let granularity = Err(Status::SGL_GRANULARITY_INVALID);
    let odd = [(DATA, BLOCK | 510), (DATA, BLOCK | 514)];
    assert_eq!(decode_with(SglSetting::MultiplesOf4, (LISTS, LAST | 32), &odd), granularity);
    assert_eq!(decode_with(SglSetting::MultiplesOf4, (DATA + 2, BLOCK | 1024), &[]), granularity);
    assert_eq!(decode((LISTS, LAST | 32), &odd), Ok(()));
}

#[test]
fn a_list_for_a_drive_that_has_none_is_refused() {
    let memory = memory(8);
    let mut sender = Sender::io(&memory, Settings { sgl: SglSetting::Refused, ..Settings::default() });
    let list = read_with(&[(0, 5 << 16 | 1 << 14 | 2), (8, 4096)]);
    assert_eq!(sender.send(list), Status::INVALID_FIELD);
    let mut sender = Sender::io(&memory, Settings::default());
    assert_eq!(sender.send(list), Status::SUCCESS);
}

#[test]
fn an_admin_command_with_a_field_that_is_not_allowed_is_refused_with_its_status() {
    let memory = memory(8);
    let mut sender = Sender::admin(&memory);
    let data = Prp { prp1: IDENTIFY, prp2: 0 };
    let identify = words_of(&Command::IdentifyController { data });
    let field = Status::INVALID_FIELD;
    for (change, status) in [
        ((0, 5 << 16 | 6), Status::SUCCESS),
        ((0, 5 << 16 | 0x7f), Status::INVALID_OPCODE),
        ((0, 5 << 16 | 1 << 14 | 6), field),
        ((1, 1), field),
        ((10, 2), field),
        ((10, 0), Status::INVALID_NAMESPACE),
        ((11, 1), field),
        ((6, 1), Status::PRP_OFFSET_INVALID),
        ((7, 1), Status::DATA_TRANSFER_ERROR),
    ] {
        assert_eq!(sender.send(changed(identify, &[change])), status, "{change:?}");
    }
    let numbers = words_of(&Command::SetNumberOfQueues { submission: 2, completion: 2 });
    assert_eq!(sender.send(changed(numbers, &[(11, 0xffff)])), field);
    assert_eq!(sender.send(changed(numbers, &[(10, 8)])), field);
    assert_eq!(sender.send(numbers), Status::SUCCESS);
}

#[test]
fn queues_that_cannot_be_are_refused_with_their_status() {
    let memory = memory(8);
    let mut sender = Sender::admin(&memory);
    let cq = Command::CreateCompletionQueue { queue: 1, entries: 4, address: DATA, interrupt: None };
    let cq = words_of(&cq);
    let sq = Command::CreateSubmissionQueue { queue: 1, entries: 4, address: SQ, completion_queue: 1 };
    let sq = words_of(&sq);
    let (id, size) = (Status::INVALID_QUEUE_ID, Status::INVALID_QUEUE_SIZE);
    assert_eq!(sender.send(sq), Status::INVALID_COMPLETION_QUEUE, "not there yet");
    let at = DATA as u32;
    for (change, status) in [
        ((10, 3 << 16), id),
        ((10, 3 << 16 | 5), id),
        ((10, 1), size),
        ((10, 1024 << 16 | 1), size),
        ((11, 0), Status::INVALID_FIELD),
        ((11, 5), Status::INVALID_FIELD),
        ((11, 2048 << 16 | 3), Status::INVALID_INTERRUPT_VECTOR),
        ((6, at + 64), Status::PRP_OFFSET_INVALID),
        ((7, 1), Status::INVALID_FIELD),
    ] {
        assert_eq!(sender.send(changed(cq, &[change])), status, "{change:?}");
    }
    assert_eq!(sender.send(cq), Status::SUCCESS);
    assert_eq!(sender.send(cq), id, "there already");
    assert_eq!(sender.send(changed(sq, &[(11, 1)])), Status::INVALID_COMPLETION_QUEUE, "the admin queue's");
    assert_eq!(sender.send(changed(sq, &[(11, 1 << 16 | 3)])), Status::INVALID_FIELD, "a priority");
    assert_eq!(sender.send(sq), Status::SUCCESS);
    let numbers = words_of(&Command::SetNumberOfQueues { submission: 2, completion: 2 });
    assert_eq!(sender.send(numbers), Status::COMMAND_SEQUENCE_ERROR);
    let [delete_sq, delete_cq] =
        [Command::DeleteSubmissionQueue { queue: 1 }, Command::DeleteCompletionQueue { queue: 1 }];
    assert_eq!(sender.send(words_of(&delete_cq)), Status::INVALID_QUEUE_DELETION, "in use");
    assert_eq!(sender.send(words_of(&delete_sq)), Status::SUCCESS);
    assert_eq!(sender.send(words_of(&delete_sq)), id);
    assert_eq!(sender.send(changed(words_of(&delete_sq), &[(10, 0)])), id, "the admin queue");
    assert_eq!(sender.send(words_of(&delete_cq)), Status::SUCCESS);
    assert_eq!(sender.send(words_of(&delete_cq)), id);
}

#[test]
fn a_doorbell_that_cannot_be_rung_changes_nothing_and_is_told() {
    let memory = memory(8);
    let mut sender = Sender::io(&memory, Settings::default());
    let Machine { controller, capabilities, .. } = &mut sender.machine;
    let (tail, head) = (capabilities.tail_doorbell(1), capabilities.head_doorbell(1));
    let no_queue = capabilities.tail_doorbell(2);
    let wrong = [(tail, 0), (tail, 4), (tail, u32::MAX), (head, 1), (head, 0)];
    let nowhere = [(0, 0), (0xffc, 1), (0x1002, 1), (no_queue, 1), (u64::MAX, 1)];
    wrong.iter().chain(&nowhere).for_each(|(offset, value)| controller.write_doorbell(*offset, *value));
    let values = wrong.map(|(offset, value)| DoorbellError::InvalidValue { offset, value });
    let registers = nowhere.map(|(offset, _)| DoorbellError::InvalidRegister { offset });
    assert_eq!(controller.doorbell_errors(), [values, registers].concat());
    assert!(!controller.step(), "there is nothing to fetch");
    let before = controller.doorbell_errors().len();
    controller.write_doorbell(tail, 3);
    // The ring has one entry left, which must stay free.
    controller.write_doorbell(tail, 0);
    assert_eq!(controller.doorbell_errors().len(), before + 1);
}

#[test]
fn a_controller_with_admin_queues_that_cannot_be_does_not_become_ready() {
    let memory = memory(8);
    let mut machine = Machine::new(&memory, Settings::default(), Faults::default());
    let good = AdminQueues { sq_address: SQ, sq_entries: 2, cq_address: DATA, cq_entries: 2 };
    let mut enable = |queues| machine.controller.enable(queues);
    assert_eq!(enable(good), Ok(()));
    let refused = EnableError::Entries { field: "AQA.ASQS", entries: 1 };
    assert_eq!(enable(AdminQueues { sq_entries: 1, ..good }), Err(refused));
    let refused = EnableError::Entries { field: "AQA.ACQS", entries: 4097 };
    assert_eq!(enable(AdminQueues { cq_entries: 4097, ..good }), Err(refused));
    for address in [SQ + 64, 0, u64::MAX - 4095] {
        let refused = EnableError::Address { field: "ASQ", address };
        assert_eq!(enable(AdminQueues { sq_address: address, ..good }), Err(refused));
    }
}

#[test]
fn a_command_identifier_that_is_in_use_is_refused() {
    let memory = memory(8);
    let faults = Faults { slow_steps: 1_000_000, seed: 3, ..Faults::default() };
    let mut machine = Machine::new(&memory, Settings::default(), faults);
    machine.enable();
    machine.create_queues(4);
    let bytes: Vec<u8> = read_with(&[]).iter().flat_map(|word| word.to_le_bytes()).collect();
    memory.write(SQ, &bytes).unwrap();
    memory.write(SQ + 64, &bytes).unwrap();
    machine.controller.write_doorbell(machine.capabilities.tail_doorbell(1), 2);
    (0..10).for_each(|_| assert!(machine.controller.step()));
    let mut entry = [0; 16];
    memory.read(CQ, &mut entry).unwrap();
    let status = Completion::decode(&entry).status;
    assert_eq!((status.code_type, status.code, status.do_not_retry), (0, 3, true));
}

/// A machine with one command in queue 1, fetched and a long way from its end.
fn with_slow_command(memory: &WordMemory, words: [u32; 16]) -> Machine<'_> {
    let faults = Faults { slow_steps: 1000, seed: 3, ..Faults::default() };
    let mut machine = Machine::new(memory, Settings::default(), faults);
    machine.enable();
    machine.create_queues(4);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    memory.write(SQ, &bytes).unwrap();
    machine.controller.write_doorbell(machine.capabilities.tail_doorbell(1), 1);
    machine.controller.step();
    machine
}

#[test]
fn commands_of_a_deleted_queue_are_aborted() {
    let memory = memory(8);
    let mut machine = with_slow_command(&memory, read_with(&[]));
    assert_eq!(machine.admin(Command::DeleteSubmissionQueue { queue: 1 }), Outcome::Done(0));
    steps(&mut machine.controller, 4);
    let mut entry = [0; 16];
    memory.read(CQ, &mut entry).unwrap();
    assert_eq!(Completion::decode(&entry).status.code, 8);
}

#[test]
fn a_disabled_controller_moves_no_byte() {
    let memory = memory(8);
    memory.write(DATA, &[7; PAGE as usize]).unwrap();
    let mut machine = with_slow_command(&memory, read_with(&[(0, 5 << 16 | 1)]));
    machine.controller.disable();
    steps(&mut machine.controller, 2000);
    assert!(machine.controller.image().iter().all(|byte| *byte == 0));
    let mut entry = [0; 16];
    memory.read(CQ, &mut entry).unwrap();
    assert_eq!(entry, [0; 16]);
}

#[test]
fn completions_wait_while_their_queue_is_full() {
    let memory = memory(8);
    let mut machine = Machine::new(&memory, Settings::default(), Faults::default());
    machine.enable();
    machine.create_queues(4);
    let flush = words_of(&Command::Flush { namespace: 1 });
    let bytes: Vec<u8> = flush.iter().flat_map(|word| word.to_le_bytes()).collect();
    (0..4).for_each(|slot| memory.write(SQ + slot * 64, &bytes).unwrap());
    let [tail, head] = [machine.capabilities.tail_doorbell(1), machine.capabilities.head_doorbell(1)];
    for value in [3, 2] {
        machine.controller.write_doorbell(tail, value);
        steps(&mut machine.controller, 20);
    }
    let last_entry = || memory.load(CQ + 3 * 16 + 12).unwrap();
    assert_eq!(last_entry(), 0, "one entry stays free");
    machine.controller.write_doorbell(head, 1);
    steps(&mut machine.controller, 20);
    assert_eq!(last_entry(), 1 << 16 | 5);
    assert_eq!(memory.load(CQ + 12).unwrap(), 1 << 16 | 5, "of the first round");
    assert_eq!(machine.controller.doorbell_errors(), []);
}
