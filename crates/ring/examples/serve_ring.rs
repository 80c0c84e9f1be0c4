//! Serves a ring for whoever wants to try a producer: `serve_ring POSTED ARMED CONTEXTS` prints the
//! path of its memory, then a line for each request that it takes, until its input ends. A read of
//! layer L of chunk C lies at (C << 20) + (L << 12), has the checksum C ^ L and 4,096 bytes; every
//! chunk whose number ends in 7 is not read. Requests of class 3 end behind those after them.

use forebay_ring::memory::{self, RingMemory};
use forebay_ring::sleep::{fall_asleep, is_to_be_woken};
use forebay_ring::{Consumer, Context, ContextResult, ContextStatus, Layout, Op, Taken, Work};
use std::error::Error;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const EPOCH: u64 = 41;
const LAYER_BYTES: u64 = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let sizes = std::env::args().skip(1).map(|size| size.parse()).collect::<Result<Vec<u16>, _>>()?;
    let [posted, armed, contexts] = sizes[..] else { return Err("POSTED ARMED CONTEXTS".into()) };
    let layout = Layout::new(posted, armed, contexts)?;
    let memory = RingMemory::create(layout, EPOCH)?;
    println!("/proc/{}/fd/{}", std::process::id(), memory.as_fd().as_raw_fd());
    let is_over = Arc::new(AtomicBool::new(false));
    let ends = Arc::clone(&is_over);
    std::thread::spawn(move || {
        // Its end is all that matters.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ends.store(true, Ordering::Release);
    });
    let (mut consumer, mut late) = (Consumer::new(layout, &memory.header()), Vec::new());
    while !is_over.load(Ordering::Acquire) {
        match consumer.take(memory.words()) {
            Ok(Some(Taken::Work(work))) if work.request.class == 3 => late.push(work),
            Ok(Some(Taken::Work(work))) => serve(&mut consumer, &memory, work),
            Ok(Some(other)) => println!("{other:?}"),
            Ok(None) if late.is_empty() => sleep(&consumer, &memory),
            Ok(None) => late.drain(..).rev().for_each(|work| serve(&mut consumer, &memory, work)),
            Err(violation) => {
                println!("{violation}");
                memory.header().close();
                break;
            }
        }
        wake(&memory);
    }
    Ok(())
}

fn serve(consumer: &mut Consumer, memory: &RingMemory, work: Work) {
    let Work { ticket, request, contexts } = work;
    println!("{:?} {} {}", request.op, request.lease, contexts.len());
    let results: Vec<ContextResult> = contexts.iter().map(|context| result(request.op, context)).collect();
    let done = results.iter().filter(|result| result.status == ContextStatus::Done).count();
    consumer.end(memory.words(), ticket, &results, done as u64 * LAYER_BYTES);
}

fn result(op: Op, context: &Context) -> ContextResult {
    let Context { extent, layer, checksum } = *context;
    if op == Op::Commit {
        return ContextResult { checksum, ..ContextResult::default() };
    }
    if extent % 10 == 7 {
        return ContextResult::failed(ContextStatus::NotRead);
    }
    let offset_bytes = (u64::from(extent) << 20) + (u64::from(layer) << 12);
    ContextResult { status: ContextStatus::Done, offset_bytes, checksum: extent ^ u32::from(layer) }
}

fn sleep(consumer: &Consumer, memory: &RingMemory) {
    let (header, asleep) = (memory.header(), memory.header().consumer_asleep());
    if fall_asleep(asleep, || consumer.has_work(memory.words())) {
        let at_most = if header.armed() > 0 { Duration::from_micros(50) } else { Duration::from_millis(20) };
        memory::wait(asleep, Some(at_most));
    }
    header.beat();
}

fn wake(memory: &RingMemory) {
    let asleep = memory.header().producer_asleep();
    if is_to_be_woken(asleep) {
        memory::wake(asleep);
    }
}
