//! With a driver that moves real bytes and keeps CUDA's rules: every byte arrives, whoever moves
//! it, and no rule is broken.

use crate::stage::{moving, stage};

const WAYS: [&str; 5] = ["sync", "stream", "thread", "batch", "link"];

#[test]
fn every_byte_arrives_whether_copies_are_passed_on_declined_or_switched_off() {
    let library = stage().join("libforebay_cuda.so");
    for (mode, library, offers) in
        [("on", &*library.to_string_lossy(), 10), ("on", "/nowhere", 0), ("off", "/nowhere", 0)]
    {
        let play = moving(&WAYS).with("FOREBAY_PRELOAD", mode).with("FOREBAY_CUDA_LIBRARY", library);
        let said = play.with("DOUBLE_DECLINES", "6").says();
        for way in WAYS {
            assert!(said.out.contains(&format!("{way} right\n")), "{mode} {library}: {}", said.out);
        }
        assert!(said.out.ends_with("misuse 0\n"), "{mode} {library}: {} {}", said.out, said.err);
        assert_eq!(said.out.matches("offer").count(), offers, "{mode} {library}: {}", said.out);
    }
}

#[test]
fn every_byte_arrives_when_copies_are_taken() {
    let said = moving(&["stream", "batch", "link"]).with("DOUBLE_COPIES", "1").says();
    for way in ["stream", "batch", "link"] {
        assert!(said.out.contains(&format!("{way} right\n")), "{}", said.out);
    }
    assert!(said.out.ends_with("misuse 0\n"), "{} {}", said.out, said.err);
}

#[test]
fn the_start_of_the_library_ends_nobodys_capture() {
    let steps = ["capture", "copy_in_capture", "stream", "end", "stream"];
    let said = moving(&steps).with("DOUBLE_ALLOCATES", "1").with("DOUBLE_DECLINES", "6").says();
    assert!(said.out.starts_with("open\nallocated 0\n"), "{}", said.out);
    assert_eq!(said.out.matches("stream right\n").count(), 2, "{}", said.out);
    assert!(said.out.ends_with("misuse 0\n"), "{} {}", said.out, said.err);
}
