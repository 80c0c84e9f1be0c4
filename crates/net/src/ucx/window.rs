//! A reorder buffer. UCX may deliver messages in another order than they were sent in; a message
//! that comes early is kept here until those before it have come.

use std::collections::BTreeMap;

/// How far a message may be ahead of the next one that is due. A sender has far fewer under way.
pub(super) const AHEAD_MAX: u64 = 8_192;

/// A number that no message may have now: it came before, or is too far ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OutOfWindow;

/// The messages that have come and are not taken.
#[derive(Debug)]
pub(super) struct Window<T> {
    /// The number of the one that is due.
    first: u64,
    messages: BTreeMap<u64, T>,
}

impl<T> Default for Window<T> {
    fn default() -> Window<T> {
        Window { first: 0, messages: BTreeMap::new() }
    }
}

impl<T> Window<T> {
    pub fn insert(&mut self, number: u64, message: T) -> Result<(), OutOfWindow> {
        let ahead = number.checked_sub(self.first).ok_or(OutOfWindow)?;
        if ahead >= AHEAD_MAX || self.messages.contains_key(&number) {
            return Err(OutOfWindow);
        }
        self.messages.insert(number, message);
        Ok(())
    }

    /// The message that is due, if it is here.
    pub fn front(&mut self) -> Option<&mut T> {
        self.messages.get_mut(&self.first)
    }

    pub fn take_front(&mut self) -> Option<T> {
        let message = self.messages.remove(&self.first)?;
        self.first += 1;
        Some(message)
    }

    pub fn get(&mut self, number: u64) -> Option<&mut T> {
        self.messages.get_mut(&number)
    }

    /// The messages that are here, in order, with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.messages.iter().map(|(number, message)| (*number, message))
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// All that are here, whatever is missing.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + use<T> {
        let messages = std::mem::take(&mut self.messages);
        self.first = messages.last_key_value().map_or(self.first, |(last, _)| last + 1);
        messages.into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn whatever_the_order_of_arrival_messages_are_taken_in_order_and_once(
            order in Just((0u64..200).collect::<Vec<_>>()).prop_shuffle(),
            again in prop::collection::vec(0u64..200, 0..50),
        ) {
            let mut window = Window::default();
            let mut taken = Vec::new();
            for (at, number) in order.iter().enumerate() {
                prop_assert_eq!(window.insert(*number, *number), Ok(()));
                if let Some(number) = again.get(at) && order[..=at].contains(number) {
                    prop_assert_eq!(window.insert(*number, 999), Err(OutOfWindow));
                }
                if at % 3 == 0 {
                    taken.extend(std::iter::from_fn(|| window.take_front()));
                }
            }
            taken.extend(std::iter::from_fn(|| window.take_front()));
            prop_assert_eq!(taken, (0..200).collect::<Vec<_>>());
            prop_assert_eq!(window.len(), 0);
        }
    }

    #[test]
    fn a_message_too_far_ahead_takes_no_memory() {
        let mut window = Window::default();
        assert_eq!(window.insert(AHEAD_MAX, ()), Err(OutOfWindow));
        assert_eq!(window.insert(u64::MAX, ()), Err(OutOfWindow));
        assert_eq!(window.insert(AHEAD_MAX - 1, ()), Ok(()));
        assert!(window.front().is_none() && window.len() == 1);
    }
}
