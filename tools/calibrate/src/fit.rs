//! From measurements to the constants of the step model: non-negative least squares over relative
//! errors. A pure function; it knows points and constants, and no engine.
//!
//! All but the floor is linear in the constants. `max(floor, linear * tokens)` is not, but below
//! one number of tokens it is the floor and above it the linear part. So each number of tokens that
//! a step had is tried as that limit, and the constants that predict best are taken.

use crate::least_squares::non_negative;
use crate::point::Point;
use forebay_steps::{ApiCosts, Launch, StepCosts, StepModel};

/// Constants that explain points, and how well.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    pub step: StepCosts,
    pub api: ApiCosts,
    /// For each point the share by which the model says more than was measured.
    pub errors: Vec<f64>,
}

/// Why points have no constants.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    #[error("there are no points")]
    NoPoints,
    /// The tokens of an answer came all at once, perhaps.
    #[error("a {0} seems to take no time")]
    NoTime(String),
    /// Each prompt hides under the floor.
    #[error(
        "no prompt took longer than the shortest step, so the time per token cannot be told; \
         longer prompts are needed"
    )]
    OnlyFloor,
    /// Decodes take as long as their tokens times the time per token.
    #[error("the shortest step cannot be told from the time per token; longer prompts are needed")]
    NoFloor,
}

impl Fit {
    /// The root of the mean square of all errors.
    pub fn error(&self) -> f64 {
        let squares: f64 = self.errors.iter().map(|error| error * error).sum();
        (squares / self.errors.len() as f64).sqrt()
    }

    /// The model with these constants.
    pub fn model(&self) -> StepModel {
        StepModel::of_costs(&self.step, &self.api, Launch::Graph)
    }
}

/// The constants that explain `points` best.
pub fn fit(points: &[Point]) -> Result<Fit, FitError> {
    if let Some(point) = points.iter().find(|point| point.measured_us <= 0.0) {
        return Err(FitError::NoTime(point.name.clone()));
    }
    let mut limits: Vec<usize> = points.iter().flat_map(Point::tokens_of_steps).collect();
    limits.push(0);
    limits.sort_unstable();
    limits.dedup();
    let tried = limits.into_iter().filter_map(|floored_tokens| fit_with(points, floored_tokens));
    let best = tried.min_by(|a, b| a.error().total_cmp(&b.error())).ok_or(FitError::NoPoints)?;
    match () {
        () if best.step.floor_graph_us <= 0.0 => Err(FitError::NoFloor),
        () if best.step.linear_us_per_token <= 0.0 => Err(FitError::OnlyFloor),
        () => Ok(best),
    }
}

/// The constants, if steps of up to `floored_tokens` take the floor and larger ones do not.
fn fit_with(points: &[Point], floored_tokens: usize) -> Option<Fit> {
    // Divided by what was measured: a share of a long prompt counts as much as one of a short.
    let rows: Vec<[f64; 7]> =
        points.iter().map(|point| point.row(floored_tokens).map(|value| value / point.measured_us)).collect();
    let [floor, linear, attention, kv_read, request, api, api_token] =
        non_negative(&rows, &vec![1.0; rows.len()])?;
    let step = StepCosts {
        linear_us_per_token: linear,
        attention_ns_per_pair: attention * 1e3,
        kv_read_ns_per_context_token: kv_read * 1e3,
        us_per_request: request,
        // Only one of the two was seen, and nobody knows which.
        floor_eager_us: floor,
        floor_graph_us: floor,
    };
    let api = ApiCosts { us_per_request: api, us_per_token: api_token };
    let model = StepModel::of_costs(&step, &api, Launch::Graph);
    let errors = points.iter().map(|point| point.predicted_us(&model) / point.measured_us - 1.0).collect();
    Some(Fit { step, api, errors })
}

#[cfg(test)]
mod tests;
