//! What every reader guarantees: it never panics, reads whatever is good around what is bad, and says what was bad.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use forebay_trace::format::{Format, Place, ReadOptions, TraceError, TraceReader, WekaOptions, write_line};
use forebay_trace::request::TraceRequest;
use proptest::prelude::*;
use std::io::Cursor;
use std::path::Path;

fn read_all(text: impl Into<Vec<u8>>, format: Format) -> (Vec<TraceRequest>, u64) {
    let mut reader =
        TraceReader::from_input("test", Cursor::new(text.into()), format, ReadOptions::default());
    let requests = reader.by_ref().map(Result::unwrap).collect();
    (requests, reader.skipped().lines)
}

fn any_format() -> impl Strategy<Value = Format> {
    prop::sample::select(Format::ALL.map(|(format, _)| format).to_vec())
}

fn any_request() -> impl Strategy<Value = TraceRequest> {
    let time_us = || 0u64..4_000_000_000_000_000;
    let times = (time_us(), prop::option::of(time_us()), prop::option::of(time_us()));
    let lengths = (1u32..1 << 20, 0u32..1 << 20, prop::option::of(any::<u32>()));
    let names = (any::<String>(), prop::option::of(any::<String>()), any::<u32>());
    let prefix = (1u32..1_024, prop::collection::vec(any::<u64>(), 0..40));
    (names, times, lengths, prefix).prop_map(|(names, times, lengths, (block_tokens, mut blocks))| {
        blocks.truncate(lengths.0.div_ceil(block_tokens) as usize);
        TraceRequest {
            session: names.0,
            parent_session: names.1,
            turn: names.2,
            arrival_us: times.0,
            think_us: times.1,
            service_us: times.2,
            input_tokens: lengths.0,
            output_tokens: lengths.1,
            system_tokens: lengths.2,
            block_tokens,
            blocks,
        }
    })
}

/// One good line of each format.
fn good_line(format: Format) -> &'static str {
    match format {
        Format::Forebay => {
            r#"{"session":"a","turn":0,"arrival_us":5,"input_tokens":100,"output_tokens":7,"block_tokens":64,"blocks":[1,2]}"#
        }
        Format::Mooncake => {
            r#"{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}"#
        }
        Format::Weka => {
            r#"{"id":"a","block_size":64,"requests":[{"t":1.5,"type":"n","in":130,"out":5,"hash_ids":[1,2],"think_time":2.0}]}"#
        }
        Format::Bailian => {
            r#"{"chat_id":7,"parent_chat_id":-1,"timestamp":61.114,"input_length":40,"output_length":9,"type":"text","turn":1,"hash_ids":[1,2,3]}"#
        }
        Format::AgenticKv => {
            r#"{"chat_id":7,"parent_chat_id":-1,"timestamp":61.114,"input_length":900,"output_length":9,"type":"coder","turn":1,"hash_ids":[1],"session_id":9,"time_to_parent_chat":1.5}"#
        }
        Format::Azure => "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10",
    }
}

proptest! {
    #[test]
    fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), format in any_format()) {
        read_all(bytes, format);
    }

    #[test]
    fn no_damage_to_a_good_trace_makes_a_reader_panic(
        format in any_format(),
        at in any::<prop::sample::Index>(),
        replacement in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(b"{}[]\",:0-9.e\\\n ".to_vec())], 0..6),
        removed in 0usize..20,
    ) {
        let mut text = good_line(format).as_bytes().to_vec();
        let from = at.index(text.len());
        let to = (from + removed).min(text.len());
        text.splice(from..to, replacement);
        let (requests, _) = read_all(text, format);
        prop_assert!(requests.iter().all(|request| request.input_tokens > 0));
    }

    #[test]
    fn the_projects_own_format_brings_back_every_field(requests in prop::collection::vec(any_request(), 0..20)) {
        let mut text = Vec::new();
        requests.iter().for_each(|request| write_line(&mut text, request).unwrap());
        prop_assert_eq!(read_all(text, Format::Forebay), (requests, 0));
    }

    #[test]
    fn good_lines_are_read_whatever_stands_between_them(
        format in prop::sample::select(vec![Format::Forebay, Format::Mooncake, Format::Bailian, Format::AgenticKv]),
        between in prop::collection::vec("[^\n\u{feff}]{0,30}", 0..8),
    ) {
        let blank = between.iter().filter(|line| line.trim_ascii().is_empty()).count();
        let text: String = between.iter().map(|line| format!("{line}\r\n{}\n", good_line(format))).collect();
        let (requests, bad) = read_all(text, format);
        prop_assert_eq!(requests.len(), between.len());
        prop_assert_eq!(bad as usize, between.len() - blank);
    }
}

