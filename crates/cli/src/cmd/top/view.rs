//! A frame of `forebay top`: lines of text, from what processes say. Pure.

use super::change::{Change, Label};

/// An address, and what it says, or why it says nothing.
#[derive(Debug)]
pub struct Process<'a> {
    pub address: &'a str,
    pub said: Result<Change<'a>, &'a str>,
}

/// Reasons that are shown for one process at most.
const REASONS_MAX: usize = 4;

/// Lines that fit so many columns and rows.
pub fn frame(processes: &[Process], width: usize, height: usize) -> Vec<String> {
    let mut lines = vec![format!("forebay top   {} addresses, each second   q quits", processes.len())];
    for process in processes {
        lines.push(String::new());
        lines.extend(process_lines(process));
    }
    if lines.len() > height {
        let hidden = lines.len() - height.saturating_sub(1);
        lines.truncate(height.saturating_sub(1));
        lines.push(format!("... {hidden} more lines: a taller window shows them"));
    }
    lines.iter().map(|line| line.chars().take(width).collect::<String>().trim_end().to_owned()).collect()
}

fn process_lines(process: &Process) -> Vec<String> {
    let address = process.address;
    let change = match &process.said {
        Ok(change) => change,
        Err(why) => return vec![format!("{address}   no answer: {why}")],
    };
    let mut lines = Vec::new();
    if change.now.has("forebay_route_") {
        lines.extend(router(address, change));
    }
    if change.now.has("forebay_memory_capacity_bytes") {
        lines.extend(node(address, change));
    }
    if change.now.has("vllm:") {
        lines.extend(engine(address, change));
    }
    if lines.is_empty() {
        lines.push(format!("{address}   neither a router, nor a node, nor an engine"));
    }
    lines
}

fn router(address: &str, change: &Change) -> Vec<String> {
    let policy = change.now.values("forebay_route_info", "policy").join(" ");
    let seconds = change.rate("forebay_route_first_byte_seconds_sum", &[]);
    let firsts = change.rate("forebay_route_first_byte_seconds_count", &[]);
    let first_byte = seconds.zip(firsts).filter(|(_, count)| *count > 0.0).map(|(sum, count)| sum / count);
    let answered = change.rate("forebay_route_attempts_total", &[("end", "answered")]);
    let refused = change.rate("forebay_route_refused_total", &[]);
    let mut lines = vec![
        format!("router {address}   {policy}"),
        format!(
            "  answers/s {}  refused/s {}  first byte {} s  hand-overs/s {}  CPU {}",
            number(answered),
            number(refused),
            number(first_byte),
            number(change.rate("forebay_route_hand_overs_total", &[])),
            percent(change.rate("forebay_route_process_cpu_seconds_total", &[])),
        ),
        row("  engine", &["up", "running", "others", "KV need", "hits", "done/s", "failed/s"]),
    ];
    let engines = change.now.values("forebay_route_backend_up", "backend");
    lines.extend(engines.into_iter().map(|name| router_engine(name, change)));
    lines
}

fn router_engine(name: &str, change: &Change) -> String {
    let of: &[Label] = &[("backend", name)];
    let up = change.gauge("forebay_route_backend_up", of).map(|up| if up > 0.0 { "yes" } else { "NO" });
    let pool = change.gauge("forebay_route_pool_tokens", of).filter(|pool| *pool > 0.0);
    let used = change.gauge("forebay_route_context_tokens", of).zip(pool).map(|(used, pool)| used / pool);
    let answered = change.rate("forebay_route_attempts_total", &[of[0], ("end", "answered")]);
    let ended = change.rate("forebay_route_attempts_total", of);
    let failed = ended.zip(answered).map(|(all, answered)| (all - answered).max(0.0));
    row(
        &format!("  {name}"),
        &[
            up.unwrap_or("-"),
            &count(change.gauge("forebay_route_in_flight", of)),
            &count(change.gauge("forebay_route_others_in_flight", of)),
            &percent(used),
            &percent(change.share(
                "forebay_route_cached_tokens_total",
                "forebay_route_prompt_tokens_total",
                of,
            )),
            &number(answered),
            &number(failed),
        ],
    )
}

fn node(address: &str, change: &Change) -> Vec<String> {
    let mut lines = vec![
        format!(
            "node {address}   clients {}  memory {}  CPU {}",
            count(change.gauge("forebay_clients", &[])),
            bytes(change.gauge("forebay_process_resident_bytes", &[])),
            percent(change.rate("forebay_process_cpu_seconds_total", &[])),
        ),
        row("  tier", &["used", "size", "chunks", "hits/s", "stored/s", "evict/s", "GB/s"]),
    ];
    lines.push(tier(change, "memory", "forebay_memory_bytes", "forebay_memory_capacity_bytes"));
    if change.now.has("forebay_disk_capacity_bytes") {
        lines.push(tier(change, "disk", "forebay_disk_live_bytes", "forebay_disk_live_limit_bytes"));
    }
    lines.extend(transfers(change));
    lines.extend(peers(change));
    lines.push(format!("  why not: {}", reasons(change)));
    lines
}

