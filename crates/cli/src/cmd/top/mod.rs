//! `forebay top`: what nodes, routers and engines do, live, from their `/metrics`. This file asks
//! them each second and shows a frame; `view` makes the frame, `terminal` has the screen and keys.

mod change;
mod terminal;
mod view;

use super::signals::Signals;
use crate::metrics_page::MetricsPage;
use change::{Change, Snapshot};
use forebay_results::output::CommandResult;
use std::time::{Duration, Instant};
use terminal::{Key, Screen};
use view::Process;

/// Time between two frames, and how long an address may take to answer.
const EVERY: Duration = Duration::from_secs(1);
const ANSWER_LIMIT: Duration = Duration::from_millis(900);
/// What a frame has room for where nobody says it.
const USUAL_SIZE: (usize, usize) = (80, 24);

/// Arguments of `forebay top`.
#[derive(clap::Args)]
pub struct Args {
    /// Where nodes, routers and engines answer /metrics
    #[arg(value_name = "HOST:PORT", default_values = ["127.0.0.1:8080", "127.0.0.1:9310"])]
    addresses: Vec<String>,
    /// Print one frame as text, after a second, and end
    #[arg(long)]
    once: bool,
}

pub fn run(args: Args) -> CommandResult {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut asked: Vec<Asked> = args.addresses.into_iter().map(Asked::new).collect();
    runtime.block_on(ask(&mut asked));
    if args.once {
        std::thread::sleep(EVERY);
        runtime.block_on(ask(&mut asked));
        let width = USUAL_SIZE.0;
        view::frame(&processes(&asked), width, usize::MAX).iter().for_each(|line| println!("{line}"));
        return Ok(());
    }
    let mut signals = runtime.block_on(async { Signals::listen() })?;
    let screen = Screen::open()?;
    loop {
        let next = Instant::now() + EVERY;
        loop {
            let (width, height) = screen.size().unwrap_or(USUAL_SIZE);
            screen.show(&view::frame(&processes(&asked), width, height))?;
            let key = screen.key_before(next)?;
            if key == Some(Key::Quit) || runtime.block_on(signals.have_come()) {
                return Ok(());
            }
            if key.is_none() {
                break;
            }
        }
        runtime.block_on(ask(&mut asked));
    }
}

/// An address, and what it said the last two times.
struct Asked {
    address: String,
    now: Result<Snapshot, String>,
    at: Instant,
    before: Option<(Snapshot, Instant)>,
}

impl Asked {
    fn new(address: String) -> Asked {
        Asked { address, now: Err("not asked yet".into()), at: Instant::now(), before: None }
    }

    async fn ask(&mut self) {
        let page = MetricsPage::within(ANSWER_LIMIT, &self.address).await;
        let now = page.map(|page| Snapshot::read(page.body().as_bytes())).map_err(|error| error.why);
        let (before, at) =
            (std::mem::replace(&mut self.now, now), std::mem::replace(&mut self.at, Instant::now()));
        self.before = before.ok().map(|before| (before, at));
    }

    fn process(&self) -> Process<'_> {
        let before = self.before.as_ref();
        let before = before.map(|(before, at)| (before, self.at.duration_since(*at).as_secs_f64()));
        let said = self.now.as_ref().map(|now| Change { now, before }).map_err(String::as_str);
        Process { address: &self.address, said }
    }
}

/// Asks all of them at once.
async fn ask(asked: &mut [Asked]) {
    futures_util::future::join_all(asked.iter_mut().map(Asked::ask)).await;
}

fn processes(asked: &[Asked]) -> Vec<Process<'_>> {
    asked.iter().map(Asked::process).collect()
}