#[test]
fn each_format_gives_its_fields() {
    let of = |format| read_all(good_line(format), format).0.remove(0);
    let mooncake = of(Format::Mooncake);
    assert_eq!(
        (mooncake.session.as_str(), mooncake.arrival_us, mooncake.block_tokens),
        ("line-1", 27_482_000, 512)
    );
    assert_eq!((mooncake.input_tokens, mooncake.output_tokens, mooncake.blocks), (6_955, 52, vec![46, 47]));
    let bailian = of(Format::Bailian);
    assert_eq!((bailian.session.as_str(), bailian.turn, bailian.block_tokens), ("chat-7", 0, 16));
    assert_eq!((bailian.arrival_us, bailian.think_us), (61_114_000, None));
    let agentic = of(Format::AgenticKv);
    assert_eq!(
        (agentic.session.as_str(), agentic.block_tokens, agentic.think_us),
        ("9", 512, Some(1_500_000))
    );
    let azure = of(Format::Azure);
    assert_eq!((azure.session.as_str(), azure.arrival_us, azure.block_tokens), ("line-2", 0, 0));
    assert_eq!((azure.input_tokens, azure.output_tokens), (4_808, 10));
    let weka = of(Format::Weka);
    assert_eq!((weka.session.as_str(), weka.arrival_us, weka.think_us), ("a", 1_500_000, Some(2_000_000)));
}

#[test]
fn bad_lines_are_counted_and_the_first_ones_kept() {
    let good = good_line(Format::Mooncake);
    let text = format!(
        "{good}\n{{\"timestamp\": 1, \"input_length\": \"x\", \"output_length\": 2}}\n{}{good}\n",
        "nonsense\n".repeat(8)
    );
    let mut reader =
        TraceReader::from_input("some.jsonl", Cursor::new(text), Format::Mooncake, ReadOptions::default());
    assert_eq!(reader.by_ref().count(), 2);
    assert_eq!((reader.skipped().lines, reader.skipped().first.len()), (9, 5));
    assert_eq!(
        reader.skipped().first[0].to_string(),
        "some.jsonl: line 2: input_length: invalid type: string \"x\", expected u32"
    );
}

