//! Records of the journal: each is a change to what the log holds, in 64 bytes. This file knows the
//! changes and their bytes.
//!
//! ```text
//!  0  kind       u8
//!  1  flags      u8      1: moved from another slot
//!  2  tenant     u16
//!  4  segment    u32
//!  8  sequence   u64     the segment's generation
//! 16  slot       u16
//! 18  slots      u16     of a segment that is opened
//! 20  from       u32 segment, u16 slot: where a moved chunk was
//! 26  zero       6 bytes
//! 32  id         32 bytes
//! ```

use super::page::{Damaged, Fields, Parser, check};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;

pub(crate) const RECORD_BYTES: usize = 64;

const MOVED: u8 = 1;

/// A slot of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotRef {
    pub segment: u32,
    pub slot: u16,
}

/// A change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// A segment begins a new generation. Whatever it held is gone.
    Opened { segment: u32, sequence: u64, slots: u16 },
    /// A chunk rests in a slot: its bytes and its footer are durable.
    Stored {
        tenant: TenantId,
        id: ChunkId,
        at: SlotRef,
        sequence: u64,
        /// Where it was until now, if it was relocated.
        moved_from: Option<SlotRef>,
    },
    /// A slot's chunk is gone.
    Forgotten { id: ChunkId, at: SlotRef, sequence: u64 },
    /// A segment takes no more chunks.
    Sealed { segment: u32, sequence: u64 },
    /// A segment holds nothing any more and may be opened.
    Freed {
        segment: u32,
        /// The generation that ended.
        sequence: u64,
    },
    /// The space of a free segment is given back to the file system.
    Withdrawn { segment: u32 },
    /// A withdrawn segment has space again.
    Restored { segment: u32 },
    /// All chunks of a tenant are gone, and their bytes are to be overwritten.
    TenantDoomed { tenant: TenantId },
    /// The bytes of a doomed tenant are overwritten.
    TenantGone { tenant: TenantId },
}

/// All fields, whether the kind uses them or not.
#[derive(Debug, Clone, Copy, Default)]
struct Raw {
    kind: u8,
    flags: u8,
    tenant: u16,
    segment: u32,
    sequence: u64,
    slot: u16,
    slots: u16,
    from_segment: u32,
    from_slot: u16,
    id: [u8; 32],
}

impl Record {
    pub(crate) fn encode(&self, fields: &mut Fields) {
        let raw = self.raw();
        fields.u8(raw.kind).u8(raw.flags).u16(raw.tenant).u32(raw.segment).u64(raw.sequence);
        fields.u16(raw.slot).u16(raw.slots).u32(raw.from_segment).u16(raw.from_slot);
        fields.bytes(&[0; 6]).bytes(&raw.id);
    }

    pub(crate) fn parse(fields: &mut Parser<'_>) -> Result<Record, Damaged> {
        let mut raw = Raw {
            kind: fields.u8()?,
            flags: fields.u8()?,
            tenant: fields.u16()?,
            segment: fields.u32()?,
            sequence: fields.u64()?,
            slot: fields.u16()?,
            slots: fields.u16()?,
            from_segment: fields.u32()?,
            from_slot: fields.u16()?,
            id: [0; 32],
        };
        fields.slice(6)?;
        raw.id = fields.bytes()?;
        raw.record()
    }

