//! The fit finds the constants from which measurements were made.

use super::*;
use forebay_steps::Profile;
use proptest::prelude::*;

/// What a calibration measures, with the times of a profile's model times `noise`, one factor each.
fn measured(profile: &Profile, mut noise: impl FnMut() -> f64) -> Vec<Point> {
    let budget = profile.scheduler.max_batched_tokens;
    let cold = [128, 512, 2_048, 8_192, 32_768];
    let prompts = cold.into_iter().flat_map(|tokens| [(tokens, 0), (tokens, tokens - 16)]);
    let decodes = [(1, 128), (16, 128), (1, 32_768), (16, 8_192)];
    let mut points: Vec<Point> = prompts
        .map(|(tokens, cached)| Point::first_token(tokens, cached, budget, 1.0))
        .chain(decodes.map(|(requests, context)| Point::decodes(&vec![context; requests], 1.0)))
        .collect();
    let model = StepModel::new(profile, Launch::Graph);
    for point in &mut points {
        point.measured_us = point.predicted_us(&model) * noise();
    }
    points
}

fn shipped() -> Vec<Profile> {
    Profile::names().map(|name| Profile::shipped(name).unwrap()).collect()
}

fn assert_close(fit: &Fit, profile: &Profile, share: f64) {
    let (found, wanted) = (&fit.step, &profile.step);
    let pairs = [
        ("floor", found.floor_graph_us, wanted.floor_graph_us),
        ("linear", found.linear_us_per_token, wanted.linear_us_per_token),
        ("attention", found.attention_ns_per_pair, wanted.attention_ns_per_pair),
        ("kv_read", found.kv_read_ns_per_context_token, wanted.kv_read_ns_per_context_token),
        ("request", found.us_per_request, wanted.us_per_request),
        ("api", fit.api.us_per_request, profile.api.us_per_request),
        ("api per token", fit.api.us_per_token, profile.api.us_per_token),
    ];
    for (name, found, wanted) in pairs {
        let error = found / wanted - 1.0;
        assert!(error.abs() <= share, "{} {name}: {found} for {wanted}", profile.name);
    }
}

#[test]
fn the_constants_of_a_model_are_found_again() {
    for profile in shipped() {
        let fit = fit(&measured(&profile, || 1.0)).unwrap();
        assert_close(&fit, &profile, 1e-6);
        assert!(fit.error() < 1e-9);
    }
}

#[test]
fn the_row_of_a_point_is_what_the_model_says_of_it() {
    for profile in shipped() {
        let (step, api) = (&profile.step, &profile.api);
        let constants = [
            step.floor_graph_us,
            step.linear_us_per_token,
            step.attention_ns_per_pair / 1e3,
            step.kv_read_ns_per_context_token / 1e3,
            step.us_per_request,
            api.us_per_request,
            api.us_per_token,
        ];
        let floored = (step.floor_graph_us / step.linear_us_per_token) as usize;
        for point in measured(&profile, || 1.0) {
            let sum: f64 =
                point.row(floored).iter().zip(constants).map(|(row, constant)| row * constant).sum();
            assert!((sum / point.measured_us - 1.0).abs() < 1e-9, "{}", point.name);
        }
    }
}

#[test]
fn prompts_that_all_hide_under_the_floor_are_refused() {
    let mut profile = Profile::shipped("h100-llama-3.1-8b").unwrap();
    profile.step.linear_us_per_token = 1e-9;
    profile.step.attention_ns_per_pair = 0.0;
    profile.api.us_per_token = 0.0;
    let refused = fit(&measured(&profile, || 1.0)).map(|fit| fit.step);
    assert_eq!(refused, Err(FitError::OnlyFloor));
    assert_eq!(fit(&[]).map(|fit| fit.step), Err(FitError::NoPoints));
    let timeless = [Point::decodes(&[100], 0.0)];
    let refused = fit(&timeless).map(|fit| fit.step).unwrap_err().to_string();
    assert_eq!(refused, "a step of 1 decodes behind 100 tokens seems to take no time");
}

#[test]
fn what_no_constants_explain_has_a_large_error_where_it_does_not_fit() {
    let profile = Profile::shipped("h100-llama-3.1-8b").unwrap();
    let mut points = measured(&profile, || 1.0);
    // Twice the decodes take half as long: no model says so.
    points.last_mut().unwrap().measured_us /= 3.0;
    let fit = fit(&points).unwrap();
    assert!(fit.error() > 0.1, "{}", fit.error());
    let worst = fit.errors.iter().map(|error| error.abs()).fold(0.0, f64::max);
    assert_eq!(fit.errors.last().map(|error| error.abs()), Some(worst));
}

proptest! {
    #[test]
    fn noise_of_two_percent_moves_the_large_constants_by_a_few(
        profile in prop::sample::select(shipped()),
        noise in prop::collection::vec(0.98..1.02_f64, 14),
    ) {
        let mut noise = noise.into_iter();
        let fit = fit(&measured(&profile, || noise.next().unwrap_or(1.0))).unwrap();
        prop_assert!(fit.error() < 0.02, "{}", fit.error());
        let model = fit.model();
        // What was not measured is predicted as well: that is what the constants are for.
        let truth = StepModel::new(&profile, Launch::Graph);
        let budget = profile.scheduler.max_batched_tokens;
        for tokens in [1_024, 4_096, 16_384, 65_536] {
            let point = Point::first_token(tokens, 0, budget, 1.0);
            let share = point.predicted_us(&model) / point.predicted_us(&truth) - 1.0;
            prop_assert!(share.abs() < 0.06, "{} {}: {}", profile.name, point.name, share);
        }
        for (requests, context) in [(4, 4_096), (32, 2_048), (64, 128)] {
            let point = Point::decodes(&vec![context; requests], 1.0);
            let share = point.predicted_us(&model) / point.predicted_us(&truth) - 1.0;
            prop_assert!(share.abs() < 0.15, "{} {}: {}", profile.name, point.name, share);
        }
    }
}
