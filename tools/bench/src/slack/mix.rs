//! What reads and writes take from each other on a disk: both alone, then both at once, by bare
//! io_uring behind the log. It knows rates.

use super::trace::MIB;
use crate::disk::file::TestFile;
use crate::disk::memory::{At, Buffers, Direction, Objects};
use crate::disk::raw::Raw;
use crate::output::Outcome;
use crate::timing::median;
use forebay_results::Row;
use std::time::{Duration, Instant};

const OBJECTS: Objects = Objects { bytes: MIB, depth: 8, slots: 16 };
/// How long each rate is measured, and what is moved between two looks at the clock.
const SPAN: Duration = Duration::from_millis(700);
const SLICE: usize = 32;

pub fn rows(file: &TestFile, runs: u32) -> Outcome<Vec<Row>> {
    let buffers = Buffers::new(OBJECTS)?;
    let open = || Raw::open(&[file.path()], &buffers);
    let (mut reader, mut writer) = (open()?, open()?);
    let (start, bytes) = file.room();
    let places: Vec<At> =
        (0..bytes / MIB).map(|number| At { file: 0, offset: start + number * MIB }).collect();
    let (to_read, to_write) = places.split_at(places.len() / 2);
    let mut rates: [Vec<f64>; 4] = std::array::from_fn(|_| Vec::new());
    for _ in 0..runs {
        let read_alone = rate(&mut reader, Direction::Read, to_read)?;
        let write_alone = rate(&mut writer, Direction::Write, to_write)?;
        let (read_beside, write_beside) = std::thread::scope(|scope| {
            let reads = scope
                .spawn(|| rate(&mut reader, Direction::Read, to_read).map_err(|error| error.to_string()));
            let written = rate(&mut writer, Direction::Write, to_write);
            let read = reads.join().unwrap_or_else(|_| Err("the reading thread has panicked".into()));
            Ok::<_, crate::output::Error>((read?, written?))
        })?;
        rates.iter_mut().zip([read_alone, write_alone, read_beside, write_beside]).for_each(
            |(runs, rate)| {
                runs.push(rate);
            },
        );
    }
    let [read_alone, write_alone, read_beside, write_beside] = &rates;
    let rate = |name: &str, runs: &[f64]| Row::of_runs(format!("slack.mix.{name}"), "MiB/s", runs);
    let share = |name: &str, of: &dyn Fn(usize) -> f64| {
        let runs: Vec<f64> = (0..read_alone.len()).map(of).collect();
        Row::of_runs(format!("slack.mix.{name}"), "ratio", &runs)
    };
    Ok(vec![
        rate("read_alone", read_alone),
        rate("write_alone", write_alone),
        rate("read_beside_writes", read_beside).with_ceiling(median(read_alone)),
        rate("write_beside_reads", write_beside).with_ceiling(median(write_alone)),
        share("reads_keep", &|run| read_beside[run] / read_alone[run]),
        share("writes_keep", &|run| write_beside[run] / write_alone[run]),
        share("sum_to_read_alone", &|run| (read_beside[run] + write_beside[run]) / read_alone[run]),
    ])
}

/// MiB per second.
fn rate(raw: &mut Raw, direction: Direction, places: &[At]) -> Outcome<f64> {
    let (begun, mut moved) = (Instant::now(), 0);
    for slice in places.chunks(SLICE).cycle() {
        raw.run(direction, slice)?;
        moved += slice.len();
        if begun.elapsed() >= SPAN {
            break;
        }
    }
    Ok(moved as f64 / begun.elapsed().as_secs_f64())
}
