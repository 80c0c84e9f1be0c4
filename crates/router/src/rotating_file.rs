//! A file that lines are appended to, of bounded length: when it is full it becomes the file `.1`
//! beside it, in the place of the one before, and begins anew. It knows bytes and files.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The file and the one before it are each half of what both may take.
#[derive(Debug)]
pub struct RotatingFile {
    path: PathBuf,
    file: File,
    /// The line that each file begins with.
    header: Vec<u8>,
    /// What is to be written before the next line: the header, or the end of a line that broke off.
    before: Vec<u8>,
    written_bytes: u64,
    limit_bytes: u64,
}

impl RotatingFile {
    /// Opens or makes the file. It and the one before it are never longer than `bytes` together:
    /// what was written when they might be longer is removed. Nothing is written yet: a disk that
    /// is full now may have room later.
    pub fn open(path: &Path, bytes: u64, header: Vec<u8>) -> io::Result<RotatingFile> {
        let limit_bytes = bytes / 2;
        remove_if_longer(&former(path), limit_bytes)?;
        remove_if_longer(path, limit_bytes)?;
        let file = append(path)?;
        let written_bytes = file.metadata()?.len();
        // The last line of a file that is there may have broken off.
        let end = if written_bytes > 0 { &b"\n"[..] } else { b"" };
        let before = [end, &header].concat();
        Ok(RotatingFile { path: path.to_owned(), file, header, before, written_bytes, limit_bytes })
    }

    fn rotate(&mut self) -> io::Result<()> {
        match std::fs::rename(&self.path, former(&self.path)) {
            // Somebody took it away, or it was renamed before and the new one could not be made.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            renamed => renamed?,
        }
        self.file = append(&self.path)?;
        self.before = self.header.clone();
        self.written_bytes = 0;
        Ok(())
    }
}

impl Write for RotatingFile {
    /// Takes whole lines only, and all of them or none.
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        // One more may be needed for the end of a line that broke off.
        if (self.header.len() + lines.len()) as u64 + 1 > self.limit_bytes {
            return Err(io::Error::other("a line is longer than the file may be"));
        }
        if self.written_bytes + (self.before.len() + lines.len()) as u64 > self.limit_bytes {
            self.rotate()?;
        }
        let text = [&self.before[..], lines].concat();
        match self.file.write_all(&text) {
            Ok(()) => {
                self.before.clear();
                self.written_bytes += text.len() as u64;
                Ok(lines.len())
            }
            Err(error) => {
                if !self.before.starts_with(b"\n") {
                    self.before.insert(0, b'\n');
                }
                self.written_bytes = self.file.metadata().map_or(self.limit_bytes, |metadata| metadata.len());
                Err(error)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Where the file before this one is.
fn former(path: &Path) -> PathBuf {
    let mut former = path.as_os_str().to_owned();
    former.push(".1");
    former.into()
}

fn remove_if_longer(path: &Path, limit_bytes: u64) -> io::Result<()> {
    match std::fs::metadata(path) {
        // No device has a length that counts.
        Ok(metadata) if metadata.is_file() && metadata.len() > limit_bytes => {
            let (file, bytes) = (path.display(), metadata.len());
            tracing::warn!(%file, bytes, limit_bytes, "log file removed: it is longer than it may be");
            std::fs::remove_file(path)
        }
        // What cannot be looked at is told when it is opened.
        _ => Ok(()),
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_full_file_becomes_the_one_before_it_and_both_stay_in_their_bound() {
        let folder = tempfile::tempdir().unwrap();
        let (path, former) = (folder.path().join("log"), folder.path().join("log.1"));
        let mut file = RotatingFile::open(&path, 200, b"head\n".to_vec()).unwrap();
        for number in 0..100 {
            file.write_all(format!("line {number:>3}\n").as_bytes()).unwrap();
            let former_bytes = former.metadata().map_or(0, |metadata| metadata.len());
            assert!(path.metadata().unwrap().len() + former_bytes <= 200);
        }
        assert!(read(&path).starts_with("head\nline ") && read(&path).ends_with("line  99\n"));
        assert!(read(&former).starts_with("head\nline "));
        let all = read(&former) + &read(&path);
        let last: Vec<&str> = all.lines().filter(|line| *line != "head").collect();
        assert_eq!(
            last,
            (100 - last.len()..100).map(|number| format!("line {number:>3}")).collect::<Vec<_>>()
        );
        assert!(file.write_all(&[b'x'; 100]).is_err(), "a line that fits no file");
        assert!(file.write_all(b"short\n").is_ok());
    }

    #[test]
    fn files_of_a_larger_limit_are_not_kept_beyond_the_smaller_one() {
        let folder = tempfile::tempdir().unwrap();
        let (path, former) = (folder.path().join("log"), folder.path().join("log.1"));
        let bytes = |path: &Path| path.metadata().map_or(0, |metadata| metadata.len());
        for (length, kept) in [(50, 50), (51, 0)] {
            [&path, &former].iter().for_each(|path| std::fs::write(path, vec![b'x'; length]).unwrap());
            let mut file = RotatingFile::open(&path, 100, Vec::new()).unwrap();
            assert_eq!((bytes(&path), bytes(&former)), (kept, kept));
            for _ in 0..20 {
                file.write_all(b"a line\n").unwrap();
                assert!(bytes(&path) + bytes(&former) <= 100);
            }
        }
    }

    #[test]
    fn a_line_that_broke_off_does_not_spoil_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        std::fs::write(&path, "whole\nhal").unwrap();
        RotatingFile::open(&path, 1_000, b"head\n".to_vec()).unwrap().write_all(b"line\n").unwrap();
        assert_eq!(read(&path), "whole\nhal\nhead\nline\n");
    }

    #[test]
    fn a_file_that_somebody_took_away_is_made_anew_when_it_is_full() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut file = RotatingFile::open(&path, 100, b"head\n".to_vec()).unwrap();
        file.write_all(b"first\n").unwrap();
        std::fs::remove_file(&path).unwrap();
        for _ in 0..10 {
            file.write_all(b"later\n").unwrap();
        }
        assert!(read(&path).starts_with("head\nlater\n"));
    }

    #[test]
    fn a_full_disk_is_an_error_and_nothing_else() {
        let mut file = RotatingFile::open(Path::new("/dev/full"), 1_000, Vec::new()).unwrap();
        assert!(file.write_all(b"line\n").is_err());
        assert!(file.write_all(b"line\n").is_err());
        assert!(!Path::new("/dev/full.1").exists(), "nothing was written that would fill it");
    }
}
