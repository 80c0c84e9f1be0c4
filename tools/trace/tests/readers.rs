//! What every reader guarantees: it never panics, reads whatever is good around what is bad, and
//! says what was bad.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use forebay_trace::format::{
    Format, Place, ReadOptions, Rereadable, TimeUnit, TraceError, TraceReader, WekaOptions, write_line,
};
use forebay_trace::request::TraceRequest;
use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::io::{Cursor, Write};
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
        Format::BurstGpt => {
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log"
        }
        Format::TraceLab => {
            "session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\ns,0,0,200,30,1500"
        }
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
fn burstgpt_and_tracelab_give_their_fields() {
    let of = |format| read_all(good_line(format), format).0.remove(0);
    let burst = of(Format::BurstGpt);
    assert_eq!((burst.session.as_str(), burst.arrival_us, burst.block_tokens), ("line-2", 0, 0));
    assert_eq!((burst.input_tokens, burst.output_tokens), (472, 18));
    let lab = of(Format::TraceLab);
    assert_eq!((lab.session.as_str(), lab.turn, lab.arrival_us), ("s", 0, 0));
    assert_eq!((lab.input_tokens, lab.output_tokens, lab.block_tokens, lab.blocks.len()), (200, 30, 64, 3));
}

#[test]
fn whole_numbers_and_ids_are_read_however_they_are_written() {
    let lines = [
        (
            Format::Forebay,
            r#"{"session":"a","turn":0,"arrival_us":5,"input_tokens":100.0,"output_tokens":7.0,"block_tokens":64.0,"blocks":[-1,2.0]}"#,
        ),
        (
            Format::Mooncake,
            r#"{"timestamp": 27482.0, "input_length": 600.0, "output_length": 7.0, "hash_ids": [-1, 2.0]}"#,
        ),
        (
            Format::Bailian,
            r#"{"chat_id":7,"timestamp":61,"input_length":32.0,"output_length":7.0,"hash_ids":[-1,2.0]}"#,
        ),
        (
            Format::AgenticKv,
            r#"{"chat_id":7,"timestamp":61,"input_length":900.0,"output_length":7.0,"hash_ids":[-1,2.0]}"#,
        ),
    ];
    for (format, line) in lines {
        let (requests, bad) = read_all(line, format);
        assert_eq!((requests.len(), bad), (1, 0), "{line}");
        assert_eq!((requests[0].output_tokens, &requests[0].blocks[..]), (7, &[u64::MAX, 2][..]), "{line}");
    }
    let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,512.0,7.0";
    assert_eq!(read_all(csv, Format::Azure).0[0].input_tokens, 512);
    let weka = r#"{"id":"a","block_size":64.0,"requests":[{"t":1,"in":130.0,"out":5.0,"hash_ids":[1.0]}]}"#;
    assert_eq!(read_all(weka, Format::Weka).0[0].blocks, [1]);
}

