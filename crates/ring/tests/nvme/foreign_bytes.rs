//! Bytes of the other side may be anything: a drive's structures for the driver, a driver's
//! commands and doorbells for the controller. Nothing panics, and nothing leaves memory.

use crate::host::{ADMIN_SQ, Machine, PAGE, PLACES, SQ, memory, steps};
use forebay_ring::controller::{Faults, HostMemory, Settings};
use forebay_ring::nvme::{
    Capabilities, Command, Completion, ControllerIdentity, IdentifyError, NamespaceIdentity, Outcome, Prp,
    SglSupport,
};
use proptest::prelude::*;

/// A structure of Identify that is zero but for these bytes.
fn structure(bytes: &[(usize, u8)]) -> Box<[u8; 4096]> {
    let mut structure = Box::new([0; 4096]);
    bytes.iter().for_each(|(at, byte)| structure[at % 4096] = *byte);
    structure
}

/// Entries that are nearly commands: an opcode that exists, addresses in memory or not.
fn entry() -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop_oneof![Just(0_u8), Just(1), Just(2), Just(4), Just(5), Just(6), Just(9), any::<u8>()];
    let address = prop_oneof![
        (0_u64..40).prop_map(|pages| PLACES + pages * PAGE),
        (0_u64..4096).prop_map(|bytes| PLACES + bytes),
        any::<u64>(),
    ];
    let list = (0_u64..64, 0_u64..5).prop_map(|(count, kind)| (kind << 60) | (count * 16));
    let second = prop_oneof![address.clone(), list, Just(0)];
    let dwords = prop::collection::vec(prop_oneof![4 => 0_u32..20, 1 => any::<u32>()], 6);
    let flags = prop_oneof![3 => Just(0_u8), 2 => Just(0x40), 1 => any::<u8>()];
    let namespace = prop_oneof![4 => Just(1_u32), 1 => any::<u32>()];
    (opcode, flags, any::<u16>(), namespace, address, second, dwords).prop_map(
        |(opcode, flags, cid, namespace, first, second, dwords)| {
            let mut bytes = vec![opcode, flags];
            bytes.extend(cid.to_le_bytes());
            bytes.extend(namespace.to_le_bytes());
            bytes.extend([0; 16]);
            bytes.extend(first.to_le_bytes());
            bytes.extend(second.to_le_bytes());
            dwords.iter().for_each(|dword| bytes.extend(dword.to_le_bytes()));
            bytes
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5_000))]

    #[test]
    fn any_completion_can_be_decoded(bytes in any::<[u8; 16]>(), register in any::<u64>()) {
        let completion = Completion::decode(&bytes);
        prop_assert_eq!(completion.cid, u16::from_le_bytes([bytes[12], bytes[13]]));
        let doorbell = Capabilities::decode(register).head_doorbell(u16::MAX);
        prop_assert!(doorbell > 0x1000);
    }

    #[test]
    fn any_identity_is_refused_or_has_sensible_limits(
        bytes in prop::collection::vec((0_usize..600, any::<u8>()), 0..600),
        sizes in prop_oneof![Just((0x66_u8, 0x44_u8)), any::<(u8, u8)>()],
        min_page_bytes in prop_oneof![(12_u32..28).prop_map(|log2| 1 << log2), any::<u64>()],
    ) {
        let mut bytes = structure(&bytes);
        (bytes[512], bytes[513]) = sizes;
        if let Ok(controller) = ControllerIdentity::decode(&bytes, min_page_bytes) {
            let range = min_page_bytes.min(1 << 32)..=1 << 32;
            prop_assert!(range.contains(&controller.max_transfer_bytes));
        }
        if let Ok(namespace) = NamespaceIdentity::decode(&bytes) {
            prop_assert!(namespace.blocks > 0 && namespace.blocks.checked_mul(namespace.block_bytes).is_some());
            prop_assert!((512..=65_536).contains(&namespace.block_bytes));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    #[test]
    fn a_controller_survives_any_commands_and_doorbells(
        entries in prop::collection::vec((entry(), any::<bool>()), 1..30),
        doorbells in prop::collection::vec((prop_oneof![0x1000_u64..0x1040, any::<u64>()], any::<u32>()), 0..4),
        lists in prop::collection::vec(any::<u8>(), 64),
    ) {
        let memory = memory(8);
        let mut machine = Machine::new(&memory, Settings::default(), Faults::default());
        machine.enable();
        machine.create_queues(64);
        memory.write(PLACES, &lists).unwrap();
        let (mut admin, mut io) = (3_u32, 0_u32);
        for (entry, is_admin) in &entries {
            let (queue, sq, slots, tail) =
                if *is_admin { (0, ADMIN_SQ, 8, &mut admin) } else { (1, SQ, 64, &mut io) };
            memory.write(sq + u64::from(*tail % slots) * 64, entry).unwrap();
            *tail += 1;
            let Machine { controller, capabilities, .. } = &mut machine;
            controller.write_doorbell(capabilities.tail_doorbell(queue), *tail % slots);
            steps(controller, 4);
        }
        doorbells.iter().for_each(|(offset, value)| machine.controller.write_doorbell(*offset, *value));
        steps(&mut machine.controller, 40);
        // It still does what it should.
        machine.enable();
        machine.create_queues(4);
        let identify = Command::IdentifyController { data: Prp { prp1: PLACES, prp2: 0 } };
        prop_assert_eq!(machine.admin(identify), Outcome::Done(0));
    }
}

#[test]
fn a_drive_that_cannot_be_used_is_refused_with_the_field() {
    let sizes = [(512, 0x66), (513, 0x44)];
    let controller = |changes: &[(usize, u8)], page| {
        ControllerIdentity::decode(&structure(&[&sizes[..], changes].concat()), page)
    };
    assert_eq!(controller(&[(512, 0x55)], 4096), Err(IdentifyError::SubmissionEntrySize(0x55)));
    assert_eq!(controller(&[(512, 0x77)], 4096), Err(IdentifyError::SubmissionEntrySize(0x77)));
    assert_eq!(controller(&[(513, 0x33)], 4096), Err(IdentifyError::CompletionEntrySize(0x33)));
    assert_eq!(controller(&[(536, 3)], 4096), Err(IdentifyError::SglSupport(3)));
    assert_eq!(controller(&[], 2048), Err(IdentifyError::PageBytes(2048)));
    let namespace = |changes: &[(usize, u8)]| {
        NamespaceIdentity::decode(&structure(&[&[(0, 8), (130, 9)][..], changes].concat()))
    };
    assert_eq!(namespace(&[]), Ok(NamespaceIdentity { blocks: 8, block_bytes: 512 }));
    assert_eq!(namespace(&[(0, 0)]), Err(IdentifyError::NoBlocks));
    assert_eq!(namespace(&[(26, 1)]), Err(IdentifyError::Format { format: 1, last: 0 }));
    assert_eq!(namespace(&[(130, 8)]), Err(IdentifyError::BlockSize(8)));
    assert_eq!(namespace(&[(130, 17)]), Err(IdentifyError::BlockSize(17)));
    assert_eq!(namespace(&[(128, 8)]), Err(IdentifyError::Metadata(8)));
    let too_many = IdentifyError::Size { blocks: 8 | 1 << 63, block_bytes: 512 };
    assert_eq!(namespace(&[(7, 0x80)]), Err(too_many));
    // A second format of 4 KiB, and a seventeenth by the two high bits.
    assert_eq!(namespace(&[(25, 1), (26, 1), (134, 12)]).unwrap().block_bytes, 4096);
    assert_eq!(namespace(&[(25, 16), (26, 1 << 5), (194, 12)]).unwrap().block_bytes, 4096);
}

#[test]
fn the_largest_transfer_is_counted_in_the_smallest_page() {
    let identity = |mdts, page| {
        let bytes = structure(&[(512, 0x66), (513, 0x44), (77, mdts), (536, 2), (537, 12), (538, 4)]);
        ControllerIdentity::decode(&bytes, page).unwrap()
    };
    assert_eq!(identity(5, 4096).max_transfer_bytes, 128 << 10);
    assert_eq!(identity(5, 8192).max_transfer_bytes, 256 << 10);
    assert_eq!(identity(0, 4096).max_transfer_bytes, 1 << 32);
    assert_eq!(identity(255, 4096).max_transfer_bytes, 1 << 32);
    let identity = identity(5, 4096);
    assert_eq!(identity.sgl, SglSupport::Dwords);
    assert_eq!((identity.sgl_descriptor_threshold, identity.sgl_may_be_longer), (Some(12), true));
    let capabilities = Capabilities::decode(1 << 52 | 1 << 48 | 2 << 32 | 20 << 24 | 63);
    assert_eq!((capabilities.max_queue_entries, capabilities.timeout_ms), (64, 10_000));
    assert_eq!((capabilities.min_page_bytes, capabilities.max_page_bytes), (8192, 8192));
    assert_eq!((capabilities.tail_doorbell(1), capabilities.head_doorbell(1)), (0x1020, 0x1030));
}
