//! The report as one HTML page that needs nothing but itself: no fonts, scripts, styles or pictures
//! from elsewhere. It knows the order and the words of the page; figures come from the summary and
//! pictures from the plots.

mod decisions;
mod gpus;

use super::plot::{
    Distribution, Measure, Moved, Panel, Series, Split, distributions, escape, moved, over_time, sources,
};
use super::summary::{ArmSummary, Class, Summary, TokenSources};
use crate::quantile::{Quantiles, sorted};
use crate::record::RecordLog;
use crate::units::{NONE, count, millis_or_none, percent_or_none, seconds_or_none};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// Parts of a prompt by source, as the page names them.
const SOURCES: [&str; 5] = ["GPU cache", "memory", "SSD", "peer", "computed"];

const LOAD: Measure = Measure {
    title: "Requests per engine over time",
    axis: "requests over model time (s)",
    unit: "requests",
    most: None,
};

/// The page. `summary` is the summary of `log`.
pub fn html(summary: &Summary, log: &RecordLog) -> String {
    let sections = [
        headline(summary),
        ttft(summary, log),
        hits(summary),
        loads(summary, log),
        gpus::section(summary, log),
        decisions::section(summary, log),
        links(summary),
        classes(summary),
        how_to_read(),
        parameters(log),
    ];
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<link rel=\"icon\" href=\"data:,\">\n\
         <title>Forebay replay report</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <header>\n<h1>Replay report</h1>\n{}</header>\n{}</main>\n<div id=\"tip\" hidden></div>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n",
        verdict(summary),
        sections.concat(),
    )
}

/// The figures that decide whether the rest is worth reading.
fn verdict(summary: &Summary) -> String {
    let total = |of: fn(&ArmSummary) -> u64| summary.arms.iter().map(of).sum::<u64>();
    let checked = total(|arm| arm.wrong.map_or(0, |wrong| wrong.checked_requests as u64));
    let wrong = total(|arm| arm.wrong.map_or(0, |wrong| wrong.tokens));
    let failed = total(|arm| arm.failed() as u64);
    let arms = if summary.arms.len() == 1 { "arm" } else { "arms" };
    let tiles = [
        tile(
            "",
            &count(total(|arm| arm.requests as u64)),
            &format!("requests in {} {arms}", summary.arms.len()),
        ),
        tile(if failed > 0 { "bad" } else { "good" }, &count(failed), "failed"),
        match checked {
            0 => tile("", NONE, "wrong tokens: nobody checked"),
            _ => tile(
                if wrong > 0 { "bad" } else { "good" },
                &count(wrong),
                &format!("wrong tokens in {} checked answers", count(checked)),
            ),
        },
    ];
    format!("<ul class=\"tiles\">{}</ul>\n", tiles.concat())
}

fn tile(class: &str, figure: &str, label: &str) -> String {
    format!("<li class=\"{class}\"><b>{}</b> <span>{}</span></li>", escape(figure), escape(label))
}

fn headline(summary: &Summary) -> String {
    let head = "<thead><tr><th rowspan=\"2\" scope=\"col\">Arm</th><th rowspan=\"2\" scope=\"col\">Requests</th>\
         <th rowspan=\"2\" scope=\"col\">Failed</th><th colspan=\"3\" scope=\"colgroup\">TTFT (s)</th>\
         <th colspan=\"3\" scope=\"colgroup\">TPOT (ms)</th><th colspan=\"3\" scope=\"colgroup\">E2E (s)</th>\
         <th rowspan=\"2\" scope=\"col\">Hit rate (%)</th><th rowspan=\"2\" scope=\"col\">Wrong tokens</th>\
         <th colspan=\"2\" scope=\"colgroup\">Answer tokens</th></tr>\
         <tr><th>p50</th><th>p90</th><th>p99</th><th>p50</th><th>p90</th><th>p99</th><th>p50</th><th>p90</th><th>p99</th>\
         <th>asked</th><th>got</th></tr></thead>";
    let rows = summary.arms.iter().map(|arm| {
        let mut cells = vec![count(arm.requests as u64), count(arm.failed() as u64)];
        cells.extend([arm.ttft_s.p50, arm.ttft_s.p90, arm.ttft_s.p99].map(seconds_or_none));
        cells.extend([arm.tpot_s.p50, arm.tpot_s.p90, arm.tpot_s.p99].map(millis_or_none));
        cells.extend([arm.e2e_s.p50, arm.e2e_s.p90, arm.e2e_s.p99].map(seconds_or_none));
        cells.push(percent_or_none(arm.sources.hit_rate()));
        cells.push(arm.wrong.map_or_else(|| "unchecked".into(), |wrong| count(wrong.tokens)));
        cells.push(arm.asked_tokens.map_or_else(|| NONE.into(), count));
        cells.push(count(arm.output_tokens));
        row(&arm.arm, cells)
    });
    let table = format!("<table>{head}<tbody>{}</tbody></table>", rows.collect::<String>());
    section("headline", "Results by arm", "", &(scrolling(&table) + &counters(summary) + &notes(summary)))
}

