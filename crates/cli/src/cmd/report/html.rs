//! The report as one page that needs nothing but itself.

use super::sums::{Report, Row};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:56em;margin:2em auto;padding:0 1em}\
                     table{border-collapse:collapse}td,th{padding:.3em .8em;text-align:right;\
                     border-bottom:1px solid #8884}td:nth-child(-n+3),th:nth-child(-n+3){text-align:left}";

pub fn page(report: &Report) -> String {
    let rows: String = report.rows.iter().map(row).collect();
    let Report { hours, prefill_tokens_per_gpu_second: rate, prices, .. } = report;
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<link rel=\"icon\" href=\"data:,\">\n\
         <title>Forebay report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>What was not computed in {hours} hours</h1>\n\
         <p>The nodes saved GPU time worth <b>{:.2}</b>. Their memory cost <b>{:.2}</b> ({:.1} GiB), and their \
         SSDs <b>{:.2}</b> ({:.1} GiB).</p>\n\
         <table>\n<tr><th>model<th>tenant<th>tier<th>tokens<th>GPU-seconds<th>worth</tr>\n{rows}</table>\n\
         <p>GPU-seconds are tokens divided by {rate:.0} tokens of prefill in a GPU-second; their worth is at {} \
         for a GPU-hour. Memory costs {} and SSD {} for a GiB-hour. The tier gpu is the engines' own cache, \
         which is not in the sum.</p>\n</body>\n</html>\n",
        report.saved_worth,
        report.memory_cost,
        report.memory_gib,
        report.ssd_cost,
        report.ssd_gib,
        prices.per_gpu_hour,
        prices.memory_per_gib_hour,
        prices.ssd_per_gib_hour,
    )
}

fn row(row: &Row) -> String {
    format!(
        "<tr><td>{}<td>{}<td>{}<td>{:.0}<td>{:.1}<td>{:.2}</tr>\n",
        escape(&row.model),
        escape(&row.tenant),
        escape(&row.tier),
        row.tokens,
        row.gpu_seconds,
        row.worth
    )
}

/// Names are foreign text.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::sums::{EnginePages, Prices, report};
    use super::*;

    #[test]
    fn a_name_is_text_on_the_page_whatever_it_is() {
        let text = "vllm:forebay_tokens_memory_total{model_name=\"<script>\"} 5\n";
        let pages = EnginePages { now: super::super::page::read(text), ..EnginePages::default() };
        let prices = Prices { memory_per_gib_hour: 0.0, ssd_per_gib_hour: 0.0, per_gpu_hour: 1.0 };
        let page = page(&report(&[pages], &[], 1.0, 1.0, prices));
        assert!(page.contains("&lt;script&gt;") && !page.contains("<script>"), "{page}");
    }
}
