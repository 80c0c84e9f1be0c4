//! Load samples over real sockets: an engine that answers is sampled in model time, one that does
//! not costs nothing.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use forebay_trace::record::LoadSample;
use forebay_trace::replay::{Instance, Options, Replayer, sample_load};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

const PAGE: &str =
    "vllm:num_requests_running 3.0\nvllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc 0.25\n";

/// Serves one page of metrics to whoever asks.
async fn engine(page: &'static str) -> Instance {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("engine-0=http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 1024];
            let read = stream.read(&mut request).await.unwrap();
            assert!(request[..read].starts_with(b"GET /metrics "));
            let head =
                format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", page.len());
            stream.write_all((head + page).as_bytes()).await.unwrap();
        }
    });
    url.parse().unwrap()
}

#[tokio::test]
async fn engines_are_sampled_in_model_time_and_a_dead_one_is_left_out() {
    let dead: Instance = "engine-1=http://127.0.0.1:1".parse().unwrap();
    let instances = [dead, engine("up 1\n").await, engine(PAGE).await];
    let (sender, mut samples) = mpsc::unbounded_channel::<LoadSample>();
    let transport = Replayer::new("http://127.0.0.1:1", Options::default()).unwrap().transport();
    let interval = Duration::from_millis(40);
    let sampling = sample_load(&transport, "lpwl", &instances, interval, 100.0, move |sample| {
        sender.send(sample).unwrap();
    });
    let three =
        async { [samples.recv().await, samples.recv().await, samples.recv().await].map(Option::unwrap) };
    let three = tokio::select! {
        three = three => three,
        () = sampling => unreachable!("sampling does not end"),
    };
    for sample in &three {
        assert_eq!((sample.arm.as_str(), sample.instance.as_str()), ("lpwl", "engine-0"));
        assert_eq!((sample.running, sample.waiting, sample.kv_usage), (3, 2, 0.25));
    }
    // Two intervals of 40 ms are 8 s of model time.
    assert!(three[2].at_s >= 7.0 && three[0].at_s < three[1].at_s, "{three:?}");
}