    fn raw(&self) -> Raw {
        let none = Raw::default();
        match *self {
            Record::Opened { segment, sequence, slots } => Raw { kind: 1, segment, sequence, slots, ..none },
            Record::Stored { tenant: TenantId(tenant), id, at, sequence, moved_from } => {
                let SlotRef { segment, slot } = at;
                let from = moved_from.unwrap_or(SlotRef { segment: 0, slot: 0 });
                let flags = moved_from.map_or(0, |_| MOVED);
                let (from_segment, from_slot) = (from.segment, from.slot);
                let id = *id.as_bytes();
                Raw { kind: 2, flags, tenant, segment, sequence, slot, from_segment, from_slot, id, ..none }
            }
            Record::Forgotten { id, at: SlotRef { segment, slot }, sequence } => {
                Raw { kind: 3, segment, sequence, slot, id: *id.as_bytes(), ..none }
            }
            Record::Sealed { segment, sequence } => Raw { kind: 4, segment, sequence, ..none },
            Record::Freed { segment, sequence } => Raw { kind: 5, segment, sequence, ..none },
            Record::Withdrawn { segment } => Raw { kind: 6, segment, ..none },
            Record::Restored { segment } => Raw { kind: 7, segment, ..none },
            Record::TenantDoomed { tenant: TenantId(tenant) } => Raw { kind: 8, tenant, ..none },
            Record::TenantGone { tenant: TenantId(tenant) } => Raw { kind: 9, tenant, ..none },
        }
    }
}

impl Raw {
    fn record(self) -> Result<Record, Damaged> {
        let Raw { kind, flags, segment, sequence, slot, slots, .. } = self;
        let (tenant, id) = (TenantId(self.tenant), ChunkId::from_bytes(self.id));
        let at = SlotRef { segment, slot };
        let from = SlotRef { segment: self.from_segment, slot: self.from_slot };
        check("flags", flags, flags & !MOVED == 0, "0 or 1")?;
        Ok(match kind {
            1 => Record::Opened { segment, sequence, slots },
            2 => {
                let moved_from = (flags & MOVED != 0).then_some(from);
                Record::Stored { tenant, id, at, sequence, moved_from }
            }
            3 => Record::Forgotten { id, at, sequence },
            4 => Record::Sealed { segment, sequence },
            5 => Record::Freed { segment, sequence },
            6 => Record::Withdrawn { segment },
            7 => Record::Restored { segment },
            8 => Record::TenantDoomed { tenant },
            9 => Record::TenantGone { tenant },
            _ => {
                let allowed = "1 to 9".to_owned();
                return Err(Damaged::Field { field: "record kind", value: kind.into(), allowed });
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_record() -> impl Strategy<Value = Record> {
        let at = (any::<u32>(), any::<u16>()).prop_map(|(segment, slot)| SlotRef { segment, slot });
        let id = any::<[u8; 32]>().prop_map(ChunkId::from_bytes);
        let tenant = any::<u16>().prop_map(TenantId);
        prop_oneof![
            (any::<u32>(), any::<u64>(), any::<u16>())
                .prop_map(|(segment, sequence, slots)| Record::Opened { segment, sequence, slots }),
            (tenant.clone(), id.clone(), at.clone(), any::<u64>(), prop::option::of(at.clone())).prop_map(
                |(tenant, id, at, sequence, moved_from)| Record::Stored {
                    tenant,
                    id,
                    at,
                    sequence,
                    moved_from
                }
            ),
            (id, at, any::<u64>()).prop_map(|(id, at, sequence)| Record::Forgotten { id, at, sequence }),
            (any::<u32>(), any::<u64>()).prop_map(|(segment, sequence)| Record::Sealed { segment, sequence }),
            (any::<u32>(), any::<u64>()).prop_map(|(segment, sequence)| Record::Freed { segment, sequence }),
            any::<u32>().prop_map(|segment| Record::Withdrawn { segment }),
            any::<u32>().prop_map(|segment| Record::Restored { segment }),
            tenant.clone().prop_map(|tenant| Record::TenantDoomed { tenant }),
            tenant.prop_map(|tenant| Record::TenantGone { tenant }),
        ]
    }

    proptest! {
        #[test]
        fn records_survive_the_disk_in_64_bytes(record in any_record()) {
            let mut fields = Fields::new();
            record.encode(&mut fields);
            let bytes = fields.finish();
            prop_assert_eq!(bytes.len(), RECORD_BYTES);
            prop_assert_eq!(Record::parse(&mut Parser::new(&bytes)), Ok(record));
        }

        #[test]
        fn any_bytes_give_a_record_or_a_reason(bytes in any::<[u8; RECORD_BYTES]>()) {
            let _ = Record::parse(&mut Parser::new(&bytes));
        }
    }
}
