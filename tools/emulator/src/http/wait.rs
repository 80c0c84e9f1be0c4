//! Waits for what the engine answers to the prompts of one HTTP request. This file knows tickets
//! and updates.

use super::error::ApiError;
use super::fields::Options;
use super::prompt::Prompt;
use crate::job::{Delivery, End, Intake, Ticket, Update};
use crate::scheduler::CacheHit;
use std::sync::Arc;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// The answers under way. Dropped before their end, when the client goes away, they are aborted.
#[derive(Debug)]
pub struct Answers {
    updates: UnboundedReceiver<Update>,
    tickets: Vec<Option<Ticket>>,
}

impl Answers {
    /// Hands all prompts over, or none.
    pub fn submit(
        intake: &Arc<Intake>,
        prompts: Vec<Prompt>,
        options: &Options,
        stream_interval: usize,
    ) -> Result<Answers, ApiError> {
        let (sender, updates) = unbounded_channel();
        let delivery = if options.stream { Delivery::Every(stream_interval) } else { Delivery::AtEnd };
        let tickets = prompts.into_iter().zip(0..).map(|(prompt, index)| {
            let ticket = intake.submit(index, prompt.tokens, options.max_tokens, delivery, sender.clone())?;
            Ok(Some(ticket))
        });
        Ok(Answers { tickets: tickets.collect::<Result<_, ApiError>>()?, updates })
    }

    /// The next piece of an answer; `None` when all answers have ended.
    pub async fn next(&mut self) -> Option<Update> {
        let open = self.tickets.iter().position(Option::is_some)?;
        let update = self.updates.recv().await.unwrap_or_else(|| Update {
            index: open as u32,
            tokens: Vec::new(),
            hit: CacheHit::default(),
            end: Some(End::Failed("the engine has stopped".into())),
        });
        if update.end.is_some()
            && let Some(mut ticket) = self.tickets.get_mut(update.index as usize).and_then(Option::take)
        {
            ticket.ended();
        }
        Some(update)
    }
}
