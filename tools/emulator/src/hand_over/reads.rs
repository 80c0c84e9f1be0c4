//! How a decoder gets a prompt's KV: it asks the prefiller over HTTP, and waits as long as the
//! modelled network would take. Nothing that comes in is trusted to be of the right length.

use super::{Read, Source, WAIT};
use crate::job::Message;
use crate::scheduler::RequestId;
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::sync::mpsc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// Reads under way, on the runtime on which the engine was started.
#[derive(Debug)]
pub struct Reads {
    runtime: Handle,
    inbox: mpsc::Sender<Message>,
}

impl Reads {
    pub fn new(runtime: Handle, inbox: mpsc::Sender<Message>) -> Reads {
        Reads { runtime, inbox }
    }

    /// Starts a read. Its end comes as [`Message::Read`], and takes at least as long as the
    /// network.
    pub fn start(&self, request: RequestId, source: Source, network: Duration) -> JoinHandle<()> {
        let inbox = self.inbox.clone();
        self.runtime.spawn(async move {
            let bytes = tokio::time::timeout(WAIT, fetch(&source)).await.ok().flatten();
            if bytes.is_some() {
                tokio::time::sleep(network).await;
            }
            // An engine that has ended does not care.
            let _ = inbox.send(Message::Read(Read { request, bytes }));
        })
    }
}

async fn fetch(source: &Source) -> Option<Bytes> {
    let stream = TcpStream::connect(&source.address).await.ok()?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
    let driving = tokio::spawn(async move { drop(connection.await) });
    let request = Request::get(format!("/kv/{}", source.key))
        .header("host", &source.address)
        .body(Empty::<Bytes>::new());
    let answer = sender.send_request(request.ok()?).await.ok()?;
    let found = answer.status() == StatusCode::OK;
    let bytes = answer.into_body().collect().await.ok()?.to_bytes();
    driving.abort();
    found.then_some(bytes)
}
