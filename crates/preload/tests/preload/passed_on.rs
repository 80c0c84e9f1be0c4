//! What is not for several links goes to the driver, unchanged and at no cost; and the user sees
//! what was done.

use crate::stage::{Said, other_program, play, preloads};

const BY_DRIVER: &str = "driver cuMemcpyHtoDAsync_v2 1 2 4194304 7";

#[test]
fn the_library_is_opened_once_by_the_first_large_copy_in_relaxed_capture_mode() {
    let said =
        play("program", &["init", "bytes=1048576", "handle", "bytes=4194304", "handle", "handle"]).says();
    let small = "driver cuMemcpyHtoDAsync_v2 1 2 1048576 7";
    let offer = "offer 2->1 count 1 bytes 4194304 direction 0 stream 7 flags 0";
    let modes = ["driver capture mode 2", "open", "driver capture mode 0"];
    assert_eq!(said.lines(), [&[small], &modes[..], &[offer, offer]].concat());
}

#[test]
fn nobody_waits_for_the_library_to_start() {
    let play = play("program", &["init", "threads"]).with("FOREBAY_PRELOAD", "stats");
    let said = play.with("DOUBLE_WAITS", "1").says();
    let (by_driver, offer) = (said.out.find(BY_DRIVER).unwrap(), said.out.find("offer").unwrap());
    assert!(by_driver < offer, "{}", said.out);
    assert!(said.err.contains("passed on, copying library still starting: 1 calls"), "{}", said.err);
}

#[test]
fn the_librarys_own_smallest_size_holds_from_then_on() {
    let steps = ["init", "handle", "bytes=1048576", "handle", "bytes=1048575", "handle", "bytes=0", "handle"];
    let said = play("program", &steps).says();
    assert!(said.out.contains("offer 2->1 count 1 bytes 1048576"), "{}", said.out);
    assert!(said.out.contains("driver cuMemcpyHtoDAsync_v2 1 2 1048575 7"), "{}", said.out);
    assert!(said.out.contains("driver cuMemcpyHtoDAsync_v2 1 2 0 7"), "{}", said.out);
}

#[test]
fn a_declined_copy_is_the_drivers_and_is_counted_by_its_reason() {
    for (code, reason) in
        [("3", "host memory not pinned"), ("10", "switched off"), ("99", "reason not known")]
    {
        let play = play("program", &["init", "handle", "handle"]).with("FOREBAY_PRELOAD", "stats");
        let said = play.with("DOUBLE_DECLINES", code).says();
        assert_eq!(said.out.matches(BY_DRIVER).count(), 2, "{}", said.out);
        let line = format!("by dlsym: passed on, {reason}: 2 calls, 8388608 bytes\n");
        assert!(said.err.contains(&line), "{}", said.err);
    }
}

#[test]
fn the_result_of_a_copy_is_the_librarys_where_it_was_taken() {
    let said = play("program", &["init", "finish"]).with("DOUBLE_RESULT", "700").says();
    assert!(said.out.contains("result 700"), "{}", said.out);
}

#[test]
fn before_there_is_a_context_nothing_is_started() {
    for (steps, name) in [(&["handle"][..], "UNUSED"), (&["init", "handle"], "DRIVER_NO_CONTEXT")] {
        let said = play("program", steps).with("FOREBAY_PRELOAD", "stats").with(name, "1").says();
        assert_eq!(said.lines(), [BY_DRIVER], "{steps:?}");
        assert!(said.err.contains("passed on, no context: 1 calls"), "{}", said.err);
    }
}

#[test]
fn a_captured_stream_does_not_start_the_library() {
    // Stream 7 is captured; the legacy stream may not even be asked; another stream may start it.
    let steps = ["init", "handle", "stream=0", "handle", "stream=8", "handle"];
    let play = play("program", &steps).with("DRIVER_CAPTURED", "7").with("FOREBAY_PRELOAD", "stats");
    let said = play.says();
    assert_eq!(said.lines()[..2], [BY_DRIVER, "driver cuMemcpyHtoDAsync_v2 1 2 4194304 0"]);
    assert!(said.out.contains("offer 2->1 count 1 bytes 4194304 direction 0 stream 8"), "{}", said.out);
    assert!(said.err.contains("passed on, capturing: 2 calls"), "{}", said.err);
}

#[test]
fn without_the_library_copies_are_the_drivers_and_it_is_said_once() {
    for (library, why) in
        [("/nowhere/libforebay_cuda.so", "No such file"), ("libc.so.6", "forebay_copy_open")]
    {
        let play = play("program", &["init", "handle", "handle"]).with("FOREBAY_PRELOAD", "stats");
        let said = play.with("FOREBAY_CUDA_LIBRARY", library).says();
        assert_eq!(said.out.matches(BY_DRIVER).count(), 2, "{}", said.out);
        assert_eq!(said.err.matches(why).count(), 1, "{}", said.err);
        assert!(said.err.contains("passed on, no copying library: 2 calls"), "{}", said.err);
    }
}

