//! The fake driver for tests: each runs in a process of its own, so that counters, faults and
//! misuse are the test's alone.
#![allow(clippy::unwrap_used, reason = "no test can go on without the driver")]

use forebay_cuda::driver::Driver;
use std::ffi::{CString, c_char, c_int};
use std::process::Command;

/// Says which test a process is to run.
const ALONE: &str = "FOREBAY_CUDA_TEST";
/// Where the crate looks for the driver.
const DRIVER: &str = "FOREBAY_LIBCUDA";

/// The fake driver as a test has it.
#[derive(Debug)]
pub struct Fake {
    /// As the crate has it.
    pub driver: &'static Driver,
}

/// Runs a test's body in a process of its own. The driver must have nothing to complain of at its
/// end.
pub fn alone(test: &str, env: &[(&str, &str)], body: impl FnOnce(&Fake)) {
    if std::env::var(ALONE).is_ok_and(|name| name == test) {
        let fake = Fake { driver: Driver::load().unwrap() };
        body(&fake);
        assert_eq!(fake.misuse(), 0, "the driver was misused; it says how on stderr");
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture"]).env(ALONE, test).envs(env.iter().copied());
    let output = child.env(DRIVER, &fake_cuda_install::installed().libcuda).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
}

impl Fake {
    /// A counter: calls of a symbol, or bytes of a way.
    pub fn stat(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        // SAFETY: this is the signature of the symbol, and the name is a C string.
        unsafe {
            let stat: unsafe extern "C" fn(*const c_char) -> u64 =
                std::mem::transmute(symbol("fake_cuda_stat"));
            stat(name.as_ptr())
        }
    }

    /// Has something go wrong.
    pub fn control(&self, commands: &str) {
        let commands = CString::new(commands).unwrap();
        // SAFETY: as above.
        let outcome = unsafe {
            let control: unsafe extern "C" fn(*const c_char) -> c_int =
                std::mem::transmute(symbol("fake_cuda_control"));
            control(commands.as_ptr())
        };
        assert_eq!(outcome, 0, "the fake driver does not know {commands:?}");
    }

    fn misuse(&self) -> u64 {
        // SAFETY: this is the signature of the symbol.
        unsafe {
            let misuse: unsafe extern "C" fn() -> u64 = std::mem::transmute(symbol("fake_cuda_misuse"));
            misuse()
        }
    }
}

/// The crate loads the driver for all to see.
pub fn symbol(name: &str) -> *mut libc::c_void {
    let name = CString::new(name).unwrap();
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?} is not in the fake driver");
    found
}
