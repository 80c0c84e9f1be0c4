//! Samples of what this machine's GPUs do, as `nvidia-smi` tells it. It knows that program and its
//! text.

use crate::record::GpuSample;
use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

const PROGRAM: &str = "nvidia-smi";
const ARGUMENTS: [&str; 2] = ["--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"];
/// Utilisation is that of about a second.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// A driver that hangs takes longer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Of a machine with hundreds of GPUs it says less.
const TEXT_BYTES_MAX: u64 = 64 << 10;
/// What is shown of text that nobody understands.
const SHOWN_LETTERS: usize = 80;

/// Why there are no samples, or no more.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    #[error("{PROGRAM} cannot be run: {0}")]
    Run(#[from] io::Error),
    #[error("{PROGRAM} did not answer within {} s", ANSWER_LIMIT.as_secs())]
    Hangs,
    #[error("{PROGRAM} ended with {status}: {said}")]
    Ended { status: ExitStatus, said: String },
    #[error("{PROGRAM} says {0:?}, which is not the utilisation and memory of a GPU")]
    Text(String),
}

/// What a GPU did.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Reading {
    gpu: u32,
    busy_percent: f64,
    memory_mib: f64,
}

/// Reads all GPUs every second of real time and hands each sample to `sink`, stamped with model
/// time since now. Ends when they cannot be read.
pub async fn sample_gpus(arm: &str, clock_ratio: f64, mut sink: impl FnMut(GpuSample)) -> GpuError {
    let start = Instant::now();
    let mut ticks = interval(SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        let readings = match timeout(ANSWER_LIMIT, read()).await {
            Ok(Ok(readings)) => readings,
            Ok(Err(error)) => return error,
            Err(_) => return GpuError::Hangs,
        };
        let at_s = start.elapsed().as_secs_f64() * clock_ratio;
        for Reading { gpu, busy_percent, memory_mib } in readings {
            sink(GpuSample { arm: arm.to_owned(), at_s, gpu, busy_percent, memory_mib });
        }
    }
}

async fn read() -> Result<Vec<Reading>, GpuError> {
    let mut command = Command::new(PROGRAM);
    command.args(ARGUMENTS).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.kill_on_drop(true).spawn()?;
    let mut text = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        // When this is dropped the program can say no more, and ends.
        stdout.take(TEXT_BYTES_MAX).read_to_end(&mut text).await?;
    }
    let status = child.wait().await?;
    let text = String::from_utf8_lossy(&text);
    match status.success() {
        true => readings(&text),
        false => Err(GpuError::Ended { status, said: shown(&text) }),
    }
}

/// One GPU a line. What a GPU does not tell is in brackets: then it has no reading.
fn readings(text: &str) -> Result<Vec<Reading>, GpuError> {
    let mut readings = Vec::new();
    for (gpu, line) in (0..).zip(text.lines()) {
        if line.contains('[') {
            continue;
        }
        let (busy, memory) = line.split_once(',').ok_or_else(|| GpuError::Text(shown(line)))?;
        let number = |text: &str| text.trim().parse::<f64>().ok().filter(|value| value.is_finite());
        let numbers = number(busy).zip(number(memory)).ok_or_else(|| GpuError::Text(shown(line)))?;
        readings.push(Reading { gpu, busy_percent: numbers.0, memory_mib: numbers.1 });
    }
    if readings.is_empty() { Err(GpuError::Text(shown(text))) } else { Ok(readings) }
}

fn shown(text: &str) -> String {
    text.trim().chars().take(SHOWN_LETTERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_gpu_and_what_one_does_not_tell_is_left_out() {
        let text = "87, 61234\n[N/A], [N/A]\n0, 4\n";
        let read: Vec<_> = readings(text).unwrap().iter().map(|of| (of.gpu, of.busy_percent)).collect();
        assert_eq!(read, [(0, 87.0), (2, 0.0)]);
    }

    #[test]
    fn what_is_no_reading_is_shown_and_not_much_of_it() {
        for text in ["", "No devices were found\n", "87\n", "nan, 4\n", "[N/A], [N/A]\n"] {
            let error = readings(text).unwrap_err().to_string();
            assert!(error.contains("is not the utilisation"), "{error}");
        }
        assert!(readings(&"x".repeat(9_999)).unwrap_err().to_string().len() < 200);
    }
}
