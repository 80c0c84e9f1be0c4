//! What was not computed, by tier, tenant and model, and what the memory and SSDs cost that it was
//! kept in. Pure. `docs/report.md` has the formulas.

use super::page::Series;
use serde::Serialize;
use std::collections::BTreeMap;

/// Counters of engines whose tokens a tier has saved, with the label that says which tier, or the
/// tier itself.
const SAVED: [(&str, Tier); 5] = [
    ("vllm:prefix_cache_hits_total", Tier::Named("gpu")),
    ("vllm:forebay_tokens_memory_total", Tier::Named("memory")),
    ("vllm:forebay_tokens_disk_total", Tier::Named("ssd")),
    ("vllm:forebay_tokens_peer_total", Tier::Named("peer")),
    // Of emulated engines.
    ("forebay_external_prefix_cache_hits_total", Tier::Labelled),
];
/// Of the tokens from nodes, those of requests that named a tenant, by the labels `tenant` and
/// `tier`.
const OF_TENANTS: &str = "vllm:forebay_tenant_tokens_total";
const MEMORY: &str = "forebay_memory_capacity_bytes";
const SSD: &str = "forebay_disk_capacity_bytes";
const GIB: f64 = (1u64 << 30) as f64;

enum Tier {
    Named(&'static str),
    /// By the label `tier`.
    Labelled,
}

/// An engine's page, and what it was at the beginning.
#[derive(Debug, Clone, Default)]
pub struct EnginePages {
    pub tenant: String,
    pub now: Vec<Series>,
    pub before: Vec<Series>,
}

/// What things cost, in anybody's money.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Prices {
    pub memory_per_gib_hour: f64,
    pub ssd_per_gib_hour: f64,
    pub per_gpu_hour: f64,
}

/// Tokens that were not computed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub model: String,
    pub tenant: String,
    pub tier: String,
    pub tokens: f64,
    pub gpu_seconds: f64,
    /// What these GPU-seconds would have cost.
    pub worth: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub hours: f64,
    pub prefill_tokens_per_gpu_second: f64,
    pub prices: Prices,
    pub rows: Vec<Row>,
    /// What the nodes' tiers saved: without the engines' own caches, which cost nothing more.
    pub saved_worth: f64,
    pub memory_gib: f64,
    pub ssd_gib: f64,
    pub memory_cost: f64,
    pub ssd_cost: f64,
}

/// The report of so many hours.
pub fn report(
    engines: &[EnginePages],
    nodes: &[Vec<Series>],
    hours: f64,
    rate: f64,
    prices: Prices,
) -> Report {
    let mut tokens: BTreeMap<(String, String, String), f64> = BTreeMap::new();
    for engine in engines {
        let named = of_tenants(engine);
        for (model, tier, more) in saved(engine) {
            let of_others = named.iter().filter(|one| (&one.0, &one.2) == (&model, &tier));
            let own = more - of_others.map(|one| one.3).sum::<f64>();
            *tokens.entry((model, engine.tenant.clone(), tier)).or_default() += own;
        }
        for (model, tenant, tier, more) in named {
            *tokens.entry((model, tenant, tier)).or_default() += more;
        }
    }
    tokens.retain(|_, tokens| *tokens > 0.0);
    let row = |((model, tenant, tier), tokens): ((String, String, String), f64)| {
        let gpu_seconds = tokens / rate;
        Row { model, tenant, tier, tokens, gpu_seconds, worth: gpu_seconds / 3600.0 * prices.per_gpu_hour }
    };
    let rows: Vec<Row> = tokens.into_iter().map(row).collect();
    let (memory_gib, ssd_gib) = (sum(nodes, MEMORY) / GIB, sum(nodes, SSD) / GIB);
    Report {
        hours,
        prefill_tokens_per_gpu_second: rate,
        prices,
        saved_worth: rows.iter().filter(|row| row.tier != "gpu").map(|row| row.worth).sum(),
        rows,
        memory_gib,
        ssd_gib,
        memory_cost: memory_gib * hours * prices.memory_per_gib_hour,
        ssd_cost: ssd_gib * hours * prices.ssd_per_gib_hour,
    }
}

/// Tokens of an engine by model and tier.
fn saved(engine: &EnginePages) -> Vec<(String, String, f64)> {
    let counted = engine.now.iter().filter_map(|series| Some((series, tier_of(series)?)));
    counted.map(|(series, tier)| (model_of(series), tier, more(engine, series))).collect()
}

/// The same of requests that named a tenant, with the tenant before the tier.
fn of_tenants(engine: &EnginePages) -> Vec<(String, String, String, f64)> {
    let one = |series: &Series| {
        let (tenant, tier) = (series.labels.get("tenant")?, series.labels.get("tier")?);
        Some((model_of(series), tenant.clone(), tier_named(tier), more(engine, series)))
    };
    engine.now.iter().filter(|series| series.name == OF_TENANTS).filter_map(one).collect()
}

