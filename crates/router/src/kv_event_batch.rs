//! A batch of KV events as vLLM writes it in msgpack: bytes in, changes of a cache out. Bytes come
//! from another process and may be anything.
//!
//! A batch and its events are maps, or, in older versions and in SGLang, arrays. Of an event only
//! the number of its blocks counts: hashes and tokens are passed over, unread. So nothing is
//! allocated for what a batch claims to have.

use rmp::Marker;

/// What a batch says.
#[derive(Debug, PartialEq, Eq)]
pub struct Batch {
    /// The data-parallel rank whose cache it is about.
    pub rank: u64,
    /// Those that concern the GPU's cache and groups of layers that keep all tokens.
    pub changes: Vec<Change>,
}

/// Neighbours of one kind are one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Stored { blocks: u64, block_tokens: u64, group: u64 },
    Removed { blocks: u64, group: u64 },
    Cleared,
}

/// Why bytes are no batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadBatch {
    #[error("it ends early")]
    Short,
    #[error("{field} is not {allowed}")]
    Field { field: &'static str, allowed: &'static str },
}

/// Where blocks of the engine itself are; what is in other places is passed over.
const GPU: &[u8] = b"GPU";
/// Kinds of layers that keep all tokens. Others keep a window or a state, which is no measure of
/// what is cached.
const DENSE: [&[u8]; 2] = [b"full_attention", b"mla_attention"];

pub fn read(payload: &[u8]) -> Result<Batch, BadBatch> {
    let mut reader = Reader(payload);
    let mut batch = Batch { rank: 0, changes: Vec::new() };
    for_fields(&mut reader, "a batch", |reader, field| match field {
        Field::Name(b"events") | Field::Place(1) => read_events(reader, &mut batch.changes),
        Field::Name(b"data_parallel_rank") | Field::Place(2) => {
            batch.rank = reader.number("data_parallel_rank")?.unwrap_or(0);
            Ok(())
        }
        _ => reader.skip(),
    })?;
    Ok(batch)
}

fn read_events(reader: &mut Reader, changes: &mut Vec<Change>) -> Result<(), BadBatch> {
    for _ in 0..reader.array("events")? {
        let mut event = Event::default();
        for_fields(reader, "an event", |reader, field| event.read(reader, field))?;
        if let Some(change) = event.change()? {
            push(changes, change);
        }
    }
    Ok(())
}

fn push(changes: &mut Vec<Change>, next: Change) {
    match (changes.last_mut(), next) {
        (
            Some(Change::Stored { blocks, block_tokens, group }),
            Change::Stored { blocks: more, block_tokens: tokens, group: of },
        ) if (*block_tokens, *group) == (tokens, of) => *blocks = blocks.saturating_add(more),
        (Some(Change::Removed { blocks, group }), Change::Removed { blocks: more, group: of })
            if *group == of =>
        {
            *blocks = blocks.saturating_add(more);
        }
        _ => changes.push(next),
    }
}

/// The fields of an event that count.
#[derive(Default)]
struct Event<'a> {
    kind: &'a [u8],
    blocks: Option<u64>,
    block_tokens: Option<u64>,
    medium: Option<&'a [u8]>,
    group: Option<u64>,
    layers: Option<&'a [u8]>,
}

impl<'a> Event<'a> {
    fn read(&mut self, reader: &mut Reader<'a>, field: Field) -> Result<(), BadBatch> {
        let name = match field {
            Field::Name(name) => name,
            Field::Place(place) => self.name(place),
        };
        match name {
            b"type" => self.kind = reader.text("type")?.unwrap_or_default(),
            b"block_hashes" => {
                let blocks = reader.array("block_hashes")?;
                reader.skip_all(blocks)?;
                self.blocks = Some(blocks);
            }
            b"block_size" => self.block_tokens = reader.number("block_size")?,
            b"medium" => self.medium = reader.text("medium")?,
            b"group_idx" => self.group = reader.number("group_idx")?,
            b"kv_cache_spec_kind" => self.layers = reader.text("kv_cache_spec_kind")?,
            _ => reader.skip()?,
        }
        Ok(())
    }

    /// The field in this place of an array.
    fn name(&self, place: u64) -> &'static [u8] {
        match (self.kind, place) {
            (_, 0) => b"type",
            (b"BlockStored" | b"BlockRemoved", 1) => b"block_hashes",
            (b"BlockStored", 4) => b"block_size",
            (b"BlockStored", 6) | (b"BlockRemoved", 2) => b"medium",
            (b"BlockStored", 9) | (b"BlockRemoved", 3) => b"group_idx",
            (b"BlockStored", 10) => b"kv_cache_spec_kind",
            _ => b"",
        }
    }

    /// `None` if it does not concern the cache that is counted, or is of a kind that is not known.
    fn change(&self) -> Result<Option<Change>, BadBatch> {
        let missing = |field| BadBatch::Field { field, allowed: "there" };
        let here = self.medium.is_none_or(|medium| medium == GPU);
        let dense = self.layers.is_none_or(|layers| DENSE.contains(&layers));
        let group = self.group.unwrap_or(0);
        let blocks = || self.blocks.ok_or(missing("block_hashes"));
        Ok(match self.kind {
            b"BlockStored" if here && dense => {
                let block_tokens = self.block_tokens.ok_or(missing("block_size"))?;
                Some(Change::Stored { blocks: blocks()?, block_tokens, group })
            }
            b"BlockRemoved" if here => Some(Change::Removed { blocks: blocks()?, group }),
            b"AllBlocksCleared" => Some(Change::Cleared),
            _ => None,
        })
    }
}

