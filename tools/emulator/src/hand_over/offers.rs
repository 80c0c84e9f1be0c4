//! The prompts whose blocks a prefiller keeps for decoders. Each is read once, or its lease ends.

use super::{Fault, LEASE};
use crate::scheduler::BlockId;
use forebay_transfer::lock::Mutex;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// A prompt whose blocks are kept.
#[derive(Debug)]
pub struct Offer {
    /// Each of them finds it.
    pub keys: [String; 2],
    /// Of the prompt's whole blocks, in order.
    pub blocks: Vec<BlockId>,
    until: Instant,
}

#[derive(Debug, Default)]
pub struct Offers {
    kept: Mutex<Vec<Offer>>,
    /// Wakes who waits for an offer.
    news: Notify,
    fault: Mutex<Option<Fault>>,
}

impl Offers {
    /// Keeps blocks for whoever has a key, for [`LEASE`].
    pub fn keep(&self, keys: [String; 2], blocks: Vec<BlockId>) {
        self.kept.lock().push(Offer { keys, blocks, until: Instant::now() + LEASE });
        self.news.notify_waiters();
    }

    /// The offer of a key, which nobody else gets. Waits for it.
    pub async fn take(&self, key: &str, limit: Duration) -> Option<Offer> {
        let taken = async {
            loop {
                let news = self.news.notified();
                let mut news = std::pin::pin!(news);
                news.as_mut().enable();
                if let Some(offer) = self.take_now(key) {
                    return offer;
                }
                news.await;
            }
        };
        tokio::time::timeout(limit, taken).await.ok()
    }

    fn take_now(&self, key: &str) -> Option<Offer> {
        let mut kept = self.kept.lock();
        let at = kept.iter().position(|offer| offer.keys.iter().any(|known| known == key))?;
        Some(kept.swap_remove(at))
    }

    /// Offers whose lease has ended.
    pub fn take_expired(&self, now: Instant) -> Vec<Offer> {
        self.kept.lock().extract_if(.., |offer| offer.until <= now).collect()
    }

    /// When the next lease ends.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.kept.lock().iter().map(|offer| offer.until).min()
    }

    /// Prompts that are kept.
    pub fn kept(&self) -> usize {
        self.kept.lock().len()
    }

    pub fn fault(&self) -> Option<Fault> {
        *self.fault.lock()
    }

    pub fn set_fault(&self, fault: Option<Fault>) {
        *self.fault.lock() = fault;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(name: &str) -> [String; 2] {
        [name.to_owned(), format!("{name}-id")]
    }

    #[tokio::test]
    async fn an_offer_is_taken_once_by_either_of_its_keys_and_waited_for() {
        let offers = Offers::default();
        offers.keep(keys("a"), vec![BlockId(1)]);
        assert_eq!(offers.take("a-id", Duration::ZERO).await.unwrap().blocks, [BlockId(1)]);
        assert!(offers.take("a", Duration::ZERO).await.is_none() && offers.kept() == 0);
        let later = async { offers.keep(keys("b"), vec![BlockId(2)]) };
        let (taken, ()) = tokio::join!(offers.take("b", Duration::from_secs(20)), later);
        assert_eq!(taken.unwrap().blocks, [BlockId(2)]);
    }

    #[test]
    fn a_lease_ends() {
        let offers = Offers::default();
        offers.keep(keys("a"), Vec::new());
        let until = offers.next_expiry().unwrap();
        assert!(offers.take_expired(until - Duration::from_millis(1)).is_empty());
        assert_eq!((offers.take_expired(until).len(), offers.kept()), (1, 0));
    }
}
