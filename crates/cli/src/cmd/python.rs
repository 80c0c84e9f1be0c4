//! The Python that has vLLM and the package of Forebay: which one it is, what it has, and whether
//! that goes together. Nothing here imports vLLM, which takes seconds.

use super::findings::Check;
use forebay_cuda::preflight::Finding;
use forebay_cuda::preflight::Severity::{Fault, Note, Unknown, Warning};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::process::Command;

/// Names the Python. The script `forebay` of the package sets it to its own.
const VARIABLE: &str = "FOREBAY_PYTHON";
const OTHERWISE: &str = "python3";
const PROBE: &str = include_str!("python_probe.py");
/// What the package is called, and its plug-in.
const FOREBAY: &str = "forebay";
/// vLLM loads all plug-ins, or those that this names.
const ALLOWED: &str = "VLLM_PLUGINS";
/// Versions of vLLM that the connector supports, and those that were run.
const OLDEST: (u32, u32) = (0, 26);
const NEWEST: (u32, u32) = (0, 33);
const RUN: [(u32, u32); 3] = [OLDEST, (0, 32), NEWEST];

/// A Python, by its path or its name.
#[derive(Debug)]
pub struct Python(OsString);

/// What it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packages {
    /// Its own version.
    pub python: String,
    /// Versions of the packages, where they are there.
    pub forebay: Option<String>,
    pub vllm: Option<String>,
    /// Names of vLLM's general plug-ins.
    pub plugins: Vec<String>,
    /// Why the package of Forebay cannot be used.
    pub import_error: Option<String>,
}

/// Why a Python does not say what it has.
#[derive(Debug, thiserror::Error)]
pub enum NotAsked {
    #[error("{python} cannot be run: {error}; {VARIABLE} names another Python", python = python.display())]
    NotRun { python: OsString, error: std::io::Error },
    #[error("{python} does not say what it has: {said}; {VARIABLE} names another Python", python = python.display())]
    Failed { python: OsString, said: String },
}

impl Python {
    /// The one that was named, or `python3`.
    pub fn find() -> Python {
        Python(std::env::var_os(VARIABLE).filter(|name| !name.is_empty()).unwrap_or_else(|| OTHERWISE.into()))
    }

    pub fn name(&self) -> String {
        self.0.to_string_lossy().into_owned()
    }

    /// A command of it. The folder that it is run in is not searched for modules.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.0);
        command.arg("-P");
        command
    }

    /// Asks what it has.
    pub fn ask(&self) -> Result<Packages, NotAsked> {
        let ran = self.command().args(["-c", PROBE]).output();
        let ran = ran.map_err(|error| NotAsked::NotRun { python: self.0.clone(), error })?;
        let failed = |said: &str| NotAsked::Failed { python: self.0.clone(), said: said.into() };
        // What a Python says last is the reason.
        let said = String::from_utf8_lossy(&ran.stderr);
        let why = said.trim().lines().next_back().unwrap_or("it prints nothing");
        serde_json::from_slice(&ran.stdout).map_err(|_| failed(why))
    }
}

impl Packages {
    /// What is to be said of them. `allowed` is the value of `VLLM_PLUGINS`.
    pub fn checks(&self, allowed: Option<&str>) -> Vec<Check> {
        let mut all = vec![Check::new("package", self.package(env!("CARGO_PKG_VERSION")))];
        all.push(Check::new("vllm", self.of_vllm()));
        if self.forebay.is_some() && self.vllm.is_some() {
            all.push(Check::new("plug-in", self.plug_in(allowed)));
        }
        all
    }

    fn package(&self, program: &str) -> Finding {
        let python = &self.python;
        let Some(package) = &self.forebay else {
            let action =
                "pip install the wheel for this Python; a host that runs a node only needs no package";
            let what = format!("Python {python} has no package forebay");
            return Finding::new(Warning, what, "vLLM in it cannot use the node", action);
        };
        if let Some(error) = &self.import_error {
            let what = format!("forebay {package} cannot be imported: {error}");
            return Finding::new(Fault, what, "vLLM in it cannot use the node", "install the wheel again");
        }
        if package != program {
            let what = format!("the package is {package}, and this program is {program}");
            let why = "a node refuses clients of another version of the protocol";
            return Finding::new(Fault, what, why, "install both from the same wheel");
        }
        Finding::ok(format!("program and package are {program}, Python is {python}"))
    }

