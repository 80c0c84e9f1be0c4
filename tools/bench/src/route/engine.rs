//! Fake engines: they answer every completion at once with a stream of 16 events, each in a write
//! of its own, as engines write tokens. They know just enough HTTP for that, so that they cost the
//! machine little.

use std::io;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const EVENTS: usize = 16;

/// Starts engines on free ports of this machine, on the current runtime.
pub async fn start(count: usize) -> io::Result<Vec<SocketAddr>> {
    let mut addresses = Vec::new();
    for _ in 0..count {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        addresses.push(listener.local_addr()?);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(async move { drop(serve(stream).await) });
            }
        });
    }
    Ok(addresses)
}

async fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let event = |finish: &str| {
        let event = format!(
            "data: {{\"id\":\"cmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"fake\",\"choices\":\
             [{{\"index\":0,\"delta\":{{\"role\":\"assistant\",\"content\":\" tok\"}},\"finish_reason\":{finish}}}]}}\n\n"
        );
        format!("{:x}\r\n{event}\r\n", event.len())
    };
    let (token, last) = (event("null"), event("\"stop\""));
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n{token}"
    );
    let mut buffer = Vec::with_capacity(256 * 1024);
    while let Some(path_is_completion) = read_request(&mut stream, &mut buffer).await? {
        if !path_is_completion {
            let body = r#"{"status":"ok","data":[{"id":"fake","object":"model","max_model_len":262144}]}"#;
            let length = body.len();
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
            );
            stream.write_all(answer.as_bytes()).await?;
            continue;
        }
        stream.write_all(head.as_bytes()).await?;
        for _ in 2..EVENTS {
            stream.write_all(token.as_bytes()).await?;
        }
        stream.write_all(last.as_bytes()).await?;
        stream.write_all(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n").await?;
    }
    Ok(())
}

/// Reads one request; is it for a completion? `None` when the connection ends.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<Option<bool>> {
    loop {
        if let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&buffer[..end]).to_ascii_lowercase();
            let completion = head.starts_with("post ");
            let length =
                head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
            let whole: usize = end + 4 + length.unwrap_or(0);
            // Nobody sends the next request before the answer.
            let is_chunked = head.contains("\r\ntransfer-encoding: chunked");
            while buffer.len() < whole || is_chunked && !buffer.ends_with(b"\r\n0\r\n\r\n") {
                if stream.read_buf(buffer).await? == 0 {
                    return Ok(None);
                }
            }
            buffer.clear();
            return Ok(Some(completion));
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}
