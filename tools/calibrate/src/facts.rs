//! What there is to know of an engine besides its times, and who said so: the engine, the command
//! line, or a shipped profile in their place.

use crate::error::CalibrateError;
use crate::page::{Metrics, Model};
use forebay_steps::Profile;
use http::HeaderMap;
use std::path::PathBuf;

/// Where a number comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Engine,
    Flag,
    /// Nobody said it: it is another profile's.
    Assumed,
}

/// A number and who said it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fact {
    pub value: usize,
    pub source: Source,
}

/// What the command line says of an engine and how it is reached; the engine's own word counts
/// more.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// Headers that every request has, such as a key.
    pub headers: HeaderMap,
    /// For https: a PEM file with the certificates to trust instead of the system's.
    pub ca: Option<PathBuf>,
    pub model: Option<String>,
    pub max_model_tokens: Option<usize>,
    pub pool_tokens: Option<usize>,
    pub max_batched_tokens: Option<usize>,
    pub max_seqs: Option<usize>,
}

/// The engine, as it is measured and written down.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    pub model: String,
    pub max_model_tokens: Fact,
    pub pool_tokens: Fact,
    pub block_tokens: Fact,
    pub max_batched_tokens: Fact,
    pub max_seqs: Fact,
}

impl Facts {
    /// The facts of the one model that is served, or of the one that was named.
    pub fn of(
        models: &[Model],
        metrics: Option<&Metrics>,
        given: &Given,
        like: &Profile,
    ) -> Result<Facts, CalibrateError> {
        let model = chosen(models, given.model.as_deref())?;
        let fact = |engine: Option<usize>, flag: Option<usize>, assumed: usize| match (engine, flag) {
            (Some(value), _) => Fact { value, source: Source::Engine },
            (None, Some(value)) => Fact { value, source: Source::Flag },
            (None, None) => Fact { value: assumed, source: Source::Assumed },
        };
        let (memory, limits) = (&like.memory, &like.scheduler);
        let block_tokens = metrics.and_then(|metrics| metrics.block_tokens);
        let pool_tokens = metrics.and_then(Metrics::pool_tokens);
        Ok(Facts {
            model: model.id.clone(),
            max_model_tokens: fact(model.max_model_len, given.max_model_tokens, like.model.max_model_tokens),
            pool_tokens: fact(pool_tokens, given.pool_tokens, memory.pool_tokens),
            block_tokens: fact(block_tokens, None, memory.block_tokens),
            max_batched_tokens: fact(None, given.max_batched_tokens, limits.max_batched_tokens),
            max_seqs: fact(None, given.max_seqs, limits.max_seqs),
        })
    }

    /// Tokens that one request may have, prompt and output.
    pub fn request_tokens(&self) -> usize {
        // Some blocks may be the engine's own.
        self.max_model_tokens.value.min(self.pool_tokens.value / 10 * 9)
    }
}

fn chosen<'a>(models: &'a [Model], wanted: Option<&str>) -> Result<&'a Model, CalibrateError> {
    let names = || models.iter().map(|model| model.id.clone()).collect();
    match wanted {
        Some(wanted) => models
            .iter()
            .find(|model| model.id == wanted)
            .ok_or_else(|| CalibrateError::NoSuchModel { wanted: wanted.to_owned(), has: names() }),
        None => {
            // Adapters come and go; what is measured is the model below them.
            let bases: Vec<&Model> = models.iter().filter(|model| model.parent.is_none()).collect();
            match bases[..] {
                [model] => Ok(model),
                [] => Err(CalibrateError::Page { path: "/v1/models", reason: "it lists no model".into() }),
                _ => Err(CalibrateError::SeveralModels(names())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(id: &str, max_model_len: Option<usize>) -> Model {
        Model { id: id.into(), max_model_len, parent: None }
    }

    #[test]
    fn the_engines_word_counts_more_than_a_flag_and_a_flag_more_than_another_profile() {
        let like = Profile::shipped(Profile::DEFAULT).unwrap();
        let metrics = Metrics { block_tokens: Some(16), blocks: Some(10), ..Metrics::default() };
        let given =
            Given { max_model_tokens: Some(7), pool_tokens: Some(5), max_seqs: Some(3), ..Given::default() };
        let facts = Facts::of(&[model("m", Some(2_048))], Some(&metrics), &given, &like).unwrap();
        assert_eq!(facts.max_model_tokens, Fact { value: 2_048, source: Source::Engine });
        assert_eq!(facts.pool_tokens, Fact { value: 160, source: Source::Engine });
        assert_eq!(facts.max_seqs, Fact { value: 3, source: Source::Flag });
        let assumed = Fact { value: like.scheduler.max_batched_tokens, source: Source::Assumed };
        assert_eq!(facts.max_batched_tokens, assumed);
        assert_eq!(facts.request_tokens(), 144);
    }

    #[test]
    fn one_of_several_models_must_be_named_but_adapters_are_no_models() {
        let like = Profile::shipped(Profile::DEFAULT).unwrap();
        let of = |models: &[Model], name: Option<&str>| {
            let given = Given { model: name.map(str::to_owned), ..Given::default() };
            Facts::of(models, None, &given, &like).map(|facts| facts.model).map_err(|e| e.to_string())
        };
        let two = [model("a", None), model("b", None)];
        assert!(of(&two, None).unwrap_err().contains("a, b"));
        assert_eq!(of(&two, Some("b")), Ok("b".into()));
        assert!(of(&two, Some("c")).unwrap_err().contains("no model \"c\"; it has a, b"));
        let adapter = Model { parent: Some("a".into()), ..model("b", None) };
        assert_eq!(of(&[model("a", None), adapter], None), Ok("a".into()));
        assert!(of(&[], None).unwrap_err().contains("lists no model"));
    }
}
