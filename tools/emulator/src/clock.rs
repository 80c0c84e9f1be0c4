//! Model time: what the step model says, stretched or squeezed onto real time by one ratio. This
//! file knows real clocks.

use std::time::{Duration, Instant};

/// How far a step may start in the past, so that a sleep that took too long does not add up over
/// many short steps.
const MAX_CATCH_UP: Duration = Duration::from_millis(2);

/// The clock of one engine. `ratio` model seconds pass in each real second.
#[derive(Debug)]
pub struct ModelClock {
    ratio: f64,
    /// When the last step ended, or should have.
    busy_until: Option<Instant>,
    lag: Duration,
}

impl ModelClock {
    /// A clock that runs `ratio` times as fast as real time.
    pub fn new(ratio: f64) -> ModelClock {
        ModelClock { ratio, busy_until: None, lag: Duration::ZERO }
    }

    /// Real microseconds that `model_us` take.
    pub fn real_us(&self, model_us: f64) -> f64 {
        model_us / self.ratio
    }

    /// Real time that `model_us` take.
    pub fn real(&self, model_us: f64) -> Duration {
        // Bounded, because Duration panics beyond its range.
        Duration::from_secs_f64((self.real_us(model_us) / 1e6).clamp(0.0, 1e9))
    }

    /// Model seconds since `then`.
    pub fn model_s_since(&self, then: Instant) -> f64 {
        then.elapsed().as_secs_f64() * self.ratio
    }

    /// When a step that began at `started`, has been emulated by now and takes `model_us` is over.
    /// Steps of a busy engine follow one another without gaps.
    pub fn end_of_step(&mut self, started: Instant, model_us: f64) -> Instant {
        let earliest = started.checked_sub(MAX_CATCH_UP).unwrap_or(started);
        let began = self.busy_until.map_or(started, |until| until.clamp(earliest, started));
        let until = began + self.real(model_us);
        self.busy_until = Some(until);
        self.lag += Instant::now().saturating_duration_since(until);
        until
    }

    /// The engine has nothing to compute: the next step begins when it begins.
    pub fn idle(&mut self) {
        self.busy_until = None;
    }

    /// Model seconds by which steps took longer to emulate than they should have taken, in total.
    /// If it grows, the ratio is too high for the machine.
    pub fn lag_s(&self) -> f64 {
        self.lag.as_secs_f64() * self.ratio
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_scales_model_time() {
        let clock = ModelClock::new(50.0);
        assert_eq!(clock.real(50_000.0), Duration::from_millis(1));
        assert_eq!(clock.real(f64::MAX), Duration::from_secs(1_000_000_000));
        assert_eq!(clock.real(-1.0), Duration::ZERO);
    }

    #[test]
    fn steps_of_a_busy_engine_take_their_time_in_sum() {
        let mut clock = ModelClock::new(10.0);
        let start = Instant::now();
        let mut ends = Vec::new();
        for _ in 0..20 {
            let end = clock.end_of_step(Instant::now(), 20_000.0);
            std::thread::sleep(end.saturating_duration_since(Instant::now()));
            ends.push(end);
        }
        // 20 steps of 2 ms, each beginning where the one before ended, even though every sleep is
        // too long.
        assert!(ends[19] >= start + Duration::from_millis(40));
        assert!(ends.windows(2).all(|pair| pair[1] - pair[0] >= Duration::from_millis(2)));
    }

    #[test]
    fn a_step_after_a_pause_begins_when_it_begins() {
        let mut clock = ModelClock::new(1.0);
        let first = clock.end_of_step(Instant::now(), 1_000.0);
        clock.idle();
        let started = first + Duration::from_millis(1);
        assert_eq!(clock.end_of_step(started, 1_000.0), started + Duration::from_millis(1));
    }

    #[test]
    fn work_that_takes_longer_than_the_model_says_is_counted_as_lag() {
        let mut clock = ModelClock::new(1.0);
        let started = Instant::now();
        std::thread::sleep(Duration::from_millis(5));
        clock.end_of_step(started, 1_000.0);
        assert!(clock.lag_s() >= 0.003, "{}", clock.lag_s());
    }
}
