//! With the real copying library, on a driver that moves real bytes and keeps CUDA's rules: large
//! copies take every path, all others none, and the program cannot tell the difference.

use crate::stage::{Said, copying_library, moving, stage};

/// More than a path has that is only tried. Even shares would be 10 MiB of each copy.
const RELAYED_MIN: u64 = 1 << 20;
const TAKEN: [&str; 5] = ["sync", "stream", "thread", "batch", "link"];

/// Links have a rate, so that how a copy is divided follows them and not who has a processor.
fn together(steps: &[&str]) -> crate::stage::Play {
    let play = moving(steps).with("FOREBAY_PRELOAD", "stats").with("FAKE_CUDA_GPUS", "3");
    let play = play.with("FAKE_CUDA_RATES", "h2d=0.4,d2h=0.4");
    play.with("FOREBAY_CUDA_LIBRARY", &copying_library().to_string_lossy())
}

/// Bytes that a step sent over links of other GPUs, where every byte of it arrived.
fn relayed(said: &Said, step: &str) -> u64 {
    assert!(said.out.contains(&format!("{step} right\n")), "{step}: {} {}", said.out, said.err);
    let line = said.out.lines().find_map(|line| line.strip_prefix(&format!("{step} relayed ")));
    line.unwrap().parse().unwrap()
}

/// Calls of an entry point with an outcome. How the program found it is another test's.
fn calls(said: &Said, symbol: &str, outcome: &str) -> u64 {
    let entry = format!(": {symbol} by ");
    let lines =
        said.err.lines().filter(|line| line.contains(&entry) && line.contains(&format!(": {outcome}: ")));
    lines
        .map(|line| line.rsplit(": ").next().unwrap().split(' ').next().unwrap().parse::<u64>().unwrap())
        .sum()
}

fn nothing_misused(said: &Said) {
    assert!(said.out.ends_with("misuse 0\n"), "{} {}", said.out, said.err);
}

#[test]
fn large_copies_take_every_path_and_every_byte_arrives() {
    for memory in [&[][..], &["closed"]] {
        let said = together(&[&["start"], memory, &TAKEN].concat()).says();
        for step in TAKEN {
            assert!(relayed(&said, step) >= RELAYED_MIN, "{step}: {}", said.out);
        }
        nothing_misused(&said);
        for (symbol, taken) in
            [("cuMemcpyHtoD_v2", 1), ("cuMemcpy", 1), ("cuMemcpyAsync_ptsz", 1), ("cuMemcpyBatchAsync_v2", 2)]
        {
            assert_eq!(calls(&said, symbol, "taken"), taken, "{symbol}: {}", said.err);
        }
    }
}

#[test]
fn until_it_has_started_copies_are_the_drivers_and_nobody_waits() {
    // The start waits for a kernel on each GPU.
    let said = together(&["sync", "stream"]).with("FAKE_CUDA_FAULTS", "freeze compute.1").says();
    for step in ["sync", "stream"] {
        assert_eq!(relayed(&said, step), 0);
    }
    nothing_misused(&said);
    assert!(said.err.contains("passed on, copying library still starting: "), "{}", said.err);
}

#[test]
fn what_is_not_for_several_links_takes_none() {
    let said = together(&["start", "pageable"]).says();
    assert_eq!(calls(&said, "cuMemcpyHtoD_v2", "passed on, host memory not pinned"), 1, "{}", said.err);
    nothing_misused(&said);
    let said = together(&["start", "small"]).says();
    assert_eq!(calls(&said, "cuMemcpyDtoHAsync_v2", "passed on, small"), 8, "{}", said.err);
    assert!(relayed(&said, "small") > 0, "its first copy is a large one");
    nothing_misused(&said);
}

#[test]
fn captures_are_left_alone_before_during_and_after_the_start() {
    let steps = ["capture", "copy_in_capture", "start", "stream", "copy_in_capture", "end", "stream"];
    let said = together(&steps).says();
    assert!(said.out.starts_with("started\n"), "{} {}", said.out, said.err);
    assert!(relayed(&said, "stream") > 0);
    assert!(said.err.contains("passed on, capturing: 2 calls"), "{}", said.err);
    nothing_misused(&said);
}

#[test]
fn a_copy_that_is_waited_for_comes_after_what_it_would_come_after() {
    let said = together(&["start", "after"]).says();
    assert!(said.out.contains("after others right\n"), "{} {}", said.out, said.err);
    assert_eq!(calls(&said, "cuMemcpyDtoH_v2", "taken"), 1, "{}", said.err);
    nothing_misused(&said);
}

#[test]
fn a_program_ends_as_it_would_with_copies_and_the_start_under_way() {
    for steps in [&["start", "leave"][..], &["leave"]] {
        let said = together(steps).with("FAKE_CUDA_RATES", "h2d=0.2,d2h=0.2").says();
        assert!(said.out.ends_with("leaving\n"), "{} {}", said.out, said.err);
        assert!(!said.err.contains("panicked") && !said.err.contains("misuse"), "{}", said.err);
    }
}

#[test]
fn a_library_that_does_not_start_says_why_and_declines() {
    let said =
        together(&["sync", "stream", "sync"]).with("FAKE_CUDA_FAULTS", "missing cuModuleLoadData").says();
    for step in ["sync", "stream"] {
        assert_eq!(relayed(&said, step), 0);
    }
    assert_eq!(
        said.err
            .matches("forebay: copies are left to the driver: the CUDA driver has no cuModuleLoadData")
            .count(),
        1,
        "{}",
        said.err
    );
    nothing_misused(&said);
}

