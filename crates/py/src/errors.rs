//! Errors as Python sees them: the classes of `forebay.errors`, one for each thing that a program
//! may do about it. This file knows which failure is which class.

use forebay_net::{AgentError, BadBlocks, BadRun, End, PeerError};
use forebay_transfer::Forked;
use forebay_transfer::mapped::Absent;
use pyo3::PyErr;

pyo3::import_exception!(forebay.errors, CancelledError);
pyo3::import_exception!(forebay.errors, DeadlineError);
pyo3::import_exception!(forebay.errors, ForebayError);
pyo3::import_exception!(forebay.errors, ForkedError);
pyo3::import_exception!(forebay.errors, InvalidError);
pyo3::import_exception!(forebay.errors, NoRoomError);
pyo3::import_exception!(forebay.errors, NotFoundError);
pyo3::import_exception!(forebay.errors, PeerLostError);
pyo3::import_exception!(forebay.errors, TransferError);

/// What the program has said cannot be.
pub fn invalid(why: impl ToString) -> PyErr {
    InvalidError::new_err(why.to_string())
}

/// Nothing that a program can do anything about.
pub fn failed(why: impl ToString) -> PyErr {
    ForebayError::new_err(why.to_string())
}

/// Bytes were not moved.
pub fn not_moved(why: impl ToString) -> PyErr {
    TransferError::new_err(why.to_string())
}

/// Why an agent did not do what it was told.
pub fn of_agent(error: AgentError) -> PyErr {
    let why = error.to_string();
    match error {
        AgentError::Name { .. }
        | AgentError::Unspecified { .. }
        | AgentError::Token { .. }
        | AgentError::Rails { .. }
        | AgentError::Overlap { .. }
        | AgentError::Absent(_)
        | AgentError::NoSuchDevice { .. }
        | AgentError::Metadata(_)
        | AgentError::Run(_)
        | AgentError::Sides
        | AgentError::TooLong { .. }
        | AgentError::UnderWay => InvalidError::new_err(why),
        AgentError::Blocks(BadBlocks::Outside { .. })
        | AgentError::NotRegistered { .. }
        | AgentError::NoSuchPeer { .. } => NotFoundError::new_err(why),
        AgentError::Blocks(_) => InvalidError::new_err(why),
        AgentError::Peer(trouble) => of_trouble(&trouble),
        AgentError::Forked(forked) => of_forked(forked),
        AgentError::InUse(_) | AgentError::Reached { .. } => TransferError::new_err(why),
        _ => ForebayError::new_err(why),
    }
}

/// An object of another process.
pub fn of_forked(forked: Forked) -> PyErr {
    ForkedError::new_err(forked.to_string())
}

/// Memory that is not there.
pub fn of_absent(absent: Absent) -> PyErr {
    InvalidError::new_err(format!("it cannot be registered: {absent}"))
}

/// Why a run cannot be part of a list.
pub fn of_run(error: BadRun) -> PyErr {
    of_agent(error.into())
}

/// Why something that was asked of a peer did not come about.
pub fn of_trouble(trouble: &PeerError) -> PyErr {
    classed(trouble, trouble.to_string())
}

fn classed(trouble: &PeerError, why: String) -> PyErr {
    match trouble {
        PeerError::Unreachable { .. }
        | PeerError::Restarted { .. }
        | PeerError::Removed { .. }
        | PeerError::Lost { .. }
        | PeerError::Ended => PeerLostError::new_err(why),
        PeerError::Late { .. } => DeadlineError::new_err(why),
        // What the program can do about it is what it can do about the reason.
        PeerError::NotNotified { why: reason, .. } => classed(reason, why),
        _ => TransferError::new_err(why),
    }
}

/// What an end is to somebody who wanted all of the bytes.
pub fn of_end(end: &End) -> Option<PyErr> {
    match end {
        End::Done { .. } => None,
        End::Failed { why, .. } => Some(of_trouble(why)),
        End::Cancelled { moved_bytes } => {
            Some(CancelledError::new_err(format!("cancelled after {moved_bytes} bytes")))
        }
    }
}
