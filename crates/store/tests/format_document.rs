//! `docs/reference/format.md` and the code say the same: its worked example and its tables of
//! numbers. Everything else in it is checked by `tests/test_format.py`, with a reader that was
//! written from it.
#![allow(clippy::unwrap_used)]

use forebay_kv::ChunkId;
use forebay_store::log::{ChunkCopy, FORMAT_VERSION, LogUuid, crc32c};

fn document() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/format.md");
    std::fs::read_to_string(path).unwrap()
}

fn assert_says(what: &str) {
    assert!(document().contains(what), "docs/reference/format.md does not say {what:?}");
}

#[test]
fn the_document_is_of_this_version() {
    assert_says(&format!("Format version: **{FORMAT_VERSION}**"));
}

#[test]
fn its_check_values_are_those_of_the_code() {
    assert_says(&format!("| none | `{:#010x}` |", crc32c(b"")));
    assert_says(&format!("| `\"123456789\"` | `{:#010x}` |", crc32c(b"123456789")));
    assert_says(&format!("| 32 times `00` | `{:#010x}` |", crc32c(&[0; 32])));
    assert_says(&format!("| 32 times `ff` | `{:#010x}` |", crc32c(&[0xff; 32])));
}

#[test]
fn its_worked_example_is_what_the_code_computes() {
    let log = LogUuid(std::array::from_fn(|byte| 0x10 + byte as u8));
    let id = ChunkId::from_bytes(std::array::from_fn(|byte| 0x20 + byte as u8));
    let seal = ChunkCopy { log, id, segment: 3, sequence: 9, slot: 5 }.checksum_tag(1);
    let crc = crc32c(b"forebay");
    assert_says(&format!("seal     {seal:#010x}"));
    assert_says(&format!("crc      {crc:#010x}"));
    assert_says(&format!("sum      {:#010x}", seal ^ crc));
}
