//! How much cache a model needs: what each layer keeps, per token or per sequence.
//!
//! Knows groups of layers that cache alike, and the sums over them. Must never know how an engine arranges
//! the bytes (`layout`), nor how a config file spells any of it (`hf`).

mod error;
mod fields;
mod hf;
mod layer_map;
mod parameters;
mod state;

pub use error::GeometryError;
pub use parameters::attention_parameters;

use crate::dtype::KvDtype;
use crate::slice::{HeadSplit, SplitError};

/// The most layers of a model.
pub const MAX_LAYERS: u32 = 4096;
/// The most bytes that all layers together may keep per token: 1 GiB.
pub const MAX_BYTES_PER_TOKEN: u64 = 1 << 30;
/// The most bytes that all layers together may keep per sequence: 1 TiB.
pub const MAX_STATE_BYTES: u64 = 1 << 40;

/// What a model caches, or one worker of it.
///
/// ```
/// use forebay_kv::Geometry;
///
/// let config = r#"{"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
///                  "num_key_value_heads": 8, "torch_dtype": "bfloat16"}"#;
/// let geometry = Geometry::from_hf_config(config)?;
/// assert_eq!(geometry.bytes_per_token(), 131_072);
/// assert_eq!(geometry.shard(4)?.bytes_per_token(), 32_768);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    layers: u32,
    groups: Vec<Group>,
}

/// Layers that cache alike. In vLLM's words, layers of one KV cache spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The layers' numbers in the model, ascending.
    pub layers: Vec<u32>,
    /// What each of them keeps.
    pub cache: Cache,
}

/// What one layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cache {
    /// A key and a value per head and token: MHA, GQA, MQA.
    KeyValue {
        /// KV heads.
        heads: u32,
        /// Elements of a key, and of a value.
        head_dim: u32,
        /// Format of the elements.
        dtype: KvDtype,
        /// How many of the latest tokens a token attends to, itself included; `None` for all.
        window_tokens: Option<u32>,
    },
    /// One latent per token that all heads share: MLA. All its elements have one format; vLLM's `fp8_ds_mla`,
    /// which mixes two and adds scales, is not known here.
    Latent {
        /// Elements of the latent: `kv_lora_rank + qk_rope_head_dim`.
        width: u32,
        /// Format of the elements.
        dtype: KvDtype,
    },
    /// A state per sequence, whatever its length: Mamba and linear attention.
    State(StateShape),
}

/// The state of one layer and sequence: the recurrent state and the last inputs of the convolution, by the
/// heads that tensor parallelism splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateShape {
    /// Heads (Mamba 2), value heads (gated delta net) or channels (Mamba 1).
    pub heads: u32,
    /// Bytes for each of them.
    pub bytes_per_head: u64,
    /// Groups (Mamba 2) or key heads (gated delta net) that heads share; 0 for Mamba 1.
    pub groups: u32,
    /// Bytes for each of them.
    pub bytes_per_group: u64,
}

impl Geometry {
    /// Reads a model's `config.json`, as Hugging Face publishes it. The cache has the format that the config
    /// states: that of `quantization_config` for the KV cache, else the weights' (`dtype` or `torch_dtype`).
    ///
    /// An engine may choose otherwise, for instance bf16 where the config says float32. Then say so, by
    /// [`Geometry::from_hf_config_with`].
    ///
    /// Layers for multi-token prediction (`num_nextn_predict_layers`) are not counted. A config with
    /// `kv_lora_rank` is taken to be served as MLA, with the latent in the cache.
    ///
    /// # Errors
    /// When the text is not JSON, a needed field is missing, or a field has a value that is impossible or
    /// stands for a kind of cache that is not known here.
    pub fn from_hf_config(json: &str) -> Result<Self, GeometryError> {
        hf::read(json, None)
    }

    /// As [`Geometry::from_hf_config`], with the cache in `dtype` as vLLM's `--kv-cache-dtype` asks. State
    /// layers keep the weights' format.
    ///
    /// # Errors
    /// As [`Geometry::from_hf_config`].
    pub fn from_hf_config_with(json: &str, dtype: KvDtype) -> Result<Self, GeometryError> {
        hf::read(json, Some(dtype))
    }

    /// A geometry of `layers` layers, the groups put in the order of their first layers. A layer that is in
    /// no group keeps nothing.
    ///
    /// # Errors
    /// When there are no layers or more than [`MAX_LAYERS`], a group names a layer that does not exist or
    /// that another has, a size is 0, or a sum exceeds [`MAX_BYTES_PER_TOKEN`] or [`MAX_STATE_BYTES`].
    pub fn from_groups(layers: u32, mut groups: Vec<Group>) -> Result<Self, GeometryError> {
        error::check_count("layers", layers.into(), 1, MAX_LAYERS.into())?;
        let mut seen = vec![false; layers as usize];
        let (mut token_bytes, mut sequence_bytes) = (0u64, 0u64);
        for group in &mut groups {
            group.layers.sort_unstable();
            error::check_count("layers of a group", group.layers.len() as u64, 1, layers.into())?;
            for &layer in &group.layers {
                error::check_count("a layer of a group", layer.into(), 0, (layers - 1).into())?;
                if std::mem::replace(&mut seen[layer as usize], true) {
                    return Err(GeometryError::invalid(
                        "a layer of a group",
                        layer,
                        "layers of no other group",
                    ));
                }
            }
            group.cache.check()?;
            let group_layers = group.layers.len() as u64;
            token_bytes = token_bytes.saturating_add(group_layers.saturating_mul(group.bytes_per_token()));
            sequence_bytes =
                sequence_bytes.saturating_add(group_layers.saturating_mul(group.bytes_per_sequence()));
        }
        groups.sort_by_key(|group| group.layers.first().copied());
        error::check_count("bytes per token", token_bytes, 0, MAX_BYTES_PER_TOKEN)?;
        error::check_count("bytes per sequence", sequence_bytes, 0, MAX_STATE_BYTES)?;
        Ok(Self { layers, groups })
    }

