//! The section of the page about the router's decisions: what was chosen, what was predicted, and
//! what the choices cost.

use super::{box_key, legend, panels_of, row, scrolling};
use crate::quantile::Quantiles;
use crate::record::{Choice, DecisionSample, RecordLog};
use crate::report::DecisionSummary;
use crate::report::plot::{Chosen, Predicted, choices, scatter};
use crate::report::summary::{ArmSummary, Summary};
use crate::units::{count, seconds, seconds_or_none};

const COSTS: &str = "Regret is by how many seconds all requests together wait longer than they would have at the \
                     cheapest engine, as predicted. Over the best other puts the time to first token that came in the \
                     place of the predicted one, and compares with the cheapest of the other engines: below zero the \
                     choice was right.";
const DOTS: &str =
    "One dot for each whole answer. On the line a prediction was right, above it the first token came later.";

/// Empty if no arm has decisions.
pub fn section(summary: &Summary, log: &RecordLog) -> String {
    let arms: Vec<(&ArmSummary, &DecisionSummary)> =
        summary.arms.iter().filter_map(|arm| Some((arm, arm.decisions.as_ref()?))).collect();
    if arms.is_empty() {
        return String::new();
    }
    let text = "Where the router sent requests: to the engine that their session had before, elsewhere, to a first \
                engine, by load alone, or nowhere.";
    let body = [
        scrolling(&choices_table(&arms)),
        legend(keys()),
        panels_of(choices("plot-choices", &Choice::ALL.map(Choice::label), &chosen(&arms, log))),
        format!("<p>{COSTS}</p>"),
        scrolling(&costs_table(&arms)),
        format!("<p>{DOTS}</p>"),
        panels_of(scatter("plot-predicted", &predicted(&arms, log))),
    ];
    super::section("decisions", "Decisions", text, &body.concat())
}

fn keys() -> impl Iterator<Item = String> {
    Choice::ALL.into_iter().enumerate().map(|(place, choice)| box_key(&format!("s{place}"), choice.label()))
}

fn choices_table(arms: &[(&ArmSummary, &DecisionSummary)]) -> String {
    let kinds: String =
        Choice::ALL.iter().map(|choice| format!("<th scope=\"col\">{}</th>", choice.label())).collect();
    let rows = arms.iter().map(|(arm, decisions)| {
        let of = Choice::ALL.map(|choice| count(decisions.count(choice) as u64));
        row(&arm.arm, [count(decisions.decisions as u64)].into_iter().chain(of))
    });
    format!(
        "<table class=\"even\"><thead><tr><th scope=\"col\">Arm</th><th scope=\"col\">decisions</th>{kinds}</tr></thead>\
         <tbody>{}</tbody></table>",
        rows.collect::<String>()
    )
}

fn costs_table(arms: &[(&ArmSummary, &DecisionSummary)]) -> String {
    let quantiles = "<th>p50</th><th>p90</th><th>p99</th>";
    let head = format!(
        "<thead><tr><th rowspan=\"2\" scope=\"col\">Arm</th>\
         <th colspan=\"4\" scope=\"colgroup\">TTFT predicted less realised (s)</th>\
         <th colspan=\"3\" scope=\"colgroup\">Regret (s)</th>\
         <th colspan=\"3\" scope=\"colgroup\">Over the best other (s)</th></tr>\
         <tr><th>median</th><th>off by p50</th><th>p90</th><th>p99</th>{quantiles}{quantiles}</tr></thead>"
    );
    let of = |Quantiles { p50, p90, p99, .. }: Quantiles| [p50, p90, p99].map(seconds_or_none);
    let rows = arms.iter().map(|(arm, decisions)| {
        let mut cells = vec![seconds_or_none(decisions.ttft_error_s.p50)];
        cells.extend(of(decisions.ttft_off_s));
        cells.extend(of(decisions.regret_s));
        cells.extend(of(decisions.over_best_other_s));
        row(&arm.arm, cells)
    });
    format!("<table>{head}<tbody>{}</tbody></table>", rows.collect::<String>())
}

fn samples<'a>(arm: &'a ArmSummary, log: &'a RecordLog) -> impl Iterator<Item = &'a DecisionSample> {
    log.decisions.iter().filter(|sample| sample.arm == arm.arm)
}

fn chosen(arms: &[(&ArmSummary, &DecisionSummary)], log: &RecordLog) -> Vec<Chosen> {
    let place = |choice| Choice::ALL.iter().position(|&other| other == choice).unwrap_or(0);
    let arms = arms.iter().map(|(arm, decisions)| {
        let with_home = decisions.count(Choice::Home) + decisions.count(Choice::Elsewhere);
        let stayed = 100.0 * decisions.count(Choice::Home) as f64 / with_home.max(1) as f64;
        Chosen {
            name: arm.arm.clone(),
            note: if with_home == 0 { String::new() } else { format!("{stayed:.0} % stay") },
            choices: samples(arm, log).map(|sample| (sample.at_s, place(sample.choice))).collect(),
        }
    });
    arms.collect()
}

fn predicted(arms: &[(&ArmSummary, &DecisionSummary)], log: &RecordLog) -> Vec<Predicted> {
    let arms = arms.iter().map(|(arm, decisions)| {
        let off = decisions.ttft_off_s.p50.zip(decisions.ttft_off_s.p90);
        let note = |(p50, p90)| format!("off by {} s, p90 {} s", seconds(p50), seconds(p90));
        let times_s = samples(arm, log).filter_map(|sample| sample.predicted_ttft_s.zip(sample.ttft_s));
        Predicted {
            name: arm.arm.clone(),
            note: off.map(note).unwrap_or_default(),
            times_s: times_s.collect(),
        }
    });
    arms.collect()
}
