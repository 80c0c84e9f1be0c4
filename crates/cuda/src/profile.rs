//! What was measured of a host's links, and where it is kept between runs.

use crate::driver::Driver;
use crate::links::Direction;
use crate::peers::Untrusted;
use crate::rates::{Rates, Relaying};
use crate::relay::Relay;
use crate::topology::Topology;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Files of another format are as good as none.
const FORMAT: u32 = 2;
/// No profile is longer.
const MOST_BYTES: u64 = 1 << 20;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    format: u32,
    /// The digest of the topology that was measured.
    pub digest: String,
    /// When: seconds since 1970.
    pub measured_unix_s: u64,
    /// Each GPU's own link while the others are idle.
    pub alone: Vec<LinkRate>,
    pub together: BothWays,
    pub pairs: Vec<PairRate>,
    /// Copies over relays; none where no GPU has one.
    pub relayed: Option<RelayedBothWays>,
    /// GPUs that reach each other and were seen to move wrong bytes.
    #[serde(default)]
    pub untrusted: Vec<Untrusted>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkRate {
    pub gpu: u16,
    pub rates: BothWays,
}

/// A rate towards GPUs and one from them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BothWays {
    pub h2d_bytes_per_s: f64,
    pub d2h_bytes_per_s: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PairRate {
    pub from: u16,
    pub to: u16,
    pub bytes_per_s: f64,
}

/// How copies over relays do towards GPUs, and how from them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RelayedBothWays {
    pub h2d: Relayed,
    pub d2h: Relayed,
}

/// How copies over relays do in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Relayed {
    /// By what stream copies are divided best.
    pub relaying: Relaying,
    /// Copies of fewer bytes are faster over the GPU's own link alone; none where larger ones are,
    /// too.
    pub break_even_bytes: Option<u64>,
    /// From this size on the mover is faster than a stream copy.
    pub mover_bytes: u64,
    /// How a peer hands on best what the mover gives it.
    pub relay: Relay,
}

impl BothWays {
    pub fn of(&self, direction: Direction) -> f64 {
        direction.in_order(self.h2d_bytes_per_s, self.d2h_bytes_per_s).0
    }
}

impl RelayedBothWays {
    pub fn of(&self, direction: Direction) -> Relayed {
        direction.in_order(self.h2d, self.d2h).0
    }
}

impl Relayed {
    fn is_sound(&self) -> bool {
        let Relaying { efficiency, latency_s } = self.relaying;
        (0.01..=2.0).contains(&efficiency) && (0.0..=1.0).contains(&latency_s)
    }
}

impl Profile {
    /// Figures measured now, of the host whose topology has this digest.
    pub fn new(
        digest: String,
        alone: Vec<LinkRate>,
        together: BothWays,
        pairs: Vec<PairRate>,
        relayed: Option<RelayedBothWays>,
    ) -> Profile {
        let measured_unix_s = u64::try_from(clock_gettime(ClockId::Realtime).tv_sec).unwrap_or(0);
        Profile {
            format: FORMAT,
            digest,
            measured_unix_s,
            alone,
            together,
            pairs,
            relayed,
            untrusted: vec![],
        }
    }

    /// The folder for profiles of this user; `None` where the user has none at all.
    pub fn folder() -> Option<PathBuf> {
        // What is not absolute is to be ignored, as the base directory specification has it.
        let absolute =
            |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Some(cache.join("forebay"))
    }

    /// What is kept of the host as a driver shows it now, if anything is.
    pub fn kept(driver: &'static Driver) -> Option<Profile> {
        Profile::kept_of(&Topology::read(driver).ok()?)
    }

    /// What is kept of a host, if anything is.
    pub(crate) fn kept_of(host: &Topology) -> Option<Profile> {
        let digest = host.digest();
        let kept = Profile::load(&Profile::folder()?, &digest);
        tracing::info!(measured = kept.is_some(), host = %digest, "rates of this host");
        kept
    }

    /// The profile of a digest, if the folder has one. A file that is damaged, or of another host
    /// or format, is none.
    pub fn load(folder: &Path, digest: &str) -> Option<Profile> {
        let mut text = String::new();
        File::open(file(folder, digest)).ok()?.take(MOST_BYTES).read_to_string(&mut text).ok()?;
        let profile: Profile = serde_json::from_str(&text).ok()?;
        let sound = profile.format == FORMAT && profile.digest == digest && profile.is_sound();
        sound.then_some(profile)
    }

