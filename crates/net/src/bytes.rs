//! Fields of messages: little-endian numbers, bytes of a known length, structures of both, and
//! texts behind their length. They are read from somebody who may be lying.

/// Something of a known length.
pub(crate) trait Field: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn take(reader: &mut Reader<'_>) -> Option<Self>;
}

/// Takes fields off the front of bytes that may be too short for them.
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    pub fn get<F: Field>(&mut self) -> Option<F> {
        F::take(self)
    }

    /// A length of two bytes, then as many bytes.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let len: u16 = self.get()?;
        self.take(len.into())
    }

    /// What was read, if nothing is left.
    pub fn whole<T>(&self, read: T) -> Option<T> {
        self.0.is_empty().then_some(read)
    }
}

impl<const N: usize> Field for [u8; N] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend(self);
    }

    fn take(reader: &mut Reader<'_>) -> Option<[u8; N]> {
        let (taken, rest) = reader.0.split_first_chunk()?;
        reader.0 = rest;
        Some(*taken)
    }
}

macro_rules! numbers {
    ($($number:ty),*) => { $(
        impl Field for $number {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }

            fn take(reader: &mut Reader<'_>) -> Option<$number> {
                reader.get().map(<$number>::from_le_bytes)
            }
        }
    )* };
}
numbers!(u8, u16, u32, u64);

macro_rules! tuples {
    ($(($($name:ident $at:tt),*))*) => { $(
        impl<$($name: Field),*> Field for ($($name,)*) {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$at.put(out);)*
            }

            fn take(reader: &mut Reader<'_>) -> Option<Self> {
                Some(($($name::take(reader)?,)*))
            }
        }
    )* };
}
tuples! {
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
}

/// Makes a structure a field: its own fields, in the order in which they are named here.
macro_rules! fields {
    ($name:ident { $($field:ident),* }) => {
        impl $crate::bytes::Field for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $($crate::bytes::Field::put(&self.$field, out);)*
            }

            fn take(reader: &mut $crate::bytes::Reader<'_>) -> Option<$name> {
                Some($name { $($field: reader.get()?),* })
            }
        }
    };
}
pub(crate) use fields;

/// Makes an enumeration of codes, with the code that each has on the wire.
macro_rules! codes {
    ($(#[$about:meta])* $vis:vis enum $name:ident: $number:ty { $($(#[$doc:meta])* $code:ident = $value:literal,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr($number)]
        $vis enum $name {
            $($(#[$doc])* $code = $value,)*
        }

        impl $name {
            /// `None`: no code has this number.
            fn of(number: $number) -> Option<$name> {
                match number {
                    $($value => Some($name::$code),)*
                    _ => None,
                }
            }
        }
    };
}
pub(crate) use codes;

/// Appends a length of two bytes, then as many of `bytes` as `bytes_max` allows.
pub(crate) fn put_bytes(bytes: &[u8], bytes_max: u16, out: &mut Vec<u8>) {
    let len = bytes.len().min(bytes_max.into());
    (len as u16).put(out);
    out.extend(&bytes[..len]);
}

/// Bytes of a text for people at most.
const TEXT_BYTES_MAX: u16 = 256;

/// Appends a text for people, as much of it as is read.
pub(crate) fn put_text(text: &str, out: &mut Vec<u8>) {
    put_bytes(text.as_bytes(), TEXT_BYTES_MAX, out);
}

/// A text for people that is all there is. What is not UTF-8 is shown as such.
pub(crate) fn parse_text(reader: &mut Reader<'_>) -> Option<String> {
    let text = reader.bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned())?;
    reader.whole(text)
}

/// 16 bytes that nobody else has drawn. Fails when the system has no random bytes.
pub(crate) fn random() -> std::io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if filled == bytes.len() { Ok(bytes) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
}
