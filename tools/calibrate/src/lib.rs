//! Measures a running engine over HTTP and fits the constants of the step model to it. It knows the
//! OpenAI API and vLLM's metrics, and nothing of what the engine computes.
//!
//! `plan` says what is sent, `measure` sends it by `engine`, `fit` turns the points into constants,
//! and `text` writes them down with what they were fitted to.

mod decodes;
mod engine;
mod error;
mod facts;
mod fit;
mod least_squares;
mod measure;
mod page;
mod plan;
mod point;
mod text;

pub use error::CalibrateError;
pub use facts::{Fact, Facts, Given, Source};
pub use fit::{Fit, FitError, fit};
pub use point::Point;
pub use text::Header;

use engine::Engine;
use forebay_steps::Profile;
use measure::Measurement;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// The longest time that a calibration may take.
pub const TIME_MAX: Duration = Duration::from_secs(90);

/// A fit with a larger error is no profile.
const ERROR_MAX: f64 = 0.1;

/// What was measured of an engine, and the constants that explain it.
#[derive(Debug)]
pub struct Calibration {
    pub facts: Facts,
    pub points: Vec<Point>,
    pub fit: Fit,
    /// What could not be measured, for people.
    pub notes: Vec<String>,
    /// How long it took.
    pub seconds: f64,
}

impl Calibration {
    /// Refuses constants that do not explain what was measured, and says which points they do not.
    pub fn check(&self) -> Result<(), CalibrateError> {
        let error = self.fit.error();
        if error <= ERROR_MAX {
            return Ok(());
        }
        let points = self.points.iter().zip(&self.fit.errors).filter(|(_, error)| error.abs() > ERROR_MAX);
        let points = points.map(|(point, error)| format!("\n  {}: {:+.0} %", point.name, error * 100.0));
        Err(CalibrateError::Unfit { error, allowed: ERROR_MAX, points: points.collect() })
    }
}

/// Measures the engine at `target` for at most `time`. What the engine does not say is taken from
/// `given`, or else from `like`. `tell` hears of each point.
pub async fn calibrate(
    target: &str,
    given: &Given,
    like: &Profile,
    time: Duration,
    mut tell: impl FnMut(&str),
) -> Result<Calibration, CalibrateError> {
    let time = time.min(TIME_MAX);
    let measured = timeout(time, measure(target, given, like, time, &mut tell)).await;
    measured.map_err(|_| CalibrateError::Late { seconds: time.as_secs_f64() })?
}

async fn measure(
    target: &str,
    given: &Given,
    like: &Profile,
    time: Duration,
    tell: measure::Tell<'_>,
) -> Result<Calibration, CalibrateError> {
    let begun = Instant::now();
    let mut engine = Engine::new(target, given)?;
    let models = engine.models().await?;
    let before = engine.check_idle().await?;
    let facts = Facts::of(&models, before.as_ref(), given, like)?;
    engine.use_model(&facts.model);
    let mut measurement = Measurement {
        engine: &mut engine,
        facts: &facts,
        begun,
        time,
        tell,
        points: Vec::new(),
        notes: Vec::new(),
    };
    if before.is_none() {
        measurement.note("The engine has no metrics of vLLM's: whether others used it is unknown.".into());
    }
    measurement.run().await?;
    let Measurement { points, notes, .. } = measurement;
    engine.check_alone_since(before.as_ref()).await?;
    let fit = fit(&points)?;
    Ok(Calibration { facts, points, fit, notes, seconds: begun.elapsed().as_secs_f64() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_steps::Launch;

    #[test]
    fn an_engine_that_the_model_does_not_explain_has_no_profile_and_the_points_are_named() {
        let like = Profile::shipped("h100-llama-3.1-8b").unwrap();
        let model = forebay_steps::StepModel::new(&like, Launch::Graph);
        let prompt = |tokens: usize| Point::first_token(tokens, 0, 8_192, 1.0);
        let mut points: Vec<Point> = [128, 512, 2_048, 8_192, 32_768].map(prompt).into();
        points.push(Point::decodes(&[128], 1.0));
        for point in &mut points {
            point.measured_us = point.predicted_us(&model);
        }
        let facts = Facts::of(
            &[page::Model { id: "m".into(), max_model_len: None, parent: None }],
            None,
            &Given::default(),
            &like,
        );
        let of = |points: &[Point]| Calibration {
            facts: facts.as_ref().unwrap().clone(),
            points: points.to_vec(),
            fit: fit(points).unwrap(),
            notes: Vec::new(),
            seconds: 1.0,
        };
        assert!(of(&points).check().is_ok());
        points[3].measured_us *= 3.0;
        let refused = of(&points).check().unwrap_err().to_string();
        assert!(refused.contains("allowed are 10 %; these points do not fit:\n"), "{refused}");
        assert!(refused.contains("cold prompt of 8192 tokens: -"), "{refused}");
    }
}
