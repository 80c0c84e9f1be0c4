//! Hand-overs straight from one engine's pages to another's: they are right or they bring nothing,
//! and a prefiller gets its pages back, whatever becomes of the decoder.

use crate::rig::*;
use forebay_paged::NotBegun;
use forebay_paged::PagedOptions;
use forebay_paged::direct::{Digest, DirectOptions, Key, OfferEnd, OfferEnded, ReadRequest, ReadSource};
use forebay_paged::pages::HeadRange;
use std::time::{Duration, Instant};
use testkit::eventually;

const TOKENS: usize = 4 * CHUNK_TOKENS as usize + 21;
const KEY: Key = [7; 16];
const PROMPT: Digest = [5; 32];
const LONG: Duration = Duration::from_secs(60);

/// Engines without a node that hand over directly.
fn engine(site: &Site, name: &str, heads: usize) -> Engine {
    rank(site, name, heads, 0)
}

/// A rank that has these heads of a model's.
fn rank(site: &Site, name: &str, heads: usize, first_head: usize) -> Engine {
    let direct = DirectOptions { name: name.into(), token: b"word".to_vec() };
    Engine::new(heads, first_head, 16, PagedOptions { direct: Some(direct), ..site.options() })
}

/// A prefiller that offers a prompt in these blocks, and a decoder.
fn offered(site: &Site) -> (Engine, Engine, Vec<i64>) {
    let (prefiller, decoder) = (engine(site, "p", 2), engine(site, "d", 2));
    let blocks = prefiller.blocks(TOKENS, 3);
    prefiller.compute(&blocks, TOKENS);
    offer(&prefiller, KEY, &blocks, LONG);
    (prefiller, decoder, blocks)
}

fn offer(prefiller: &Engine, key: Key, blocks: &[i64], ttl: Duration) {
    prefiller.paged.offer(key, PROMPT, &prefiller.tables(blocks, TOKENS), TOKENS as u64, ttl).unwrap();
}

fn request(engine: &Engine, metadata: Vec<u8>, key: Key, blocks: &[i64]) -> ReadRequest {
    request_of(engine, vec![ReadSource { metadata, key, heads: None, readers: 1 }], blocks)
}

fn request_of(engine: &Engine, sources: Vec<ReadSource>, blocks: &[i64]) -> ReadRequest {
    let (tables, tokens) = (engine.tables(blocks, TOKENS), TOKENS as u64);
    ReadRequest { job: 1, sources, digest: PROMPT, tables, first_token: 0, tokens, wait: Duration::ZERO }
}

/// One head of a prefiller's pages, for a head of a decoder's.
fn head(prefiller: &Engine, key: Key, first_there: u32, first_here: u32, readers: u32) -> ReadSource {
    let heads = Some(HeadRange { first_there, first_here, heads: 1 });
    ReadSource { metadata: prefiller.paged.metadata().unwrap(), key, heads, readers }
}

fn read(decoder: &Engine, prefiller: &Engine, key: Key, blocks: &[i64]) -> (u64, Option<String>) {
    let metadata = prefiller.paged.metadata().unwrap();
    decoder.paged.read(request(decoder, metadata, key, blocks), 0).unwrap();
    let end = decoder.end_of(1);
    (end.tokens, end.why)
}

/// The only end of an offer.
fn end_of_offer(prefiller: &Engine) -> OfferEnded {
    let mut ended = Vec::new();
    eventually("the offer ends", || {
        ended.extend(prefiller.paged.take_offers_ended());
        !ended.is_empty()
    });
    assert_eq!(ended.len(), 1, "once");
    ended[0]
}

