//! Measures what a plan says, one part after another.

use super::plan::Args;
use super::rig::Rig;
use super::{break_even, costs, daemon, paged, plot, sweep, victim};
use crate::output::Outcome;
use forebay_cuda::device::Device;
use forebay_cuda::driver::Driver;
use forebay_results::Results;
use std::time::Duration;

/// Measures everything.
pub fn measure(driver: &'static Driver, args: &Args, runs: u32, results: &mut Results) -> Outcome<()> {
    let count = Device::count(driver)?;
    if count == 0 {
        return Err("no GPU is visible; --host measures host memory".into());
    }
    let plan = args.plan(runs, count)?;
    let rig = Rig::start(driver, count, |gpu| plan.bytes_of(gpu))?;
    results.gpus(rig.ends.iter().map(|ends| ends.device.name()).collect::<Result<_, _>>()?);
    let relays = rig.has_relays(plan.first());
    if !relays {
        eprintln!("no other GPU reaches GPU {}: what needs relays is left out", plan.first());
    }
    // First copies come first.
    results.rows.extend(costs::of_starting(&rig, &plan, relays)?);
    let mut swept = sweep::sweep(&rig, &plan)?;
    results.rows.append(&mut swept.rows);
    results.rows.push(swept.cores);
    // GPUs that have just copied at the same time, as in the sweep, leave each other alone for a
    // second.
    std::thread::sleep(Duration::from_millis(1_500));
    results.rows.extend(paged::rows(&rig, &plan)?);
    if relays {
        results.rows.extend(break_even::rows(&rig, &plan)?);
        results.rows.extend(victim::rows(&rig, &plan)?);
        if args.daemon {
            results.rows.extend(daemon::rows(&rig, plan.runs)?);
        }
    }
    results.rows.push(costs::of_idling()?);
    if let Some(file) = &args.plot {
        let picture = plot::svg(&swept.points);
        std::fs::write(file, picture).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}