fn tier(change: &Change, tier: &str, used: &str, size: &str) -> String {
    let of: &[Label] = &[("tier", tier)];
    let state: &[Label] = if tier == "memory" { &[("state", "used")] } else { &[] };
    let moved = match tier {
        "memory" => change.rate("forebay_transfer_bytes_total", &[]),
        _ => change.rate("forebay_disk_bytes_total", &[]),
    };
    row(
        &format!("  {tier}"),
        &[
            &bytes(change.gauge(used, state)),
            &bytes(change.gauge(size, &[])),
            &count(change.gauge("forebay_chunks", of)),
            &number(change.rate("forebay_client_leased_chunks_total", of)),
            &number(change.rate("forebay_chunks_stored_total", of)),
            &number(change.rate("forebay_chunks_evicted_total", of)),
            &gigabytes(moved),
        ],
    )
}

/// What links carry; none where nothing moves.
fn transfers(change: &Change) -> Option<String> {
    let moving = change.growing("forebay_link_bytes_total");
    let links: Vec<String> = moving
        .iter()
        .take(REASONS_MAX)
        .map(|(link, rate)| format!("{link} {}", gigabytes(Some(*rate))))
        .collect();
    (!links.is_empty()).then(|| format!("  links GB/s: {}", links.join(", ")))
}

fn peers(change: &Change) -> Vec<String> {
    let peers = change.now.values("forebay_peer_state", "peer");
    if peers.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![row("  peer", &["state", "GB/s", "done/s", "lots", "faults/s"])];
    lines.extend(peers.into_iter().map(|peer| {
        let of: &[Label] = &[("peer", peer)];
        let states = change.now.values("forebay_peer_state", "state").into_iter();
        let mut state = states
            .filter(|state| change.gauge("forebay_peer_state", &[of[0], ("state", state)]) == Some(1.0));
        row(
            &format!("  {peer}"),
            &[
                state.next().unwrap_or("-"),
                &gigabytes(change.rate("forebay_peer_bytes_total", of)),
                &number(change.rate("forebay_peer_requests_total", &[of[0], ("end", "done")])),
                &count(change.gauge("forebay_peer_in_flight_lots", of)),
                &number(change.rate("forebay_peer_faults_total", of)),
            ],
        )
    }));
    lines
}

/// Why chunks are not stored, kept or brought, as far as it happens now.
fn reasons(change: &Change) -> String {
    let sources = [
        ("refused", "forebay_refused_total"),
        ("evicted", "forebay_chunks_evicted_total"),
        ("fault", "forebay_store_faults_total"),
        ("lease over", "forebay_leases_expired_total"),
        ("not lent", "forebay_peering_denied_total"),
        ("peer corrupt", "forebay_peering_corrupt_chunks_total"),
    ];
    let named = |(what, name): (&str, &str)| {
        let what = what.to_owned();
        change.growing(name).into_iter().map(move |(of, rate)| (format!("{what} {of}"), rate))
    };
    let mut reasons: Vec<(String, f64)> = sources.into_iter().flat_map(named).collect();
    let failed = [
        ("pull failed", "forebay_peering_pulls_total", "failed"),
        ("disk read failed", "forebay_promotions_total", "failed"),
        ("no room for disk read", "forebay_promotions_total", "refused"),
        ("write queue full", "forebay_write_back_chunks_total", "queue_full"),
    ];
    reasons.extend(failed.into_iter().filter_map(|(what, name, end)| {
        let rate = change.rate(name, &[("end", end)]).filter(|rate| *rate > 0.0)?;
        Some((what.to_owned(), rate))
    }));
    reasons.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let shown = reasons.iter().take(REASONS_MAX);
    let shown: Vec<String> =
        shown.map(|(what, rate)| format!("{} {}/s", what.trim_end(), number(Some(*rate)))).collect();
    if shown.is_empty() { "nothing refused, evicted or failed".to_owned() } else { shown.join(", ") }
}

fn engine(address: &str, change: &Change) -> [String; 2] {
    let share =
        |of: &str| change.share(&format!("vllm:{of}_hits_total"), &format!("vllm:{of}_queries_total"), &[]);
    let state = format!(
        "  running {}  waiting {}  KV {}  hits {}  found outside {}  tokens/s {}",
        count(change.gauge("vllm:num_requests_running", &[])),
        count(change.gauge("vllm:num_requests_waiting", &[])),
        percent(change.gauge("vllm:kv_cache_usage_perc", &[])),
        percent(share("prefix_cache")),
        percent(share("external_prefix_cache")),
        number(change.rate("vllm:generation_tokens_total", &[])),
    );
    [format!("engine {address}"), state]
}

/// A row of a table: what it is about, and up to seven columns.
fn row(name: &str, columns: &[&str]) -> String {
    let name: String = name.chars().take(17).collect();
    let columns: String = columns.iter().map(|column| format!(" {column:>8}")).collect();
    format!("{name:<17}{columns}")
}

fn count(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{value:.0}"))
}

fn number(value: Option<f64>) -> String {
    value
        .map_or("-".into(), |value| if value < 100.0 { format!("{value:.2}") } else { format!("{value:.0}") })
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.0} %", 100.0 * share))
}

fn gigabytes(bytes_s: Option<f64>) -> String {
    number(bytes_s.map(|bytes_s| bytes_s / 1e9))
}

fn bytes(value: Option<f64>) -> String {
    let Some(value) = value else { return "-".into() };
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let fitting = (0..units.len() - 1).find(|&unit| value < 1024_f64.powi(unit as i32 + 1));
    let unit = fitting.unwrap_or(units.len() - 1);
    let value = value / 1024_f64.powi(unit as i32);
    let digits = usize::from(value < 100.0);
    format!("{value:.digits$} {}", units[unit])
}

#[cfg(test)]
mod tests;
