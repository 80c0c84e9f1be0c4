//! What a listener does with connections that have not authenticated: they have a small room and a short time of their own, so
//! that silent ones never keep others out.

mod pending;
mod room;

pub use pending::{Entry, GRACE_US, Pending};
pub use room::{Room, RoomPlace, RoomStat};
