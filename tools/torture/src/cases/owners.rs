//! Two processes that open the same store, as a deployment with a typing error has it.

use super::space::exceeded;
use crate::case::{Case, Verdict};
use crate::protocol::Do;
use crate::rig::Rig;
use crate::value;
use crate::worker::Broken;

pub const CASES: &[Case] = &[Case {
    name: "two owners",
    what: "a second process opens the store: it is refused, or both together stay within the capacity",
    run: two_owners,
}];

fn two_owners(rig: &mut Rig) -> Result<Verdict, Broken> {
    let disk = rig.disk();
    rig.open_and_fill()?;
    let mut second = rig.start_another()?;
    match second.open(rig.setup.clone()) {
        Err(Broken::NotOpened { reason }) => {
            rig.note(format!("refuses the second: {reason}"));
            rig.get_all(rig.keys())?;
            return Ok(Verdict::Passed);
        }
        opened => opened?,
    }
    let values = rig.scale.capacity_bytes / rig.scale.value_bytes;
    rig.put_all(rig.scale.keys..values)?;
    for key in values..2 * values {
        let value = value::value(key, 0, rig.scale.value_bytes as usize);
        second.ask(Do::Put { key }, value)?;
    }
    rig.get_all(0..values)?;
    rig.note("lets a second owner in");
    Ok(exceeded(disk.physical_bytes()?, rig.scale.capacity_bytes))
}
