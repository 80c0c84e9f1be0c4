//! Messages in the order in which they were sent, though UCX may deliver them in another: one that
//! goes ahead waits for those before it.

use std::collections::VecDeque;

/// How far a message may be ahead of the next one that is due. A sender has far fewer under way.
pub(super) const AHEAD_MAX: u64 = 8_192;

/// A number that no message may have now: it came before, or is too far ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OutOfWindow;

/// The messages that have come and are not taken.
#[derive(Debug)]
pub(super) struct Window<T> {
    /// The number of the first one.
    first: u64,
    messages: VecDeque<Option<T>>,
    held: usize,
}

impl<T> Default for Window<T> {
    fn default() -> Window<T> {
        Window { first: 0, messages: VecDeque::new(), held: 0 }
    }
}

impl<T> Window<T> {
    pub fn insert(&mut self, number: u64, message: T) -> Result<(), OutOfWindow> {
        let ahead = number.checked_sub(self.first).filter(|ahead| *ahead < AHEAD_MAX).ok_or(OutOfWindow)?;
        let at = ahead as usize;
        while self.messages.len() <= at {
            self.messages.push_back(None);
        }
        if self.messages[at].is_some() {
            return Err(OutOfWindow);
        }
        self.messages[at] = Some(message);
        self.held += 1;
        Ok(())
    }

    /// The message that is due, if it is here.
    pub fn front(&mut self) -> Option<&mut T> {
        self.messages.front_mut()?.as_mut()
    }

    pub fn take_front(&mut self) -> Option<T> {
        let message = self.messages.front_mut()?.take()?;
        self.messages.pop_front();
        self.first += 1;
        self.held -= 1;
        Some(message)
    }

    pub fn get(&mut self, number: u64) -> Option<&mut T> {
        let at = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.messages.get_mut(at)?.as_mut()
    }

    /// The messages that are here, in order, with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        let numbered = self.messages.iter().zip(self.first..);
        numbered.filter_map(|(message, number)| message.as_ref().map(|message| (number, message)))
    }

    pub fn len(&self) -> usize {
        self.held
    }

    /// All that are here, whatever is missing.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.held = 0;
        self.first += self.messages.len() as u64;
        self.messages.drain(..).flatten()
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
