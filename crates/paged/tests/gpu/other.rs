//! The same test in another process, which says and is told lines.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Tells a process that it is the other one.
const OTHER: &str = "FOREBAY_TEST_OTHER";
const PATIENCE: Duration = Duration::from_secs(60);

/// Killed when it is dropped.
pub struct Other {
    process: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Other {
    /// Whether this process is the other one.
    pub fn is_this() -> bool {
        std::env::var(OTHER).is_ok()
    }

    pub fn start(test: &str, env: &[(&str, &str)]) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([test, "--exact", "--nocapture"]).env(OTHER, "1").envs(env.iter().copied());
        let mut process = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (process.stdin.take(), process.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // What nobody hears is said all the same.
                let _ = sender.send(line);
            }
        });
        Other { process, input, lines }
    }

    /// The rest of the next line that begins so.
    pub fn says(&mut self, begin: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).expect(begin);
            if let Some(rest) = line.strip_prefix(begin) {
                return rest.trim().to_owned();
            }
        }
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    pub fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    /// It ends by itself when it hears no more.
    pub fn end(mut self) {
        drop(self.input.take());
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
