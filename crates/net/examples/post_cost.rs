//! Prints what making and posting a request costs the caller, per descriptor: a strided list of
//! 10,000 blocks, none of which joins its neighbour. Best of many; the transfers run to their ends
//! in between.

use forebay_net::*;
use forebay_transfer::HostBuffer;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const COUNT: u64 = 10_000;
const STRIDE: u64 = 128;
const ROUNDS: u32 = 50;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (one, two) = (Agent::start(AgentConfig::named("one"))?, Agent::start(AgentConfig::named("two"))?);
    let memory = || Arc::new(HostBuffer::new((COUNT * STRIDE) as usize));
    let (here, there) = (one.register(memory(), Access::OPEN)?, two.register(memory(), Access::OPEN)?);
    let peer = one.add_peer(&two.metadata())?;
    one.connect(&peer)?;
    let list = |base| Descriptors::from_runs([Run { address: base, len: 64, count: COUNT, stride: STRIDE }]);
    let local = one.prepare_local(&list(here.base())?)?;
    let remote = one.prepare_remote(&peer, &list(there.base())?)?;
    let (mut making, mut posting) = (Duration::MAX, Duration::MAX);
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let request = one.request(Op::Read, (&local, Select::All), (&remote, Select::All), None, None)?;
        making = making.min(began.elapsed());
        let (sender, receiver) = mpsc::channel();
        let began = Instant::now();
        request.post(move |end| drop(sender.send(end)))?;
        posting = posting.min(began.elapsed());
        assert_eq!(receiver.recv()?, End::Done { bytes: COUNT * 64 });
    }
    let each = |time: Duration| time.as_nanos() as f64 / COUNT as f64;
    println!("make {:.1} ns, post {:.1} ns per descriptor", each(making), each(posting));
    Ok(())
}
