//! A node of these tests, which relays for engines in a process of its own.

use super::*;

/// Plays the node until its input ends.
pub fn node(socket: &Path) {
    let memory_limit_bytes = std::env::var(LIMIT).unwrap().parse().unwrap();
    let config = RelaysConfig { memory_limit_bytes, ..config(socket) };
    let relays = Relays::start(Driver::load().unwrap(), config).unwrap();
    println!("\nREADY");
    let _ = std::io::stdin().lines().count();
    drop(relays);
}

pub fn config(socket: &Path) -> RelaysConfig {
    RelaysConfig {
        socket: socket.to_owned(),
        gpus: None,
        token: b"token".to_vec(),
        uids: Vec::new(),
        memory_limit_bytes: 1 << 30,
    }
}

/// A node in a process of its own, which sees its GPUs in another order.
pub struct Node(Child);

impl Node {
    pub fn start(socket: &Path) -> Node {
        Node::with_limit(socket, 1 << 30)
    }

    /// One that takes so many bytes of an engine's memory.
    pub fn with_limit(socket: &Path, bytes: u64) -> Node {
        Node::by(command("node", socket, "3,2,1,0"), bytes)
    }

    /// One that sees no process but its own.
    pub fn apart(socket: &Path) -> Node {
        Node::by(command_by(&APART, "node", socket, "3,2,1,0"), 1 << 30)
    }

    fn by(mut child: Command, bytes: u64) -> Node {
        child.env(LIMIT, bytes.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = child.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "READY"), "the node did not start");
        std::thread::spawn(move || lines.count());
        Node(child)
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: the process is a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.0.id().try_into().unwrap(), signal) }, 0);
    }

    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
