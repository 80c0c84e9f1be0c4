//! How many chunks of a stored prefix to load and how many to compute: a pure function of sizes,
//! queues and rates. [`CostModel::chunks_to_load`](super::CostModel::chunks_to_load) asks it with
//! what was measured.
//!
//! Loading the first `k` chunks and computing the rest takes
//!
//! ```text
//! max(wait, load(k)) + compute(tokens that are then there .. end of the prompt)
//!
//! load(k)       = max over sources in use (latency + (queue + bytes of the k chunks there) / rate)
//! compute(a..b) = max(floor, C_lin * (b - a) + C_att * (b^2 - a^2) / 2)
//! ```
//!
//! and [`choose`] takes the `k` that takes least. The cost of computing is that of the emulated
//! engine's steps, `C_att` for each pair of a query and a key, so a token is the dearer the deeper
//! it stands. With one source that makes it all or nothing but for the floor; part of a prefix is
//! loaded when the rest lies on a slower or busier source, or when what is left fits into a step
//! that has to run anyway. Then it is computed for nothing only as far as the floor is known, and
//! the GPU has others to serve: what is loaded at [`NEXT_TO_NOTHING`] of what computing it would
//! take by itself is loaded all the same.

/// The part of the time to compute a chunk for which it is always loaded.
const NEXT_TO_NOTHING: f64 = 1.0 / 8.0;

/// A chunk that could be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredChunk {
    pub tokens: u32,
    pub bytes: u64,
    /// Where it lies: an index of [`Prefix::sources`].
    pub source: usize,
}

/// Where chunks lie: memory, a disk, a peer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Source {
    /// The measured rate. What is not a positive number is a source that gives nothing.
    pub bytes_per_us: f64,
    /// From asking to the first byte, without queueing.
    pub latency_us: f64,
    /// What has to be read for others before.
    pub queued_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillCost {
    /// `C_lin`: all that is linear in the tokens.
    pub linear_us_per_token: f64,
    /// `C_att`: attention, for each pair of a query and a key.
    pub attention_us_per_pair: f64,
    pub floor_us: f64,
}

/// A prompt, of which a part is stored.
#[derive(Debug, Clone, Copy)]
pub struct Prefix<'a> {
    /// Tokens at the start whose KV the engine has.
    pub held_tokens: u32,
    /// What is stored of the tokens that follow, in their order.
    pub chunks: &'a [StoredChunk],
    /// Tokens after them, which have to be computed in any case.
    pub new_tokens: u32,
    pub sources: &'a [Source],
    pub prefill: PrefillCost,
    /// How long the GPU is busy with others before it could compute anything.
    pub wait_us: f64,
}

/// What to do, and what it is expected to take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// How many of the first chunks to load. The rest is computed.
    pub chunks: usize,
    /// How long it takes until all KV of the prompt is there.
    pub expected_us: f64,
}

/// The quickest way to the KV of a prompt; among equally quick ones the one that loads least, and
/// then what is loaded for next to nothing.
pub fn choose(prefix: &Prefix) -> Choice {
    let held = u64::from(prefix.held_tokens);
    let stored: u64 = prefix.chunks.iter().map(|chunk| u64::from(chunk.tokens)).sum();
    let end = held + stored + u64::from(prefix.new_tokens);
    let time_us = |load_us: f64, there: u64| prefix.wait_us.max(load_us) + prefix.prefill.time_us(there, end);
    let mut choice = Choice { chunks: 0, expected_us: time_us(0.0, held) };
    let mut loading = Loading::new(prefix.sources);
    let (mut there, mut before_us) = (held, choice.expected_us);
    for (index, chunk) in prefix.chunks.iter().enumerate() {
        loading.add(chunk);
        let from = there;
        there += u64::from(chunk.tokens);
        let expected_us = time_us(loading.time_us, there);
        let dearer_us = expected_us - before_us;
        let is_next = choice.chunks == index && prefix.prefill.hides(from, end);
        let costs_nothing = dearer_us <= NEXT_TO_NOTHING * prefix.prefill.unhidden_us(from, there);
        if expected_us < choice.expected_us || (is_next && costs_nothing) {
            choice = Choice { chunks: index + 1, expected_us };
        }
        before_us = expected_us;
    }
    choice
}