fn counters(summary: &Summary) -> String {
    let names = summary.counter_names();
    if names.is_empty() {
        return String::new();
    }
    let head: String =
        summary.arms.iter().map(|arm| format!("<th scope=\"col\">{}</th>", escape(&arm.arm))).collect();
    let rows = names.into_iter().map(|name| {
        let value =
            |arm: &ArmSummary| arm.counters.get(name).map_or_else(|| NONE.into(), |&value| count(value));
        row(name, summary.arms.iter().map(value))
    });
    let rows: String = rows.collect();
    scrolling(&format!(
        "<table class=\"even\"><thead><tr><th scope=\"col\">Counted</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    ))
}

/// What a reader must know before believing the figures.
fn notes(summary: &Summary) -> String {
    let notes: String =
        super::notes::notes(summary).iter().map(|note| format!("<li>{}</li>", escape(note))).collect();
    if notes.is_empty() { notes } else { format!("<ul class=\"notes\">{notes}</ul>") }
}

fn ttft(summary: &Summary, log: &RecordLog) -> String {
    let groups: Vec<Distribution> = summary
        .arms
        .iter()
        .enumerate()
        .map(|(color, arm)| Distribution {
            name: arm.arm.clone(),
            color,
            sorted_s: sorted(
                log.requests
                    .iter()
                    .filter(|record| record.arm == arm.arm && record.is_ok())
                    .filter_map(|record| record.ttft_s),
            ),
        })
        .collect();
    let keys =
        groups.iter().map(|group| line_key(&format!("c{} d{}", group.color % 6, group.color), &group.name));
    let plot = distributions(
        "plot-ttft",
        "Time to first token by arm",
        "share of requests over time to first token (model s, logarithmic)",
        &groups,
    );
    let text = "Share of requests that had their first token within a time. Further to the left is better.";
    section("ttft", "Time to first token", text, &(legend(keys) + &scrolling(&plot)))
}

fn hits(summary: &Summary) -> String {
    let wholes: Vec<Split> =
        summary.arms.iter().map(|arm| Split { name: arm.arm.clone(), parts: parts(&arm.sources) }).collect();
    let plot =
        sources("plot-hits", "Prompt tokens by source and arm", "share of prompt tokens", &SOURCES, &wholes);
    let keys = SOURCES.iter().enumerate().map(|(index, name)| box_key(&format!("s{index}"), name));
    let text = "Where the prompt's KV came from, as the engines report it: found in the GPU's own cache, fetched from \
                memory, from SSD or from another node, or computed. Where answers do not say it, as vLLM's do not, the \
                engines' counters above do. What nothing names is booked as the GPU's own cache.";
    section("hits", "Hits by source", text, &(legend(keys) + &scrolling(&plot)))
}

fn parts(sources: &TokenSources) -> Vec<u64> {
    let TokenSources { gpu, memory, ssd, peer, computed, .. } = *sources;
    vec![gpu, memory, ssd, peer, computed]
}

fn loads(summary: &Summary, log: &RecordLog) -> String {
    if log.loads.is_empty() {
        return String::new();
    }
    let mut names: Vec<&str> = log.loads.iter().map(|sample| sample.instance.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let panels: Vec<Panel> = summary
        .arms
        .iter()
        .map(|arm| Panel {
            name: arm.arm.clone(),
            note: imbalance(arm),
            series: load_series(&names, &arm.arm, log),
        })
        .collect();
    let keys = names
        .iter()
        .enumerate()
        .map(|(color, name)| line_key(&format!("thin i{} d{color}", color % 6), name));
    let text = "Requests running and waiting on each engine. Lines that lie together mean an even load; beside \
                each name is how many requests the busiest engine got.";
    let body = legend(keys) + &panels_of(over_time("plot-load", &LOAD, &panels));
    section("load", "Load per engine", text, &body)
}

fn load_series(names: &[&str], arm: &str, log: &RecordLog) -> Vec<Series> {
    let samples = |name| log.loads.iter().filter(move |sample| sample.arm == arm && sample.instance == name);
    names
        .iter()
        .enumerate()
        .map(|(color, &name)| Series {
            name: name.to_owned(),
            color,
            points: samples(name)
                .map(|sample| (sample.at_s, f64::from(sample.running) + f64::from(sample.waiting)))
                .collect(),
        })
        .collect()
}

fn imbalance(arm: &ArmSummary) -> String {
    let text = |imbalance| format!("busiest engine: {imbalance:.2} x the mean");
    arm.imbalance().map(text).unwrap_or_default()
}

fn links(summary: &Summary) -> String {
    if summary.arms.iter().all(|arm| arm.links.is_empty()) {
        return String::new();
    }
    let arms: Vec<Moved> = summary
        .arms
        .iter()
        .map(|arm| Moved {
            name: arm.arm.clone(),
            links: arm.links.iter().map(|link| (link.link.clone(), link.bytes, link.lots)).collect(),
        })
        .collect();
    let text = "Bytes that each link really moved during the arm.";
    section("links", "Bytes by link", text, &panels_of(moved("plot-links", &arms)))
}

fn classes(summary: &Summary) -> String {
    let groups: String = Class::ALL
        .iter()
        .map(|class| format!("<th colspan=\"4\" scope=\"colgroup\">{}</th>", escape(class.label())))
        .collect();
    let columns = "<th>n</th><th>p50</th><th>p90</th><th>p99</th>".repeat(Class::ALL.len());
    let rows = summary.arms.iter().map(|arm| {
        let cells = arm.classes.iter().flat_map(|class| {
            let Quantiles { p50, p90, p99, .. } = class.ttft_s;
            [count(class.requests as u64), seconds_or_none(p50), seconds_or_none(p90), seconds_or_none(p99)]
        });
        row(&arm.arm, cells)
    });
    let table = format!(
        "<table><thead><tr><th rowspan=\"2\" scope=\"col\">Arm</th>{groups}</tr><tr>{columns}</tr></thead>\
         <tbody>{}</tbody></table>",
        rows.collect::<String>()
    );
    let text = "Time to first token in model seconds, by how many prompt tokens the engine really computed, of n \
                requests.";
    section("classes", "By executed tokens", text, &scrolling(&table))
}

fn how_to_read() -> String {
    let items = [
        "All times are model time: real time times the clock ratio. With real engines the ratio is 1.",
        "Latencies count from the moment a request was due, not from when it was sent, so a late client cannot hide \
         waiting.",
        "TTFT is the time to first token, TPOT the mean time per token after the first, E2E the time to the last token. \
         Failed requests are counted, but they are in none of the latencies.",
        "The hit rate is the share of prompt tokens that the engine did not compute, by its own account. Executed tokens \
         are input less cached.",
        "A wrong token is one that the engine could not have answered had every byte of its KV been right.",
        "One run is one sample. Differences below a tenth say nothing until they hold over several seeds.",
    ];
    let items: String = items.iter().map(|item| format!("<li>{item}</li>")).collect();
    section("how", "How to read this", "", &format!("<ul>{items}</ul>"))
}

/// What all arms share once, and what differs by arm.
fn parameters(log: &RecordLog) -> String {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in log.runs.iter().flat_map(|run| &run.parameters) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let rows: String = names.iter().map(|name| parameter(name, log)).collect();
    if rows.is_empty() {
        return String::new();
    }
    section(
        "parameters",
        "Parameters",
        "",
        &scrolling(&format!("<table class=\"words\"><tbody>{rows}</tbody></table>")),
    )
}

fn parameter(name: &str, log: &RecordLog) -> String {
    let value_in = |run: &'_ crate::record::RunInfo| {
        run.parameters.iter().find(|(other, _)| other == name).map(|(_, value)| value.clone())
    };
    let values: Vec<(&str, String)> =
        log.runs.iter().filter_map(|run| Some((run.arm.as_str(), value_in(run)?))).collect();
    let shared = values.windows(2).all(|pair| pair[0].1 == pair[1].1);
    let text = match values.first() {
        Some((_, value)) if shared => value.clone(),
        _ => values.iter().map(|(arm, value)| format!("{arm}: {value}")).collect::<Vec<_>>().join("; "),
    };
    row(name, [text])
}

fn section(id: &str, title: &str, text: &str, body: &str) -> String {
    let text = if text.is_empty() { String::new() } else { format!("<p>{text}</p>\n") };
    format!("<section id=\"{id}\">\n<h2>{title}</h2>\n{text}{body}\n</section>\n")
}

fn row(name: &str, cells: impl IntoIterator<Item = String>) -> String {
    let cells: String = cells.into_iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
    format!("<tr><th scope=\"row\">{}</th>{cells}</tr>", escape(name))
}

/// A wide thing in a box that scrolls by itself, so that the page never does.
fn scrolling(inner: &str) -> String {
    format!("<div class=\"wide\" tabindex=\"0\">{inner}</div>")
}

fn panels_of(pictures: Vec<String>) -> String {
    let panels: String = pictures.iter().map(|picture| format!("<div>{picture}</div>")).collect();
    format!("<div class=\"panels\">{panels}</div>")
}

fn legend(keys: impl Iterator<Item = String>) -> String {
    format!("<ul class=\"legend\">{}</ul>", keys.collect::<String>())
}

fn line_key(class: &str, name: &str) -> String {
    format!(
        "<li><svg width=\"34\" height=\"10\" aria-hidden=\"true\"><line class=\"curve {class}\" x1=\"1\" y1=\"5\" \
         x2=\"33\" y2=\"5\"/></svg>{}</li>",
        escape(name)
    )
}

fn box_key(class: &str, name: &str) -> String {
    format!(
        "<li><svg width=\"14\" height=\"14\" aria-hidden=\"true\"><rect class=\"{class}\" width=\"14\" height=\"14\"/>\
         </svg>{}</li>",
        escape(name)
    )
}
