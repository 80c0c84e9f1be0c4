//! Peer access that this library needs, and what the program knows of it. Access belongs to two
//! contexts, not to who turned it on: under the preload, a program that turns it on or off is
//! answered as if nobody else had, and the real access stays.

use crate::driver::abi::{self, ContextHandle, Status};
use forebay_transfer::lock::{Mutex, MutexGuard};
use libc::c_uint;
use std::cell::Cell;
use std::collections::HashMap;

/// Two contexts: who reaches whose memory.
type Pair = (usize, usize);

/// Pairs that this library needs, each with whether the program turned it on.
static NEEDED: Mutex<Option<HashMap<Pair, bool>>> = Mutex::new(None);

thread_local! {
    /// Whether this thread is in here: a call that comes back to us by way of another library is
    /// the driver's to answer.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Calls the driver.
fn inside(call: impl FnOnce() -> Status) -> Status {
    let before = INSIDE.replace(true);
    let status = call();
    INSIDE.set(before);
    status
}

fn pair(who: ContextHandle, whose: ContextHandle) -> Pair {
    (who as usize, whose as usize)
}

fn needed() -> MutexGuard<'static, Option<HashMap<Pair, bool>>> {
    // What it guards is whole at every step.
    NEEDED.lock()
}

/// Turns access on for this library. `enable` is the driver's call in the context of `who`.
pub fn need(who: ContextHandle, whose: ContextHandle, enable: impl FnOnce() -> Status) -> Status {
    let mut needed = needed();
    let status = inside(enable);
    let pairs = needed.get_or_insert_default();
    match status {
        abi::SUCCESS => _ = pairs.insert(pair(who, whose), false),
        // Unless this library was the first, the program was.
        abi::PEER_ACCESS_ALREADY_ENABLED => _ = pairs.entry(pair(who, whose)).or_insert(true),
        _ => return status,
    }
    abi::SUCCESS
}

/// The program turns access on, in its current context. `real` is the call that it would have made.
pub fn enabled(
    who: ContextHandle,
    whose: ContextHandle,
    flags: c_uint,
    real: impl FnOnce() -> Status,
) -> Status {
    if INSIDE.get() {
        return real();
    }
    let mut needed = needed();
    // Also where the answer is known: a context that is lost says so.
    let status = inside(real);
    let known = needed.as_mut().and_then(|pairs| pairs.get_mut(&pair(who, whose)));
    match known {
        Some(known) if status == abi::PEER_ACCESS_ALREADY_ENABLED && flags == 0 => {
            if std::mem::replace(known, true) { status } else { abi::SUCCESS }
        }
        _ => status,
    }
}

/// The program turns access off, in its current context. `real` is the call that it would have
/// made.
pub fn disabled(who: ContextHandle, whose: ContextHandle, real: impl FnOnce() -> Status) -> Status {
    if INSIDE.get() {
        return real();
    }
    let mut needed = needed();
    match needed.as_mut().and_then(|pairs| pairs.get_mut(&pair(who, whose))) {
        Some(known) => match std::mem::replace(known, false) {
            true => abi::SUCCESS,
            false => abi::PEER_ACCESS_NOT_ENABLED,
        },
        None => inside(real),
    }
}

/// A context is reset: nothing that it had is left.
pub fn forget(context: ContextHandle) {
    if let Some(pairs) = needed().as_mut() {
        pairs.retain(|&(who, whose), _| who != context as usize && whose != context as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(number: usize) -> ContextHandle {
        std::ptr::without_provenance_mut(number)
    }

    /// A driver with one pair of contexts.
    struct Pretended(bool);

    impl Pretended {
        fn enable(&mut self) -> Status {
            if std::mem::replace(&mut self.0, true) { abi::PEER_ACCESS_ALREADY_ENABLED } else { abi::SUCCESS }
        }

        fn disable(&mut self) -> Status {
            if std::mem::replace(&mut self.0, false) { abi::SUCCESS } else { abi::PEER_ACCESS_NOT_ENABLED }
        }
    }

    /// Runs the program's calls, `+` and `-`, with this library's own, `!`, among them. Gives what
    /// the program was answered.
    fn answers(number: usize, calls: &str) -> (Vec<Status>, bool) {
        let (who, whose) = (context(number), context(number + 1));
        let mut driver = Pretended(false);
        let mut answers = Vec::new();
        for call in calls.chars() {
            match call {
                '!' => assert_eq!(need(who, whose, || driver.enable()), abi::SUCCESS),
                '+' => answers.push(enabled(who, whose, 0, || driver.enable())),
                _ => answers.push(disabled(who, whose, || driver.disable())),
            }
        }
        forget(who);
        (answers, driver.0)
    }

    #[test]
    fn a_program_is_answered_as_if_nobody_else_had_turned_access_on() {
        const CALLS: usize = 6;
        let programs = (0..1 << CALLS).map(|bits: u32| {
            (0..CALLS).map(|nth| if bits >> nth & 1 == 0 { '+' } else { '-' }).collect::<String>()
        });
        for (nth, program) in programs.enumerate() {
            let (alone, _) = answers(1_000 + 2 * nth, &program);
            for place in 0..=CALLS {
                let with_us = format!("{}!{}", &program[..place], &program[place..]);
                let (answered, is_on) = answers(100_000 + 2 * (nth * 10 + place), &with_us);
                assert_eq!(answered, alone, "{with_us}");
                assert!(is_on, "{with_us}: the access that is needed was taken away");
            }
        }
    }

    #[test]
    fn a_lost_context_says_so_also_where_the_answer_is_known() {
        let (who, whose) = (context(10), context(11));
        assert_eq!(need(who, whose, || abi::SUCCESS), abi::SUCCESS);
        assert_eq!(enabled(who, whose, 0, || 700), 700);
        assert_eq!(need(context(12), whose, || 700), 700);
        assert_eq!(disabled(context(12), whose, || 705), 705, "what is not needed is the driver's to answer");
        forget(whose);
    }
}