#[test]
fn with_one_gpu_or_switched_off_nothing_is_relayed() {
    for (name, value) in [("FAKE_CUDA_GPUS", "1"), ("FOREBAY_PRELOAD", "off")] {
        let said = together(&TAKEN).with(name, value).says();
        for step in TAKEN {
            assert_eq!(relayed(&said, step), 0, "{name}={value}");
        }
        assert!(!said.err.contains("taken"), "{}", said.err);
        nothing_misused(&said);
    }
}

/// The lines that a program wrote of what its own calls gave.
fn given(said: &Said) -> Vec<&str> {
    said.out.lines().filter(|line| line.contains(" gives ") || line.starts_with("refused: ")).collect()
}

#[test]
fn peers_that_move_wrong_bytes_and_report_success_never_relay() {
    for fault in ["p2p copies lost", "p2p copies zero", "p2p kernels lost", "p2p kernels zero"] {
        let steps = [&["warm"], &TAKEN[..], &["pages64", "pages16"]].concat();
        let said = together(&steps).with("FAKE_CUDA_FAULTS", fault).says();
        for step in &steps[1..] {
            assert_eq!(relayed(&said, step), 0, "{fault}: {step}");
        }
        let named = said.err.matches("forebay: GPUs do not relay for each other gpu=0 peer=1 ").count();
        assert_eq!(named, 1, "{fault}: {}", said.err);
        assert!(
            calls(&said, "cuMemcpyBatchAsync_v2", "passed on, relays move wrong bytes") > 0,
            "{}",
            said.err
        );
        nothing_misused(&said);
    }
}

#[test]
fn a_program_that_turns_peer_access_on_or_off_is_answered_as_if_alone() {
    let ways = ["stream", "pages64", "pages16"];
    for order in [
        // Off, although it never turned it on; on and off again; twice.
        &["start", "disable>1", "disable<1"][..],
        &["start", "enable>1", "enable<1", "enable<1", "disable<1", "disable>1", "disable>1"],
        // On before there is a library.
        &["enable>1", "enable<1", "start", "enable<1", "disable<1", "disable<1", "disable>1"],
        &["enable<1", "start", "disable<1", "enable<1", "enable>1"],
    ] {
        let said = together(&[order, &ways].concat()).says();
        let alone: Vec<&str> = order.iter().copied().filter(|step| *step != "start").collect();
        let alone = together(&alone).without_preload().says();
        assert_eq!(given(&said), given(&alone), "{order:?}");
        for way in ways {
            assert!(relayed(&said, way) >= RELAYED_MIN, "{order:?}: {way}: {}", said.out);
        }
        nothing_misused(&said);
    }
}

#[test]
fn after_a_reset_nothing_stale_is_used_and_copies_start_anew() {
    let said = together(&["start", "stream", "reset", "start", "pages16", "reset", "start", "sync"]).says();
    assert_eq!(said.out.matches("started\n").count() - said.out.matches("NOT").count(), 3, "{}", said.out);
    for way in ["stream", "pages16", "sync"] {
        assert!(relayed(&said, way) >= RELAYED_MIN, "{way}: {} {}", said.out, said.err);
    }
    nothing_misused(&said);
}

#[test]
fn contexts_are_made_when_the_first_copy_comes_that_could_go_over_several_links() {
    let said = together(&["contexts", "refused", "contexts", "start", "contexts"]).says();
    let contexts: Vec<&str> = said.out.lines().filter(|line| line.starts_with("contexts")).collect();
    assert_eq!(contexts, ["contexts 1 0 0", "contexts 1 0 0", "contexts 1 1 1"], "{}", said.out);
}

#[test]
fn in_an_exclusive_mode_only_the_programs_own_gpu_is_used() {
    let said =
        together(&["warm1", "stream", "contexts"]).with("FAKE_CUDA_FAULTS", "mode 1 3; mode 2 2").says();
    assert_eq!(relayed(&said, "stream"), 0);
    assert!(said.out.contains("contexts 1 0 0\n"), "{}", said.out);
    for (gpu, why) in [(1, "exclusive"), (2, "prohibited")] {
        let line = format!("forebay: GPU is left out gpu={gpu}: its compute mode is {why}");
        assert_eq!(said.err.matches(&line).count(), 1, "{}", said.err);
    }
    nothing_misused(&said);
}

#[test]
fn a_gpu_that_cannot_be_opened_is_left_out_and_named() {
    // The first context is the program's, the second one the library's on the same GPU.
    let said =
        together(&["warm2", "stream"]).with("FAKE_CUDA_FAULTS", "fail cuDevicePrimaryCtxRetain 3 2").says();
    assert!(relayed(&said, "stream") > 0, "{} {}", said.out, said.err);
    assert_eq!(said.err.matches("forebay: GPU is left out gpu=1: ").count(), 1, "{}", said.err);
    nothing_misused(&said);
}

#[test]
fn calls_that_the_driver_refuses_are_refused_also_once_the_library_has_started() {
    let alone = together(&["refused"]).without_preload().says();
    assert!(
        given(&alone).len() == 5 && given(&alone).iter().all(|line| !line.ends_with(" 0")),
        "{}",
        alone.out
    );
    let said = together(&["start", "refused", "stream"]).says();
    assert_eq!(given(&said), given(&alone));
    assert!(relayed(&said, "stream") > 0);
}

#[test]
fn a_report_goes_where_stderr_was_and_not_into_a_file_of_the_programs() {
    let own = stage().join("own-descriptor-2");
    let play = together(&["start", "own2", "stream"]).with("OWN_FILE", &own.to_string_lossy());
    let said = play.says();
    assert!(said.err.contains(": taken: "), "{}", said.err);
    assert_eq!(std::fs::read_to_string(&own).unwrap(), "", "the report is in the program's file");
}
