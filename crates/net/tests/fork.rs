//! An agent after `fork()`: the child can only forget it, and the parent notifications nothing.
#![allow(clippy::unwrap_used)]

mod common;

use common::{LONG, scattered, two};
use forebay_net::{Access, Agent, AgentConfig, AgentError, End, Op, Request};
use forebay_transfer::HostBuffer;
use std::sync::{Arc, mpsc};

/// What a child does, which must say `true` and hang nowhere.
fn in_child(act: impl FnOnce() -> bool) {
    // SAFETY: the child calls what it is to call in programs that fork, and ends without a
    // destructor of the test's.
    match unsafe { libc::fork() } {
        -1 => panic!("{}", std::io::Error::last_os_error()),
        0 => {
            // SAFETY: whoever hangs is ended by the kernel.
            unsafe { libc::alarm(30) };
            let right = act();
            // SAFETY: ends the child here.
            unsafe { libc::_exit(if right { 0 } else { 1 }) }
        }
        child => {
            let mut status = 0;
            // SAFETY: this test's own child, and a place for its status.
            let ended = unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!((ended, status), (child, 0), "the child did wrong, hung or died of a signal");
        }
    }
}

#[test]
fn an_agent_of_another_process_refuses_every_call_and_is_only_forgotten() {
    let (one, two) = two(1 << 16);
    let request = scattered(&one, "two", two.registration.base(), Op::Read, 4096, 16);
    let read = |request: &Request| {
        let (sender, receiver) = mpsc::channel();
        request.post(move |end| drop(sender.send(end))).unwrap();
        receiver.recv_timeout(LONG).unwrap()
    };
    assert_eq!(read(&request), End::Done { bytes: 1 << 16 });
    // The child's is not the parent's: it drops its copy.
    let mine = std::mem::ManuallyDrop::new(Agent::start(AgentConfig::named("mine")).unwrap());
    in_child(|| {
        let forked = |error: AgentError| matches!(error, AgentError::Forked(_));
        let memory = Arc::new(HostBuffer::new(10));
        let refused =
            one.agent.here().is_err_and(|forked| forked.to_string().starts_with("made before fork"))
                && request.post(|_| {}).is_err_and(forked)
                && one.agent.notify("two", vec![1], |_| {}).is_err_and(forked)
                && one.agent.register(memory, Access::OPEN).is_err_and(forked)
                && one.agent.connect("two").is_err_and(forked)
                && one.agent.event_fd().is_err_and(forked)
                && one.agent.mover().telemetry().is_err()
                && one.agent.take_notifications().is_empty();
        request.cancel();
        drop(std::mem::ManuallyDrop::into_inner(mine));
        refused
    });
    assert_eq!(read(&request), End::Done { bytes: 1 << 16 });
}
