//! An etcd of a test's own, on a free port. `None`, said loudly, where there is none installed.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

pub struct Etcd {
    process: Child,
    _folder: tempfile::TempDir,
    pub url: String,
}

impl Etcd {
    pub fn start() -> Option<Etcd> {
        let [port, peer_port] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [url, peer_url] = [port, peer_port].map(|port| format!("http://{}", port.local_addr().unwrap()));
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
                eprintln!("SKIPPED: etcd is not installed (Debian: apt-get install etcd-server)");
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
