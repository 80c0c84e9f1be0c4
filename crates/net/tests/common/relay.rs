//! Carries connections on to an agent, so that a test can cut them, or stop taking what comes back.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A relay before one agent. Its threads end with the connections, and the last one with the test.
pub struct Relay {
    pub address: SocketAddr,
    carried: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    /// A relay that carries everything.
    pub fn before(agent: SocketAddr) -> Relay {
        Relay::taking(agent, u64::MAX)
    }

    /// A relay that carries so many bytes of each connection's answers, and then takes no more of
    /// them.
    pub fn taking(agent: SocketAddr, answers: u64) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let carried: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let list = Arc::clone(&carried);
        std::thread::spawn(move || {
            for asker in listener.incoming().map_while(Result::ok) {
                let Ok(owner) = TcpStream::connect(agent) else { continue };
                let ends = [&asker, &owner].map(|end| end.try_clone().unwrap());
                list.lock().unwrap().extend(ends);
                let (questions, back) = (asker.try_clone().unwrap(), owner.try_clone().unwrap());
                std::thread::spawn(move || carry(questions, back, u64::MAX));
                std::thread::spawn(move || carry(owner, asker, answers));
            }
        });
        Relay { address, carried }
    }

    /// Ends every connection. Later ones are carried again.
    pub fn cut(&self) {
        for end in self.carried.lock().unwrap().drain(..) {
            // It may have ended already.
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

/// Carries so many bytes, and then leaves the connection open.
fn carry(mut from: TcpStream, mut to: TcpStream, mut most: u64) {
    let mut part = [0; 16 << 10];
    while most > 0 {
        let room = part.len().min(usize::try_from(most).unwrap_or(usize::MAX));
        match from.read(&mut part[..room]) {
            Ok(len @ 1..) if to.write_all(&part[..len]).is_ok() => most -= len as u64,
            _ => {
                let _ = to.shutdown(Shutdown::Both);
                return;
            }
        }
    }
}
