//! Statuses that the controller gives, with the codes of the specification.

/// Status code, its type above it, and Do Not Retry: the bits of a completion above the phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(pub u16);

const DO_NOT_RETRY: u16 = 1 << 14;

const fn generic(code: u16) -> Status {
    Status(code | DO_NOT_RETRY)
}

const fn specific(code: u16) -> Status {
    Status(1 << 8 | code | DO_NOT_RETRY)
}

impl Status {
    pub const SUCCESS: Status = Status(0);
    pub const INVALID_OPCODE: Status = generic(0x01);
    pub const INVALID_FIELD: Status = generic(0x02);
    pub const COMMAND_ID_CONFLICT: Status = generic(0x03);
    pub const DATA_TRANSFER_ERROR: Status = generic(0x04);
    /// May be tried again.
    pub const INTERNAL_ERROR: Status = Status(0x06);
    pub const ABORTED_SQ_DELETION: Status = Status(0x08);
    pub const INVALID_NAMESPACE: Status = generic(0x0b);
    pub const COMMAND_SEQUENCE_ERROR: Status = generic(0x0c);
    pub const INVALID_SGL_SEGMENT: Status = generic(0x0d);
    pub const INVALID_SGL_COUNT: Status = generic(0x0e);
    pub const SGL_LENGTH_INVALID: Status = generic(0x0f);
    pub const SGL_TYPE_INVALID: Status = generic(0x11);
    pub const PRP_OFFSET_INVALID: Status = generic(0x13);
    pub const SGL_GRANULARITY_INVALID: Status = generic(0x1e);
    pub const LBA_OUT_OF_RANGE: Status = generic(0x80);
    pub const INVALID_COMPLETION_QUEUE: Status = specific(0x00);
    pub const INVALID_QUEUE_ID: Status = specific(0x01);
    pub const INVALID_QUEUE_SIZE: Status = specific(0x02);
    pub const INVALID_INTERRUPT_VECTOR: Status = specific(0x08);
    pub const INVALID_QUEUE_DELETION: Status = specific(0x0c);
}
