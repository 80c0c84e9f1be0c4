//! Whether a program can have the preload library: what its file says of the dynamic linker that
//! will start it, and what the library's says of the glibc that it needs. Pure but for reading
//! files.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Scripts that start scripts: the kernel follows as many.
const SCRIPTS_MAX: usize = 5;
/// Of a script's first line.
const LINE_BYTES: usize = 256;

const ELF: &[u8; 4] = b"\x7fELF";
const CLASS_64: u8 = 2;
const PT_INTERP: u32 = 3;
const SHT_DYNSYM: u32 = 11;
/// The C library, which lies beside its dynamic linker.
const LIBC: &str = "libc.so.6";
/// What the names of glibc's versions of symbols begin with.
const GLIBC: &str = "GLIBC_";

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
        "{} is started with {}, whose symbols end at glibc {has}; the preload library needs glibc {needs} or later",
        .program.display(), .libc.display()
    )]
    Old { program: PathBuf, libc: PathBuf, has: Version, needs: Version },
}

/// A version of glibc's symbols: 2.17 is `[2, 17]`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(Vec<u32>);

impl std::str::FromStr for Version {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Version, Self::Err> {
        text.split('.').map(str::parse).collect::<Result<_, _>>().map(Version)
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<_> = self.0.iter().map(u32::to_string).collect();
        to.write_str(&parts.join("."))
    }
}