    /// Keeps it in the folder, which is made if it is not there. Readers find the old one or the
    /// new one.
    pub fn save(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let path = file(folder, &self.digest);
        let new = path.with_extension(format!("{}.new", std::process::id()));
        let written = File::create(&new).and_then(|mut file| {
            serde_json::to_writer_pretty(&mut file, self)?;
            file.write_all(b"\n")
        });
        let kept = written.and_then(|()| fs::rename(&new, path));
        if kept.is_err() {
            let _ = fs::remove_file(&new);
        }
        kept
    }

    pub fn alone(&self, gpu: u16) -> Option<BothWays> {
        self.alone.iter().find(|link| link.gpu == gpu).map(|link| link.rates)
    }

    /// Whether every figure is one that a host can have.
    fn is_sound(&self) -> bool {
        let both = |rates: &BothWays| [rates.h2d_bytes_per_s, rates.d2h_bytes_per_s];
        let links = self.alone.iter().flat_map(|link| both(&link.rates));
        let pairs = self.pairs.iter().map(|pair| pair.bytes_per_s);
        let mut relayed = self.relayed.iter().flat_map(|both| [both.h2d, both.d2h]);
        links.chain(both(&self.together)).chain(pairs).all(|rate| rate.is_finite() && rate > 0.0)
            && relayed.all(|relayed| relayed.is_sound())
    }
}

/// As measured. What was not measured, since no GPU of the host has a relay, stays as it is
/// assumed.
impl From<&Profile> for Rates {
    fn from(profile: &Profile) -> Rates {
        let of_links = |rates: Rates, direction| {
            let link = |rates: Rates, link: &LinkRate| {
                rates.with_link(link.gpu, direction, link.rates.of(direction))
            };
            profile.alone.iter().fold(rates, link).with(direction, |own| {
                own.host_bytes_per_s = Some(profile.together.of(direction));
                if let Some(relayed) = profile.relayed.map(|relayed| relayed.of(direction)) {
                    own.relaying = relayed.relaying;
                    own.break_even_bytes = relayed.break_even_bytes.unwrap_or(u64::MAX);
                    own.mover_bytes = relayed.mover_bytes;
                }
            })
        };
        Direction::BOTH.into_iter().fold(Rates::default(), of_links)
    }
}

fn file(folder: &Path, digest: &str) -> PathBuf {
    folder.join(format!("gpu-{digest}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        let rates = BothWays { h2d_bytes_per_s: 55.1e9, d2h_bytes_per_s: 55.4e9 };
        let together = BothWays { h2d_bytes_per_s: 136.3e9, d2h_bytes_per_s: 127.7e9 };
        let alone = vec![LinkRate { gpu: 0, rates }, LinkRate { gpu: 1, rates }];
        let pairs = vec![PairRate { from: 0, to: 1, bytes_per_s: 396.6e9 }];
        let h2d = Relayed {
            relaying: Relaying { efficiency: 0.85, latency_s: 40e-6 },
            break_even_bytes: Some(2 << 20),
            mover_bytes: 400 << 20,
            relay: Relay::ALL[1],
        };
        let relayed = RelayedBothWays { h2d, d2h: Relayed { break_even_bytes: None, ..h2d } };
        Profile::new("0123".into(), alone, together, pairs, Some(relayed))
    }

    #[test]
    fn a_profile_that_is_kept_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("made/when/needed");
        assert_eq!(Profile::load(&folder, "0123"), None);
        let kept = profile();
        kept.save(&folder).unwrap();
        assert_eq!(Profile::load(&folder, "0123"), Some(kept));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left in the folder");
    }

    #[test]
    fn a_damaged_or_foreign_file_is_a_miss() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let good = serde_json::to_string(&profile()).unwrap();
        let bad = [
            String::new(),
            good[..good.len() / 2].into(),
            good.replace("\"format\":2", "\"format\":1"),
            good.replace("0123", "4567"),
            good.replace("55100000000.0", "-1.0"),
            good.replace("55100000000.0", "1e999"),
            good.replace("55100000000.0", "null"),
            good.replace("\"efficiency\":0.85", "\"efficiency\":0.0"),
            good.replace("\"peer\"", "\"thrown\""),
            "x".repeat(2 << 20),
        ];
        for text in bad {
            assert_ne!(text, good);
            fs::write(file(folder, "0123"), text).unwrap();
            assert_eq!(Profile::load(folder, "0123"), None);
        }
        fs::write(file(folder, "0123"), good).unwrap();
        assert!(Profile::load(folder, "0123").is_some());
    }
}