fn model_of(series: &Series) -> String {
    series.labels.get("model_name").cloned().unwrap_or_else(|| "unnamed".into())
}

/// How much a counter has grown. An engine that was started again counts from 0.
fn more(engine: &EnginePages, series: &Series) -> f64 {
    let same = |other: &&Series| other.name == series.name && other.labels == series.labels;
    let before = engine.before.iter().find(same).map_or(0.0, |before| before.value);
    if series.value < before { series.value } else { series.value - before }
}

/// A tier as the report calls it.
fn tier_named(tier: &str) -> String {
    if tier == "disk" { "ssd" } else { tier }.to_owned()
}

fn tier_of(series: &Series) -> Option<String> {
    let (_, tier) = SAVED.iter().find(|(name, _)| *name == series.name)?;
    match tier {
        Tier::Named(name) => Some((*name).to_owned()),
        Tier::Labelled => series.labels.get("tier").map(|tier| tier_named(tier)),
    }
}

fn sum(nodes: &[Vec<Series>], name: &str) -> f64 {
    nodes.iter().flatten().filter(|series| series.name == name).map(|series| series.value).sum()
}

#[cfg(test)]
mod tests {
    use super::super::page::read;
    use super::*;

    const PRICES: Prices = Prices { memory_per_gib_hour: 0.5, ssd_per_gib_hour: 0.25, per_gpu_hour: 3.0 };

    fn engine(tenant: &str, now: &str, before: &str) -> EnginePages {
        EnginePages { tenant: tenant.into(), now: read(now), before: read(before) }
    }

    #[test]
    fn tokens_are_summed_by_model_tenant_and_tier_and_the_engines_own_cache_is_no_saving_of_nodes() {
        let page = |memory: u32, gpu: u32| {
            format!(
                "vllm:forebay_tokens_memory_total{{model_name=\"m\",engine=\"0\"}} {memory}\n\
                 vllm:prefix_cache_hits_total{{model_name=\"m\",engine=\"0\"}} {gpu}\n"
            )
        };
        let engines = [
            engine("0", &page(36_000, 50), ""),
            engine("0", &page(1_000, 0), ""),
            engine("7", &page(5, 0), ""),
        ];
        let nodes =
            [read("forebay_memory_capacity_bytes 2147483648\nforebay_disk_capacity_bytes 4294967296\n")];
        let report = report(&engines, &nodes, 24.0, 10.0, PRICES);
        let rows: Vec<(&str, &str, f64)> =
            report.rows.iter().map(|row| (row.tenant.as_str(), row.tier.as_str(), row.tokens)).collect();
        assert_eq!(rows, [("0", "gpu", 50.0), ("0", "memory", 37_000.0), ("7", "memory", 5.0)]);
        assert_eq!(report.rows[1].gpu_seconds, 3_700.0);
        assert!((report.saved_worth - 37_005.0 / 10.0 / 3600.0 * 3.0).abs() < 1e-9);
        assert_eq!((report.memory_cost, report.ssd_cost), (2.0 * 24.0 * 0.5, 4.0 * 24.0 * 0.25));
    }

    #[test]
    fn tokens_of_requests_that_named_a_tenant_are_that_tenants_and_nobody_elses() {
        let page = "vllm:forebay_tokens_disk_total{model_name=\"m\"} 100\n\
            vllm:forebay_tenant_tokens_total{model_name=\"m\",tenant=\"3\",tier=\"disk\"} 70\n\
            vllm:forebay_tenant_tokens_total{model_name=\"m\",tenant=\"4\",tier=\"disk\"} 30\n";
        let rows = report(&[engine("0", page, "")], &[], 1.0, 1.0, PRICES).rows;
        let rows: Vec<(&str, &str, f64)> =
            rows.iter().map(|row| (row.tenant.as_str(), row.tier.as_str(), row.tokens)).collect();
        assert_eq!(rows, [("3", "ssd", 70.0), ("4", "ssd", 30.0)], "nothing is left for its own");
    }

    #[test]
    fn what_was_counted_before_is_left_out_and_an_engine_started_again_counts_from_nothing() {
        let name = "forebay_external_prefix_cache_hits_total{model_name=\"m\",tier=\"disk\"}";
        for (before, now, expected) in [(10, 25, Some(15.0)), (30, 25, Some(25.0)), (25, 25, None)] {
            let pages = engine("0", &format!("{name} {now}\n"), &format!("{name} {before}\n"));
            let report = report(&[pages], &[], 1.0, 1.0, PRICES);
            assert_eq!(report.rows.first().map(|row| row.tokens), expected);
            assert!(report.rows.first().is_none_or(|row| row.tier == "ssd"));
        }
    }
}
