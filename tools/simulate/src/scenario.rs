//! What is simulated: engines of a profile, tiers, links, and how sessions come. It turns what a
//! user says into a cluster, and refuses what makes no sense by name.

use crate::arm::Arm;
use crate::cluster::{Cluster, ClusterConfig, Outcome, Stuck, TierConfig};
use crate::engine::{Admission, EngineConfig};
use crate::router::{RouterConfig, ViewErrors};
use crate::sessions::{Pacing, WarmUp};
use crate::workload::Workload;
use forebay_router::EngineModel;
use forebay_router::elastic::KvNetwork;
use forebay_steps::{Launch, Profile, StepModel};

/// Everything but the trace and the arm.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub profile: Profile,
    /// What the router takes the engines for.
    pub router_profile: Profile,
    pub launch: Launch,
    pub engines: usize,
    pub pacing: Pacing,
    /// Host memory for KV of each engine; 0 for none.
    pub tier_bytes: u64,
    /// Whether all engines can read what one's host has.
    pub shared_tier: bool,
    /// Of each host to all others, in 10^9 bytes per second.
    pub network_gb_per_s: f64,
    pub errors: ViewErrors,
    /// Whether the router knows what engines have.
    pub knows_hits: bool,
    pub most_answers: usize,
}

/// A value that no cluster has.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field}: {found}, allowed {allowed}")]
pub struct ScenarioError {
    pub field: &'static str,
    pub found: String,
    pub allowed: String,
}

impl Scenario {
    /// The longest prompt and answer of a request: what fits the model and an engine's pool. A
    /// prompt that is cached whole computes its last block again, beside the cached one.
    pub fn most_tokens(&self) -> u32 {
        let Profile { model, memory, .. } = &self.profile;
        let blocks = (memory.pool_tokens / memory.block_tokens).saturating_sub(1);
        model.max_model_tokens.min(blocks * memory.block_tokens) as u32
    }

    /// Refuses what cannot be simulated.
    pub fn check(&self) -> Result<(), ScenarioError> {
        let within = |field, value: f64, least: f64, most: f64| match (least..=most).contains(&value) {
            true => Ok(()),
            false => {
                Err(ScenarioError { field, found: value.to_string(), allowed: format!("{least} to {most}") })
            }
        };
        within("--engines", self.engines as f64, 1.0, 1e5)?;
        if let Pacing::Closed { at_once, .. } = self.pacing {
            within("--at-once", at_once as f64, 1.0, 1e7)?;
        }
        if let Pacing::Closed { warm_up: WarmUp::Ramp { share, .. }, .. } = self.pacing {
            within("--warm-up", share, 0.0, 1.0)?;
        }
        within("--answers", self.most_answers as f64, 1.0, usize::MAX as f64)?;
        within("--network", self.network_gb_per_s, 1e-3, 1e6)?;
        within("--hit-error", self.errors.hits, 0.0, 1.0)?;
        let Profile { scheduler, memory, .. } = &self.profile;
        within("--pool-tokens", memory.pool_tokens as f64, 2.0 * memory.block_tokens as f64, 1e12)?;
        within(
            "--max-num-batched-tokens",
            scheduler.max_batched_tokens as f64,
            scheduler.max_seqs as f64,
            1e9,
        )
    }

    /// Runs a workload under an arm.
    pub fn run(&self, arm: Arm, workload: &Workload, seed: u64) -> Result<Outcome, Stuck> {
        let Profile { model, memory, scheduler, host_link, .. } = &self.profile;
        let engine = EngineConfig {
            steps: StepModel::new(&self.profile, self.launch),
            pool_tokens: memory.pool_tokens as u64,
            block_tokens: memory.block_tokens as u32,
            max_batched_tokens: scheduler.max_batched_tokens as u32,
            max_seqs: scheduler.max_seqs,
            admission: Admission::WholePrompt,
        };
        let tokens = self.tier_bytes / model.kv_bytes_per_token;
        let tier = TierConfig { tokens, shared: self.shared_tier, link_gb_per_s: host_link.gb_per_s };
        let router = RouterConfig {
            arm,
            network: KvNetwork::new(&self.profile, self.network_gb_per_s),
            engine_model: EngineModel::new(&self.router_profile, self.launch),
            errors: self.errors,
            knows_hits: self.knows_hits,
        };
        let config = ClusterConfig {
            engines: self.engines,
            engine,
            kv_bytes_per_token: model.kv_bytes_per_token,
            tier: (tokens > 0).then_some(tier),
            router,
            network_gb_per_s: self.network_gb_per_s,
            pacing: self.pacing,
            most_answers: self.most_answers,
            seed,
        };
        Cluster::new(config, workload).run()
    }
}
