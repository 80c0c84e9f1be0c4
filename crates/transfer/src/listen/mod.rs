//! What listeners have in common. Connections that have not authenticated have a small room and a
//! short time of their own, so that silent ones never keep others out. Of UNIX sockets: the file,
//! the client's credentials, and who is admitted.

mod admission;
mod credentials;
mod room;
mod socket_file;

pub use admission::{Admission, NotAdmitted};
pub use credentials::{Credentials, NotWatched, credentials};
pub use room::{Room, RoomPlace, RoomStat};
pub use socket_file::{SocketFile, bind_socket, inherit_socket};
