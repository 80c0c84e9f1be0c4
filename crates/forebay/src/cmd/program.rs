//! Whether a program can have the preload library: what its file says of the dynamic linker that will start it. Pure but for reading
//! files. It knows ELF's first headers and scripts' first lines; it must never start anything.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The oldest C library that the preload library starts with.
pub const OLDEST_GLIBC: &str = "2.34";
/// The version's name in the dynamic linker of such a C library, as a C string.
const OLDEST_VERSION: &[u8] = b"GLIBC_2.34\0";
/// Scripts that start scripts: the kernel follows as many.
const SCRIPTS_MAX: usize = 5;
/// Of a script's first line.
const LINE_BYTES: usize = 256;

const ELF: &[u8; 4] = b"\x7fELF";
const CLASS_64: u8 = 2;
const PT_INTERP: u32 = 3;

/// Why a program cannot have the preload library.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// There is no dynamic linker that would load it.
    #[error("{} is linked statically, so that LD_PRELOAD does nothing in it", .0.display())]
    Static(PathBuf),
    /// The library is for 64 bits.
    #[error("{} is a program of 32 bits, and the preload library has 64", .0.display())]
    Narrow(PathBuf),
    /// It would not start.
    #[error("{} is linked with musl ({}), and the preload library needs glibc", .program.display(), .linker.display())]
    Musl { program: PathBuf, linker: PathBuf },
    /// It would not start.
    #[error(
        "{} is started by {}, which is older than glibc {OLDEST_GLIBC}; the preload library needs that or a newer one",
        .program.display(), .linker.display()
    )]
    Old { program: PathBuf, linker: PathBuf },
}

/// Finds out whether a program, found as `exec` finds it, can have the preload library. What cannot be read or understood is
/// left to `exec`.
pub fn check(program: &OsStr, path: Option<&OsStr>) -> Result<(), Unfit> {
    let Some(mut file) = find(program, path) else { return Ok(()) };
    for _ in 0..SCRIPTS_MAX {
        let Ok(mut opened) = File::open(&file) else { return Ok(()) };
        match script(&mut opened, path) {
            Ok(Some(next)) => file = next,
            Ok(None) => return elf(&file, &mut opened),
            Err(_) => return Ok(()),
        }
    }
    Ok(())
}

/// The file of a program: itself where its name is a path, else the first in the folders of `path`.
fn find(program: &OsStr, path: Option<&OsStr>) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    std::env::split_paths(path?).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// What a script is run by; for `env`, what that runs.
fn script(file: &mut File, path: Option<&OsStr>) -> io::Result<Option<PathBuf>> {
    let mut line = Vec::new();
    file.by_ref().take(LINE_BYTES as u64).read_to_end(&mut line)?;
    let Some(line) = line.strip_prefix(b"#!") else { return Ok(None) };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
    let Some(interpreter) = words.next().map(|word| PathBuf::from(OsStr::from_bytes(word))) else {
        return Ok(None);
    };
    let run_by_env = words.map(OsStr::from_bytes).find(|word| !word.as_bytes().starts_with(b"-"));
    match run_by_env.filter(|_| interpreter.file_name() == Some(OsStr::new("env"))) {
        Some(program) => Ok(find(program, path).or(Some(interpreter))),
        None => Ok(Some(interpreter)),
    }
}

/// Of a file that is no script.
fn elf(program: &Path, file: &mut File) -> Result<(), Unfit> {
    let Ok(Some(headers)) = headers(file) else { return Ok(()) };
    let program = program.to_path_buf();
    match headers {
        Headers::Narrow => Err(Unfit::Narrow(program)),
        Headers::Linker(linker) if linker.as_os_str().as_bytes().windows(4).any(|part| part == b"musl") => {
            Err(Unfit::Musl { program, linker })
        }
        Headers::Linker(linker) => match std::fs::read(&linker) {
            Ok(bytes) if !bytes.windows(OLDEST_VERSION.len()).any(|part| part == OLDEST_VERSION) => {
                Err(Unfit::Old { program, linker })
            }
            _ => Ok(()),
        },
        Headers::None => Err(Unfit::Static(program)),
    }
}

/// What an ELF file says of its dynamic linker.
enum Headers {
    /// Which one.
    Linker(PathBuf),
    /// There is none.
    None,
    /// It is of 32 bits.
    Narrow,
}

