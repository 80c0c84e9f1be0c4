//! `forebay.Slack`: the cost model of [`forebay_paged::cost_model`], as Python sees it. This file
//! only converts arguments.

use crate::errors::invalid;
use forebay_paged::cost_model::{self, Question, Tier};
use forebay_transfer::lock::Mutex;
use pyo3::prelude::*;

/// What computing costs, learned online; load or recompute.
#[pyclass(frozen, module = "forebay", name = "Slack")]
pub struct CostModel(Mutex<cost_model::CostModel>);

#[pymethods]
impl CostModel {
    #[new]
    #[pyo3(signature = (layers, profile = None))]
    fn new(layers: u32, profile: Option<&str>) -> PyResult<CostModel> {
        let model = cost_model::CostModel::new(layers, profile).map_err(invalid)?;
        Ok(CostModel(Mutex::new(model)))
    }

    /// A step computed so many tokens behind a prefix.
    fn note_step(&self, new_tokens: u64, prefix_tokens: u64, seconds: f64) {
        self.0.lock().note_step(new_tokens, prefix_tokens, seconds);
    }

    /// So many bytes of a tier took so long.
    fn note_load(&self, tier: &str, bytes: u64, seconds: f64) -> PyResult<()> {
        let tier = match tier {
            "memory" => Tier::Memory,
            "disk" => Tier::Disk,
            "peer" => Tier::Peer,
            other => return Err(invalid(format!("tier is {other:?}; allowed: 'memory', 'disk', 'peer'"))),
        };
        self.0.lock().note_load(tier, bytes, seconds);
        Ok(())
    }

    /// How many of the chunks that can be had to load, from the one on that `held_tokens` ends in.
    #[pyo3(signature = (
        *, prompt_tokens, held_tokens, chunk_tokens, chunk_bytes, in_memory, on_disk, on_peers, queued = (0, 0, 0), others = 0
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn worth(
        &self,
        prompt_tokens: u64,
        held_tokens: u64,
        chunk_tokens: u32,
        chunk_bytes: u64,
        in_memory: usize,
        on_disk: usize,
        on_peers: usize,
        queued: (u64, u64, u64),
        others: u32,
    ) -> usize {
        let question = Question {
            prompt_tokens,
            held_tokens,
            chunk_tokens,
            chunk_bytes,
            in_memory,
            on_disk,
            on_peers,
            queued: queued.into(),
            wait_us: 0,
            others,
        };
        self.0.lock().chunks_to_load(&question)
    }

    /// How long a load takes of so many bytes from memory, disk and other nodes, behind those that
    /// are queued there; None if that is not known.
    fn load_s(&self, sizes: (u64, u64, u64), queued: (u64, u64, u64)) -> Option<f64> {
        Some(self.0.lock().load_us(sizes.into(), queued.into())? / 1e6)
    }

    /// How long one layer of a step takes; 0 as long as nothing is known.
    fn layer_us(&self, new_tokens: u64, prefix_tokens: u64) -> f64 {
        self.0.lock().layer_us(new_tokens, prefix_tokens)
    }

    /// What is known, as JSON.
    fn profile(&self) -> String {
        self.0.lock().profile()
    }
}
