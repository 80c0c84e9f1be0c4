//! Many chunks in a message: few messages for a long prompt, and an end of its own for each chunk.

use crate::rig::*;
use forebay_client::{NewChunk, Reserved, Slot};
use forebay_kv::ChunkId;
use forebay_node::{Node, SsdConfig, WriteBackPolicy};
use forebay_store::{ChunkShape, StoreEnd};
use forebay_transfer::Class;
use std::sync::mpsc::channel;
use testkit::ended;

/// A prompt of this many chunks costs few messages.
const PROMPT: usize = 600;

fn chunk_id(number: usize) -> ChunkId {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&(number as u64).to_le_bytes());
    ChunkId::from_bytes(bytes)
}

/// Reserves chunks that follow one another, and says what became of each.
fn reserve(peer: &Peer, chunks: usize) -> Vec<Reserved> {
    let new = |number: usize| NewChunk { id: chunk_id(number), parent: number.checked_sub(1).map(chunk_id) };
    let chunks: Vec<NewChunk> = (0..chunks).map(new).collect();
    let (sender, ends) = channel();
    let shape = ChunkShape::new([1000, 2000]).unwrap();
    peer.client.reserve(&shape, &chunks, move |number, end| drop(sender.send((number, end))));
    let mut ends: Vec<(usize, Reserved)> = chunks.iter().map(|_| ended(&ends)).collect();
    ends.sort_by_key(|(number, _)| *number);
    ends.into_iter().map(|(_, end)| end).collect()
}

fn slot(reserved: Reserved) -> Slot {
    match reserved {
        Reserved::Slot(slot) => slot,
        other => panic!("{other:?}"),
    }
}

/// Commits slots as they are, and says what became of each.
fn commit(slots: Vec<Slot>) -> Vec<StoreEnd> {
    let receivers: Vec<_> = slots
        .into_iter()
        .map(|slot| {
            let (sender, end) = channel();
            let sums = slot.sums(&[]);
            slot.commit(sums, move |end| drop(sender.send(end)));
            end
        })
        .collect();
    receivers.iter().map(ended).collect()
}

#[test]
fn a_long_prompt_costs_few_messages_and_few_reads_and_comes_whole() {
    let site = Site::new();
    let mut config = site.config();
    let path = site.folder.path().join("log");
    config.ssd = vec![SsdConfig { path, size: 64 << 20, segment_size: 1 << 20, create: true }];
    config.write_back = WriteBackPolicy::All;
    let node = Node::start(&config).unwrap();
    let writer = site.peer();
    let before = writer.client.messages();
    let ends = commit(reserve(&writer, PROMPT).into_iter().map(slot).collect());
    assert!(ends.iter().all(|end| *end == StoreEnd::Stored { bytes: 3000 }));
    // Three to reserve, six to commit, and the answers; there may be a ping.
    let messages = writer.client.messages() - before;
    assert!(messages <= 20, "{messages}");
    drop(writer);
    node.drain(PATIENCE).unwrap();

    let node = Node::start(&config).unwrap();
    let reader = site.peer();
    let ids: Vec<ChunkId> = (0..PROMPT).map(chunk_id).collect();
    let lease = reader.client.lease(&ids, MINUTE_US);
    assert_eq!((lease.in_memory(), lease.on_disk()), (0, PROMPT));
    let (before, (sender, ends)) = (reader.client.messages(), channel());
    let chunks: Vec<usize> = (0..PROMPT).collect();
    let on_end = move |chunk, end: Result<_, String>| {
        let _ = sender.send((chunk, end.is_ok()));
    };
    reader.client.bring(&lease, &chunks, Class::Demand, None, on_end);
    let mut came: Vec<_> = chunks.iter().map(|_| ended(&ends)).collect();
    came.sort_unstable();
    assert!(came.into_iter().eq(chunks.into_iter().map(|chunk| (chunk, true))), "each has one end");
    let messages = reader.client.messages() - before;
    assert!(messages <= 12, "{messages}");
    let reads = node.store().disk_stat().unwrap().ssd.reads;
    assert!(reads <= 12, "{reads}");
}

#[test]
fn chunks_of_one_message_end_each_in_its_own_way() {
    let site = Site::new();
    let mut config = site.config();
    config.limits.slots_per_client = 5;
    let node = Node::start(&config).unwrap();
    let peer = site.peer();
    assert_eq!(commit(vec![slot(reserve(&peer, 1).remove(0))]), [StoreEnd::Stored { bytes: 3000 }]);
    let mut reserved = reserve(&peer, 8);
    assert!(matches!(reserved[0], Reserved::Here));
    for beyond in reserved.drain(6..) {
        assert!(matches!(&beyond, Reserved::Refused(why) if why.contains("5 slots")), "{beyond:?}");
    }
    let mut slots: Vec<Slot> = reserved.drain(1..).map(slot).collect();
    // Wrong in number, so that the node refuses it, and given back.
    let (sender, refused) = channel();
    slots.pop().unwrap().commit(vec![1], move |end| drop(sender.send(end)));
    drop(slots.pop());
    assert_eq!(commit(slots), vec![StoreEnd::Stored { bytes: 3000 }; 3]);
    assert!(matches!(ended(&refused), StoreEnd::Failed(_)));
    let ids: Vec<ChunkId> = (0..8).map(chunk_id).collect();
    assert_eq!((peer.client.lookup(&ids), node.stat().slots), (4, 0));

    let lease = peer.client.lease(&ids, MINUTE_US);
    let (sender, ends) = channel();
    let on_end = move |chunk, end: Result<_, String>| drop(sender.send((chunk, end.err())));
    peer.client.bring(&lease, &[2, 9, 0], Class::Demand, None, on_end);
    let mut ends: Vec<_> = (0..3).map(|_| ended(&ends)).collect();
    ends.sort();
    let [(0, None), (2, None), (9, Some(why))] = &ends[..] else { panic!("{ends:?}") };
    assert!(why.contains("chunk 9"), "{why}");
}

#[test]
fn a_filled_slot_waits_for_those_of_its_message_and_for_no_others() {
    let site = Site::new();
    let _node = site.node();
    let peer = site.peer();
    let mut slots: Vec<Slot> = reserve(&peer, 3).into_iter().map(slot).collect();
    let last = slots.pop();
    let (sender, ends) = channel();
    for slot in slots {
        let (sums, told) = (slot.sums(&[]), sender.clone());
        slot.commit(sums, move |end| drop(told.send(end)));
    }
    // Stored alone, while the others wait.
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    assert!(ends.try_recv().is_err());
    drop(last);
    assert_eq!(
        [ended(&ends), ended(&ends)],
        [StoreEnd::Stored { bytes: 3000 }, StoreEnd::Stored { bytes: 3000 }]
    );
}
