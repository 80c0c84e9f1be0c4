//! Reads and writes through a queue while the controller is slow, out of order, fails, loses or
//! repeats completions, or is reset: no byte is wrong, none is lost, and each command ends once.

use crate::host::{Driver, Machine, Report, memory};
use forebay_ring::controller::{Faults, Settings, Status};
use forebay_ring::nvme::{Format, SglSupport};

const NONE: Faults = Faults {
    seed: 1,
    out_of_order: false,
    slow_steps: 0,
    phase_delay_steps: 0,
    status: None,
    duplicate_every: None,
    lose_every: None,
};
const OUT_OF_ORDER: Faults = Faults { out_of_order: true, slow_steps: 8, ..NONE };
const LATE_PHASE: Faults = Faults { phase_delay_steps: 3, ..NONE };
const SLOW: Faults = Faults { slow_steps: 60, ..NONE };
const FAILING: Faults = Faults { status: Some((5, Status::INTERNAL_ERROR)), ..NONE };
const REPEATING: Faults = Faults { duplicate_every: Some(4), ..NONE };
const LOSING: Faults = Faults { lose_every: Some(37), ..NONE };
const ALL: Faults = Faults {
    status: Some((11, Status::INTERNAL_ERROR)),
    duplicate_every: Some(7),
    lose_every: Some(97),
    phase_delay_steps: 1,
    ..OUT_OF_ORDER
};

/// Runs with both formats, so many times round the completion queue.
fn run(entries: u32, rounds: u64, faults: Faults, reset_every: Option<u64>) -> [Report; 2] {
    [Format::Prp, Format::Sgl].map(|format| {
        let memory = memory(u64::from(entries) - 1);
        let driver = Driver::new(&memory, entries, format, faults);
        let report = driver.run(rounds * u64::from(entries), reset_every);
        assert_eq!((report.wrong_bytes, report.not_ended_once), (0, 0), "{format:?} {report:?}");
        assert!(report.rounds >= rounds, "{report:?}");
        report
    })
}

/// At all depths: many rounds through short queues, a few through long ones.
fn at_all_depths(faults: Faults) -> Vec<Report> {
    let depths = [(2, 100), (3, 100), (16, 100), (128, 8), (1024, 2)];
    depths.into_iter().flat_map(|(entries, rounds)| run(entries, rounds, faults, None)).collect()
}

#[test]
fn commands_end_right_without_faults() {
    assert!(at_all_depths(NONE).iter().all(|report| report.failed + report.resets + report.duplicates == 0));
}

#[test]
fn commands_end_right_out_of_order() {
    assert!(at_all_depths(OUT_OF_ORDER).iter().all(|report| report.failed + report.resets == 0));
}

#[test]
fn a_completion_without_its_phase_is_none_yet() {
    assert!(at_all_depths(LATE_PHASE).iter().all(|report| report.failed + report.resets == 0));
}

#[test]
fn commands_of_a_slow_drive_end_right() {
    assert!(at_all_depths(SLOW).iter().all(|report| report.failed + report.resets == 0));
}

#[test]
fn a_status_ends_its_command_and_no_other() {
    for report in at_all_depths(FAILING) {
        let all = report.failed + report.succeeded;
        assert_eq!(report.failed, all / 5, "{report:?}");
    }
}

#[test]
fn a_repeated_completion_is_counted_and_ends_nothing() {
    for report in at_all_depths(REPEATING) {
        // The last one may still be on its way.
        let repeated = report.succeeded / 4;
        assert!((repeated.saturating_sub(1)..=repeated).contains(&report.duplicates), "{report:?}");
    }
}

#[test]
fn a_lost_completion_ends_by_a_reset() {
    for report in at_all_depths(LOSING) {
        assert!(report.resets > 0 && report.ended_by_reset >= report.resets, "{report:?}");
    }
}

#[test]
fn commands_end_right_under_all_faults_together() {
    assert!(at_all_depths(ALL).iter().all(|report| report.failed > 0 && report.resets > 0));
}

#[test]
fn a_reset_under_io_ends_each_command_once() {
    for (entries, rounds) in [(2, 100), (16, 100), (128, 8), (1024, 2)] {
        for report in run(entries, rounds, OUT_OF_ORDER, Some(151)) {
            assert!(report.resets > 2 && report.ended_by_reset > 0, "{report:?}");
        }
    }
}

#[test]
fn a_drive_is_what_it_says_it_is() {
    let memory = memory(1);
    let mut machine = Machine::new(&memory, Settings::default(), NONE);
    machine.enable();
    let (controller, namespace) = machine.identify();
    assert_eq!((controller.max_transfer_bytes, controller.sgl), (512 << 10, SglSupport::Bytes));
    assert_eq!((namespace.blocks, namespace.block_bytes), (1 << 15, 512));
}
