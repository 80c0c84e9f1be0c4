//! What a node says of its clients in its log: one line for each change, which names the client and
//! the reason.

use crate::hostile;
use crate::rig::*;
use forebay_client::ClientOptions;
use parking_lot::Mutex;
use std::io::Write;
use std::sync::{Arc, OnceLock};
use testkit::eventually;

/// What all threads of this process have logged. Other tests log beside this one.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// The log of this process, from now on at the latest.
    fn start() -> Log {
        static LOG: OnceLock<Log> = OnceLock::new();
        let start = || {
            let log = Log::default();
            let writer = log.clone();
            let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
            lines.init();
            log
        };
        LOG.get_or_init(start).clone()
    }

    fn lines(&self, words: &[&str]) -> Vec<String> {
        let log = String::from_utf8_lossy(&self.0.lock()).into_owned();
        let has_all = |line: &&str| words.iter().all(|word| line.contains(word));
        log.lines().filter(has_all).map(str::to_owned).collect()
    }
}

#[test]
fn each_client_that_comes_or_goes_is_named_in_one_line_with_the_reason() {
    let (log, site) = (Log::start(), Site::new());
    let node = site.node();
    let socket = site.socket().display().to_string();
    assert_eq!(log.lines(&["INFO", "node started", &socket, "slots_per_client=1024"]).len(), 1);
    let name = format!("client of {socket}");
    let peer = connect(ClientOptions { name: name.clone(), ..options(&site.socket()) }).unwrap();
    assert_eq!(log.lines(&["INFO", "client connected", &name]).len(), 1);
    peer.client.close();
    drop(peer);
    eventually("it is gone", || !log.lines(&["INFO", "client gone", &name, "it said goodbye"]).is_empty());
    // Another one goes without a word, with a slot.
    drop(hostile::raw_reservation(&site.socket()));
    eventually("it is gone", || {
        !log.lines(&["WARN", "client gone", "it closed the connection", "slots=1"]).is_empty()
    });
    assert_eq!(log.lines(&["client gone", &name]).len(), 1);
    // Refused over and over, and told once.
    let refuse = || {
        let mut raw = std::os::unix::net::UnixStream::connect(site.socket()).unwrap();
        raw.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let _ = std::io::Read::read_to_end(&mut raw, &mut Vec::new());
    };
    let refused = || log.lines(&["WARN", "client refused", "the hello: a frame of"]).len();
    let before = refused();
    (0..3).for_each(|_| refuse());
    let told = refused() - before;
    // Each node of another test may have its line too.
    assert!((1..3).contains(&told), "{told}");
    drop(node);
}
