//! What a process says of itself at `/metrics`.

use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long it may take to answer where nobody waits for it, and how much it may say.
const LIMIT: Duration = Duration::from_secs(5);
const BYTES_MAX: u64 = 16 << 20;

/// A page of metrics.
#[derive(Debug, Clone, Default)]
pub struct MetricsPage(String);

/// Somebody who did not say anything.
#[derive(Debug, thiserror::Error)]
#[error("http://{address}/metrics: {why}")]
pub struct MetricsError {
    address: String,
    pub why: String,
}

impl MetricsPage {
    /// Asks the engine at `address`.
    pub async fn of(address: SocketAddr) -> Result<MetricsPage, MetricsError> {
        MetricsPage::within(LIMIT, &address.to_string()).await
    }

    /// Asks whoever is at `HOST:PORT`, who has to answer in time.
    pub async fn within(limit: Duration, address: &str) -> Result<MetricsPage, MetricsError> {
        let failed = |why: String| MetricsError { address: address.to_owned(), why };
        match timeout(limit, get(address)).await {
            Ok(Ok(page)) if page.starts_with("HTTP/1.1 200") => Ok(MetricsPage(page)),
            Ok(Ok(page)) => Err(failed(page.lines().next().unwrap_or("it said nothing").to_owned())),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_) => Err(failed(format!("no answer within {} s", limit.as_secs_f64()))),
        }
    }

    /// The page itself, behind the head of the answer.
    pub fn body(&self) -> &str {
        self.0.split_once("\r\n\r\n").map_or("", |(_, body)| body)
    }

    /// The value of the counter `name` whose labels have `label`, or 0 if there is none.
    pub fn count(&self, name: &str, label: &str) -> u64 {
        let series = |line: &str| {
            let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once("} ")?;
            labels.contains(label).then(|| value.trim().parse::<f64>().ok())?
        };
        self.0.lines().find_map(series).map_or(0, |value| value as u64)
    }
}

async fn get(address: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut page = String::new();
    stream.take(BYTES_MAX).read_to_string(&mut page).await?;
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_found_by_its_name_and_a_label() {
        let page = "HTTP/1.1 200 OK\r\n\r\n# TYPE chunks_total counter\nchunks_total{engine=\"0\",outcome=\"good\"} 4\n\
                    chunks_total{engine=\"0\",outcome=\"corrupt\"} 2\nchunks{engine=\"0\"} 9\n";
        let page = MetricsPage(page.to_owned());
        assert_eq!(page.count("chunks_total", "outcome=\"corrupt\""), 2);
        assert_eq!(page.count("chunks_total", "outcome=\"missing\""), 0);
        assert_eq!(page.count("chunks", ""), 9);
    }
}
