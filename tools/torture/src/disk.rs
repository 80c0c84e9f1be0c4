//! A store's files as the suite damages them: where each value lies, found by its bytes and not by
//! knowing the store, and edits of those places. Whole directories can be copied and put back. This
//! file knows files.

use crate::random::Random;
use crate::value::{MARK_BYTES, SECTOR_BYTES, mark};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone)]
pub struct Disk {
    dir: PathBuf,
}

/// Where a value lies: the place of each of its sectors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    pub key: u64,
    pub version: u32,
    /// In the order of the value's bytes.
    pub sectors: Vec<Place>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub file: PathBuf,
    pub offset: u64,
}

/// The bytes of all files at some moment.
#[derive(Debug, Clone)]
pub struct Image(BTreeMap<PathBuf, Vec<u8>>);

impl Disk {
    pub fn of(dir: &Path) -> Disk {
        Disk { dir: dir.to_owned() }
    }

    /// All regular files, in order.
    pub fn files(&self) -> io::Result<Vec<PathBuf>> {
        let (mut files, mut dirs) = (Vec::new(), vec![self.dir.clone()]);
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir)? {
                let entry = entry?;
                match entry.file_type()? {
                    kind if kind.is_dir() => dirs.push(entry.path()),
                    kind if kind.is_file() => files.push(entry.path()),
                    _ => {}
                }
            }
        }
        files.sort();
        Ok(files)
    }

    /// Bytes of disk that the files take, as `du` counts them. A file that goes meanwhile takes
    /// none.
    pub fn physical_bytes(&self) -> io::Result<u64> {
        let blocks = |file: PathBuf| std::fs::metadata(file).map_or(0, |metadata| metadata.blocks());
        Ok(self.files()?.into_iter().map(blocks).sum::<u64>() * 512)
    }

    /// The complete copies of values of `keys` in versions below `versions`, wherever they lie at
    /// multiples of a sector.
    pub fn find(&self, keys: u64, versions: u32, value_bytes: u64) -> io::Result<Vec<Copy>> {
        let sectors = value_bytes as usize / SECTOR_BYTES;
        let mut by_mark: HashMap<[u8; MARK_BYTES], (u64, u32, usize)> = HashMap::new();
        for key in 0..keys {
            for version in 0..versions {
                by_mark.extend((0..sectors).map(|at| (mark(key, version, at), (key, version, at))));
            }
        }
        let mut found: BTreeMap<(u64, u32), BTreeMap<usize, Place>> = BTreeMap::new();
        for file in self.files()? {
            for (number, sector) in std::fs::read(&file)?.chunks(SECTOR_BYTES).enumerate() {
                let known = sector.first_chunk().and_then(|mark: &[u8; MARK_BYTES]| by_mark.get(mark));
                if let Some((key, version, at)) = known {
                    let place = Place { file: file.clone(), offset: (number * SECTOR_BYTES) as u64 };
                    found.entry((*key, *version)).or_default().insert(*at, place);
                }
            }
        }
        let complete = found.into_iter().filter(|(_, places)| places.len() == sectors);
        let copy = |((key, version), places): (_, BTreeMap<_, _>)| Copy {
            key,
            version,
            sectors: places.into_values().collect(),
        };
        Ok(complete.map(copy).collect())
    }

    pub fn read(&self, place: &Place, bytes: usize) -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; bytes];
        File::open(&place.file)?.read_exact_at(&mut buffer, place.offset)?;
        Ok(buffer)
    }

    /// Overwrites a place in the system's cache, which direct reads see, too.
    pub fn write(&self, place: &Place, bytes: &[u8]) -> io::Result<()> {
        File::options().write(true).open(&place.file)?.write_all_at(bytes, place.offset)
    }

    /// Flips a bit somewhere in the sector.
    pub fn flip_bit(&self, place: &Place, random: &mut Random) -> io::Result<()> {
        let mut sector = self.read(place, SECTOR_BYTES)?;
        sector[random.below(SECTOR_BYTES as u64) as usize] ^= 1 << random.below(8);
        self.write(place, &sector)
    }

    /// Exchanges two values, sector by sector.
    pub fn swap(&self, one: &Copy, other: &Copy) -> io::Result<()> {
        for (one, other) in one.sectors.iter().zip(&other.sectors) {
            let (first, second) = (self.read(one, SECTOR_BYTES)?, self.read(other, SECTOR_BYTES)?);
            self.write(one, &second)?;
            self.write(other, &first)?;
        }
        Ok(())
    }

    pub fn image(&self) -> io::Result<Image> {
        let read = |file: PathBuf| std::fs::read(&file).map(|bytes| (file, bytes));
        Ok(Image(self.files()?.into_iter().map(read).collect::<io::Result<_>>()?))
    }

    /// Puts all files back as they were in `image`. Files stay the same ones where they exist.
    pub fn restore(&self, image: &Image) -> io::Result<()> {
        for file in self.files()? {
            if !image.0.contains_key(&file) {
                std::fs::remove_file(file)?;
            }
        }
        for (path, bytes) in &image.0 {
            let file = File::options().write(true).create(true).truncate(false).open(path)?;
            file.set_len(bytes.len() as u64)?;
            file.write_all_at(bytes, 0)?;
        }
        Ok(())
    }
}

