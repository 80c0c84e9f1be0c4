//! An etcd of a test's own, on an address of its own. `None`, said loudly, where there is none
//! installed.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};

static INSTANCES: AtomicU8 = AtomicU8::new(1);

/// Where clients and peers of an etcd find it. No two of one process, and no two processes side by
/// side, have the same address; the ports are none that the system gives away.
pub fn urls() -> [String; 2] {
    let [low, high, ..] = std::process::id().to_le_bytes();
    let instance = INSTANCES.fetch_add(1, Ordering::Relaxed);
    [23_790, 23_791].map(|port| format!("http://127.{low}.{high}.{instance}:{port}"))
}

pub struct Etcd {
    process: Child,
    _folder: tempfile::TempDir,
    pub url: String,
}

impl Etcd {
    pub fn start() -> Option<Etcd> {
        let [url, peer_url] = urls();
        let folder = tempfile::tempdir().unwrap();
        let started = Command::new("etcd")
            .args(["--data-dir".as_ref(), folder.path().join("data").as_os_str()])
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("default={peer_url}")])
            .args(["--unsafe-no-fsync", "--log-level", "error"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match started {
            Ok(process) => Some(Etcd { process, _folder: folder, url }),
            Err(_) => {
                testkit::skipped("etcd is not installed (Debian: apt-get install etcd-server)");
                None
            }
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
