//! A client by hand, over the real protocol: it keeps nothing alive, and goes when it is told to.

use forebay_client::protocol::answer::Answer;
use forebay_client::protocol::frame::Inbox;
use forebay_client::protocol::request::{Hello, Request};
use forebay_client::protocol::socket;
use forebay_store::TenantId;
use std::os::fd::OwnedFd;
use std::path::Path;

pub struct Raw {
    socket: OwnedFd,
    inbox: Inbox,
}

impl Raw {
    pub fn connect(path: &Path, name: &str) -> Raw {
        let mut raw = Raw { socket: socket::connect_to(path).unwrap(), inbox: Inbox::default() };
        let hello = Hello { token: Vec::new(), name: name.into(), tenant: TenantId::default() };
        assert!(matches!(raw.ask(&Request::Hello(hello)), Answer::Welcome { .. }));
        raw
    }

    pub fn tell(&self, request: &Request) {
        socket::send_all(&self.socket, &request.encode(0).encode()).unwrap();
    }

    pub fn ask(&mut self, request: &Request) -> Answer {
        socket::send_all(&self.socket, &request.encode(1).encode()).unwrap();
        let mut bytes = [0; 4096];
        loop {
            if let Some(frame) = self.inbox.next_frame().unwrap() {
                return Answer::decode(&frame).unwrap();
            }
            let received = socket::receive(&self.socket, &mut bytes).unwrap();
            assert_ne!(received, 0, "the node hung up");
            self.inbox.put(&bytes[..received]);
        }
    }
}
