//! However a program finds the driver's copies, they are offered; and it gets everything else as it
//! would without us.

use crate::stage::{Said, other_program, play};

const OFFER: &str = "offer 2->1 count 1 bytes 4194304";

fn offered(said: &Said) -> bool {
    said.out.contains(OFFER) && !said.out.contains("driver cuMemcpy")
}

#[test]
fn a_copy_is_offered_by_whichever_way_it_was_found() {
    for (program, step, way) in [
        ("linked", "link", "cuMemcpyHtoDAsync_v2 by link"),
        ("linked", "default", "cuMemcpyHtoDAsync_v2 by link"),
        ("linked", "program", "cuMemcpyHtoDAsync_v2 by link"),
        ("linked", "handle", "cuMemcpyHtoDAsync_v2 by dlsym"),
        ("program", "handle", "cuMemcpyHtoDAsync_v2 by dlsym"),
        ("program", "default", "cuMemcpyHtoDAsync_v2 by link"),
        ("program", "program", "cuMemcpyHtoDAsync_v2 by link"),
        ("program", "ask:cuMemcpyHtoDAsync:3020:0", "cuMemcpyHtoDAsync_v2 by cuGetProcAddress"),
        ("program", "ask:cuMemcpyAsync:7000:2", "cuMemcpyAsync_ptsz by cuGetProcAddress"),
        ("program", "ask:cuMemcpyDtoH:7000:2", "cuMemcpyDtoH_v2_ptds by cuGetProcAddress"),
        ("program", "ask1", "cuMemcpyHtoDAsync_v2 by cuGetProcAddress"),
        ("runtime", "runtime", "cuMemcpyAsync by cuGetProcAddress"),
        ("runtime", "versioned", "cuMemcpyAsync by cuGetProcAddress"),
    ] {
        let said = play(program, &["init", step]).with("FOREBAY_PRELOAD", "stats").says();
        assert!(offered(&said), "{program} {step}: {}", said.out);
        let line = format!("{way}: taken: 1 calls, 4194304 bytes");
        assert!(said.err.contains(&line), "{program} {step}: {}", said.err);
    }
}

#[test]
fn ctypes_is_caught() {
    let script = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0); \
                  u64 = ctypes.c_uint64; cuda.cuMemcpyHtoD_v2(u64(1), u64(2), u64(4194304))";
    let said = other_program("python3").args(&["-c", script]).says();
    assert!(said.out.contains(&format!("{OFFER} direction 0 stream 0 flags 1")), "{}", said.out);
    assert!(!said.out.contains("driver cuMemcpy"), "{}", said.out);
}

#[test]
fn what_is_offered_is_what_was_asked() {
    for (step, offer) in [
        ("handle", "direction 0 stream 7 flags 0"),
        ("finish", "direction 1 stream 0 flags 1"),
        ("ask:cuMemcpy:4000:0", "direction 2 stream 0 flags 1"),
        ("ask:cuMemcpyHtoD:7000:2", "direction 0 stream 0 flags 3"),
        ("ask:cuMemcpyDtoHAsync:7000:2", "direction 1 stream 7 flags 2"),
        ("ask:cuMemcpyAsync:7000:1", "direction 2 stream 7 flags 0"),
    ] {
        let said = play("program", &["init", step]).says();
        assert!(said.out.contains(&format!("{OFFER} {offer}")), "{step}: {}", said.out);
    }
}

#[test]
fn a_batch_is_offered_as_one_in_both_of_its_signatures() {
    let whole = "offer 10->100 count 4 bytes 4194304 direction 2 stream 7";
    for (step, flags) in
        [("batch:12080:0", 0), ("batch:12080:2", 2), ("batch:13000:0", 0), ("batch:13020:2", 2)]
    {
        let said = play("program", &["init", step]).says();
        assert!(said.out.contains(&format!("{whole} flags {flags}")), "{step}: {}", said.out);
        assert!(said.out.contains("result 0 failed 99"), "{step}: {}", said.out);
    }
}

#[test]
fn an_error_of_a_batch_that_was_taken_is_no_single_copys() {
    let said = play("program", &["init", "batch:12080:0"]).with("DOUBLE_RESULT", "700").says();
    assert!(said.out.contains("result 700 failed -1"), "{}", said.out);
}

#[test]
fn a_batch_that_is_passed_on_fails_as_the_drivers() {
    for (steps, more) in [
        (&["init", "batch:12080:0"][..], ("DOUBLE_DECLINES", "6")),
        (&["init", "order=2", "batch:12080:0"], ("DOUBLE_DECLINES", "0")),
        (&["init", "order=9", "batch:12080:0"], ("DOUBLE_DECLINES", "0")),
        (&["init", "stream=1", "batch:12080:0"], ("DOUBLE_DECLINES", "0")),
        (&["init", "bytes=4096", "batch:12080:0"], ("DOUBLE_DECLINES", "0")),
    ] {
        let said = play("program", steps).with(more.0, more.1).says();
        assert!(said.out.contains("driver cuMemcpyBatchAsync 4"), "{steps:?}: {}", said.out);
        assert!(said.out.contains("result 1 failed 5"), "{steps:?}: {}", said.out);
    }
}

#[test]
fn a_batch_of_a_version_to_come_is_the_drivers_own() {
    let said = play("program", &["init", "batch:14000:0"]).says();
    assert!(said.out.contains("driver unknown batch"), "{}", said.out);
    assert!(!said.out.contains("offer"), "{}", said.out);
}

#[test]
fn without_a_driver_nothing_is_found() {
    for step in ["default", "program"] {
        let said = play("program", &[step]).with("LD_LIBRARY_PATH", "/nowhere").says();
        assert!(said.out.starts_with("not found: "), "{step}: {}", said.out);
        assert!(said.out.contains("cuMemcpyHtoDAsync_v2"), "{step}: {}", said.out);
    }
}
