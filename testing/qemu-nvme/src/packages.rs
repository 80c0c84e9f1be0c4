//! Where the program QEMU comes from: it is installed, or Debian's packages are unpacked into the
//! target folder. It knows apt-get and dpkg-deb; nothing is installed and root is not needed.

use crate::Error;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const PROGRAM: &str = "qemu-system-x86_64";
const PACKAGE: &str = "qemu-system-x86";
/// For one call of apt-get: a machine without a network must not hold up its tests.
const LIMIT_S: &str = "30";
/// Why QEMU could not be fetched: each process tries once, however many tests ask.
static NOT_FETCHED: OnceLock<String> = OnceLock::new();

/// QEMU, ready to be started.
#[derive(Debug)]
pub(crate) enum Program {
    Installed(PathBuf),
    /// The folder into which the packages were unpacked.
    Unpacked(PathBuf),
}

impl Program {
    /// Finds QEMU, or fetches it. Who comes second waits for who fetches.
    pub(crate) fn find() -> Result<Program, Error> {
        if let Some(path) = installed() {
            return Ok(Program::Installed(path));
        }
        let folder = profile_folder()?.join("qemu");
        let root = folder.join("root");
        std::fs::create_dir_all(&folder).map_err(Error::io(format!("making {}", folder.display())))?;
        let lock = File::create(folder.join("lock")).map_err(Error::io("making the lock file"))?;
        lock.lock().map_err(Error::io("waiting for another test that fetches QEMU"))?;
        if root.exists() {
            return Ok(Program::Unpacked(root));
        }
        if let Some(why) = NOT_FETCHED.get() {
            return Err(Error::Missing(why.clone()));
        }
        let fetched = fetch(&folder, &root);
        if let Err(Error::Missing(why)) = &fetched {
            NOT_FETCHED.get_or_init(|| why.clone());
        }
        fetched.map(|()| Program::Unpacked(root))
    }

    /// A command that runs it.
    pub(crate) fn command(&self) -> Command {
        let root = match self {
            Program::Installed(path) => return Command::new(path),
            Program::Unpacked(root) => root,
        };
        let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
        let libraries = [root.join("usr/lib").join(&triplet), root.join("lib").join(&triplet)];
        let mut command = Command::new(root.join("usr/bin").join(PROGRAM));
        command.env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap_or_default());
        command.arg("-L").arg(root.join("usr/share/qemu")).arg("-L").arg(root.join("usr/share/seabios"));
        command
    }

    /// The first line of what it says of itself.
    pub(crate) fn version(&self) -> Result<String, Error> {
        let output = run(self.command().arg("-version"))?;
        Ok(output.lines().next().unwrap_or_default().to_owned())
    }
}

fn installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(PROGRAM)).find(|file| file.is_file())
}

/// The folder of cargo's profile, in whose `deps` or `examples` this program was built.
fn profile_folder() -> Result<PathBuf, Error> {
    let program = std::env::current_exe().map_err(Error::io("no path of this program"))?;
    let missing = || Error::Missing(format!("{} is in no folder to fetch into", program.display()));
    program.ancestors().nth(2).map(Path::to_owned).ok_or_else(missing)
}

/// Fetches QEMU with the libraries that are not installed, and unpacks them as `root`.
fn fetch(folder: &Path, root: &Path) -> Result<(), Error> {
    let work = tempfile::tempdir_in(folder).map_err(Error::io("no folder to fetch QEMU into"))?;
    let (archives, lists) = (work.path().join("archives"), work.path().join("lists"));
    let unpacked = work.path().join("root");
    for each in [archives.join("partial"), lists.join("partial"), unpacked.clone()] {
        std::fs::create_dir_all(&each).map_err(Error::io(format!("making {}", each.display())))?;
    }
    // The system's lists may be missing or too old: then with lists of our own.
    if download(&archives, None).is_err() {
        apt_get(&archives, Some(&lists), &["update"])?;
        download(&archives, Some(&lists))?;
    }
    for package in packages_in(&archives)? {
        run(Command::new("dpkg-deb").arg("--extract").arg(&package).arg(&unpacked))?;
    }
    // Libraries of other versions than apt-get knew of would fail here.
    Program::Unpacked(unpacked.clone()).version()?;
    // Renamed at last: what has this name is whole.
    std::fs::rename(&unpacked, root).map_err(Error::io(format!("renaming to {}", root.display())))
}

fn download(archives: &Path, lists: Option<&Path>) -> Result<String, Error> {
    apt_get(archives, lists, &["install", "--download-only", "--no-install-recommends", "-y", PACKAGE])
}

/// Runs apt-get such that it needs no root and changes nothing of the system.
fn apt_get(archives: &Path, lists: Option<&Path>, arguments: &[&str]) -> Result<String, Error> {
    let mut command = Command::new("timeout");
    command.args([LIMIT_S, "apt-get", "-q", "-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="]);
    command.arg("-o").arg(format!("Dir::Cache::archives={}/", archives.display()));
    if let Some(lists) = lists {
        let caches = lists.with_file_name("caches");
        command.arg("-o").arg(format!("Dir::State::lists={}/", lists.display()));
        command.arg("-o").arg(format!("Dir::Cache::pkgcache={}.pkg", caches.display()));
        command.arg("-o").arg(format!("Dir::Cache::srcpkgcache={}.src", caches.display()));
    }
    run(command.args(arguments))
}

fn packages_in(archives: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = std::fs::read_dir(archives).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
    let entries = entries.map_err(Error::io("reading the folder of packages"))?;
    let paths = entries.into_iter().map(|entry| entry.path());
    Ok(paths.filter(|path| path.extension().is_some_and(|extension| extension == "deb")).collect())
}

/// Runs a step of finding QEMU; returns what it printed. Where it fails, this machine gives no
/// QEMU.
fn run(command: &mut Command) -> Result<String, Error> {
    let line = format!("{command:?}");
    match command.output() {
        Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(Error::Missing(format!(
                "it is not installed, and {line} ended with {}: {said}",
                output.status
            )))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(Error::Missing(format!("it is not installed, and {line} cannot be run")))
        }
        Err(source) => Err(Error::Io { what: line, source }),
    }
}
