//! Restarts in good order: the values are still there, and only for the namespace that they belong
//! to.

use crate::case::{Case, Verdict, is_warm, still_works};
use crate::rig::Rig;
use crate::worker::Broken;

pub const CASES: &[Case] = &[
    Case { name: "warm restart", what: "close and open again: what was flushed is there", run: warm_restart },
    Case {
        name: "another namespace",
        what: "open with another model's namespace: nothing of the first is there",
        run: another_namespace,
    },
];

fn warm_restart(rig: &mut Rig) -> Result<Verdict, Broken> {
    rig.open_and_fill()?;
    rig.close()?;
    rig.open()?;
    rig.get_all(rig.keys())?;
    let warm = is_warm(rig);
    Ok(warm.or(still_works(rig)?))
}

fn another_namespace(rig: &mut Rig) -> Result<Verdict, Broken> {
    rig.open_and_fill()?;
    rig.close()?;
    let of_first = rig.model().clone();
    rig.model().nothing_is_there();
    rig.setup.namespace = "model-b".into();
    rig.open()?;
    rig.get_all(rig.keys())?;
    rig.close()?;
    // Back in the first, its values are right, or gone.
    *rig.model() = of_first;
    rig.setup.namespace = "model-a".into();
    rig.open()?;
    rig.get_all(rig.keys())?;
    still_works(rig)
}