impl PrefillCost {
    /// How long it takes to compute the tokens from one to another.
    fn time_us(&self, from: u64, to: u64) -> f64 {
        self.unhidden_us(from, to).max(self.floor_us)
    }

    /// Whether a step that has to run anyway takes no longer for these tokens.
    fn hides(&self, from: u64, to: u64) -> bool {
        self.unhidden_us(from, to) <= self.floor_us
    }

    /// As [`time_us`](PrefillCost::time_us) without the floor.
    fn unhidden_us(&self, from: u64, to: u64) -> f64 {
        let (from, to) = (from as f64, to as f64);
        let pairs = (to * to - from * from) / 2.0;
        self.linear_us_per_token * (to - from) + self.attention_us_per_pair * pairs
    }
}

/// What is to be loaded, source by source.
struct Loading<'a> {
    sources: &'a [Source],
    bytes: Vec<u64>,
    time_us: f64,
}

impl<'a> Loading<'a> {
    fn new(sources: &'a [Source]) -> Loading<'a> {
        Loading { sources, bytes: vec![0; sources.len()], time_us: 0.0 }
    }

    fn add(&mut self, chunk: &StoredChunk) {
        let there = self.sources.get(chunk.source).zip(self.bytes.get_mut(chunk.source));
        let Some((source, bytes)) = there else {
            self.time_us = f64::INFINITY;
            return;
        };
        *bytes = bytes.saturating_add(chunk.bytes);
        self.time_us = self.time_us.max(source.time_us(*bytes));
    }
}

impl Source {
    fn time_us(&self, bytes: u64) -> f64 {
        if self.bytes_per_us > 0.0 {
            self.latency_us + (self.queued_bytes as f64 + bytes as f64) / self.bytes_per_us
        } else {
            f64::INFINITY
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Qwen3-Coder-30B-A3B on an H20, with CUDA graphs: the emulated engine's profile.
    const H20: PrefillCost =
        PrefillCost { linear_us_per_token: 61.5, attention_us_per_pair: 0.005_904, floor_us: 7_200.0 };
    const BYTES_PER_TOKEN: u64 = 98_304;

    fn disk(gb_per_s: f64, queued_bytes: u64) -> Source {
        Source { bytes_per_us: gb_per_s * 1e3, latency_us: 100.0, queued_bytes }
    }

    fn chunks(count: usize, source: usize) -> Vec<StoredChunk> {
        vec![StoredChunk { tokens: 256, bytes: 256 * BYTES_PER_TOKEN, source }; count]
    }

    fn prefix<'a>(chunks: &'a [StoredChunk], sources: &'a [Source]) -> Prefix<'a> {
        Prefix { held_tokens: 0, chunks, new_tokens: 500, sources, prefill: H20, wait_us: 0.0 }
    }

    #[test]
    fn a_table_of_disks() {
        // Computing takes 61.5 us for each token and 5.9 ns for each pair; loading at 1 GB/s takes
        // 98.3 us for each token.
        let cases = [
            ("a fast disk, a short prefix", 3.5, 0, 16, 16),
            ("a slow disk, a short prefix: computing is quicker", 1.0, 0, 16, 0),
            ("a slow disk, a long prefix: attention is dear", 1.0, 0, 128, 128),
            ("a fast disk behind a queue of a second", 3.5, 3_500_000_000, 16, 0),
            ("the same queue before a long prefix", 3.5, 3_500_000_000, 128, 128),
            ("a dead disk", 0.0, 0, 128, 0),
            ("a disk that was never measured", f64::NAN, 0, 128, 0),
            ("nothing stored", 3.5, 0, 0, 0),
        ];
        for (name, gb_per_s, queued_bytes, count, expected) in cases {
            let (chunks, disk) = (chunks(count, 0), disk(gb_per_s, queued_bytes));
            assert_eq!(choose(&prefix(&chunks, &[disk])).chunks, expected, "{name}");
        }
    }

    #[test]
    fn a_load_of_forty_seconds_gives_way_to_a_prefill_of_one() {
        // What dynamo#6101 reports: 40 s from the disk, 0.9 s to compute.
        let chunks = chunks(40, 0);
        let bytes: u64 = chunks.iter().map(|chunk| chunk.bytes).sum();
        let disk = Source { bytes_per_us: bytes as f64 / 40e6, latency_us: 0.0, queued_bytes: 0 };
        let choice = choose(&prefix(&chunks, &[disk]));
        assert_eq!(choice.chunks, 0);
        assert!((choice.expected_us - 1e6).abs() < 0.1e6, "{choice:?}");
    }

    #[test]
    fn a_fast_beginning_is_loaded_and_a_slow_rest_is_computed() {
        let sources = [disk(50.0, 0), disk(0.5, 0)];
        let stored: Vec<StoredChunk> = chunks(20, 0).into_iter().chain(chunks(10, 1)).collect();
        assert_eq!(choose(&prefix(&stored, &sources)).chunks, 20);
        let striped = [disk(1.0, 0), disk(1.0, 0)];
        let stored: Vec<StoredChunk> = (0..16).flat_map(|at| chunks(1, at % 2)).collect();
        assert_eq!(choose(&prefix(&stored, &striped)).chunks, 16, "two slow disks");
    }

    #[test]
    fn what_fits_into_a_step_that_runs_anyway_is_loaded_for_next_to_nothing_alone() {
        let floor = PrefillCost { floor_us: 50_000.0, ..H20 };
        let (stored, disks) = (chunks(16, 0), [disk(3.5, 0)]);
        let few_new = Prefix { prefill: floor, new_tokens: 1, ..prefix(&stored, &disks) };
        // 50 ms are 600 tokens behind a context of 3,500: two chunks and the new token.
        assert_eq!(choose(&few_new).chunks, 14);
        let memory = [disk(50.0, 0)];
        assert_eq!(choose(&Prefix { sources: &memory, ..few_new }).chunks, 16);
    }

    #[test]
    fn nothing_is_loaded_that_saves_nothing_and_takes_time() {
        let tiny = [StoredChunk { tokens: 16, bytes: 16 * BYTES_PER_TOKEN, source: 0 }];
        let slow = Source { latency_us: 0.0, ..disk(1.0, 0) };
        let under_the_floor = Prefix { new_tokens: 16, ..prefix(&tiny, &[]) };
        let choice = choose(&Prefix { sources: &[slow], ..under_the_floor });
        assert_eq!((choice.chunks, choice.expected_us), (0, 7_200.0));
    }

    #[test]
    fn loading_is_free_while_the_gpu_is_busy() {
        let (stored, slow) = (chunks(16, 0), [disk(0.5, 0)]);
        let idle = prefix(&stored, &slow);
        assert_eq!(choose(&idle).chunks, 0);
        let busy = Prefix { wait_us: 2e6, ..idle };
        assert_eq!(choose(&busy).chunks, 16);
    }

    #[test]
    fn a_chunk_at_no_source_ends_what_can_be_loaded() {
        let stored: Vec<StoredChunk> =
            chunks(8, 0).into_iter().chain(chunks(1, 7)).chain(chunks(8, 0)).collect();
        assert_eq!(choose(&prefix(&stored, &[disk(50.0, 0)])).chunks, 8);
    }

    prop_compose! {
        fn any_source()(bytes_per_us in 1.0f64..1e5, latency_us in 0.0f64..1e4, queued_bytes in 0u64..1 << 34) -> Source {
            Source { bytes_per_us, latency_us, queued_bytes }
        }
    }

    prop_compose! {
        fn any_chunk()(tokens in 1u32..2_000, bytes in 0u64..1 << 28, source in 0usize..3) -> StoredChunk {
            StoredChunk { tokens, bytes, source }
        }
    }

    /// The time of each number of chunks, computed without any shortcut.
    fn times(prefix: &Prefix) -> Vec<f64> {
        let tokens = |chunks: &[StoredChunk]| chunks.iter().map(|chunk| chunk.tokens).sum::<u32>();
        let end = prefix.held_tokens + tokens(prefix.chunks) + prefix.new_tokens;
        let load_us = |chunks: &[StoredChunk]| {
            let at = |(index, source): (usize, &Source)| {
                let here: Vec<u64> =
                    chunks.iter().filter(|chunk| chunk.source == index).map(|chunk| chunk.bytes).collect();
                let bytes = here.iter().sum::<u64>() + source.queued_bytes;
                if here.is_empty() { 0.0 } else { source.latency_us + bytes as f64 / source.bytes_per_us }
            };
            prefix.sources.iter().enumerate().map(at).fold(0.0, f64::max)
        };
        (0..=prefix.chunks.len())
            .map(|count| {
                let there = prefix.held_tokens + tokens(&prefix.chunks[..count]);
                let computed = (end - there) as f64;
                let attention = computed * (there as f64 + computed / 2.0);
                let compute_us = computed * prefix.prefill.linear_us_per_token
                    + attention * prefix.prefill.attention_us_per_pair;
                prefix.wait_us.max(load_us(&prefix.chunks[..count])) + compute_us.max(prefix.prefill.floor_us)
            })
            .collect()
    }

    proptest! {
        #[test]
        fn no_number_of_chunks_is_quicker_but_for_what_next_to_nothing_costs(
            stored in prop::collection::vec(any_chunk(), 0..40),
            sources in prop::collection::vec(any_source(), 3),
            held_tokens in 0u32..50_000,
            new_tokens in 0u32..5_000,
            wait_us in 0.0f64..1e6,
            floor_us in 0.0f64..1e5,
        ) {
            let prefill = PrefillCost { floor_us, ..H20 };
            let prefix = Prefix { held_tokens, chunks: &stored, new_tokens, sources: &sources, prefill, wait_us };
            let (choice, times) = (choose(&prefix), times(&prefix));
            let best = times.iter().copied().fold(f64::INFINITY, f64::min);
            let quickest = times.iter().position(|time| *time <= best * (1.0 + 1e-9)).unwrap();
            let tokens = |chunks: &[StoredChunk]| chunks.iter().map(|chunk| u64::from(chunk.tokens)).sum::<u64>();
            let from = u64::from(held_tokens) + tokens(&stored[..quickest.min(choice.chunks)]);
            let to = u64::from(held_tokens) + tokens(&stored[..choice.chunks]);
            let most = best + NEXT_TO_NOTHING * prefill.unhidden_us(from, to);
            prop_assert!((choice.expected_us - times[choice.chunks]).abs() <= best * 1e-9);
            prop_assert!(times[choice.chunks] <= most * (1.0 + 1e-9));
        }

        #[test]
        fn a_faster_disk_or_a_shorter_queue_never_loads_less(
            stored in prop::collection::vec(any_chunk(), 0..40),
            disk in any_source(),
            faster in 1.0f64..10.0,
            shorter in 0.0f64..1.0,
            wait_us in 0.0f64..1e6,
        ) {
            let stored: Vec<StoredChunk> = stored.into_iter().map(|chunk| StoredChunk { source: 0, ..chunk }).collect();
            let with = |source: Source| {
                let prefix = Prefix { wait_us, ..prefix(&stored, &[]) };
                choose(&Prefix { sources: &[source], ..prefix }).chunks
            };
            let before = with(disk);
            let faster = with(Source { bytes_per_us: disk.bytes_per_us * faster, ..disk });
            prop_assert!(faster >= before);
            let queued_bytes = (disk.queued_bytes as f64 * shorter) as u64;
            let shorter = with(Source { queued_bytes, ..disk });
            prop_assert!(shorter >= before);
        }

        #[test]
        fn nonsense_is_survived(
            numbers in prop::collection::vec(any::<f64>(), 6),
            tokens in any::<u32>(),
            bytes in any::<u64>(),
        ) {
            let source = Source { bytes_per_us: numbers[0], latency_us: numbers[1], queued_bytes: bytes };
            let prefill = PrefillCost {
                linear_us_per_token: numbers[2],
                attention_us_per_pair: numbers[3],
                floor_us: numbers[4],
            };
            let stored = [StoredChunk { tokens, bytes, source: 0 }; 3];
            let prefix = Prefix {
                held_tokens: tokens,
                chunks: &stored,
                new_tokens: tokens,
                sources: &[source],
                prefill,
                wait_us: numbers[5],
            };
            prop_assert!(choose(&prefix).chunks <= 3);
        }
    }
}
