//! What the environment says about the machine to be pretended.

use std::env::var;

/// GPUs that may be pretended at most.
const GPUS_MAX: usize = 16;

/// The pretended machine.
pub struct Settings {
    pub gpus: usize,
    /// Physical numbers of the GPUs that this process sees, in the order of its ordinals.
    pub visible: Vec<usize>,
    pub memory_bytes: u64,
    pub version: i32,
    /// What all GPUs are called.
    pub name: String,
    /// Rates as given; `links` knows their form.
    pub rates: String,
    /// Commands as given; `commands` knows their form.
    pub faults: String,
}

impl Settings {
    /// Reads the environment.
    pub fn read() -> Result<Settings, String> {
        let gpus = number("FAKE_CUDA_GPUS", 4, 0, GPUS_MAX as u64)? as usize;
        Ok(Settings {
            gpus,
            visible: visible(gpus),
            memory_bytes: number("FAKE_CUDA_MEMORY_MIB", 8192, 1, 1 << 20)? << 20,
            version: number("FAKE_CUDA_VERSION", 13000, 11000, 99999)? as i32,
            name: var("FAKE_CUDA_NAME").unwrap_or_else(|_| "Fake H200".into()),
            rates: var("FAKE_CUDA_RATES").unwrap_or_default(),
            faults: var("FAKE_CUDA_FAULTS").unwrap_or_default(),
        })
    }

    /// The machine when the environment makes no sense: nothing to be found on it.
    pub fn nothing() -> Settings {
        Settings {
            gpus: 0,
            visible: Vec::new(),
            memory_bytes: 0,
            version: 13000,
            name: String::new(),
            rates: String::new(),
            faults: String::new(),
        }
    }
}

fn number(name: &str, default: u64, min: u64, max: u64) -> Result<u64, String> {
    let Ok(given) = var(name) else { return Ok(default) };
    let parsed = given.parse().ok().filter(|parsed| (min..=max).contains(parsed));
    parsed.ok_or_else(|| format!("{name}: {given:?} is no number from {min} to {max}"))
}

/// As the real driver reads it: ordinals up to the first one that makes no sense.
fn visible(gpus: usize) -> Vec<usize> {
    let Ok(given) = var("CUDA_VISIBLE_DEVICES") else { return (0..gpus).collect() };
    let ordinals =
        given.split(',').map(|ordinal| ordinal.trim().parse().ok().filter(|&gpu: &usize| gpu < gpus));
    ordinals.map_while(|ordinal| ordinal).collect()
}
