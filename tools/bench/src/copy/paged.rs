//! Pages that lie one after another on the host, as a chunk of KV does, and scattered on the GPU,
//! as an engine's blocks do. Beside ours: the driver page by page, the driver's batches, and a
//! kernel that does it alone.

use super::ceiling::ceiling;
use super::plan::Plan;
use super::rig::Rig;
use super::size::Size;
use super::sweep::peer;
use super::way::{Course, Way};
use crate::output::Outcome;
use crate::timing::{Cost, median};
use forebay_results::Row;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// All pages of all sizes that were asked for, each way.
pub fn rows(rig: &Rig, plan: &Plan) -> Outcome<Vec<Row>> {
    let one_way = plan.courses.iter().filter(|course| **course != Course::Both);
    let cases = one_way.flat_map(|course| plan.pages.iter().map(|page| (*course, *page)));
    let rows = cases.map(|(course, page_bytes)| measure(rig, plan, course, page_bytes));
    Ok(rows.collect::<Outcome<Vec<_>>>()?.into_iter().flatten().collect())
}

fn measure(rig: &Rig, plan: &Plan, course: Course, page_bytes: u64) -> Outcome<Vec<Row>> {
    let mut order: Vec<u64> = (0..plan.pages_total_bytes / page_bytes).collect();
    order.shuffle(&mut StdRng::seed_from_u64(page_bytes));
    let others = [Way::Direct, Way::Batch, Way::Kernel];
    let others = others.into_iter().filter(|way| *way != Way::Batch || rig.ways().has_batches());
    let ways: Vec<Way> = plan.ways.iter().copied().chain(others).collect();
    let jobs = [rig.pages(plan.first(), course.directions()[0], page_bytes, &order)];
    let (mut ceilings, mut costs) = (Vec::new(), vec![Vec::new(); ways.len()]);
    for run in 0..plan.runs as usize {
        ceilings.push(ceiling(rig, course)?);
        for nth in 0..ways.len() {
            let nth = (nth + run) % ways.len();
            costs[nth].push(rig.timed(ways[nth], &jobs)?.again);
        }
    }
    let name = format!("copy.{}.paged.{}", course.name(), Size(page_bytes));
    Ok(to_rows(rig, plan, &name, median(&ceilings), ways.into_iter().zip(costs).collect()))
}

/// A row for each way; the first is ours, and its peer is the fastest of those who are not.
fn to_rows(rig: &Rig, plan: &Plan, name: &str, ceiling: f64, costs: Vec<(Way, Vec<Cost>)>) -> Vec<Row> {
    let rates = |costs: &[Cost]| -> Vec<f64> {
        costs.iter().map(|cost| cost.gb_per_s(plan.pages_total_bytes)).collect()
    };
    let others = costs[plan.ways.len()..].iter().map(|(way, costs)| (*way, median(&rates(costs))));
    let fastest = others.max_by(|one, other| one.1.total_cmp(&other.1));
    let row = |(nth, (way, costs)): (usize, &(Way, Vec<Cost>))| {
        let name = if nth == 0 { name.into() } else { format!("{name}.{way:?}").to_lowercase() };
        let mut row = Row::of_runs(name, "GB/s", &rates(costs)).with_ceiling(ceiling);
        let cpu_s: f64 = costs.iter().map(|cost| cost.cpu_s).sum();
        row.cpu_s_per_gb = Some(cpu_s / (plan.pages_total_bytes as f64 / 1e9 * costs.len() as f64));
        if nth < plan.ways.len() {
            row.peer = fastest.map(|(way, value)| peer(rig, way, value));
        }
        row
    };
    costs.iter().enumerate().map(row).collect()
}
