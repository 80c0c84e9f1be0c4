//! Tests: bytes that change behind the host's last look at them, in the arena or on their way, are
//! found where they are used. Each is a miss and a counted fault, never data.

use super::tests::rig::*;
use super::tests::{ONE, queued};
use crate::page_tables::NO_PAGE;
use crate::pages::Source;
use crate::{JobStored, Verify};
use cuda_testkit::{Fake, alone};
use forebay_transfer::Backing;
use std::cell::Cell;
use testkit::eventually;

const THREE: [(&str, &str); 2] = [("FAKE_CUDA_GPUS", "3"), ("XDG_CACHE_HOME", "/nonexistent")];
const SEED: u64 = 7;
/// A page that is not the first of its chunk, of one that is not the first.
const BLOCK: usize = 2 * BLOCKS_OF_CHUNK + 1;
const BLOCKS_OF_CHUNK: usize = CHUNK_TOKENS / PAGE_TOKENS;

/// Chunks that were stored anew for each load.
struct Stored<'a> {
    fake: &'a Fake,
    engine: &'a Engine,
    from: Vec<i64>,
    to: Vec<i64>,
    salt: Cell<u8>,
}

impl<'a> Stored<'a> {
    fn new(fake: &'a Fake, engine: &'a Engine) -> Stored<'a> {
        Stored { fake, engine, from: blocks(3), to: blocks(20), salt: Cell::new(0) }
    }

    fn store(&self) -> u8 {
        self.salt.set(self.salt.get() + 1);
        self.engine.store(1, &self.from, self.salt.get(), SEED);
        self.engine.paged.take_ended();
        self.salt.get()
    }

    /// Where the arena has a page of a block that was stored last.
    fn place(&self, layer: usize, block: usize) -> *mut u8 {
        let client = self.engine.paged.shared.client().unwrap();
        let lease = client.lease(&ids(self.salt.get()), 10_000_000);
        let chunk = client.leased_chunk(&lease, block / BLOCKS_OF_CHUNK).unwrap();
        let page = block % BLOCKS_OF_CHUNK * PAGE_BYTES;
        let at = chunk.layer(layer).unwrap().offset as usize + page;
        chunk.arena().memory().as_ptr().wrapping_add(at)
    }

    /// Loads, and changes the arena when the copies are queued and before any has begun. The tokens
    /// that may be used, which have the right bytes, and how many chunks were found to be wrong.
    fn load_changed(&self, salt: u8, layerwise: bool, source: Source, change: impl FnOnce()) -> (u64, u64) {
        let (fake, before) = (self.fake, queued(self.fake));
        fake.control("freeze h2d.0; freeze compute.0");
        let corrupt = self.engine.paged.stats().chunks_corrupt;
        assert!(self.engine.try_load_from(source, 2, &self.to, salt, layerwise));
        eventually("copies are on their way", || queued(fake) > before);
        change();
        fake.control("release h2d.0; release compute.0");
        let tokens = self.engine.end_of(2).tokens;
        if !self.to.contains(&NO_PAGE) {
            // Of pages of other tokens the last one has some only.
            let whole =
                source.page_tokens.map_or(tokens as usize, |_| tokens as usize / PAGE_TOKENS * PAGE_TOKENS);
            assert!(self.engine.has(&self.to, &self.from, SEED, whole), "wrong bytes are data");
        }
        (tokens, self.engine.paged.stats().chunks_corrupt - corrupt)
    }

    fn same(&self) -> Source {
        Source::same(self.engine.paged.cache())
    }
}

fn flip(at: *mut u8) {
    // SAFETY: a place in the arena, which is mapped; copies stand still.
    unsafe { *at ^= 0x10 };
}

/// The tokens before the chunk of a block.
fn tokens_before(block: usize) -> u64 {
    (block / BLOCKS_OF_CHUNK * CHUNK_TOKENS) as u64
}

#[test]
fn a_byte_that_flips_in_the_arena_behind_the_lease_is_a_miss_and_never_data() {
    alone(
        "gpu::checked::a_byte_that_flips_in_the_arena_behind_the_lease_is_a_miss_and_never_data",
        &ONE,
        |fake| {
            let site = Site::new();
            let _node = site.node();
            let engine = site.engine(fake);
            let stored = Stored::new(fake, &engine);
            let last = stored.from.len() - 1;
            let places = [(0, 0, 0), (1, BLOCK, 12_345), (LAYERS - 1, last, PAGE_BYTES - 1)];
            for (layerwise, (layer, block, byte)) in
                [true, false].into_iter().flat_map(|how| places.map(|at| (how, at)))
            {
                let salt = stored.store();
                let at = stored.place(layer, block).wrapping_add(byte);
                let found = stored.load_changed(salt, layerwise, stored.same(), || flip(at));
                assert_eq!(found, (tokens_before(block), 1), "layer {layer}, block {block}, {layerwise}");
            }
            let salt = stored.store();
            assert_eq!(stored.load_changed(salt, true, stored.same(), || ()), (TOKENS as u64, 0));
        },
    );
}

#[test]
fn a_page_of_another_block_is_a_miss_and_never_data() {
    alone("gpu::checked::a_page_of_another_block_is_a_miss_and_never_data", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let stored = Stored::new(fake, &engine);
        for layerwise in [true, false] {
            // Both pages are whole and right, but in each other's place: of a chunk, of two.
            for other in [BLOCK + 1, 5 * BLOCKS_OF_CHUNK] {
                let salt = stored.store();
                let (one, other) = (stored.place(1, BLOCK), stored.place(1, other));
                // SAFETY: two pages in the arena, which is mapped; copies stand still.
                let exchange = || unsafe { std::ptr::swap_nonoverlapping(one, other, PAGE_BYTES) };
                let found = stored.load_changed(salt, layerwise, stored.same(), exchange);
                assert_eq!(found, (tokens_before(BLOCK), 1));
            }
        }
    });
}

