//! A folder with a driver, a CUDA runtime, a copying library, interposers and programs, built from
//! `tests/c`, and the preload among them; and runs of those programs. It knows how to set the
//! stage, not what the tests expect.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
const DLSYM_VERSION: &str = "-DDLSYM_VERSION=\"GLIBC_2.2.5\"";
#[cfg(target_arch = "aarch64")]
const DLSYM_VERSION: &str = "-DDLSYM_VERSION=\"GLIBC_2.17\"";

/// The folder, built once by each run of the tests.
pub fn stage() -> &'static Path {
    static STAGE: OnceLock<PathBuf> = OnceLock::new();
    STAGE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stage");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(folder.join("optimised")).unwrap();
        build(&folder);
        folder
    })
}

/// The preload as a debug build and as a release build has it.
pub fn preloads() -> [PathBuf; 2] {
    [stage().join("libforebay_preload.so"), stage().join("optimised/libforebay_preload.so")]
}

fn build(folder: &Path) {
    let shared = ["-shared", "-fPIC"];
    let search = format!("-L{}", folder.display());
    let map = format!("-Wl,--version-script={}", sources().join("runtime.map").display());
    let cuda = [search.as_str(), "-l:libcuda.so.1"];
    let runtime = [search.as_str(), "-l:libcudart.so.13"];
    compile_preload(&folder.join("libforebay_preload.so"), &["-Copt-level=0", "-Cdebug-assertions=on"]);
    compile_preload(&folder.join("optimised/libforebay_preload.so"), &["-Copt-level=3"]);
    compile(
        folder,
        "driver.c",
        "libcuda.so.1",
        &[&shared[..], &["-Wl,-soname,libcuda.so.1,-Bsymbolic"]].concat(),
    );
    compile(folder, "copying.c", "libforebay_cuda.so", &shared);
    let named = ["-Wl,-soname,libcudart.so.13", &map];
    compile(folder, "runtime.c", "libcudart.so.13", &[&shared[..], &named].concat());
    compile(folder, "program.c", "program", &[]);
    compile(folder, "program.c", "linked", &[&["-DLINKED"][..], &cuda].concat());
    compile(folder, "program.c", "runtime", &[&["-DRUNTIME"][..], &runtime].concat());
    let hooks = ["-DHOOKS_DLSYM", DLSYM_VERSION];
    for (name, options) in [
        ("other-O0.so", &["-O0"][..]),
        ("other-O2.so", &["-O2"]),
        ("other-handle.so", &["-O0", "-DLOOKS_AT_HANDLE"]),
        ("other-dlsym-O0.so", &[&hooks[..], &["-O0"]].concat()),
        ("other-dlsym-O2.so", &[&hooks[..], &["-O2"]].concat()),
    ] {
        compile(folder, "stacked.c", name, &[&shared[..], options].concat());
    }
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c")
}

/// A program that moves bytes by the CUDA runtime, linked against the fake one, which other tests
/// have as well.
pub fn moving(steps: &[&str]) -> Play {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let fake = fake_cuda_install::installed();
    let program = BUILT.get_or_init(|| {
        let search = format!("-L{}", fake.folder.display());
        compile(stage(), "moving.c", "moving", &[&search, "-l:libcudart.so.13", "-l:libcuda.so.1"]);
        stage().join("moving")
    });
    let mut play = other_program(program).with("LD_LIBRARY_PATH", &fake.folder.to_string_lossy());
    play.command.args(steps);
    play
}

/// The real copying library, which Cargo builds beside these tests because they depend on it.
pub fn copying_library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libforebay_cuda.so");
    assert!(library.exists(), "{} is missing", library.display());
    library
}

/// Cargo does not build a library for tests that no test can link; it has no dependency, so the
/// compiler alone does.
fn compile_preload(target: &Path, options: &[&str]) {
    let mut command = Command::new("rustc");
    command.args(["--edition=2024", "--crate-name=forebay_preload", "--crate-type=cdylib"]).args(options);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).arg("-o").arg(target);
    run(&mut command);
}

fn compile(folder: &Path, source: &str, target: &str, options: &[&str]) {
    let mut command = Command::new("cc");
    command.args(["-Wall", "-Wextra", "-Werror", "-o"]).arg(folder.join(target)).arg(sources().join(source));
    command.args(options).args(["-ldl", "-lpthread"]);
    run(&mut command);
}

/// What a program that succeeded wrote.
pub struct Said {
    pub out: String,
    pub err: String,
}

impl Said {
    pub fn lines(&self) -> Vec<&str> {
        self.out.lines().collect()
    }
}

fn run(command: &mut Command) -> Said {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = Said {
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    };
    assert!(output.status.success(), "{command:?}: {}\n{}\n{}", output.status, said.out, said.err);
    said
}

/// A program under the preload.
pub struct Play {
    command: Command,
}

/// A program of the stage, with its steps.
pub fn play(program: &str, steps: &[&str]) -> Play {
    let mut play = other_program(stage().join(program));
    play.command.args(steps);
    play
}

/// Any program, with the stage's driver.
pub fn other_program(program: impl AsRef<std::ffi::OsStr>) -> Play {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", stage()).env("LD_PRELOAD", stage().join("libforebay_preload.so"));
    command.env_remove("FOREBAY_PRELOAD").env_remove("FOREBAY_CUDA_LIBRARY");
    Play { command }
}

impl Play {
    pub fn with(mut self, name: &str, value: &str) -> Play {
        self.command.env(name, value);
        self
    }

    pub fn args(mut self, arguments: &[&str]) -> Play {
        self.command.args(arguments);
        self
    }

    /// Other libraries to preload, in this order.
    pub fn preloading(mut self, libraries: &[&Path]) -> Play {
        let names: Vec<_> = libraries.iter().map(|library| library.to_str().unwrap()).collect();
        self.command.env("LD_PRELOAD", names.join(":"));
        self
    }

    pub fn without_preload(mut self) -> Play {
        self.command.env_remove("LD_PRELOAD");
        self
    }

    pub fn says(mut self) -> Said {
        run(&mut self.command)
    }
}
