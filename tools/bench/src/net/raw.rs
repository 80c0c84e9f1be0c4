//! The ceiling: plain sockets between the same two processes, as many as there are flows, 256 KiB
//! at a time, between memory of the same size. Nothing is checked and nothing scattered.

use crate::output::Error;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Bytes of a system call.
const CALL_BYTES: usize = 256 << 10;

/// What an asking end wants next of its connection.
const SEND: u8 = b's';
const RECEIVE: u8 = b'r';

/// The asking end's connections and memory.
pub struct Raw {
    streams: Vec<TcpStream>,
    memory: Vec<u8>,
}

/// Opens a port for so many connections, serves them until they are closed, and gives the port.
pub fn serve(streams: usize, bytes: usize) -> Result<u16, Error> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        let mut memory = vec![1u8; bytes];
        std::thread::scope(|scope| {
            for part in memory.chunks_mut(bytes.div_ceil(streams)) {
                let Ok((stream, _)) = listener.accept() else { return };
                // The other end sees what went wrong.
                scope.spawn(move || drop(serve_one(stream, part)));
            }
        });
    });
    Ok(port)
}

fn serve_one(mut stream: TcpStream, part: &mut [u8]) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut wish = [0];
    while stream.read(&mut wish)? == 1 {
        match wish[0] {
            SEND => part.chunks_mut(CALL_BYTES).try_for_each(|piece| stream.read_exact(piece))?,
            _ => part.chunks(CALL_BYTES).try_for_each(|piece| stream.write_all(piece))?,
        }
        if wish[0] == SEND {
            stream.write_all(&[0])?;
        }
    }
    Ok(())
}

impl Raw {
    /// Connects to a port that the owner has opened.
    pub fn connect(port: u16, streams: usize, bytes: usize) -> Result<Raw, Error> {
        let connect = |_| TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        let streams = (0..streams).map(connect).collect::<Result<Vec<_>, _>>()?;
        streams.iter().try_for_each(|stream| stream.set_nodelay(true))?;
        Ok(Raw { streams, memory: vec![2; bytes] })
    }

    /// Moves all bytes once, and says how long it took.
    pub fn run(&mut self, write: bool) -> Result<Duration, Error> {
        let begin = Instant::now();
        let part_bytes = self.memory.len().div_ceil(self.streams.len());
        std::thread::scope(|scope| {
            let parts = self.streams.iter_mut().zip(self.memory.chunks_mut(part_bytes));
            let threads: Vec<_> =
                parts.map(|(stream, part)| scope.spawn(move || move_one(stream, part, write))).collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?.map_err(Error::from))
        })?;
        Ok(begin.elapsed())
    }
}

fn move_one(stream: &mut TcpStream, part: &mut [u8], write: bool) -> std::io::Result<()> {
    if !write {
        stream.write_all(&[RECEIVE])?;
        return part.chunks_mut(CALL_BYTES).try_for_each(|piece| stream.read_exact(piece));
    }
    stream.write_all(&[SEND])?;
    part.chunks(CALL_BYTES).try_for_each(|piece| stream.write_all(piece))?;
    stream.read_exact(&mut [0])
}

/// Opens a port for one connection whose messages of `bytes` bytes are answered with one byte each,
/// and gives the port.
pub fn echo(bytes: usize) -> Result<u16, Error> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut message = vec![0; bytes];
        loop {
            stream.read_exact(&mut message)?;
            stream.write_all(&[0])?;
        }
    });
    Ok(port)
}

/// Sends messages to an echo port one after another, and gives how long each took.
pub fn round_trips(port: u16, bytes: usize, times: usize) -> Result<Vec<f64>, Error> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_nodelay(true)?;
    let message = vec![0; bytes];
    let one = |_| {
        let begin = Instant::now();
        stream.write_all(&message)?;
        stream.read_exact(&mut [0])?;
        Ok(begin.elapsed().as_secs_f64() * 1e6)
    };
    (0..times).map(one).collect()
}
