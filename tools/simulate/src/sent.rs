//! What a router believes engines to hold: what it sent there, less what they have evicted since,
//! as `forebay route` learns it from answers. It knows prompts and answers, and never looks into an
//! engine.
//!
//! Each engine has a clock of the tokens that it had to compute. A token's age is the clock now,
//! less the clock at its last use, plus its position. An engine is taken to hold what is younger
//! than its *reach*, which answers correct: `docs/routing.md` says how.

use crate::prefixes::Run;

/// Errors below so many tokens, or below an eighth of the prediction, teach nothing.
const SMALL_TOKENS: u64 = 512;

#[derive(Debug)]
pub struct Sent {
    engines: Vec<Reach>,
    /// By node: the engines that got some of it.
    nodes: Vec<Vec<SentRun>>,
}

#[derive(Clone, Copy, Debug)]
struct Reach {
    clock: u64,
    reach: u64,
}

/// The beginning of a run that was sent to an engine.
#[derive(Clone, Copy, Debug)]
struct SentRun {
    engine: u32,
    end: u32,
    last_use: u64,
}

/// The age of a path's tokens at one engine, when a request went there.
#[derive(Clone, Debug, Default)]
pub struct Visit {
    pub predicted_tokens: u32,
    /// Up to which position, and the age of its tokens without their positions.
    ages: Vec<(u32, u64)>,
}

impl Sent {
    pub fn new(engines: usize, nodes: usize) -> Sent {
        let reach = Reach { clock: 0, reach: u64::MAX };
        Sent { engines: vec![reach; engines], nodes: vec![Vec::new(); nodes] }
    }

    /// Writes how many tokens of a path each engine is believed to hold.
    pub fn hits(&self, path: &[Run], hits: &mut [u32]) {
        hits.fill(0);
        for run in path {
            for sent in &self.nodes[run.node.0 as usize] {
                let (engine, hit) = (self.engines[sent.engine as usize], &mut hits[sent.engine as usize]);
                if *hit < run.start {
                    continue;
                }
                let young = engine.reach.saturating_sub(engine.clock - sent.last_use);
                let end = u64::from(sent.end.min(run.end)).min(young);
                *hit = (*hit).max(end as u32);
            }
        }
    }

    /// A prompt goes to an engine that is believed to hold the first `hit` tokens of it.
    pub fn send(&mut self, engine: u32, path: &[Run], hit: u32) -> Visit {
        let end = path.last().map_or(0, |run| run.end);
        let clock = &mut self.engines[engine as usize].clock;
        let before = *clock;
        *clock += u64::from(end.saturating_sub(hit));
        let mut visit = Visit { predicted_tokens: hit, ages: Vec::new() };
        for run in path {
            let sent = &mut self.nodes[run.node.0 as usize];
            match sent.iter_mut().find(|sent| sent.engine == engine) {
                Some(sent) => {
                    visit.ages.push((sent.end.min(run.end), before - sent.last_use));
                    (sent.end, sent.last_use) = (sent.end.max(run.end), *clock);
                }
                None => sent.push(SentRun { engine, end: run.end, last_use: *clock }),
            }
        }
        visit
    }

    /// An answer says how many tokens of the prompt were cached.
    pub fn learn(&mut self, engine: u32, visit: &Visit, cached_tokens: u32) {
        let (predicted, cached) = (u64::from(visit.predicted_tokens), u64::from(cached_tokens));
        if cached.abs_diff(predicted) < SMALL_TOKENS.max(predicted / 8) {
            return;
        }
        let known = visit.ages.iter().map(|&(end, _)| end).max().unwrap_or(0);
        let position = cached_tokens.min(known);
        let Some(&(_, age)) = visit.ages.iter().find(|&&(end, _)| position <= end) else { return };
        let age = age + u64::from(position);
        let reach = &mut self.engines[engine as usize].reach;
        *reach = if cached < predicted { (*reach).min(age) } else { (*reach).max(age) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefixes::NodeId;

    fn path(leaf: u32, tokens: u32) -> [Run; 2] {
        [Run { node: NodeId(0), start: 0, end: 1_000 }, Run { node: NodeId(leaf), start: 1_000, end: tokens }]
    }

    fn hits(sent: &Sent, path: &[Run]) -> [u32; 2] {
        let mut hits = [0; 2];
        sent.hits(path, &mut hits);
        hits
    }

    #[test]
    fn an_engine_is_believed_to_hold_what_was_sent_there() {
        let mut sent = Sent::new(2, 3);
        sent.send(1, &path(1, 9_000), 0);
        assert_eq!(hits(&sent, &path(1, 20_000)), [0, 9_000]);
        assert_eq!(hits(&sent, &path(2, 20_000)), [0, 1_000], "the system prompt is shared");
    }

    #[test]
    fn one_answer_corrects_what_is_believed_of_all_prompts() {
        let mut sent = Sent::new(2, 4);
        sent.send(0, &path(1, 9_000), 0);
        sent.send(0, &path(2, 9_000), 1_000);
        sent.send(0, &path(3, 9_000), 1_000);
        let visit = sent.send(0, &path(1, 9_500), 9_000);
        // All that was computed since and 4,000 tokens of this prompt are in the cache.
        sent.learn(0, &visit, 4_000);
        assert_eq!(hits(&sent, &path(1, 20_000)), [9_500, 0], "it was used just now");
        sent.send(0, &path(3, 60_000), 9_000);
        assert_eq!(hits(&sent, &path(2, 20_000)), [1_000, 0], "too much was computed since");
    }
}