#[test]
fn rows_out_of_order_are_kept_in_every_format() {
    let times = [2_000u64, 0, 500, 1_000, 3_000];
    let lines = |line: &dyn Fn(u64) -> String| times.map(line).join("\n");
    let texts = [
        (
            Format::Forebay,
            lines(&|ms| {
                let us = ms * 1_000;
                format!(
                    r#"{{"session":"{ms}","turn":0,"arrival_us":{us},"input_tokens":9,"output_tokens":1}}"#
                )
            }),
        ),
        (
            Format::Mooncake,
            lines(&|ms| format!(r#"{{"timestamp":{ms},"input_length":9,"output_length":1}}"#)),
        ),
        (
            Format::Bailian,
            lines(&|ms| {
                format!(r#"{{"chat_id":{ms},"timestamp":{ms}e-3,"input_length":9,"output_length":1}}"#)
            }),
        ),
        (
            Format::Azure,
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59,9,1\n2023-11-16 23:59:57,9,1\n\
             2023-11-16 23:59:57.5,9,1\n2023-11-16 23:59:58,9,1\n2023-11-17 00:00:00,9,1"
                .into(),
        ),
        (
            Format::BurstGpt,
            "Timestamp,Request tokens,Response tokens\n".to_owned()
                + &lines(&|ms| format!("{},9,1", 19_440_110.0 + ms as f64 / 1e3)),
        ),
    ];
    for (format, text) in texts {
        let (requests, bad) = read_all(text.clone(), format);
        let found: Vec<u64> = requests.iter().map(|request| request.arrival_us / 1_000).collect();
        assert_eq!((found, bad), (times.to_vec(), 0), "{format}: {text}");
    }
}

#[test]
fn another_block_size_and_another_unit_of_time_can_be_said() {
    let text = r#"{"timestamp": 1.5, "input_length": 600, "output_length": 20, "hash_ids": [4, 7, 9]}"#;
    let with = |block_tokens, time_unit| {
        let options = ReadOptions { block_tokens, time_unit, ..ReadOptions::default() };
        TraceReader::from_input("t", Cursor::new(text), Format::Mooncake, options)
    };
    assert_eq!(with(None, None).count(), 0, "three blocks of 512 tokens are too many");
    let request = with(Some(256), Some(TimeUnit::Seconds)).next().unwrap().unwrap();
    assert_eq!((request.block_tokens, request.arrival_us), (256, 1_500_000));
    let mut refused = with(None, None);
    assert!(refused.next().is_none());
    let said = refused.skipped().first[0].to_string();
    assert!(said.contains("--block-tokens"), "{said}");
}

#[test]
fn options_that_say_nothing_about_a_format_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("t");
    std::fs::write(&path, good_line(Format::Azure)).unwrap();
    let refused = |options| TraceReader::open(&path, options).err().unwrap().to_string();
    let block = refused(ReadOptions { block_tokens: Some(16), ..ReadOptions::default() });
    assert!(block.contains("--block-tokens") && block.contains("mooncake, bailian, agentic-kv"), "{block}");
    let unit = refused(ReadOptions { time_unit: Some(TimeUnit::Millis), ..ReadOptions::default() });
    assert!(unit.contains("--time-unit") && unit.contains("azure format"), "{unit}");
    std::fs::write(&path, good_line(Format::Mooncake)).unwrap();
    let none = refused(ReadOptions { block_tokens: Some(0), ..ReadOptions::default() });
    assert!(none.contains("--block-tokens: 0, allowed 1 to"), "{none}");
}

#[test]
fn ids_that_do_not_cover_their_prompts_are_counted() {
    let line = |input: u32, ids: &str| {
        format!("{{\"timestamp\":0,\"input_length\":{input},\"output_length\":1,\"hash_ids\":[{ids}]}}\n")
    };
    let coverage = |text: String| {
        let mut reader =
            TraceReader::from_input("t", Cursor::new(text), Format::Mooncake, ReadOptions::default());
        assert!(reader.by_ref().all(|request| request.is_ok()));
        reader.coverage().clone()
    };
    let whole = coverage(line(1_000, "1") + &line(1_024, "1,2") + &line(100, ""));
    assert!(!whole.is_worth_a_note(), "{whole:?}");
    let short = coverage(line(8_192, "1,2") + &line(1_024, "1,2") + &line(700, ""));
    assert!(short.is_worth_a_note());
    let said = short.to_string();
    assert!(said.contains("2 of 3") && said.contains("2 of 512 tokens for a prompt of 8192"), "{said}");
    assert!(!coverage(line(8_192, "")).is_worth_a_note(), "a trace without ids has no prefix information");
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

/// More than any buffer holds, and than what is looked at to tell the format.
fn long_trace() -> String {
    (0..4_000)
        .map(|ms| format!("{{\"timestamp\":{ms},\"input_length\":{},\"output_length\":1}}\n", ms + 1))
        .collect()
}

#[test]
fn a_trace_through_a_pipe_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    for packed in [long_trace().into_bytes(), gzip(long_trace().as_bytes())] {
        let path = directory.path().join("pipe");
        let _ = std::fs::remove_file(&path);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let feed = || {
            let (path, packed) = (path.clone(), packed.clone());
            std::thread::spawn(move || std::fs::write(path, packed).unwrap())
        };
        let feeding = feed();
        let mut reader = TraceReader::open(&path, ReadOptions::default()).unwrap();
        assert_eq!((reader.by_ref().count(), reader.skipped().lines), (4_000, 0));
        feeding.join().unwrap();
        // With a reader left, all of the text could be in the pipe before the next one opens it.
        drop(reader);
        let feeding = feed();
        let again = Rereadable::new(&path).unwrap();
        feeding.join().unwrap();
        for _ in 0..2 {
            assert_eq!(again.open(ReadOptions::default()).unwrap().count(), 4_000);
        }
    }
}

#[test]
fn a_compressed_trace_is_read_by_its_content_and_not_by_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let zstandard = zstd::encode_all(long_trace().as_bytes(), 1).unwrap();
    let members: Vec<u8> = long_trace().as_bytes().chunks(50_000).flat_map(gzip).collect();
    for (name, bytes) in [("a.jsonl", gzip(long_trace().as_bytes())), ("b", zstandard), ("c.zst", members)] {
        let path = directory.path().join(name);
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(open(&path, WekaOptions::default()).map(Result::unwrap).count(), 4_000, "{name}");
        std::fs::write(&path, &bytes[..bytes.len() - 20]).unwrap();
        let cut = open(&path, WekaOptions::default()).find_map(Result::err);
        assert!(matches!(cut, Some(TraceError::Io { .. })), "{name}: what is cut off is not the end");
    }
}

#[test]
fn compressed_session_files_are_part_of_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let nameless = session("x", &[0.0, 7.0]).replace(r#""id":"x","#, "");
    std::fs::write(directory.path().join("a.json.gz"), gzip(nameless.as_bytes())).unwrap();
    let plain = zstd::encode_all(session("two", &[1.0]).as_bytes(), 1).unwrap();
    std::fs::write(directory.path().join("b.json.zst"), plain).unwrap();
    let requests: Vec<_> = open(directory.path(), WekaOptions::default()).map(Result::unwrap).collect();
    assert_eq!(requests.iter().map(|r| r.session.as_str()).collect::<Vec<_>>(), ["a", "two", "a"]);
    std::fs::write(directory.path().join("a.json"), nameless).unwrap();
    let twice = TraceReader::open(directory.path(), ReadOptions::default()).err().unwrap().to_string();
    assert!(twice.contains("a.json and") && twice.contains("a.json.gz are one session twice"), "{twice}");
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
        "some.jsonl: line 2: input_length: invalid type: string \"x\", expected a whole number of tokens"
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
    assert!(
        refused("chat.txt", r#"[{"conversations":[{"from":"human","value":"x"}]}]"#).contains("ShareGPT")
    );
    let turns =
        refused("turns.jsonl", r#"{"session_id":"a","input_length":5,"output_length":5,"timestamp":0}"#);
    assert!(turns.contains("aiperf") && turns.contains("--format mooncake"), "{turns}");
    let wide: String = "\u{feff}{".into();
    let wide: Vec<u8> = wide.encode_utf16().flat_map(u16::to_le_bytes).collect();
    std::fs::write(directory.path().join("wide"), wide).unwrap();
    let forced = ReadOptions { format: Some(Format::Mooncake), ..ReadOptions::default() };
    let wide = TraceReader::open(&directory.path().join("wide"), forced).err().unwrap().to_string();
    assert!(wide.contains("UTF-16") && wide.contains("iconv"), "{wide}");
    assert!(refused("empty", "").contains("no known trace format"));
    let none = TraceReader::open(directory.path(), ReadOptions::default()).err().unwrap();
    assert!(matches!(none, TraceError::SessionFiles { found: 0, .. }), "{none}");
    std::fs::write(directory.path().join("lfs.json"), pointer).unwrap();
    let lfs = TraceReader::open(directory.path(), ReadOptions::default()).err().unwrap();
    assert!(matches!(lfs, TraceError::Unsupported { .. }), "{lfs}");
    let absent = TraceReader::open(&directory.path().join("absent"), ReadOptions::default()).err().unwrap();
    assert!(matches!(absent, TraceError::Io { .. }), "{absent}");
}

#[test]
fn a_trace_of_any_length_takes_the_memory_of_a_line() {
    // The input has no end: a reader that wanted all of it before it gives anything would never
    // return.
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