impl Image {
    /// What lay at a place, if the file reached that far.
    pub fn read(&self, place: &Place, bytes: usize) -> Option<&[u8]> {
        let start = place.offset as usize;
        self.0.get(&place.file)?.get(start..start + bytes)
    }

    /// The places of all whole sectors.
    pub fn sectors(&self) -> impl Iterator<Item = Place> {
        let of_file = |(file, bytes): (&PathBuf, &Vec<u8>)| {
            let (file, sectors) = (file.clone(), bytes.len() / SECTOR_BYTES);
            (0..sectors).map(move |at| Place { file: file.clone(), offset: (at * SECTOR_BYTES) as u64 })
        };
        self.0.iter().flat_map(of_file)
    }

    /// An image of the same files in which only what lies before `share_percent` of each file is
    /// this one's, and the rest that of `newer`.
    pub fn mixed_with(&self, newer: &Image, share_percent: u64) -> Image {
        let mix = |(path, new): (&PathBuf, &Vec<u8>)| {
            let mut bytes = new.clone();
            let until = (bytes.len() as u64 * share_percent / 100) as usize / 4096 * 4096;
            if let Some(old) = self.0.get(path).and_then(|old| old.get(..until)) {
                bytes[..until].copy_from_slice(old);
            }
            (path.clone(), bytes)
        };
        Image(newer.0.iter().map(mix).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::value;

    const BYTES: u64 = 4 * SECTOR_BYTES as u64;

    #[test]
    fn values_are_found_wherever_they_lie() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = vec![9; 3 * SECTOR_BYTES];
        log.extend(value(1, 0, BYTES as usize));
        log.extend(&value(0, 1, BYTES as usize)[..SECTOR_BYTES]);
        std::fs::write(dir.path().join("log"), &log).unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::fs::write(dir.path().join("sub/file"), value(2, 0, BYTES as usize)).unwrap();
        let found = Disk::of(dir.path()).find(3, 2, BYTES).unwrap();
        assert_eq!(found.iter().map(|copy| (copy.key, copy.version)).collect::<Vec<_>>(), [(1, 0), (2, 0)]);
        assert_eq!(found[0].sectors[0].offset, 3 * SECTOR_BYTES as u64);
    }

    #[test]
    fn an_image_puts_back_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::of(dir.path());
        std::fs::write(dir.path().join("a"), [1; 100]).unwrap();
        let image = disk.image().unwrap();
        std::fs::write(dir.path().join("a"), [2; 50]).unwrap();
        std::fs::write(dir.path().join("b"), [3; 50]).unwrap();
        disk.restore(&image).unwrap();
        assert_eq!(disk.files().unwrap(), [dir.path().join("a")]);
        assert_eq!(std::fs::read(dir.path().join("a")).unwrap(), [1; 100]);
    }
}
