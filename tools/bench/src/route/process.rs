//! Processes under test: started on one CPU, watched through `/proc`, ended with all their
//! children.

use rustix::process::{Pid, Signal, kill_process_group};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// How long a process may take until it is well: some routers load Python first.
const START_LIMIT: Duration = Duration::from_secs(90);

/// The unit of times in `/proc/PID/stat`: `USER_HZ`, which is 100 wherever Linux shows it to
/// programs.
const TICKS_PER_SECOND: f64 = 100.0;

/// The CPUs that this process may use.
pub fn cpus() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Binds the calling thread, and what it starts from now on, to one CPU.
pub fn pin_this_thread(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// A port that is free at this moment.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// While it lives, this process and some others go before all others on their CPUs (real-time
/// scheduling), so that other work on the machine is not taken for the router's. For phases that
/// use little CPU only. It takes `chrt` and the right to use it; without them it does nothing.
pub struct Priority {
    pids: Vec<u32>,
}

impl Priority {
    pub fn raise(mut pids: Vec<u32>) -> Priority {
        pids.push(std::process::id());
        pids.iter().for_each(|pid| chrt(&["--rr", "--pid", "1"], *pid));
        Priority { pids }
    }
}

impl Drop for Priority {
    fn drop(&mut self) {
        self.pids.iter().for_each(|pid| chrt(&["--other", "--pid", "0"], *pid));
    }
}

/// Sets the scheduling of all threads of a process.
fn chrt(policy: &[&str], pid: u32) {
    let mut command = Command::new("chrt");
    command.arg("--all-tasks").args(policy).arg(pid.to_string());
    let _ = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// A process and its children, all on one CPU. Ended when dropped.
pub struct Pinned {
    child: Child,
    name: String,
}

impl Pinned {
    /// Starts `command` on `cpu`, in a process group of its own and without output.
    pub fn start(command: &[String], cpu: usize) -> io::Result<Pinned> {
        let (program, arguments) =
            command.split_first().ok_or_else(|| io::Error::other("there is no command to start"))?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        // A child inherits the CPUs of the thread that starts it.
        let starting = std::thread::spawn(move || {
            pin_this_thread(cpu)?;
            command.spawn()
        });
        let started =
            starting.join().unwrap_or_else(|_| Err(io::Error::other("the starting thread panicked")));
        let child =
            started.map_err(|error| io::Error::new(error.kind(), format!("start {program}: {error}")))?;
        Ok(Pinned { child, name: program.clone() })
    }

    /// Waits until it answers `/health` with 200.
    pub async fn wait_until_well(&mut self, address: SocketAddr) -> io::Result<()> {
        let start = Instant::now();
        while start.elapsed() < START_LIMIT {
            if let Some(status) = self.child.try_wait()? {
                return Err(io::Error::other(format!("{} ended with {status}", self.name)));
            }
            if matches!(is_well(address).await, Ok(true)) {
                // Give it time to find all engines well, too.
                tokio::time::sleep(Duration::from_secs(1)).await;
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Err(io::Error::other(format!("{} was not well after {} s", self.name, START_LIMIT.as_secs())))
    }

    /// Stops it and its children until they are resumed.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it go on.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process_group(group, signal);
        }
    }

    /// User and system time of it and its children so far, by their programs' names.
    pub fn cpu_seconds(&self) -> io::Result<BTreeMap<String, f64>> {
        let mut seconds = BTreeMap::new();
        for stat in self.stats()? {
            *seconds.entry(stat.name).or_insert(0.0) += stat.ticks as f64 / TICKS_PER_SECOND;
        }
        Ok(seconds)
    }

    /// The ids of it and its children.
    pub fn ids(&self) -> io::Result<Vec<u32>> {
        Ok(self.stats()?.into_iter().map(|stat| stat.id).collect())
    }

    fn stats(&self) -> io::Result<Vec<Stat>> {
        let mut stats = HashMap::new();
        for entry in std::fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            // Processes come and go while the directory is read.
            if let Some(stat) =
                std::fs::read_to_string(format!("/proc/{pid}/stat")).ok().as_deref().and_then(Stat::read)
            {
                stats.insert(pid, stat);
            }
        }
        let is_ours = |mut pid: u32| loop {
            if pid == self.child.id() {
                return true;
            }
            match stats.get(&pid) {
                Some(stat) if stat.parent > 1 => pid = stat.parent,
                _ => return false,
            }
        };
        let ours: Vec<u32> = stats.keys().copied().filter(|&pid| is_ours(pid)).collect();
        Ok(ours.into_iter().filter_map(|pid| stats.remove(&pid)).collect())
    }
}

/// What `/proc/PID/stat` says.
struct Stat {
    id: u32,
    name: String,
    parent: u32,
    ticks: u64,
}

impl Stat {
    /// Fields are counted after the name, which is in brackets and may contain anything
    /// (proc_pid_stat(5)).
    fn read(text: &str) -> Option<Stat> {
        let (id, rest) = text.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Stat {
            id: id.parse().ok()?,
            name: name.to_owned(),
            parent: u32::try_from(number(1)?).ok()?,
            ticks: number(11)? + number(12)?,
        })
    }
}

async fn is_well(address: SocketAddr) -> io::Result<bool> {
    let mut stream = tokio::net::TcpStream::connect(address).await?;
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n").await?;
    let mut status = [0; 12];
    let read = stream.read_exact(&mut status);
    let _ = tokio::time::timeout(Duration::from_secs(1), read).await;
    Ok(&status == b"HTTP/1.1 200")
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.signal(Signal::TERM);
        self.resume();
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end && !matches!(self.child.try_wait(), Ok(Some(_))) {
            std::thread::sleep(Duration::from_millis(50));
        }
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_read_past_any_name() {
        let text = "7 (a) b (c) S 3 7 7 0 -1 4194560 1 2 3 4 15 6 7 8 20 0 1 0 9";
        let stat = Stat::read(text).unwrap();
        assert_eq!((stat.id, &stat.name[..], stat.parent, stat.ticks), (7, "a) b (c", 3, 21));
        assert!(Stat::read("").is_none() && Stat::read("7 (x) S").is_none());
    }
}