/// Finds out whether a program, found as `exec` finds it, can have the preload library. What cannot
/// be read or understood is left to `exec`.
pub fn check(program: &OsStr, path: Option<&OsStr>, library: &Path) -> Result<(), Unfit> {
    let Some(mut file) = find(program, path) else { return Ok(()) };
    for _ in 0..SCRIPTS_MAX {
        let Ok(mut opened) = File::open(&file) else { return Ok(()) };
        match script(&mut opened, path) {
            Ok(Some(next)) => file = next,
            Ok(None) => return elf(&file, &mut opened, library),
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
fn elf(program: &Path, file: &mut File, library: &Path) -> Result<(), Unfit> {
    let Ok(Some(headers)) = headers(file) else { return Ok(()) };
    let program = program.to_path_buf();
    match headers {
        Headers::Narrow => Err(Unfit::Narrow(program)),
        Headers::Linker(linker) if linker.as_os_str().as_bytes().windows(4).any(|part| part == b"musl") => {
            Err(Unfit::Musl { program, linker })
        }
        Headers::Linker(linker) => new_enough(program, &linker, library),
        Headers::None => Err(Unfit::Static(program)),
    }
}

/// The version of glibc that a program is started with, and the one that a library needs, as far as
/// their files say so.
pub fn glibc(program: &Path, library: &Path) -> Option<(Version, Version)> {
    let Headers::Linker(linker) = headers(&mut File::open(program).ok()?).ok()?? else { return None };
    Some((newest_version(&libc_beside(&linker)?)?, newest_version(library)?))
}

fn libc_beside(linker: &Path) -> Option<PathBuf> {
    linker.canonicalize().ok().map(|linker| linker.with_file_name(LIBC))
}

/// Of a program that glibc's dynamic linker starts.
fn new_enough(program: PathBuf, linker: &Path, library: &Path) -> Result<(), Unfit> {
    let Some(libc) = libc_beside(linker) else { return Ok(()) };
    match (newest_version(&libc), newest_version(library)) {
        (Some(has), Some(needs)) if has < needs => Err(Unfit::Old { program, libc, has, needs }),
        _ => Ok(()),
    }
}

/// The newest version of glibc's symbols that a library has or needs. Both are in the strings of
/// its dynamic symbols, where a library's own constants are not.
fn newest_version(library: &Path) -> Option<Version> {
    let bytes = std::fs::read(library).ok()?;
    if bytes.get(..6)? != [ELF.as_slice(), &[CLASS_64, 1]].concat() {
        return None;
    }
    let start = usize::try_from(word(bytes.get(40..48)?, 0)).ok()?;
    let size = usize::from(short(bytes.get(58..60)?, 0));
    let section = |nth: usize| bytes.get(start.checked_add(nth * size)?..)?.get(..64);
    let count = usize::from(short(bytes.get(60..62)?, 0));
    let symbols = (0..count).filter_map(section).find(|section| int(section, 4) == SHT_DYNSYM)?;
    let strings = section(usize::try_from(int(symbols, 40)).ok()?)?;
    let [from, length] = [24, 32].map(|at| usize::try_from(word(strings, at)).ok());
    let strings = bytes.get(from?..)?.get(..length?)?;
    strings.split(|byte| *byte == 0).filter_map(version).max()
}

/// `GLIBC_2.17`, but not `GLIBC_PRIVATE`.
fn version(name: &[u8]) -> Option<Version> {
    std::str::from_utf8(name).ok()?.strip_prefix(GLIBC)?.parse().ok()
}

/// What an ELF file says of its dynamic linker.
enum Headers {
    Linker(PathBuf),
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
        if int(&entry, 0) == PT_INTERP {
            let (offset, bytes) = (word(&entry, 8), word(&entry, 32).min(4096));
            let mut name = Vec::new();
            file.seek(SeekFrom::Start(offset))?;
            file.by_ref().take(bytes).read_to_end(&mut name)?;
            name.retain(|byte| *byte != 0);
            return Ok(Some(Headers::Linker(OsString::from(OsStr::from_bytes(&name)).into())));
        }
    }
    // A dynamic linker itself, or a static program whose place is not fixed: either way nobody
    // loads libraries first.
    Ok(Some(Headers::None))
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn int(bytes: &[u8], at: usize) -> u32 {
    let mut int = [0; 4];
    int.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(int)
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

    /// An ELF file of 64 bits that names versions of glibc's symbols, and others where it has
    /// constants.
    fn naming(versions: &str) -> Vec<u8> {
        let mut file = vec![0; 64 + 3 * 64];
        file[..4].copy_from_slice(ELF);
        (file[4], file[5]) = (CLASS_64, 1);
        (file[40], file[58], file[60]) = (64, 64, 3);
        let (symbols, strings) = (64 + 64, 64 + 2 * 64);
        (file[symbols + 4], file[symbols + 40]) = (SHT_DYNSYM as u8, 2);
        file[strings + 24..strings + 26].copy_from_slice(&256_u16.to_le_bytes());
        file[strings + 32] = versions.len() as u8;
        file.extend(versions.bytes());
        file.extend(b"\0GLIBC_9.99\0");
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
        let [old, new] = ["old", "new"].map(|name| folder.join(format!("libc-{name}")));
        for (folder, versions) in [
            (&old, "\0GLIBC_2.2.5\0GLIBC_2.9\0GLIBC_2.16\0GLIBC_PRIVATE\0"),
            (&new, "\0GLIBC_2.2.5\0GLIBC_2.17\0GLIBC_2.36\0GLIBC_ABI_DT_RELR\0"),
        ] {
            std::fs::create_dir(folder).unwrap();
            put(folder, "ld.so", b"");
            put(folder, LIBC, &naming(versions));
        }
        let library = put(folder, "preload.so", &naming("\0dlsym\0GLIBC_2.17\0GLIBC_2.2.5\0"));
        let linked = |name: &str, linker: &Path| {
            let mut says = linker.as_os_str().as_bytes().to_vec();
            says.push(0);
            put(folder, name, &made(PT_INTERP, &says))
        };
        let musl = PathBuf::from("/lib/ld-musl-x86_64.so.1");
        let (of_new, of_old, of_musl) =
            (linked("new", &new.join("ld.so")), linked("old", &old.join("ld.so")), linked("musl", &musl));
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
            (
                OsStr::new("old"),
                Err(Unfit::Old {
                    program: of_old.clone(),
                    libc: old.canonicalize().unwrap().join(LIBC),
                    has: Version(vec![2, 16]),
                    needs: Version(vec![2, 17]),
                }),
            ),
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
            assert_eq!(check(program, path, &library), expected, "{program:?}");
        }
    }

    #[test]
    fn programs_of_this_host_can_have_it() {
        let path = std::env::var_os("PATH");
        let this = std::env::current_exe().unwrap();
        assert_eq!(check(OsStr::new("sh"), path.as_deref(), &this), Ok(()));
        let (has, needs) = glibc(&this, &this).unwrap();
        assert!(has >= needs && needs >= Version(vec![2, 17]), "{has} {needs}");
    }

    #[test]
    fn a_script_that_runs_itself_ends() {
        let folder = tempfile::tempdir().unwrap();
        let itself = folder.path().join("itself");
        put(folder.path(), "itself", format!("#!{}\n", itself.display()).as_bytes());
        assert_eq!(check(itself.as_os_str(), None, Path::new("/nowhere")), Ok(()));
    }
}
