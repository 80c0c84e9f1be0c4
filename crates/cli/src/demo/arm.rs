//! One policy, from a cold start to its last record, or to the Ctrl-C before it.

use super::kill::Kill;
use super::system::{Spec, System};
use super::workload::Workload;
use crate::decisions::ArmDecisions;
use forebay_results::output::Error;
use forebay_router::Policy;
use forebay_trace::record::{Counter, Line, RecordWriter, RequestRecord, RunInfo, Start};
use forebay_trace::replay::{Options, Replayer};
use forebay_trace::report::LiveLine;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How long what runs may take to end in order after a cancellation. What does not, is killed.
const END_LIMIT: Duration = Duration::from_secs(10);

/// The replay of a workload under a policy.
pub struct Arm<'a> {
    pub policy: Policy,
    pub workload: &'a Workload,
    pub spec: &'a Spec,
    /// What comes of it is appended here.
    pub records: &'a RecordWriter,
    pub cancel: &'a CancellationToken,
    /// Where its router logs what it decides.
    pub decision_log: PathBuf,
}

impl Arm<'_> {
    /// Runs it, and gives what there is to say of it beside the records.
    pub async fn run(&self) -> Result<Option<String>, Error> {
        // Engines may take minutes to start. Dropping what has started kills it.
        match std::fs::remove_file(&self.decision_log) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let starting = self.spec.start(self.policy, &self.decision_log);
        let Some(system) = self.cancel.run_until_cancelled(starting).await else { return Ok(None) };
        tokio::select! {
            said = self.replay(system?) => said,
            () = self.too_late() => Ok(None),
        }
    }

    /// Comes back when a cancellation is [`END_LIMIT`] ago.
    async fn too_late(&self) {
        self.cancel.cancelled().await;
        tokio::time::sleep(END_LIMIT).await;
    }

    async fn replay(&self, system: System) -> Result<Option<String>, Error> {
        let Arm { workload, records, .. } = self;
        let (arm, host) = (self.policy.name(), self.spec.host());
        records.write(&Line::Run(self.run_info()))?;
        let options = Options {
            arm: arm.to_owned(),
            model: host.profile.model.name.clone(),
            pacing: workload.pacing,
            clock_ratio: host.clock_ratio,
            vocab: host.profile.model.vocab,
            ..Options::default()
        };
        let replayer = Replayer::new(&system.url(), options)?;
        let live = LiveLine::new(arm, replayer.progress());
        let check = self.spec.check()?;
        let kill = Kill::halfway(system.cluster_to_harm(), workload.requests.len());
        let sink = |record: &RequestRecord| {
            kill.note(record);
            records.write(&Line::Request(record.clone()))
        };
        let replay = replayer.run(workload.requests.clone(), check, sink, self.cancel);
        let outcome = tokio::select! {
            outcome = live.during(replay) => outcome,
            failed = system.sample(arm, host.clock_ratio, records) => return Err(failed),
            failed = kill.carry_out(replayer.progress()) => return Err(failed),
        };
        let counts = system.counts().await?;
        let said = kill.words(arm, &counts);
        for (name, value) in counts.into_iter().chain(kill.counts()) {
            records.write(&Line::Counter(Counter { arm: arm.to_owned(), name: name.to_owned(), value }))?;
        }
        system.stop().await?;
        ArmDecisions::read(&self.decision_log, 0, arm, host.clock_ratio)?.write(arm, records)?;
        outcome?;
        Ok(said)
    }

    fn run_info(&self) -> RunInfo {
        let parameters = [
            ("trace", self.workload.description.clone()),
            ("host", self.spec.description()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ];
        let parameters = parameters.map(|(name, value)| (name.to_owned(), value)).into();
        // Each arm starts its own engines.
        RunInfo { arm: self.policy.name().to_owned(), start: Some(Start::Fresh), parameters }
    }
}