#[test]
fn what_is_offered_is_read_with_every_byte_right_and_the_prefiller_hears_of_it() {
    let site = Site::new();
    let (prefiller, decoder, _) = offered(&site);
    let blocks = decoder.blocks(TOKENS, 9);
    assert_eq!(read(&decoder, &prefiller, KEY, &blocks), (TOKENS as u64, None));
    assert!(decoder.is_true(&blocks, 0..TOKENS) && decoder.is_clean_beside(&blocks));
    assert_eq!(end_of_offer(&prefiller), OfferEnded { key: KEY, how: OfferEnd::Closed });
    let stats = decoder.paged.stats();
    assert_eq!((stats.reads, stats.reads_failed, stats.loads), (1, 0, 0));
    assert_eq!(stats.bytes_read, decoder.paged.cache().layer_bytes(320).sum::<u64>() / 20 * 18);
}

#[test]
fn only_pages_that_the_decoder_lacks_are_written() {
    let site = Site::new();
    let (prefiller, decoder, _) = offered(&site);
    let all = decoder.blocks(TOKENS, 9);
    let wanted = without(&all, &[0, 1, 5]);
    assert_eq!(read(&decoder, &prefiller, KEY, &wanted), (TOKENS as u64, None));
    assert!(decoder.is_true(&wanted, 0..TOKENS) && decoder.is_clean_beside(&wanted));
}

#[test]
fn an_offer_is_read_once_and_nobody_reads_without_the_key() {
    let site = Site::new();
    let (prefiller, decoder, _) = offered(&site);
    let blocks = decoder.blocks(TOKENS, 9);
    let (tokens, why) = read(&decoder, &prefiller, [8; 16], &blocks);
    assert!(tokens == 0 && why.is_some_and(|why| why.contains("nothing was offered")));
    assert!(decoder.is_clean_beside(&[]));
    assert_eq!(read(&decoder, &prefiller, KEY, &blocks).0, TOKENS as u64);
    assert_eq!(read(&decoder, &prefiller, KEY, &blocks).0, 0);
}

#[test]
fn a_ticket_for_another_prompt_brings_nothing_and_leaves_the_offer() {
    let site = Site::new();
    let (prefiller, decoder, _) = offered(&site);
    let blocks = decoder.blocks(TOKENS, 9);
    let wrong = ReadRequest {
        digest: [6; 32],
        ..request(&decoder, prefiller.paged.metadata().unwrap(), KEY, &blocks)
    };
    decoder.paged.read(wrong, 0).unwrap();
    let end = decoder.end_of(1);
    assert!(end.tokens == 0 && end.why.is_some_and(|why| why.contains("another prompt")));
    assert!(decoder.is_clean_beside(&[]));
    assert_eq!(read(&decoder, &prefiller, KEY, &blocks), (TOKENS as u64, None));
}

#[test]
fn a_decoder_may_ask_before_the_prefiller_offers() {
    let site = Site::new();
    let (prefiller, decoder) = (engine(&site, "p", 2), engine(&site, "d", 2));
    let (blocks, theirs) = (decoder.blocks(TOKENS, 9), prefiller.blocks(TOKENS, 3));
    prefiller.compute(&theirs, TOKENS);
    let metadata = prefiller.paged.metadata().unwrap();
    decoder.paged.read(request(&decoder, metadata, KEY, &blocks), 0).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    offer(&prefiller, KEY, &theirs, LONG);
    assert_eq!(decoder.end_of(1).tokens, TOKENS as u64);
    assert!(decoder.is_true(&blocks, 0..TOKENS));
}

#[test]
fn a_decoder_that_is_asked_at_the_same_time_waits_for_a_long_prefill() {
    let site = Site::new();
    let (prefiller, decoder) = (engine(&site, "p", 2), engine(&site, "d", 2));
    let (blocks, theirs) = (decoder.blocks(TOKENS, 9), prefiller.blocks(TOKENS, 3));
    prefiller.compute(&theirs, TOKENS);
    let ask = |wait| {
        let metadata = prefiller.paged.metadata().unwrap();
        decoder.paged.read(ReadRequest { wait, ..request(&decoder, metadata, KEY, &blocks) }, 0).unwrap();
        std::thread::sleep(Duration::from_millis(3_500));
    };
    ask(Duration::ZERO);
    assert_eq!(decoder.paged.take_ended().0[0].tokens, 0, "whoever may not be ahead does not wait");
    ask(LONG);
    offer(&prefiller, KEY, &theirs, LONG);
    assert_eq!(decoder.end_of(1).tokens, TOKENS as u64);
    assert!(decoder.is_true(&blocks, 0..TOKENS));
}