/// `None`: no ELF file, or one that is not understood.
fn headers(file: &mut File) -> io::Result<Option<Headers>> {
    let mut header = [0; 64];
    file.seek(SeekFrom::Start(0))?;
    file.read_exact(&mut header)?;
    if header[..4] != *ELF || header[5] != 1 {
        return Ok(None);
    }
    if header[4] != CLASS_64 {
        return Ok(Some(Headers::Narrow));
    }
    let (start, size, count) = (word(&header, 32), short(&header, 54), short(&header, 56));
    if size < 56 {
        return Ok(None);
    }
    for nth in 0..u64::from(count) {
        let mut entry = [0; 56];
        file.seek(SeekFrom::Start(start + nth * u64::from(size)))?;
        file.read_exact(&mut entry)?;
        let kind = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
        if kind == PT_INTERP {
            let (offset, bytes) = (word(&entry, 8), word(&entry, 32).min(4096));
            let mut name = Vec::new();
            file.seek(SeekFrom::Start(offset))?;
            file.by_ref().take(bytes).read_to_end(&mut name)?;
            name.retain(|byte| *byte != 0);
            return Ok(Some(Headers::Linker(OsString::from(OsStr::from_bytes(&name)).into())));
        }
    }
    // A dynamic linker itself, or a static program whose place is not fixed: either way nobody loads libraries first.
    Ok(Some(Headers::None))
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn short(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// An ELF file of 64 bits whose only program header is of a kind, and what that says.
    fn made(kind: u32, says: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 120];
        file[..4].copy_from_slice(ELF);
        (file[4], file[5]) = (CLASS_64, 1);
        file[32] = 64;
        file[54] = 56;
        file[56] = 1;
        file[64..68].copy_from_slice(&kind.to_le_bytes());
        file[72] = 120;
        file[96] = says.len() as u8;
        file.extend(says);
        file
    }

    fn put(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
        let file = folder.join(name);
        std::fs::write(&file, bytes).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        file
    }

    #[test]
    fn programs_that_would_not_start_or_not_be_caught_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let (old, new) =
            (put(folder, "ld-old.so", b"GLIBC_2.31\0"), put(folder, "ld-new.so", OLDEST_VERSION));
        let linked = |name: &str, linker: &Path| {
            let mut says = linker.as_os_str().as_bytes().to_vec();
            says.push(0);
            put(folder, name, &made(PT_INTERP, &says))
        };
        let musl = PathBuf::from("/lib/ld-musl-x86_64.so.1");
        let (of_new, of_old, of_musl) = (linked("new", &new), linked("old", &old), linked("musl", &musl));
        let fixed = put(folder, "static", &made(1, b""));
        let mut narrow = made(PT_INTERP, b"/lib/ld-linux.so.2\0");
        narrow[4] = 1;
        let narrow = put(folder, "narrow", &narrow);
        let script = put(folder, "script", b"#!/usr/bin/env -S static --option\n");
        let by_path = put(folder, "by-path", format!("#! {}\n", of_musl.display()).as_bytes());
        let path = Some(folder.as_os_str());
        for (program, expected) in [
            (of_new.as_os_str(), Ok(())),
            (OsStr::new("new"), Ok(())),
            (OsStr::new("old"), Err(Unfit::Old { program: of_old.clone(), linker: old })),
            (of_musl.as_os_str(), Err(Unfit::Musl { program: of_musl.clone(), linker: musl.clone() })),
            (by_path.as_os_str(), Err(Unfit::Musl { program: of_musl.clone(), linker: musl })),
            (fixed.as_os_str(), Err(Unfit::Static(fixed.clone()))),
            (script.as_os_str(), Err(Unfit::Static(fixed.clone()))),
            (narrow.as_os_str(), Err(Unfit::Narrow(narrow.clone()))),
            // What exec says of these is right.
            (OsStr::new("nowhere"), Ok(())),
            (OsStr::new("/nowhere/at/all"), Ok(())),
            (put(folder, "empty", b"").as_os_str(), Ok(())),
            (put(folder, "short", b"\x7fELF").as_os_str(), Ok(())),
        ] {
            assert_eq!(check(program, path), expected, "{program:?}");
        }
    }

    #[test]
    fn programs_of_this_host_can_have_it() {
        let path = std::env::var_os("PATH");
        assert_eq!(check(OsStr::new("sh"), path.as_deref()), Ok(()));
    }

    #[test]
    fn a_script_that_runs_itself_ends() {
        let folder = tempfile::tempdir().unwrap();
        let itself = folder.path().join("itself");
        put(folder.path(), "itself", format!("#!{}\n", itself.display()).as_bytes());
        assert_eq!(check(itself.as_os_str(), None), Ok(()));
    }
}
