//! `forebay torture`: harm done to stores of KV, and a table of how they bore it. With `--worker`
//! the same program is the store under test, for the suite that started it. What is done is
//! `forebay-torture`'s to say.

use forebay_results::output::{CommandResult, Error};
use forebay_results::{Results, Row};
use forebay_torture::report::{finding, word};
use forebay_torture::serve::{Subject, serve};
use forebay_torture::subjects::{FilePerObject, Forebay, Node, lmcache};
use forebay_torture::worker::{Launch, Timeouts};
use forebay_torture::{Outcome, Report, Scale, Store, Suite};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Arguments of `forebay torture`.
#[derive(clap::Args)]
pub struct Args {
    /// Stores to torture; lmcache needs --lmcache-python
    #[arg(long, value_name = "STORE,..", value_delimiter = ',', default_values_t = [Kind::Forebay, Kind::Node, Kind::FilePerObject])]
    store: Vec<Kind>,
    /// Python interpreter that has lmcache and torch; adds lmcache to the stores
    #[arg(long, value_name = "PATH")]
    lmcache_python: Option<PathBuf>,
    /// A worker of your own that speaks the protocol of docs/torture.md; added to the stores under
    /// the program's name
    #[arg(long, value_name = "PROGRAM")]
    program: Option<PathBuf>,
    /// Run only the cases whose names contain this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Use fewer values, kills and crash points, and take a minute or two
    #[arg(long)]
    quick: bool,
    /// Seed of all that is random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Existing directory on the disk to use; a directory is made in it, and removed [default: the
    /// directory for temporary files]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Write the figures to a file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Show what workers print
    #[arg(long)]
    verbose: bool,
    /// Be the store under test, on standard input and output
    #[arg(long, hide = true)]
    worker: Option<Kind>,
}

/// A store that comes with the suite.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// Forebay's SSD tier
    Forebay,
    /// A node and its client, which asks through its ring
    Node,
    /// The same with a client that checks nothing, to see the cases fail
    NodeUnverified,
    FilePerObject,
    Lmcache,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Forebay => "forebay",
            Kind::Node => "node",
            Kind::NodeUnverified => "node-unverified",
            Kind::FilePerObject => "file-per-object",
            Kind::Lmcache => "lmcache",
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

pub fn run(args: Args) -> CommandResult {
    match args.worker {
        Some(kind) => work(kind),
        None => torture(args),
    }
}

fn work(kind: Kind) -> CommandResult {
    let subject: Arc<dyn Subject> = match kind {
        Kind::Forebay => Arc::new(Forebay::default()),
        Kind::Node => Arc::new(Node::new()),
        Kind::NodeUnverified => Arc::new(Node::unverified()),
        Kind::FilePerObject => Arc::new(FilePerObject::default()),
        Kind::Lmcache => return Err("--worker lmcache: LMCache's worker is a Python program".into()),
    };
    Ok(serve(subject, std::io::stdin().lock(), std::io::stdout())?)
}

fn torture(args: Args) -> CommandResult {
    let base = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let dir = base.join(format!("forebay-torture-{}", std::process::id()));
    std::fs::create_dir(&dir).map_err(|error| format!("--dir {}: {error}", base.display()))?;
    let ran = suite(&args, dir.clone()).and_then(|suite| Ok(suite.run(print_outcome)?));
    // What cannot be removed is below a directory that says what it was for.
    let _ = std::fs::remove_dir_all(&dir);
    let report = ran?;
    println!("{}\n{}", report.markdown(), report.findings());
    if let Some(file) = &args.json {
        let write = results(&report).write(file);
        write.map_err(|error| format!("--json {}: {error}", file.display()))?;
    }
    for ours in [Kind::Forebay, Kind::Node].map(Kind::name) {
        match report.of(ours).map_or(0, |column| column.failed()) {
            0 => {}
            failed => return Err(format!("{ours} failed {failed} cases").into()),
        }
    }
    Ok(())
}

fn suite(args: &Args, dir: PathBuf) -> Result<Suite, Error> {
    let mut scale = if args.quick { Scale::quick() } else { Scale::full() };
    scale.seed = args.seed;
    let mut kinds = args.store.clone();
    if args.lmcache_python.is_some() && !kinds.contains(&Kind::Lmcache) {
        kinds.push(Kind::Lmcache);
    }
    let mut stores = Vec::new();
    for kind in kinds {
        let launch = match (kind, &args.lmcache_python) {
            (Kind::Lmcache, Some(python)) => lmcache::launch(python, !args.verbose),
            (Kind::Lmcache, None) => return Err("--store lmcache: --lmcache-python PATH is missing".into()),
            _ => Launch {
                program: std::env::current_exe()?.into(),
                args: ["torture", "--worker", kind.name()].map(Into::into).into(),
                quiet: !args.verbose,
            },
        };
        stores.push(Store { name: kind.name().into(), launch, timeouts: TIMEOUTS });
    }
    stores.extend(args.program.as_deref().map(|program| own(program, args)));
    Ok(Suite { stores, only: args.only.clone(), scale, dir })
}

fn own(program: &Path, args: &Args) -> Store {
    let name = program.file_stem().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    let launch = Launch { program: program.into(), args: Vec::new(), quiet: !args.verbose };
    Store { name, launch, timeouts: TIMEOUTS }
}

/// Long enough for a busy machine. Opening includes the start of an interpreter and its libraries.
const TIMEOUTS: Timeouts = Timeouts { open: Duration::from_secs(180), command: Duration::from_secs(60) };

fn print_outcome(store: &Store, outcome: &Outcome) {
    let found = finding(outcome).unwrap_or_default();
    let seconds = outcome.took.as_secs_f64();
    eprintln!("{}: {} ({seconds:.1} s): {} {found}", store.name, outcome.case, word(&outcome.verdict));
}

fn results(report: &Report) -> Results {
    let mut results = Results::new("torture");
    for column in &report.columns {
        let figures = [
            ("faults", "cases", column.faults() as f64),
            ("failed", "cases", column.failed() as f64),
            ("wrong_bytes", "bytes", column.wrong_bytes() as f64),
            ("crash_points", "writes", column.crash_points() as f64),
        ];
        for (name, unit, value) in figures {
            results.rows.push(Row::of_runs(format!("torture.{}.{name}", column.store), unit, &[value]));
        }
    }
    results
}