    /// Layers of the model, those that keep nothing included.
    pub const fn layers(&self) -> u32 {
        self.layers
    }

    /// The groups of layers, in the order of their first layers.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Bytes that one more token adds over all layers, before any window forgets another.
    pub fn bytes_per_token(&self) -> u64 {
        self.groups.iter().map(|group| group.layers.len() as u64 * group.bytes_per_token()).sum()
    }

    /// Bytes of state that a sequence has whatever its length; 0 without state layers.
    pub fn bytes_per_sequence(&self) -> u64 {
        self.groups.iter().map(|group| group.layers.len() as u64 * group.bytes_per_sequence()).sum()
    }

    /// Bytes that a sequence of `tokens` needs to go on: windows keep their latest tokens only, states count
    /// once.
    ///
    /// An engine keeps whole blocks and so somewhat more.
    pub fn bytes_at(&self, tokens: u32) -> u64 {
        let per_layer = |group: &Group| {
            let kept = group.window_tokens().map_or(tokens, |window| window.min(tokens));
            u64::from(kept) * group.bytes_per_token() + group.bytes_per_sequence()
        };
        self.groups.iter().map(|group| group.layers.len() as u64 * per_layer(group)).sum()
    }

    /// The geometry of one worker of `size` tensor-parallel workers. All are alike. Heads are split as by
    /// [`HeadSplit`]; a latent is whole on every worker.
    ///
    /// # Errors
    /// When a group's heads cannot be split so.
    pub fn shard(&self, size: u32) -> Result<Self, SplitError> {
        let groups = self
            .groups
            .iter()
            .map(|group| Ok(Group { layers: group.layers.clone(), cache: group.cache.shard(size)? }))
            .collect::<Result<_, SplitError>>()?;
        Ok(Self { layers: self.layers, groups })
    }
}

impl Group {
    /// KV heads of each layer: 1 for a latent, 0 for state layers.
    pub const fn heads(&self) -> u32 {
        match self.cache {
            Cache::KeyValue { heads, .. } => heads,
            Cache::Latent { .. } => 1,
            Cache::State(_) => 0,
        }
    }

    /// Bytes of one head's key and value of one token, or of one latent; 0 for state layers.
    pub const fn cell_bytes(&self) -> u64 {
        match self.cache {
            Cache::KeyValue { head_dim, dtype, .. } => 2 * head_dim as u64 * dtype.bytes(),
            Cache::Latent { width, dtype } => width as u64 * dtype.bytes(),
            Cache::State(_) => 0,
        }
    }

    /// Bytes per token in each layer. Saturates, though no [`Geometry`] holds a group as large as that.
    pub const fn bytes_per_token(&self) -> u64 {
        (self.heads() as u64).saturating_mul(self.cell_bytes())
    }

    /// Bytes per sequence in each layer: those of a state, else 0.
    pub const fn bytes_per_sequence(&self) -> u64 {
        match self.cache {
            Cache::State(state) => state.bytes(),
            Cache::KeyValue { .. } | Cache::Latent { .. } => 0,
        }
    }

    /// How many of the latest tokens are attended to; `None` for all, and for layers that keep no tokens.
    pub const fn window_tokens(&self) -> Option<u32> {
        match self.cache {
            Cache::KeyValue { window_tokens, .. } => window_tokens,
            Cache::Latent { .. } | Cache::State(_) => None,
        }
    }
}

impl Cache {
    /// Refuses a size of zero.
    fn check(self) -> Result<(), GeometryError> {
        let at_least_one = |field, size: u32| error::check_count(field, size.into(), 1, u32::MAX.into());
        match self {
            Cache::KeyValue { heads, head_dim, window_tokens, .. } => {
                at_least_one("heads", heads)?;
                at_least_one("head_dim", head_dim)?;
                at_least_one("window_tokens", window_tokens.unwrap_or(1))
            }
            Cache::Latent { width, .. } => at_least_one("width", width),
            Cache::State(state) => at_least_one("heads", state.heads),
        }
    }

    fn shard(self, size: u32) -> Result<Self, SplitError> {
        Ok(match self {
            Cache::KeyValue { heads, head_dim, dtype, window_tokens } => {
                let heads = HeadSplit::new(heads, size)?.heads_per_rank();
                Cache::KeyValue { heads, head_dim, dtype, window_tokens }
            }
            Cache::Latent { .. } => {
                HeadSplit::new(1, size)?;
                self
            }
            Cache::State(state) => Cache::State(state.shard(size)?),
        })
    }
}

impl StateShape {
    /// Bytes of the state of one layer and sequence. Saturates, though no [`Geometry`] holds a state as large
    /// as that.
    pub const fn bytes(&self) -> u64 {
        let heads = (self.heads as u64).saturating_mul(self.bytes_per_head);
        heads.saturating_add((self.groups as u64).saturating_mul(self.bytes_per_group))
    }

    /// Heads of a state are never copied, the groups they share are.
    fn shard(self, size: u32) -> Result<Self, SplitError> {
        let split = HeadSplit::new(self.heads, size)?;
        if split.copies() > 1 {
            return Err(SplitError::Uneven { heads: self.heads, size });
        }
        let groups = if self.groups == 0 { 0 } else { HeadSplit::new(self.groups, size)?.heads_per_rank() };
        Ok(Self { heads: split.heads_per_rank(), groups, ..self })
    }
}