#[test]
fn a_library_that_stays_out_or_is_of_another_version_is_left_alone() {
    for (name, value) in [("DOUBLE_STAYS_OUT", "1"), ("DOUBLE_ABI", "1")] {
        let play = play("program", &["init", "handle", "handle"]).with("FOREBAY_PRELOAD", "stats");
        let said = play.with(name, value).says();
        assert_eq!(said.out.matches("open\n").count(), 1, "{}", said.out);
        assert_eq!(said.out.matches(BY_DRIVER).count(), 2, "{}", said.out);
        assert!(said.err.contains("passed on, copying library stays out: 2 calls"), "{}", said.err);
    }
}

#[test]
fn the_librarys_own_calls_are_not_offered_to_it() {
    let said = play("program", &["init", "handle"]).with("DOUBLE_COPIES", "1").says();
    assert_eq!(said.out.matches("offer").count(), 1, "{}", said.out);
    assert_eq!(said.out.matches("driver cuMemcpyAsync 1 2 4194304 7").count(), 2, "{}", said.out);
}

#[test]
fn a_process_forked_before_copies_starts_by_itself_and_one_forked_after_stays_out() {
    let before = play("program", &["fork", "init", "handle"]).with("FOREBAY_PRELOAD", "stats").says();
    assert!(before.out.contains("child\ndriver capture mode 2\nopen\n"), "{}", before.out);
    assert!(before.err.contains("taken: 1 calls"), "{}", before.err);
    let after =
        play("program", &["init", "handle", "fork", "handle"]).with("FOREBAY_PRELOAD", "stats").says();
    assert!(after.out.contains(&format!("child\n{BY_DRIVER}\n")), "{}", after.out);
    assert_eq!(after.err.matches("taken: 1 calls").count(), 1, "the child counts its own: {}", after.err);
    assert!(after.err.contains("passed on, forked from a process that copies: 1 calls"), "{}", after.err);
}

#[test]
fn switched_off_nothing_is_looked_at() {
    for step in ["link", "handle", "ask:cuMemcpyHtoDAsync:3020:0"] {
        let said = play("linked", &["init", step]).with("FOREBAY_PRELOAD", "off").says();
        assert_eq!((said.lines(), said.err.as_str()), (vec![BY_DRIVER], ""), "{step}");
    }
    let said = play("linked", &["init", "batch:12080:0"]).with("FOREBAY_PRELOAD", "off").says();
    assert_eq!(said.lines(), ["driver cuMemcpyBatchAsync 4 7", "result 1 failed 5"]);
}

#[test]
fn switched_off_a_program_finds_what_it_would_find_without_us() {
    let steps = ["init", "compare"];
    let alone = play("linked", &steps).without_preload().says();
    assert_eq!(alone.lines(), ["driver's 1, C library's 1"]);
    let off = play("linked", &steps).with("FOREBAY_PRELOAD", "off").says();
    assert_eq!((off.lines(), off.err.as_str()), (alone.lines(), ""));
    let on = play("linked", &steps).says();
    assert_eq!(on.lines(), ["driver's 0, C library's 0"], "ours are found where we are on");
}

#[test]
fn an_unknown_mode_is_said_once_and_means_on() {
    let said = play("program", &["init", "handle", "handle"]).with("FOREBAY_PRELOAD", "On").says();
    assert_eq!(said.out.matches("offer").count(), 2, "{}", said.out);
    assert_eq!(said.err, "forebay: FOREBAY_PRELOAD is \"On\", allowed are on, off and stats: on is taken\n");
}

#[test]
fn programs_without_cuda_see_nothing() {
    for mode in ["stats", "nonsense"] {
        let said = other_program("sh").args(&["-c", "echo hello"]).with("FOREBAY_PRELOAD", mode).says();
        assert_eq!((said.out.as_str(), said.err.as_str()), ("hello\n", ""));
    }
}

#[test]
fn a_copy_that_is_passed_on_costs_little() {
    // The bound is for a loaded machine and a library without optimisation; what it costs is
    // printed.
    let steps = ["init", "handle", "bytes=4096", "time"];
    let nanoseconds =
        |said: Said| -> f64 { said.lines().last().unwrap().strip_prefix("ns ").unwrap().parse().unwrap() };
    let bare = nanoseconds(play("program", &steps).with("DRIVER_QUIET", "1").without_preload().says());
    for preload in preloads() {
        for mode in ["on", "stats", "off"] {
            let with = play("program", &steps).with("DRIVER_QUIET", "1").with("FOREBAY_PRELOAD", mode);
            let cost = nanoseconds(with.preloading(&[&preload]).says()) - bare;
            println!("{mode}: {cost:.1} ns more than {bare:.1} ns with {}", preload.display());
            assert!(cost < 2000.0, "{mode}: {cost} ns");
        }
    }
}
