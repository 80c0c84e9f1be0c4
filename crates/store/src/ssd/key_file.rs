//! The file that tenants' keys are read from. It knows the file's form, and that nobody but its
//! owner may read it; it must never show what a line holds, not even one that is wrong.
//!
//! ```text
//! # tenant, then 32 bytes in hexadecimal
//! 7  000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f
//! ```

use super::crypt::{KEY_BYTES, TenantKeys};
use crate::tenant::TenantId;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use thiserror::Error;
use zeroize::Zeroizing;

/// A key file is at most so long: a line for every tenant there can be, and as much again.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Debug, Error)]
pub enum KeysNotRead {
    #[error("key file {}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("key file {} is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    /// Others than its owner may read or change it.
    #[error(
        "key file {} has mode {mode:04o}, allowed are 0600 and 0400: `chmod 600 {}`, and make new keys if others may \
         have read it",
        path.display(), path.display()
    )]
    OpenToOthers { path: PathBuf, mode: u32 },
    #[error("key file {} has {bytes} bytes, allowed are {MAX_BYTES}", path.display())]
    TooLong { path: PathBuf, bytes: u64 },
    /// A line that does not say a tenant and a key.
    #[error("key file {}, line {number}: {problem}", path.display())]
    Line {
        path: PathBuf,
        /// Which line, from 1.
        number: usize,
        problem: LineProblem,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LineProblem {
    #[error("a line is a tenant and a key, with spaces between them")]
    Words,
    #[error("the tenant is not a number from 0 to 65534")]
    Tenant,
    #[error("the key is not 64 hexadecimal digits")]
    Key,
    #[error("tenant {} has a key already", .0.0)]
    Twice(TenantId),
}

impl TenantKeys {
    /// Reads a key file, which must be its owner's alone (mode 0600 or 0400).
    pub fn from_file(path: &Path) -> Result<TenantKeys, KeysNotRead> {
        let io = |error| KeysNotRead::Io { path: path.into(), error };
        let mut file = File::open(path).map_err(io)?;
        // Of the file that was opened: the path may be another one's by now.
        let facts = file.metadata().map_err(io)?;
        if !facts.is_file() {
            return Err(KeysNotRead::NotAFile { path: path.into() });
        }
        let mode = facts.permissions().mode() & 0o7777;
        if mode & 0o177 != 0 {
            return Err(KeysNotRead::OpenToOthers { path: path.into(), mode });
        }
        if facts.len() > MAX_BYTES {
            return Err(KeysNotRead::TooLong { path: path.into(), bytes: facts.len() });
        }
        // Long enough from the start, so that no copy of it is left behind where it grew.
        let mut text = Zeroizing::new(vec![0; facts.len() as usize]);
        file.read_exact(&mut text).map_err(io)?;
        let at_line = |(number, problem)| KeysNotRead::Line { path: path.into(), number, problem };
        parse(&text).map_err(at_line)
    }
}

/// The keys that these lines say, or the number of a line and what is wrong with it.
fn parse(text: &[u8]) -> Result<TenantKeys, (usize, LineProblem)> {
    let mut keys = TenantKeys::default();
    for (line, number) in text.split(|byte| *byte == b'\n').zip(1..) {
        if let Some((tenant, key)) = parse_line(line).map_err(|problem| (number, problem))? {
            if keys.has(tenant) {
                return Err((number, LineProblem::Twice(tenant)));
            }
            keys.insert(tenant, *key);
        }
    }
    Ok(keys)
}

type TenantAndKey = (TenantId, Zeroizing<[u8; KEY_BYTES]>);

/// What a line says, or nothing if it is empty or a comment.
fn parse_line(line: &[u8]) -> Result<Option<TenantAndKey>, LineProblem> {
    let line = line.trim_ascii();
    if line.is_empty() || line[0] == b'#' {
        return Ok(None);
    }
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let (Some(tenant), Some(hex), None) = (words.next(), words.next(), words.next()) else {
        return Err(LineProblem::Words);
    };
    let tenant = str::from_utf8(tenant).ok().and_then(|word| word.parse().ok()).map(TenantId);
    let tenant = tenant.filter(|tenant| *tenant != TenantId::NOBODY).ok_or(LineProblem::Tenant)?;
    Ok(Some((tenant, key(hex).ok_or(LineProblem::Key)?)))
}

fn key(hex: &[u8]) -> Option<Zeroizing<[u8; KEY_BYTES]>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    let (pairs, []) = hex.as_chunks::<2>() else { return None };
    if pairs.len() != KEY_BYTES {
        return None;
    }
    for (byte, [high, low]) in key.iter_mut().zip(pairs) {
        *byte = (digit(*high)? << 4 | digit(*low)?) as u8;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs::Permissions;

    const HEX: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F";

    /// What comes of a file with these lines and this mode.
    fn read(text: &str, mode: u32) -> Result<TenantKeys, KeysNotRead> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        TenantKeys::from_file(&path)
    }

    #[test]
    fn a_key_file_gives_its_tenants_keys() {
        let keys = read(&format!("# comment\n\n7 {HEX}\n  65534\t{HEX}\r\n"), 0o600).unwrap();
        assert_eq!(keys.len(), 2);
        assert!(keys.has(TenantId(7)) && keys.has(TenantId(65534)) && !keys.has(TenantId(0)));
        assert!(read("", 0o400).unwrap().is_empty());
        assert_eq!(*key(HEX.as_bytes()).unwrap(), std::array::from_fn(|byte| byte as u8));
    }

    #[test]
    fn a_file_that_others_may_read_is_refused() {
        for mode in [0o640, 0o604, 0o620, 0o700] {
            let refused = read(HEX, mode).unwrap_err();
            assert!(
                matches!(refused, KeysNotRead::OpenToOthers { mode: found, .. } if found == mode),
                "{refused}"
            );
        }
    }

    #[test]
    fn a_wrong_line_is_named_and_its_key_is_not_shown() {
        let cases = [
            (format!("\n{HEX}"), 2, LineProblem::Words),
            (format!("1 {HEX} {HEX}"), 1, LineProblem::Words),
            (format!("65535 {HEX}"), 1, LineProblem::Tenant),
            (format!("65536 {HEX}"), 1, LineProblem::Tenant),
            (format!("-1 {HEX}"), 1, LineProblem::Tenant),
            (format!("1 {}", &HEX[1..]), 1, LineProblem::Key),
            (format!("1 {HEX}00"), 1, LineProblem::Key),
            (format!("1 {}g", &HEX[1..]), 1, LineProblem::Key),
            (format!("1 {HEX}\n1 {HEX}"), 2, LineProblem::Twice(TenantId(1))),
        ];
        for (text, at, expected) in cases {
            let refused = read(&text, 0o600).unwrap_err();
            let KeysNotRead::Line { number, problem, .. } = &refused else { panic!("{refused}") };
            assert_eq!((*number, *problem), (at, expected), "{text}");
            assert!(!format!("{refused} {refused:?}").contains(&HEX[2..20]));
        }
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let refused = TenantKeys::from_file(directory.path()).unwrap_err();
        assert!(matches!(refused, KeysNotRead::NotAFile { .. }), "{refused}");
        let missing = TenantKeys::from_file(&directory.path().join("none")).unwrap_err();
        assert!(missing.to_string().contains("none"), "{missing}");
    }

    proptest! {
        #[test]
        fn any_bytes_give_keys_or_a_reason(text in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&text);
        }
    }
}
