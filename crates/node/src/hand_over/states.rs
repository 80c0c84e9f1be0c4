//! Who has the memory, as both ends of a hand-over know it. Sans-IO: what happens is an argument,
//! and the answer says what is to be done.

/// What the old node hears of the new one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    Ready,
    Taken,
    /// It does not take over, and has touched nothing.
    GaveUp(String),
    /// Its process has ended, or closed the connection.
    Gone,
    /// It has said nothing for as long as it may.
    Late,
}

/// The old node, once it has given everything away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Giving {
    /// The new one checks what it got. It may be taken back.
    AwaitsReady,
    /// The new one was told that it has everything.
    AwaitsTaken,
}

/// What the old node does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GivingStep {
    SayYours,
    /// The memory is the new one's.
    Leave,
    /// The memory is still this node's.
    TakeBack(String),
}

impl Giving {
    pub fn on(self, heard: Heard) -> GivingStep {
        use Giving::{AwaitsReady, AwaitsTaken};
        let gone = || GivingStep::TakeBack("the new node ended".into());
        match (self, heard) {
            (AwaitsReady, Heard::Ready) => GivingStep::SayYours,
            (_, Heard::GaveUp(why)) => GivingStep::TakeBack(format!("the new node gave up: {why}")),
            (_, Heard::Gone) => gone(),
            (AwaitsReady, Heard::Late) => GivingStep::TakeBack("the new node was not ready in time".into()),
            (AwaitsReady, Heard::Taken) => GivingStep::TakeBack("the new node took what was not its".into()),
            (AwaitsTaken, Heard::Taken) => GivingStep::Leave,
            // It may serve already, so that this node never does again.
            (AwaitsTaken, Heard::Late | Heard::Ready) => GivingStep::Leave,
        }
    }
}

/// The new node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taking {
    /// It has got everything and opens it.
    Opens,
    /// It has said that it is ready.
    AwaitsYours,
}

/// What the new node does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakingStep {
    SayReady,
    /// Says TAKEN, and serves only then.
    SayTaken,
    /// Touches nothing, says why and ends.
    GiveUp,
}

impl Taking {
    /// `ok`: it has opened everything, or heard YOURS.
    pub fn on(self, ok: bool) -> TakingStep {
        match (self, ok) {
            (Taking::Opens, true) => TakingStep::SayReady,
            (Taking::AwaitsYours, true) => TakingStep::SayTaken,
            (_, false) => TakingStep::GiveUp,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// What a step of the world does.
    #[derive(Debug, Clone, Copy)]
    enum Turn {
        Old,
        New,
        /// The new one's open fails, or its patience ends.
        NewFails,
        NewDies,
        /// The old one's patience ends.
        OldIsLate,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Old {
        Is(Giving),
        Left,
        Serves,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum New {
        Is(Taking),
        Serves,
        Ended,
    }

    struct World {
        old: Old,
        new: New,
        to_old: VecDeque<Heard>,
        /// YOURS is on its way.
        yours: bool,
        /// The old one has closed the connection.
        closed: bool,
    }

    impl World {
        fn start() -> World {
            let (old, new) = (Old::Is(Giving::AwaitsReady), New::Is(Taking::Opens));
            World { old, new, to_old: VecDeque::new(), yours: false, closed: false }
        }

        fn old_hears(&mut self, heard: Heard) {
            let Old::Is(giving) = self.old else { return };
            match giving.on(heard) {
                GivingStep::SayYours => (self.yours, self.old) = (true, Old::Is(Giving::AwaitsTaken)),
                GivingStep::Leave => (self.old, self.closed) = (Old::Left, true),
                GivingStep::TakeBack(_) => (self.old, self.closed) = (Old::Serves, true),
            }
        }

        fn new_goes_on(&mut self, ok: bool) {
            let New::Is(taking) = self.new else { return };
            match taking.on(ok) {
                TakingStep::SayReady => {
                    self.to_old.push_back(Heard::Ready);
                    self.new = New::Is(Taking::AwaitsYours);
                }
                TakingStep::SayTaken => {
                    self.to_old.push_back(Heard::Taken);
                    self.new = New::Serves;
                }
                TakingStep::GiveUp => {
                    self.to_old.push_back(Heard::GaveUp("why".into()));
                    self.new = New::Ended;
                }
            }
        }

        fn turn(&mut self, turn: Turn) {
            match (turn, self.new) {
                (Turn::Old, _) => match self.to_old.pop_front() {
                    Some(heard) => self.old_hears(heard),
                    None if self.new == New::Ended => self.old_hears(Heard::Gone),
                    None => {}
                },
                (Turn::OldIsLate, _) if self.to_old.is_empty() => self.old_hears(Heard::Late),
                (Turn::New, New::Is(Taking::Opens)) => self.new_goes_on(true),
                (Turn::New, New::Is(Taking::AwaitsYours)) if self.yours => self.new_goes_on(true),
                // The end of the connection, with nothing in it.
                (Turn::New, New::Is(Taking::AwaitsYours)) if self.closed => self.new_goes_on(false),
                (Turn::NewFails, New::Is(_)) => self.new_goes_on(false),
                (Turn::NewDies, _) => self.new = New::Ended,
                _ => {}
            }
        }
    }

    fn turns() -> impl Strategy<Value = Vec<Turn>> {
        let turn = prop_oneof![
            4 => Just(Turn::Old), 4 => Just(Turn::New), 1 => Just(Turn::NewFails),
            1 => Just(Turn::NewDies), 1 => Just(Turn::OldIsLate),
        ];
        prop::collection::vec(turn, 0..12)
    }

    proptest! {
        #[test]
        fn wherever_a_hand_over_is_cut_never_do_both_serve_and_a_live_node_does_in_the_end(turns in turns()) {
            let mut world = World::start();
            let mut new_served = false;
            for turn in turns.iter().copied() {
                world.turn(turn);
                new_served |= world.new == New::Serves;
                prop_assert!(!(new_served && world.old == Old::Serves), "both served: {turns:?}");
            }
            for _ in 0..8 {
                world.turn(Turn::New);
                new_served |= world.new == New::Serves;
                world.turn(Turn::Old);
                prop_assert!(!(new_served && world.old == Old::Serves), "both served: {turns:?}");
            }
            let serves = world.old == Old::Serves || world.new == New::Serves;
            // The memory is lost with the new one only if that had it, or if the old one waited in
            // vain for a word that it has.
            let was_late = turns.iter().any(|turn| matches!(turn, Turn::OldIsLate));
            let lost = world.new == New::Ended && world.yours && (new_served || was_late);
            prop_assert!(serves || lost, "nobody serves: {turns:?}");
        }
    }

    #[test]
    fn without_an_accident_the_new_one_serves_and_the_old_one_leaves() {
        let mut world = World::start();
        [Turn::New, Turn::Old, Turn::New, Turn::Old].into_iter().for_each(|turn| world.turn(turn));
        assert_eq!((world.old, world.new), (Old::Left, New::Serves));
    }
}
