//! What a mover has to show: each link, and what the transfers of each class went through.

use super::{counter, gauge, push_one};
use crate::metrics::{Family, Metric};
use forebay_transfer::{Class, ClassTelemetry, LinkTelemetry, Telemetry};

const ACTIVE: Family = gauge("forebay_mover_transfers", "Transfers accepted and not ended.");
const WAITING: Family = gauge("forebay_mover_waiting_bytes", "Bytes accepted and not yet on a link.");
const LINK_UP: Family = gauge("forebay_link_up", "1 if the link is in service.");
const LINK_RATE: Family = gauge("forebay_link_rate_bytes_per_second", "The link's measured rate.");
const LINK_IN_FLIGHT: Family = gauge("forebay_link_in_flight_bytes", "Bytes on the link now.");
const LINK_BYTES: Family = counter("forebay_link_bytes_total", "Bytes that the link moved.");
const LINK_LOTS: Family = counter("forebay_link_lots_total", "Operations of the link, by how they ended.");
const ENDED: Family = counter("forebay_transfers_total", "Transfers that ended, by class and how.");
const LATE: Family = counter("forebay_transfers_late_total", "Transfers that ended after their deadline.");
const LOTS: Family = counter("forebay_transfer_lots_total", "Lots that reached their target.");
const BYTES: Family = counter("forebay_transfer_bytes_total", "Bytes that reached their target.");
const SECONDS: Family = counter(
    "forebay_transfer_lot_seconds_total",
    "Time of lots, summed, by stage; for means divide by lots.",
);

pub fn collect(telemetry: &Telemetry, out: &mut Vec<Metric>) {
    push_one(out, &ACTIVE, telemetry.transfers_active as f64);
    push_one(out, &WAITING, telemetry.waiting_bytes as f64);
    telemetry.links.iter().for_each(|link| collect_link(link, out));
    for (class, of) in Class::ALL.into_iter().zip(&telemetry.classes) {
        collect_class(name_of(class), of, out);
    }
}

fn collect_link(link: &LinkTelemetry, out: &mut Vec<Metric>) {
    let name = ("link", link.name.as_str());
    out.push(Metric::new(&LINK_UP, &[name], f64::from(!link.down)));
    out.push(Metric::new(&LINK_RATE, &[name], link.rate_bytes_per_s));
    out.push(Metric::new(&LINK_IN_FLIGHT, &[name], link.in_flight_bytes as f64));
    out.push(Metric::new(&LINK_BYTES, &[name], link.bytes as f64));
    let ends = [
        ("moved", link.lots),
        ("short", link.short),
        ("failed", link.failed),
        ("corrupt", link.corrupt),
        ("timed_out", link.timed_out),
    ];
    out.extend(ends.map(|(end, lots)| Metric::new(&LINK_LOTS, &[name, ("end", end)], lots as f64)));
}

fn collect_class(class: &'static str, of: &ClassTelemetry, out: &mut Vec<Metric>) {
    let class = ("class", class);
    let ends = [("done", of.done), ("failed", of.failed), ("cancelled", of.cancelled)];
    out.extend(ends.map(|(end, count)| Metric::new(&ENDED, &[class, ("end", end)], count as f64)));
    out.push(Metric::new(&LATE, &[class], of.late as f64));
    out.push(Metric::new(&LOTS, &[class], of.lots as f64));
    out.push(Metric::new(&BYTES, &[class], of.bytes as f64));
    let stages = [("queued", of.queued_us), ("staged", of.staged_us), ("moved", of.moved_us)];
    out.extend(stages.map(|(stage, us)| Metric::new(&SECONDS, &[class, ("stage", stage)], us as f64 / 1e6)));
}

fn name_of(class: Class) -> &'static str {
    match class {
        Class::Demand => "demand",
        Class::Prefetch => "prefetch",
        Class::WriteBack => "write_back",
        Class::Scrub => "scrub",
    }
}
