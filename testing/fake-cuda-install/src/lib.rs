//! Where tests find the fake driver.
//!
//! Tests call [`installed`] and load `libcuda.so.1` from the folder, or give a child process the
//! folder as `LD_LIBRARY_PATH`, or the driver's path in whichever variable it reads.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A folder that holds the fake libraries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// The folder, for `LD_LIBRARY_PATH`.
    pub folder: PathBuf,
    /// The driver in it: `libcuda.so.1`.
    pub libcuda: PathBuf,
    /// The runtime in it: `libcudart.so.13`.
    pub libcudart: PathBuf,
}

/// Builds the fake libraries unless they are up to date, and gives the folder with links to them.
/// Once per process.
///
/// # Panics
/// If they cannot be built or linked to: no test can go on without them.
pub fn installed() -> &'static Installed {
    static INSTALLED: OnceLock<Installed> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        let built = build();
        install(&built)
            .unwrap_or_else(|error| panic!("cannot link to the fake CUDA libraries in {built:?}: {error}"))
    })
}

/// Builds both libraries where this test itself was built, so that they are never older than their
/// source.
fn build() -> PathBuf {
    let profile_folder = profile_folder();
    let target = profile_folder.parent().unwrap_or(&profile_folder);
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "-p", "fake-cuda", "-p", "fake-cudart", "--target-dir"]).arg(target);
    if profile_folder.file_name().is_some_and(|name| name == "release") {
        cargo.arg("--release");
    }
    // A test under LD_PRELOAD must not preload anything into the compiler.
    let status = cargo.env_remove("LD_PRELOAD").current_dir(&workspace).status();
    match status {
        Ok(status) if status.success() => profile_folder,
        Ok(status) => panic!("building fake-cuda and fake-cudart failed: {status}"),
        Err(error) => panic!("cannot run cargo to build fake-cuda: {error}"),
    }
}

/// `target/debug`, say: where the running test was built (`target/debug/deps/test-0123`).
fn profile_folder() -> PathBuf {
    let test = std::env::current_exe().unwrap_or_else(|error| panic!("no path of this test: {error}"));
    let folder = test.parent().unwrap_or(&test);
    match folder.file_name() {
        Some(name) if name == "deps" || name == "examples" => folder.parent().unwrap_or(folder).into(),
        _ => folder.into(),
    }
}

/// Links to the libraries in `built`. Every process does so: whoever comes second finds the same
/// links.
fn install(built: &Path) -> std::io::Result<Installed> {
    let folder = built.join("fake-cuda");
    std::fs::create_dir_all(&folder)?;
    let link = |library: &str, name: &str| {
        let path = folder.join(name);
        match std::os::unix::fs::symlink(built.join(library), &path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(path),
        }
    };
    let libcuda = link("libfake_cuda.so", "libcuda.so.1")?;
    let libcudart = link("libfake_cudart.so", "libcudart.so.13")?;
    // For programs that are linked against them: `-L FOLDER -lcuda`.
    link("libfake_cuda.so", "libcuda.so")?;
    link("libfake_cudart.so", "libcudart.so")?;
    Ok(Installed { libcuda, libcudart, folder })
}
