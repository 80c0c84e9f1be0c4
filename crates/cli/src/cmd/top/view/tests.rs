use super::super::change::Snapshot;
use super::*;

/// Pages of a small system under load, a second apart: a router, a node and an emulated engine.
const ROUTER: [&str; 2] = [include_str!("recorded/router-1.txt"), include_str!("recorded/router-2.txt")];
const NODE: [&str; 2] = [include_str!("recorded/node-1.txt"), include_str!("recorded/node-2.txt")];
const ENGINE: [&str; 2] = [include_str!("recorded/engine-1.txt"), include_str!("recorded/engine-2.txt")];

fn read([before, now]: [&str; 2]) -> [Snapshot; 2] {
    [before, now].map(|page| Snapshot::read(page.as_bytes()))
}

fn process<'a>(address: &'a str, [before, now]: &'a [Snapshot; 2]) -> Process<'a> {
    Process { address, said: Ok(Change { now, before: Some((before, 1.0)) }) }
}

#[test]
fn a_frame_shows_what_was_recorded() {
    let (router, node, engine) = (read(ROUTER), read(NODE), read(ENGINE));
    let gone = Process { address: "10.0.0.9:9310", said: Err("Connection refused (os error 111)") };
    let processes = [
        process("127.0.0.1:8080", &router),
        process("127.0.0.1:9310", &node),
        process("e0:8000", &engine),
        gone,
    ];
    let lines = frame(&processes, 80, 40);
    let shown = lines.join("\n");
    let frame = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cmd/top/view/recorded/frame.txt");
    let recorded = std::fs::read_to_string(frame).unwrap();
    assert_eq!(shown, recorded.trim_end(), "\n{shown}\n");
    assert!(lines.iter().all(|line| line.chars().count() <= 80));
}

#[test]
fn a_small_window_says_what_it_hides() {
    let node = read(NODE);
    let processes = [process("127.0.0.1:9310", &node)];
    let all = frame(&processes, 80, usize::MAX);
    let lines = frame(&processes, 30, 4);
    assert_eq!(lines.len(), 4);
    assert!(lines[3].starts_with(&format!("... {} more lines: ", all.len() - 3)), "{}", lines[3]);
    assert!(lines.iter().all(|line| line.chars().count() <= 30));
    assert_eq!(frame(&processes, 0, 0).len(), 1, "and no window is too small");
}

#[test]
fn what_is_not_known_yet_is_a_dash_and_an_empty_page_is_said() {
    let [now, _] = read(NODE);
    let first = Process { address: "a:1", said: Ok(Change { now: &now, before: None }) };
    let lines = frame(&[first], 80, 40).join("\n");
    assert!(lines.contains("CPU -") && !lines.contains("NaN"), "{lines}");
    let empty = Snapshot::default();
    let lines = frame(&[Process { address: "a:1", said: Ok(Change { now: &empty, before: None }) }], 80, 40);
    assert_eq!(lines[2], "a:1   neither a router, nor a node, nor an engine");
}

#[test]
fn sizes_and_rates_are_short() {
    assert_eq!(bytes(Some(1023.0)), "1023 B");
    assert_eq!(bytes(Some(8.0 * 1024_f64.powi(3))), "8.0 GiB");
    assert_eq!(bytes(Some(1e30)).split(' ').next_back(), Some("PiB"));
    assert_eq!(
        (number(Some(0.126)), number(Some(1234.5)), number(None)),
        ("0.13".into(), "1234".into(), "-".into())
    );
    assert_eq!(percent(Some(0.824)), "82 %");
}