#[test]
fn a_decoder_that_waits_hears_at_once_that_the_prefiller_is_gone() {
    let site = Site::new();
    let (prefiller, decoder) = (engine(&site, "p", 2), engine(&site, "d", 2));
    let (blocks, metadata) = (decoder.blocks(TOKENS, 9), prefiller.paged.metadata().unwrap());
    let ahead = ReadRequest { wait: LONG, ..request(&decoder, metadata, KEY, &blocks) };
    decoder.paged.read(ahead, 0).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let begun = Instant::now();
    drop(prefiller);
    assert_eq!(decoder.end_of(1).tokens, 0);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn an_offer_that_was_declined_before_it_came_ends_with_it() {
    let site = Site::new();
    let (prefiller, decoder) = (engine(&site, "p", 2), engine(&site, "d", 2));
    let blocks = prefiller.blocks(TOKENS, 3);
    decoder.paged.decline(&prefiller.paged.metadata().unwrap(), KEY).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    offer(&prefiller, KEY, &blocks, LONG);
    assert_eq!(end_of_offer(&prefiller), OfferEnded { key: KEY, how: OfferEnd::Closed });
}

#[test]
fn pages_that_nobody_reads_come_back_when_the_time_is_over_or_the_decoder_declines() {
    let site = Site::new();
    let (prefiller, decoder) = (engine(&site, "p", 2), engine(&site, "d", 2));
    let blocks = prefiller.blocks(TOKENS, 3);
    offer(&prefiller, KEY, &blocks, Duration::from_millis(30));
    assert_eq!(end_of_offer(&prefiller).how, OfferEnd::Expired);
    offer(&prefiller, KEY, &blocks, LONG);
    decoder.paged.decline(&prefiller.paged.metadata().unwrap(), KEY).unwrap();
    assert_eq!(end_of_offer(&prefiller).how, OfferEnd::Closed);
}

#[test]
fn an_engine_of_another_shape_gets_nothing() {
    let site = Site::new();
    let (prefiller, _, _) = offered(&site);
    let other = engine(&site, "other", 1);
    let blocks = other.blocks(TOKENS, 9);
    let (tokens, why) = read(&other, &prefiller, KEY, &blocks);
    assert!(tokens == 0 && why.is_some_and(|why| why.contains("layer 0 has pages of so many bytes: 768")));
    assert!(other.is_clean_beside(&[]));
    assert_eq!(end_of_offer(&prefiller).how, OfferEnd::Closed);
}

#[test]
fn a_prefiller_that_is_gone_costs_a_read_and_no_page() {
    let site = Site::new();
    let (prefiller, decoder, _) = offered(&site);
    let metadata = prefiller.paged.metadata().unwrap();
    drop(prefiller);
    let blocks = decoder.blocks(TOKENS, 9);
    decoder.paged.read(request(&decoder, metadata, KEY, &blocks), 0).unwrap();
    let end = decoder.end_of(1);
    assert!(end.tokens == 0 && end.why.is_some());
    assert!(decoder.is_clean_beside(&[]));
    assert_eq!(decoder.paged.stats().reads_failed, 1);
    decoder.paged.read(request(&decoder, b"nonsense".to_vec(), KEY, &blocks), 0).unwrap();
    assert_eq!(decoder.end_of(1).tokens, 0);
}

#[test]
fn a_decoder_that_is_gone_gives_the_pages_back() {
    let site = Site::new();
    let (prefiller, decoder, _) = offered(&site);
    let blocks = decoder.blocks(TOKENS, 9);
    assert_eq!(read(&decoder, &prefiller, KEY, &blocks).0, TOKENS as u64);
    end_of_offer(&prefiller);
    offer(&prefiller, KEY, &prefiller.blocks(TOKENS, 3), LONG);
    drop(decoder);
    prefiller.paged.close();
    assert!(matches!(
        prefiller.paged.read(request(&prefiller, Vec::new(), KEY, &blocks), 0),
        Err(NotBegun::Closed)
    ));
}

#[test]
fn an_engine_that_was_not_told_to_hand_over_directly_does_not() {
    let site = Site::new();
    let engine = site.engine(2, 0, 16);
    assert!(engine.paged.metadata().is_none());
    let blocks = engine.blocks(TOKENS, 3);
    let offered = engine.paged.offer(KEY, PROMPT, &engine.tables(&blocks, TOKENS), TOKENS as u64, LONG);
    assert!(matches!(offered, Err(NotBegun::NoDirect)));
}

#[test]
fn ranks_of_a_decoder_with_more_of_them_read_their_heads_and_the_offer_ends_with_the_last() {
    let site = Site::new();
    let (prefiller, _, _) = offered(&site);
    for first_head in 0..2 {
        assert!(prefiller.paged.take_offers_ended().is_empty(), "a rank has not read yet");
        let decoder = rank(&site, "rank", 1, first_head);
        let blocks = decoder.blocks(TOKENS, 9 + first_head);
        let source = head(&prefiller, KEY, first_head as u32, 0, 2);
        decoder.paged.read(request_of(&decoder, vec![source.clone()], &blocks), 0).unwrap();
        let end = decoder.end_of(1);
        assert_eq!((end.tokens, end.why), (TOKENS as u64, None));
        assert!(decoder.is_true(&blocks, 0..TOKENS) && decoder.is_clean_beside(&blocks));
    }
    assert_eq!(end_of_offer(&prefiller), OfferEnded { key: KEY, how: OfferEnd::Closed });
}

#[test]
fn a_decoder_with_fewer_ranks_reads_the_heads_of_several() {
    let site = Site::new();
    let ranks = [0, 1].map(|first_head| rank(&site, &format!("p{first_head}"), 1, first_head));
    let decoder = engine(&site, "d", 2);
    let blocks = decoder.blocks(TOKENS, 9);
    for fails in [false, true] {
        for (number, prefiller) in ranks.iter().enumerate() {
            let theirs = prefiller.blocks(TOKENS, 3 + number);
            prefiller.compute(&theirs, TOKENS);
            offer(prefiller, [number as u8; 16], &theirs, LONG);
        }
        let key = |number: u8| if fails { [2 * number; 16] } else { [number; 16] };
        let source = |number: u8| head(&ranks[usize::from(number)], key(number), 0, number.into(), 1);
        decoder.paged.read(request_of(&decoder, vec![source(0), source(1)], &blocks), 0).unwrap();
        let end = decoder.end_of(1);
        assert_eq!((end.tokens, end.why.is_some()), if fails { (0, true) } else { (TOKENS as u64, false) });
        assert!(fails || decoder.is_true(&blocks, 0..TOKENS) && decoder.is_clean_beside(&blocks));
    }
}

#[test]
fn an_offer_of_which_some_ranks_read_nothing_ends_when_its_time_is_over() {
    let site = Site::new();
    let prefiller = engine(&site, "p", 2);
    let theirs = prefiller.blocks(TOKENS, 3);
    prefiller.compute(&theirs, TOKENS);
    offer(&prefiller, KEY, &theirs, Duration::from_secs(2));
    let decoder = rank(&site, "rank", 1, 0);
    let blocks = decoder.blocks(TOKENS, 9);
    let source = head(&prefiller, KEY, 0, 0, 2);
    decoder.paged.read(request_of(&decoder, vec![source], &blocks), 0).unwrap();
    assert_eq!(decoder.end_of(1).tokens, TOKENS as u64);
    assert_eq!(end_of_offer(&prefiller).how, OfferEnd::Expired);
}