    fn of_vllm(&self) -> Finding {
        let Some(vllm) = &self.vllm else {
            let what = format!("Python {} has no vLLM", self.python);
            let action = "pip install vllm; a host that runs a node only needs none";
            return Finding::new(Warning, what, "there is no engine to start", action);
        };
        let supported = format!("{} to {} are supported", dotted(OLDEST), dotted(NEWEST));
        let run = RUN.map(dotted).join(", ");
        let what = format!("vLLM {vllm}; {supported}, {run} were run");
        match release(vllm) {
            Some(release) if RUN.contains(&release) => Finding::ok(format!("vLLM {vllm}")),
            Some(release) if release < OLDEST => {
                Finding::new(Fault, what, "the connector does not start", "install a later vLLM")
            }
            Some(release) if release < NEWEST => Finding::new(Note, what, "", ""),
            _ => Finding::new(Unknown, what, "the connector may not start", "look at its first log lines"),
        }
    }

    fn plug_in(&self, allowed: Option<&str>) -> Finding {
        let why = "vLLM does not know ForebayConnector";
        if !self.plugins.iter().any(|name| name == FOREBAY) {
            let what = "the plug-in forebay is not registered with vLLM";
            return Finding::new(Fault, what, why, "install the wheel again");
        }
        match allowed {
            Some(names) if !names.split(',').any(|name| name == FOREBAY) => {
                let what = format!("{ALLOWED} is {names:?} and leaves the plug-in forebay out");
                Finding::new(Fault, what, why, "add forebay to it, or unset it")
            }
            _ => Finding::ok("vLLM loads the plug-in forebay"),
        }
    }
}

/// Which plug-ins vLLM may load, where that is said.
pub fn allowed_plugins() -> Option<String> {
    std::env::var_os(ALLOWED).map(|names| names.to_string_lossy().into_owned())
}

fn dotted((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}

/// The first two numbers of a version: `0.33.0+cpu` is of 0.33.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_cuda::preflight::Severity::{self, Ok};

    const PROGRAM: &str = env!("CARGO_PKG_VERSION");

    fn packages() -> Packages {
        Packages {
            python: "3.12.3".into(),
            forebay: Some(PROGRAM.into()),
            vllm: Some("0.33.0+cpu".into()),
            plugins: vec!["other".into(), FOREBAY.into()],
            import_error: None,
        }
    }

    fn severities(packages: &Packages, allowed: Option<&str>) -> Vec<Severity> {
        packages.checks(allowed).iter().map(|check| check.finding.severity).collect()
    }

    #[test]
    fn what_goes_together_is_ok_and_what_does_not_is_not() {
        assert_eq!(severities(&packages(), None), [Ok, Ok, Ok]);
        let none = Packages { forebay: None, plugins: Vec::new(), ..packages() };
        assert_eq!(severities(&none, None), [Warning, Ok]);
        let broken = Packages { import_error: Some("ImportError: GLIBC_2.99".into()), ..packages() };
        assert_eq!(severities(&broken, None), [Fault, Ok, Ok]);
        let other = Packages { forebay: Some("9.9.9".into()), ..packages() };
        assert_eq!(severities(&other, None), [Fault, Ok, Ok]);
        let bare = Packages { vllm: None, ..packages() };
        assert_eq!(severities(&bare, None), [Ok, Warning]);
    }

    #[test]
    fn a_version_of_vllm_that_was_not_run_is_never_ok() {
        for (vllm, expected) in [
            ("0.26.0", Ok),
            ("0.32.1", Ok),
            ("0.33.0rc1", Ok),
            ("0.29.0", Note),
            ("0.25.9", Fault),
            ("0.34.0", Unknown),
            ("1.0", Unknown),
            ("dev", Unknown),
            ("", Unknown),
        ] {
            let of = Packages { vllm: Some(vllm.into()), ..packages() };
            assert_eq!(of.of_vllm().severity, expected, "{vllm}");
        }
    }

    #[test]
    fn a_plug_in_that_vllm_does_not_load_is_a_fault() {
        for (allowed, expected) in
            [(None, Ok), (Some("lora,forebay"), Ok), (Some("lora"), Fault), (Some(""), Fault)]
        {
            assert_eq!(packages().plug_in(allowed).severity, expected, "{allowed:?}");
        }
        let none = Packages { plugins: vec!["other".into()], ..packages() };
        assert_eq!(none.plug_in(None).severity, Fault);
    }

    #[test]
    fn a_python_that_does_not_say_what_it_has_is_named_with_the_reason() {
        for (python, why) in [("/no/such/python", "cannot be run"), ("false", "prints nothing")] {
            let said = Python(python.into()).ask().unwrap_err().to_string();
            assert!(said.contains(python) && said.contains(why) && said.contains(VARIABLE), "{said}");
        }
    }
}