#[test]
fn times_beyond_all_traces_are_refused_in_every_format() {
    let own =
        |times: &str| format!(r#"{{"session":"a","turn":0,{times},"input_tokens":1,"output_tokens":7}}"#);
    let lines = [
        (Format::Forebay, own(r#""arrival_us":4000000000000001"#)),
        (Format::Forebay, own(r#""arrival_us":0,"think_us":4000000000000001"#)),
        (Format::Forebay, own(r#""arrival_us":0,"service_us":4000000000000001"#)),
        (Format::Mooncake, r#"{"timestamp": 1e300, "input_length": 1, "output_length": 2}"#.into()),
        (Format::Bailian, r#"{"chat_id":7,"timestamp":-1,"input_length":1,"output_length":9}"#.into()),
        (
            Format::AgenticKv,
            r#"{"chat_id":7,"timestamp":0,"input_length":1,"output_length":9,"time_to_parent_chat":-2}"#
                .into(),
        ),
        (Format::Weka, r#"{"id":"a","block_size":64,"requests":[{"t":1e30,"in":1,"out":5}]}"#.into()),
    ];
    lines
        .into_iter()
        .for_each(|(format, line)| assert_eq!(read_all(line.clone(), format), (vec![], 1), "{line}"));
}

#[test]
fn a_strict_reader_stops_at_the_first_bad_line() {
    let good = good_line(Format::Mooncake);
    let options = ReadOptions { strict: true, ..ReadOptions::default() };
    let text = format!("{good}\nnonsense\n{good}\n");
    let mut reader = TraceReader::from_input("test", Cursor::new(text), Format::Mooncake, options);
    assert!(reader.next().unwrap().is_ok());
    let TraceError::Line(error) = reader.next().unwrap().unwrap_err() else { panic!("not a line error") };
    assert_eq!(error.place, Place::Line(2));
    assert!(reader.next().is_none());
}

fn session(id: &str, times: &[f64]) -> String {
    let request = |t: &f64| format!(r#"{{"t":{t},"model":"m","in":130,"out":5,"hash_ids":[1,2]}}"#);
    let requests: Vec<String> = times.iter().map(request).collect();
    let header = r#""block_size":64,"hash_id_scope":"local","tool_tokens":60,"system_tokens":4"#;
    format!(r#"{{"id":"{id}",{header},"requests":[{}],"totals":{{}}}}"#, requests.join(","))
}

fn weka_directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| std::fs::write(directory.path().join(name), text).unwrap();
    write("b.json", session("two", &[0.0, 5.0, 30.0]));
    write("a.json", session("one", &[0.0, 20.0, 21.0]));
    write("c.json", "{\"broken".into());
    write("README.md", "not a session".into());
    directory
}

fn open(path: &Path, weka: WekaOptions) -> TraceReader {
    TraceReader::open(path, ReadOptions { weka, ..ReadOptions::default() }).unwrap()
}

#[test]
fn session_files_become_one_trace_in_order_of_arrival() {
    let directory = weka_directory();
    let mut reader = open(directory.path(), WekaOptions::default());
    let requests: Vec<TraceRequest> = reader.by_ref().map(Result::unwrap).collect();
    let order: Vec<_> =
        requests.iter().map(|r| (r.session.as_str(), r.turn, r.arrival_us / 1_000_000)).collect();
    assert_eq!(
        order,
        [("one", 0, 0), ("two", 0, 0), ("two", 1, 5), ("one", 1, 20), ("one", 2, 21), ("two", 2, 30)]
    );
    assert_eq!(requests[0].blocks, requests[3].blocks);
    assert!(
        requests[0].blocks.iter().all(|block| !requests[1].blocks.contains(block)),
        "ids are local to a session"
    );
    assert_eq!(reader.skipped().lines, 1);
    assert!(
        reader.skipped().first[0].to_string().contains("c.json: before the requests: malformed"),
        "{:?}",
        reader.skipped()
    );
}

#[test]
fn a_session_goes_on_after_its_sub_agents() {
    let directory = tempfile::tempdir().unwrap();
    let agent = |t: f64| {
        format!(r#"{{"t":{t},"type":"subagent","agent_id":"a","requests":[{{"t":4,"in":64,"out":1}}]}}"#)
    };
    let request = |t: f64| format!(r#"{{"t":{t},"type":"n","in":64,"out":1}}"#);
    let entries = [request(0.0), agent(1.0), request(2.0), agent(3.0), request(10.0)].join(",");
    let text = format!(r#"{{"id":"one","block_size":64,"requests":[{entries}]}}"#);
    std::fs::write(directory.path().join("one.json"), text).unwrap();
    let requests = open(directory.path(), WekaOptions::default()).map(Result::unwrap);
    let order: Vec<_> = requests.map(|r| (r.session.clone(), r.arrival_us / 1_000_000)).collect();
    let names = order.iter().map(|(name, second)| (name.as_str(), *second)).collect::<Vec<_>>();
    assert_eq!(names, [("one", 0), ("one", 2), ("one/a", 5), ("one/a", 7), ("one", 10)]);
}

#[test]
fn assumptions_about_sessions_change_no_time_within_one() {
    let directory = weka_directory();
    let weka = WekaOptions { share_system_prompt: true, spread_starts_us: 1_000_000_000, seed: 3 };
    let requests: Vec<TraceRequest> = open(directory.path(), weka).map(Result::unwrap).collect();
    assert!(requests.is_sorted_by_key(|request| request.arrival_us));
    let of = |name: &str| -> Vec<&TraceRequest> { requests.iter().filter(|r| r.session == name).collect() };
    let (one, two) = (of("one"), of("two"));
    let after_first = |line: &[&TraceRequest]| -> Vec<u64> {
        line.iter().map(|r| r.arrival_us - line[0].arrival_us).collect()
    };
    assert_eq!(after_first(&one), [0, 20_000_000, 21_000_000]);
    assert_ne!(one[0].arrival_us, two[0].arrival_us);
    assert_eq!(one[0].blocks[0], two[0].blocks[0], "64 of the 130 tokens are the system prompt");
    assert_ne!(one[0].blocks[1], two[0].blocks[1]);
    assert_eq!(requests, open(directory.path(), weka).map(Result::unwrap).collect::<Vec<_>>());
}

#[test]
fn what_is_no_trace_is_refused_with_advice() {
    let directory = tempfile::tempdir().unwrap();
    let refused = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        TraceReader::open(&path, ReadOptions::default()).err().unwrap().to_string()
    };
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:3d\nsize 132054902\n";
    assert!(refused("qwen.jsonl", pointer).contains("git lfs pull"));
    assert!(refused("notes.txt", "hello\n").contains("--format (forebay, mooncake, weka,"));
    assert!(refused("empty", "").contains("no known trace format"));
    let none = TraceReader::open(directory.path(), ReadOptions::default()).err().unwrap();
    assert!(matches!(none, TraceError::SessionFiles { found: 0, .. }), "{none}");
    std::fs::write(directory.path().join("lfs.json"), pointer).unwrap();
    let lfs = TraceReader::open(directory.path(), ReadOptions::default()).err().unwrap();
    assert!(matches!(lfs, TraceError::LfsPointer { .. }), "{lfs}");
    let absent = TraceReader::open(&directory.path().join("absent"), ReadOptions::default()).err().unwrap();
    assert!(matches!(absent, TraceError::Io { .. }), "{absent}");
}

#[test]
fn a_trace_of_any_length_takes_the_memory_of_a_line() {
    // The input has no end: a reader that wanted all of it before it gives anything would never return.
    struct Endless;
    impl std::io::Read for Endless {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let line = format!("{}\n", good_line(Format::Mooncake));
            into[..line.len()].copy_from_slice(line.as_bytes());
            Ok(line.len())
        }
    }
    let input = std::io::BufReader::new(Endless);
    let reader = TraceReader::from_input("endless", input, Format::Mooncake, ReadOptions::default());
    assert!(reader.take(10_000).all(|request| request.unwrap().input_tokens == 6_955));
}