/// A field of a map by its name, of an array by its place.
enum Field<'a> {
    Name(&'a [u8]),
    Place(u64),
}

/// Calls `each` for each field, which is to read its value.
fn for_fields<'a>(
    reader: &mut Reader<'a>,
    what: &'static str,
    mut each: impl FnMut(&mut Reader<'a>, Field<'a>) -> Result<(), BadBatch>,
) -> Result<(), BadBatch> {
    match reader.next()? {
        Value::Map(fields) => (0..fields).try_for_each(|_| {
            let name = reader.text("a name")?.unwrap_or_default();
            each(reader, Field::Name(name))
        }),
        Value::Array(fields) => (0..fields).try_for_each(|place| each(reader, Field::Place(place))),
        _ => Err(BadBatch::Field { field: what, allowed: "a map or an array" }),
    }
}

/// A value; of arrays and maps only their length, what is in them follows.
enum Value<'a> {
    Nil,
    Number(u64),
    Text(&'a [u8]),
    Array(u64),
    Map(u64),
    Other,
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: u64) -> Result<&'a [u8], BadBatch> {
        let bytes = usize::try_from(bytes).map_err(|_| BadBatch::Short)?;
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(BadBatch::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    /// A number of so many bytes.
    fn big_endian(&mut self, bytes: u64) -> Result<u64, BadBatch> {
        Ok(self.take(bytes)?.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn next(&mut self) -> Result<Value<'a>, BadBatch> {
        let other = |bytes: Result<&[u8], BadBatch>| bytes.map(|_| Value::Other);
        let marker = Marker::from_u8(self.big_endian(1)? as u8);
        let size = match marker {
            Marker::U8 | Marker::I8 | Marker::Str8 | Marker::Bin8 | Marker::Ext8 | Marker::FixExt1 => 1,
            Marker::U16 | Marker::I16 | Marker::Str16 | Marker::Bin16 | Marker::Ext16 | Marker::FixExt2 => 2,
            Marker::Array16 | Marker::Map16 => 2,
            Marker::U32 | Marker::I32 | Marker::Str32 | Marker::Bin32 | Marker::Ext32 | Marker::FixExt4 => 4,
            Marker::Array32 | Marker::Map32 | Marker::F32 => 4,
            Marker::U64 | Marker::I64 | Marker::F64 | Marker::FixExt8 => 8,
            Marker::FixExt16 => 16,
            _ => 0,
        };
        match marker {
            Marker::Null => Ok(Value::Nil),
            Marker::FixPos(number) => Ok(Value::Number(number.into())),
            Marker::FixStr(bytes) => Ok(Value::Text(self.take(bytes.into())?)),
            Marker::FixArray(values) => Ok(Value::Array(values.into())),
            Marker::FixMap(fields) => Ok(Value::Map(fields.into())),
            Marker::True | Marker::False | Marker::FixNeg(_) => Ok(Value::Other),
            Marker::U8 | Marker::U16 | Marker::U32 | Marker::U64 => Ok(Value::Number(self.big_endian(size)?)),
            Marker::I8 | Marker::I16 | Marker::I32 | Marker::I64 => {
                let number = self.big_endian(size)?;
                let negative = number >> (8 * size - 1) == 1;
                Ok(if negative { Value::Other } else { Value::Number(number) })
            }
            Marker::F32 | Marker::F64 => other(self.take(size)),
            Marker::Str8 | Marker::Str16 | Marker::Str32 => {
                let bytes = self.big_endian(size)?;
                Ok(Value::Text(self.take(bytes)?))
            }
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => {
                let bytes = self.big_endian(size)?;
                other(self.take(bytes))
            }
            Marker::Array16 | Marker::Array32 => Ok(Value::Array(self.big_endian(size)?)),
            Marker::Map16 | Marker::Map32 => Ok(Value::Map(self.big_endian(size)?)),
            Marker::Ext8 | Marker::Ext16 | Marker::Ext32 => {
                let bytes = self.big_endian(size)?;
                other(self.take(bytes + 1))
            }
            Marker::FixExt1 | Marker::FixExt2 | Marker::FixExt4 | Marker::FixExt8 | Marker::FixExt16 => {
                other(self.take(size + 1))
            }
            Marker::Reserved => Err(BadBatch::Field { field: "a value", allowed: "msgpack" }),
        }
    }

    fn skip(&mut self) -> Result<(), BadBatch> {
        self.skip_all(1)
    }

    /// Passes over so many values, each with all that is in it.
    fn skip_all(&mut self, values: u64) -> Result<(), BadBatch> {
        let mut left = values;
        while left > 0 {
            left -= 1;
            left = left.saturating_add(match self.next()? {
                Value::Array(values) => values,
                Value::Map(fields) => 2 * fields,
                _ => 0,
            });
        }
        Ok(())
    }

    fn array(&mut self, field: &'static str) -> Result<u64, BadBatch> {
        match self.next()? {
            Value::Array(values) => Ok(values),
            _ => Err(BadBatch::Field { field, allowed: "an array" }),
        }
    }

    fn number(&mut self, field: &'static str) -> Result<Option<u64>, BadBatch> {
        match self.next()? {
            Value::Number(number) => Ok(Some(number)),
            Value::Nil => Ok(None),
            _ => Err(BadBatch::Field { field, allowed: "a count or nil" }),
        }
    }

    fn text(&mut self, field: &'static str) -> Result<Option<&'a [u8]>, BadBatch> {
        match self.next()? {
            Value::Text(text) => Ok(Some(text)),
            Value::Nil => Ok(None),
            _ => Err(BadBatch::Field { field, allowed: "text or nil" }),
        }
    }
}

#[cfg(test)]
mod tests;
