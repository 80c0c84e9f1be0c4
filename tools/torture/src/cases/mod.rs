//! The cases: what is done to a store, and what it may do then. Every case also fails when a value
//! comes back wrong, a command is not answered in time, a worker dies or an answer is an exception;
//! a case says only what comes on top. Cases must never know which store they torture.

mod astray;
mod clock;
mod crash;
mod damage;
mod image;
mod load;
mod memory;
mod owners;
mod place;
mod restart;
mod runtime;
mod space;
mod torn;

use crate::case::Case;

/// All cases, in the order in which they are run.
pub fn all() -> Vec<Case> {
    let groups = [
        restart::CASES,
        damage::CASES,
        place::CASES,
        astray::CASES,
        memory::CASES,
        torn::CASES,
        image::CASES,
        runtime::CASES,
        space::CASES,
        load::CASES,
        clock::CASES,
        owners::CASES,
        crash::CASES,
    ];
    groups.concat()
}
