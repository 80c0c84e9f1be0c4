//! Where the files lie that the kernel tells about the host in: `/`, or a tree that a test made.

use std::fs;
use std::path::{Path, PathBuf};

/// The folder that holds `proc` and `sys`.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

/// Files of the kernel are short; whatever is longer is not one of them.
const MOST_BYTES: u64 = 1 << 20;

impl Root {
    pub fn new(folder: &Path) -> Root {
        Root(folder.into())
    }

    /// The text of a file, without the white space around it. `None` where there is none that can
    /// be read.
    pub fn text(&self, path: &str) -> Option<String> {
        use std::io::Read;
        let mut text = String::new();
        let file = fs::File::open(self.0.join(path)).ok()?;
        file.take(MOST_BYTES).read_to_string(&mut text).ok()?;
        Some(text.trim().into())
    }

    /// The names in a folder, in no order; none where it cannot be read.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.0.join(path)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    /// Where a path leads when links are followed.
    pub fn real(&self, path: &str) -> Option<PathBuf> {
        fs::canonicalize(self.0.join(path)).ok()
    }
}

impl Default for Root {
    fn default() -> Root {
        Root("/".into())
    }
}
