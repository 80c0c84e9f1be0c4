//! One generated session: its turns, and those of the sub-agents that it starts and waits for, in
//! order of arrival.

use super::context::{BlockIds, Context};
use super::marginals::{Conversation, Marginals};
use crate::request::TraceRequest;
use crate::tokens::mix;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::VecDeque;

pub(super) struct Session<'a> {
    marginals: &'a Marginals,
    random: StdRng,
    ids: BlockIds,
    main: Agent<'a>,
    sub_agents: u32,
    /// The requests until the next turn of the main agent.
    ready: VecDeque<TraceRequest>,
}

/// A conversation with one context: the main agent of a session, or a sub-agent.
struct Agent<'a> {
    conversation: &'a Conversation,
    name: String,
    parent: Option<String>,
    context: Context,
    turn: u32,
    turns: u32,
    /// When the next request arrives.
    arrival_us: u64,
    /// The pause before it.
    think_us: Option<u64>,
}

impl<'a> Session<'a> {
    /// The session with a number, the same whatever other sessions there are.
    pub(super) fn new(marginals: &'a Marginals, seed: u64, number: u32) -> Session<'a> {
        let mut random = StdRng::seed_from_u64(mix(seed ^ mix(u64::from(number))));
        let start_us = (random.random::<f64>() * marginals.starts_over_s * 1e6) as u64;
        let system_prompt = pick_system_prompt(marginals, &mut random);
        let system_tokens = marginals.system_prompts[system_prompt].tokens;
        let context = Context::new(marginals.block_tokens, system_prompt, system_tokens);
        let name = format!("session-{number}");
        let main = Agent::new(&marginals.main, name, None, context, start_us, &mut random);
        let ids = BlockIds::of_session(number);
        let mut session = Session { marginals, random, ids, main, sub_agents: 0, ready: VecDeque::new() };
        session.take_turn();
        session
    }

    /// When the next request arrives, if there is one.
    pub(super) fn next_arrival_us(&self) -> Option<u64> {
        self.ready.front().map(|request| request.arrival_us)
    }

    /// Puts the next turn of the main agent into `ready`, and a sub-agent that it starts.
    fn take_turn(&mut self) {
        if self.main.turn >= self.main.turns {
            return;
        }
        let (request, answered_us) = self.main.request(self.marginals, &mut self.random, &mut self.ids);
        self.ready.push_back(request);
        if self.main.turn < self.main.turns && self.random.random_bool(self.marginals.sub_agents.per_turn) {
            let finished_us = self.run_sub_agent(answered_us);
            self.main.wait_until(answered_us, finished_us);
        }
    }

    /// Puts all turns of a sub-agent into `ready`; when its last answer is there.
    fn run_sub_agent(&mut self, start_us: u64) -> u64 {
        let sub_agents = &self.marginals.sub_agents;
        self.sub_agents += 1;
        let name = format!("{}/agent-{}", self.main.name, self.sub_agents);
        // All sub-agents share the system prompt that is numbered after those of the main agents.
        let number = self.marginals.system_prompts.len();
        let context = Context::new(self.marginals.block_tokens, number, sub_agents.system_tokens);
        let parent = Some(self.main.name.clone());
        let mut agent =
            Agent::new(&sub_agents.conversation, name, parent, context, start_us, &mut self.random);
        let mut finished_us = start_us;
        while agent.turn < agent.turns {
            let (request, answered_us) = agent.request(self.marginals, &mut self.random, &mut self.ids);
            self.ready.push_back(request);
            finished_us = answered_us;
        }
        finished_us
    }
}

impl Iterator for Session<'_> {
    type Item = TraceRequest;

    fn next(&mut self) -> Option<TraceRequest> {
        let request = self.ready.pop_front()?;
        if self.ready.is_empty() {
            self.take_turn();
        }
        Some(request)
    }
}

impl<'a> Agent<'a> {
    fn new(
        conversation: &'a Conversation,
        name: String,
        parent: Option<String>,
        context: Context,
        start_us: u64,
        random: &mut StdRng,
    ) -> Agent<'a> {
        let turns = conversation.turns.draw_count(random);
        Agent { conversation, name, parent, context, turn: 0, turns, arrival_us: start_us, think_us: None }
    }

    /// The next request, and when its answer is there.
    fn request(
        &mut self,
        marginals: &Marginals,
        random: &mut StdRng,
        ids: &mut BlockIds,
    ) -> (TraceRequest, u64) {
        let new_tokens = self.extend_prompt(marginals, random, ids);
        let output_tokens = self.conversation.output_tokens.draw_count(random);
        let request = TraceRequest {
            session: self.name.clone(),
            parent_session: self.parent.clone(),
            turn: self.turn,
            arrival_us: self.arrival_us,
            think_us: self.think_us,
            service_us: None,
            input_tokens: self.context.tokens,
            output_tokens,
            system_tokens: Some(self.context.system_tokens),
            block_tokens: marginals.block_tokens,
            blocks: self.context.blocks.clone(),
        };
        let service = &marginals.service;
        let service_us = service.fixed_ms * 1e3
            + service.per_new_token_us * f64::from(new_tokens)
            + service.per_output_token_ms * 1e3 * f64::from(output_tokens);
        let answered_us = self.arrival_us + service_us as u64;
        let think_us = (self.conversation.think_s.draw(random) * 1e6) as u64;
        self.turn += 1;
        self.think_us = Some(think_us);
        self.arrival_us = answered_us + think_us;
        (request, answered_us)
    }

    /// Makes the prompt of this turn out of that of the turn before; how many tokens are new.
    fn extend_prompt(&mut self, marginals: &Marginals, random: &mut StdRng, ids: &mut BlockIds) -> u32 {
        let own = match self.turn {
            0 => &self.conversation.first_own_tokens,
            _ => &self.conversation.growth_tokens,
        };
        let mut new_tokens = own.draw_count(random);
        if self.turn > 0 && self.context.tokens + new_tokens > marginals.context_tokens {
            self.context.reset();
            new_tokens = marginals.summary_tokens.draw_count(random);
        }
        let room = marginals.context_tokens - self.context.tokens;
        self.context.grow(new_tokens.min(room), ids);
        new_tokens.min(room)
    }

    /// Puts the next request off, from the answer before it, until something else is finished.
    fn wait_until(&mut self, answered_us: u64, finished_us: u64) {
        self.arrival_us = self.arrival_us.max(finished_us);
        self.think_us = Some(self.arrival_us - answered_us);
    }
}

fn pick_system_prompt(marginals: &Marginals, random: &mut StdRng) -> usize {
    let prompts = &marginals.system_prompts;
    let mut point = random.random::<f64>() * prompts.iter().map(|prompt| prompt.weight).sum::<f64>();
    let chosen = prompts.iter().position(|prompt| {
        point -= prompt.weight;
        point < 0.0
    });
    chosen.unwrap_or(prompts.len() - 1)
}