#[test]
fn what_goes_wrong_on_its_way_into_pages_is_a_miss_and_never_data() {
    alone("gpu::checked::what_goes_wrong_on_its_way_into_pages_is_a_miss_and_never_data", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let stored = Stored::new(fake, &engine);
        // What is waited for goes by kernels, the rest by copy engines.
        for (layerwise, by) in [(true, "compute.0"), (false, "h2d.0")] {
            for how in ["flipped", "exchanged"] {
                let salt = stored.store();
                let flaw = || fake.control(&format!("flaw {by} {how}"));
                let (tokens, corrupt) = stored.load_changed(salt, layerwise, stored.same(), flaw);
                assert!(tokens < TOKENS as u64 && corrupt == 1, "{by} {how}: {tokens}, {corrupt}");
            }
        }
    });
}

#[test]
fn what_a_relay_loses_is_a_miss_and_never_data() {
    alone("gpu::checked::what_a_relay_loses_is_a_miss_and_never_data", &THREE, |fake| {
        for how in ["lost", "zero"] {
            // A cache of its own for each load: copies that stood still say that their path is
            // slow. Where relays seem slow from the start, as on a busy machine, none of them
            // carries any.
            let is_found = (0..5).any(|_| {
                let site = Site::new();
                let _node = site.node();
                let engine = site.engine(fake);
                let stored = Stored::new(fake, &engine);
                let salt = stored.store();
                let change = || fake.control(&format!("p2p copies {how}; p2p kernels {how}"));
                let (tokens, corrupt) = stored.load_changed(salt, false, stored.same(), change);
                fake.control("p2p copies right; p2p kernels right");
                assert_eq!(tokens < TOKENS as u64, corrupt > 0, "{how}: {tokens}, {corrupt}");
                corrupt > 0
            });
            assert!(is_found, "{how}: no relay carried anything");
        }
    });
}

#[test]
fn a_load_of_some_pages_or_of_other_pages_is_checked_as_well() {
    alone("gpu::checked::a_load_of_some_pages_or_of_other_pages_is_checked_as_well", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let mut stored = Stored::new(fake, &engine);
        // Of a cache with one head, pages of twice the tokens are two that follow each other.
        let twice = Source { page_tokens: Some(2 * PAGE_TOKENS as u32), ..stored.same() };
        let unwanted = BLOCK + 1;
        for (source, holes) in [(twice, false), (stored.same(), true)] {
            stored.to = blocks(20);
            if holes {
                stored.to[unwanted] = NO_PAGE;
            }
            let salt = stored.store();
            assert_eq!(stored.load_changed(salt, true, source, || ()), (TOKENS as u64, 0));
            for block in [BLOCK, unwanted] {
                let salt = stored.store();
                let at = stored.place(1, block).wrapping_add(99);
                let found = stored.load_changed(salt, false, source, || flip(at));
                assert_eq!(found, (tokens_before(BLOCK), 1), "block {block}");
            }
        }
    });
}

#[test]
fn a_stores_sums_are_those_of_the_bytes_in_gpu_memory() {
    alone("gpu::checked::a_stores_sums_are_those_of_the_bytes_in_gpu_memory", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let stored = Stored::new(fake, &engine);
        (0..LAYERS).for_each(|layer| engine.write(engine.layer(layer), layer, SEED));
        for (salt, how) in [(1, "flipped"), (2, "exchanged")] {
            fake.control(&format!("flaw d2h.0 {how}"));
            engine.begin_store(1, &stored.from, salt);
            assert!(engine.paged.wait_stored(&[1], Some(TIMEOUT)));
            // Nobody has looked at the arena.
            assert_eq!(engine.paged.take_ended().1, [JobStored { job: 1, missing: vec![] }]);
            let (tokens, corrupt) = stored.load_changed(salt, true, stored.same(), || ());
            assert!(tokens < TOKENS as u64 && corrupt == 1, "{how}: {tokens}, {corrupt}");
        }
    });
}

#[test]
fn the_host_finds_what_changed_in_the_arena_and_both_what_changed_on_its_way_to_it() {
    let name =
        "gpu::checked::the_host_finds_what_changed_in_the_arena_and_both_what_changed_on_its_way_to_it";
    alone(name, &ONE, |fake| {
        for verify in [Verify::Host, Verify::Both] {
            let site = Site::new();
            let _node = site.node();
            let engine = site.verifying(fake, verify);
            let stored = Stored::new(fake, &engine);
            let (salt, sums) = (stored.store(), fake.stat("forebay_checksums"));
            assert_eq!(stored.load_changed(salt, true, stored.same(), || ()), (TOKENS as u64, 0));
            assert_eq!(fake.stat("forebay_checksums") > sums, verify == Verify::Both);
            let salt = stored.store();
            let at = stored.place(1, BLOCK);
            let (tokens, corrupt) = stored.load_changed(salt, true, stored.same(), || flip(at));
            assert!(tokens == tokens_before(BLOCK) && corrupt > 0, "{verify:?}: {tokens}, {corrupt}");
            fake.control("flaw d2h.0 flipped");
            engine.begin_store(1, &stored.from, 100);
            assert!(engine.paged.wait_stored(&[1], Some(TIMEOUT)));
            let missing = engine.paged.take_ended().1.remove(0).missing.len();
            assert_eq!(missing, usize::from(verify == Verify::Both), "{verify:?}");
        }
    });
}
