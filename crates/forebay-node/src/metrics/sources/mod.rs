//! What the parts of the node have to show: each file turns the snapshot of one part into numbers. These files know what
//! the parts count; they must never count themselves.

mod directory;
mod mover;
mod process;
mod ssd;
mod store;

pub use directory::of_directory;
pub use mover::of_mover;
pub use process::of_process;
pub use store::of_store;

use super::{Family, Kind, Metric};

const fn counter(name: &'static str, help: &'static str) -> Family {
    Family { name, help, kind: Kind::Counter }
}

const fn gauge(name: &'static str, help: &'static str) -> Family {
    Family { name, help, kind: Kind::Gauge }
}

/// One number for each value of a label.
fn push_each(
    out: &mut Vec<Metric>,
    family: &'static Family,
    label: &'static str,
    values: &[(&'static str, u64)],
) {
    out.extend(values.iter().map(|&(value, number)| Metric::new(family, &[(label, value)], number as f64)));
}

/// One number without labels.
fn push_one(out: &mut Vec<Metric>, family: &'static Family, number: f64) {
    out.push(Metric::new(family, &[], number));
}
