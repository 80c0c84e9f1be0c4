//! The tiers of `forebay trace info`: its arguments, and their study. What tiers do is
//! `forebay-trace`'s to say.

use forebay_results::output::Error;
use forebay_store::admission::Policy;
use forebay_trace::format::TraceError;
use forebay_trace::info::PrefixInfo;
use forebay_trace::request::TraceRequest;
use forebay_trace::tiers::{ModelCost, TierReport, TierSizes, TierStudy};

/// Arguments of the study.
#[derive(clap::Args)]
pub struct TierArgs {
    /// Tiers to try, such as memory=2%,ssd=20% of the distinct blocks; or in bytes (64GiB) or
    /// tokens (500000tokens)
    #[arg(long, value_name = "SIZES", num_args = 1..)]
    tiers: Vec<TierSizes>,
    /// Which chunks go to the SSD when memory drops them: all, second-hit, adaptive
    #[arg(
        long,
        value_name = "POLICY,..",
        value_delimiter = ',',
        default_values_t = Policy::NAMES.map(|(policy, _)| policy),
        requires = "tiers"
    )]
    admission: Vec<Policy>,
    /// Most bytes that may be written to the SSD in a day
    #[arg(long, value_name = "BYTES", value_parser = forebay_transfer::size::parse, requires = "tiers")]
    endurance: Option<u64>,
    /// KV of a token; by default that of Llama 3 8B, whose FLOP are counted
    #[arg(
        long,
        value_name = "BYTES",
        value_parser = clap::value_parser!(u32).range(1..),
        default_value_t = ModelCost::DENSE_8B.kv_bytes_per_token,
        requires = "tiers"
    )]
    kv_bytes_per_token: u32,
}

impl TierArgs {
    /// Whether there is anything to study.
    pub fn are_given(&self) -> bool {
        !self.tiers.is_empty()
    }
}

/// Tries the tiers on the requests of a trace, of which `prefix` is known already.
pub fn run(
    args: &TierArgs,
    requests: impl IntoIterator<Item = Result<TraceRequest, TraceError>>,
    prefix: Option<&PrefixInfo>,
) -> Result<TierReport, Error> {
    let prefix = prefix.ok_or("--tiers: the trace says nothing about prefixes, so nothing could be a hit")?;
    let study = TierStudy {
        sizes: args.tiers.clone(),
        policies: args.admission.clone(),
        model: ModelCost { kv_bytes_per_token: args.kv_bytes_per_token, ..ModelCost::DENSE_8B },
        endurance_bytes_per_day: args.endurance,
    };
    Ok(study.run(requests, prefix)?)
}
