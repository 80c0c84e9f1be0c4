//! The kernels that drive a pair of NVMe queues. This shares no code with the encoders of the
//! product, nor with the kernels that it stands for.

use super::{View, Work};

const PAGE_BYTES: u64 = 4096;
/// Words of `struct Queue` and `struct Transfer`.
const QUEUE_WORDS: u64 = 7;
const TRANSFER_WORDS: u64 = 6;

struct Queue {
    submissions: u64,
    completions: u64,
    tail_doorbell: u64,
    head_doorbell: u64,
    entries: u32,
    tail: u32,
    head: u32,
    phase: u32,
    taken: u64,
}

struct Transfer {
    first_block: u64,
    data: u64,
    list: u64,
    list_here: u64,
    pages: u64,
    blocks: u64,
    command_id: u64,
    opcode: u64,
    has_sgl: bool,
}

impl Queue {
    fn read(view: &mut View, at: u64) -> Result<Queue, String> {
        let words = view.table(at, QUEUE_WORDS)?;
        let half = |word: usize| [words[word] as u32, (words[word] >> 32) as u32];
        let ([entries, tail], [head, phase]) = (half(4), half(5));
        let [submissions, completions, tail_doorbell, head_doorbell] = [0, 1, 2, 3].map(|at| words[at]);
        let taken = words[6];
        Ok(Queue {
            submissions,
            completions,
            tail_doorbell,
            head_doorbell,
            entries,
            tail,
            head,
            phase,
            taken,
        })
    }
}

impl Transfer {
    fn new(words: &[u64]) -> Transfer {
        let half = |word: usize| (words[word] & 0xffff_ffff, words[word] >> 32);
        let ((pages, blocks), (command_id, kind)) = (half(4), half(5));
        let [first_block, data, list, list_here] = [0, 1, 2, 3].map(|at| words[at]);
        let (opcode, has_sgl) = (kind & 0xff, kind >> 8 == 1);
        Transfer { first_block, data, list, list_here, pages, blocks, command_id, opcode, has_sgl }
    }

    /// The pages, in the order of the blocks.
    fn pages(&self) -> Vec<u64> {
        (0..self.pages).rev().map(|page| self.data + page * PAGE_BYTES).collect()
    }

    /// Stores the list, and gives the two words of the data pointer.
    fn pointer(&self, work: &mut Work) -> [u64; 2] {
        let (pages, descriptor) = (self.pages(), |bytes: u64, kind: u64| bytes | kind << 60);
        match (self.has_sgl, &pages[..]) {
            (true, &[only]) => [only, descriptor(PAGE_BYTES, 0)],
            (true, all) => {
                for (at, page) in (self.list_here..).step_by(16).zip(all) {
                    work.store(at, *page);
                    work.store(at + 8, descriptor(PAGE_BYTES, 0));
                }
                [self.list, descriptor(16 * self.pages, 3)]
            }
            (false, &[only]) => [only, 0],
            (false, &[first, second]) => [first, second],
            (false, all) => {
                (self.list_here..).step_by(8).zip(&all[1..]).for_each(|(at, page)| work.store(at, *page));
                [all[0], self.list]
            }
        }
    }
}

/// `(Queue* queue, const Transfer* transfers, u32 count)`
pub fn submit(view: &mut View, args: &[u64]) -> Result<Work, String> {
    let &[at, transfers, count] = args else { return Err("wrong parameters".into()) };
    let queue = Queue::read(view, at)?;
    let (mut work, mut tail) = (Work::default(), queue.tail);
    for words in view.table(transfers, count * TRANSFER_WORDS)?.chunks_exact(TRANSFER_WORDS as usize) {
        let transfer = Transfer::new(words);
        let [first, second] = transfer.pointer(&mut work);
        let shape = u64::from(transfer.has_sgl) << 14;
        let head = transfer.opcode | shape | transfer.command_id << 16 | 1 << 32;
        let entry = [head, 0, 0, first, second, transfer.first_block, transfer.blocks - 1, 0];
        let to = queue.submissions + u64::from(tail) * 64;
        (to..).step_by(8).zip(entry).for_each(|(to, word)| work.store(to, word));
        tail = (tail + 1) % queue.entries;
    }
    work.store_half(at + 36, tail);
    work.store_half(queue.tail_doorbell, tail);
    Ok(work)
}

/// `(Queue* queue, u32 count, u64 within_ns, u32* outcomes)`: what has come by now.
pub fn take(view: &mut View, args: &[u64]) -> Result<Work, String> {
    let &[at, count, _, outcomes] = args else { return Err("wrong parameters".into()) };
    let Queue { completions, head_doorbell, entries, mut head, mut phase, taken, .. } =
        Queue::read(view, at)?;
    let (mut work, mut found) = (Work::default(), 0);
    let mut changed: Vec<(u64, u32)> = Vec::new();
    while found < count {
        let last = view.half_words(completions + 16 * u64::from(head) + 12, 1)?[0];
        if (last >> 16 & 1) != phase {
            break;
        }
        let outcome = outcomes + 4 * u64::from(last & 0xffff);
        let known = changed.iter().rev().find(|(at, _)| *at == outcome).map(|(_, word)| *word);
        let before = known.map_or_else(|| view.half_words(outcome, 1).map(|words| words[0]), Ok)?;
        changed.push((outcome, ((before & 0xffff_0000) + 0x1_0000) | last >> 17));
        found += 1;
        head = (head + 1) % entries;
        phase ^= u32::from(head == 0);
    }
    changed.into_iter().for_each(|(at, word)| work.store_half(at, word));
    work.store_half(at + 40, head);
    work.store_half(at + 44, phase);
    work.store(at + 48, taken + found);
    work.store_half(head_doorbell, head);
    Ok(work)
}
