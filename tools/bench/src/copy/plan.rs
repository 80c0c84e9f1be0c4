//! What is to be measured on GPUs: the axes of the command line, and what they are where none is
//! given.

use super::size::{Size, size};
use super::way::{Course, Way};
use crate::output::Outcome;
use std::path::PathBuf;

/// Sizes that are measured unless others are asked for.
const SIZES: [u64; 10] =
    [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];
/// What GPUs that only relay have of each memory at most, and what is copied of all GPUs at once.
const ALL_BYTES_MAX: u64 = 1 << 30;

/// Arguments for GPUs.
#[derive(clap::Args)]
#[group(id = "gpus", multiple = true)]
pub struct Args {
    /// Size of a copy, such as 64kib; several with commas [default: 4kib to 1gib]
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = size)]
    sizes: Vec<Size>,
    /// Directions of the copies [default: h2d,d2h,both]
    #[arg(long, value_enum, value_delimiter = ',')]
    direction: Vec<Course>,
    /// Ways to copy that are measured beside the driver's own [default: best]
    #[arg(long, value_enum, value_delimiter = ',')]
    paths: Vec<Way>,
    /// Size of a page, for copies of scattered pages [default: 64kib,16kib]
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = size)]
    pages: Vec<Size>,
    /// Size of all pages of a copy together [default: 256mib]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pages_total: Option<Size>,
    /// Ordinals of the GPUs that are copied to and from by themselves; all others relay [default:
    /// 0]
    #[arg(long = "gpus", id = "targets", value_name = "GPU", value_delimiter = ',')]
    targets: Vec<u16>,
    /// Measure copies over relays that another process owns too
    #[arg(long)]
    pub daemon: bool,
    /// Draw rates over sizes into this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// The axes, filled in.
pub struct Plan {
    pub runs: u32,
    pub sizes: Vec<u64>,
    pub courses: Vec<Course>,
    /// Who copies; the one that a row's plain name is of comes first.
    pub ways: Vec<Way>,
    pub pages: Vec<u64>,
    pub pages_total_bytes: u64,
    pub targets: Vec<usize>,
}

impl Args {
    /// Whether any was given.
    pub fn are_given(&self) -> bool {
        let lists =
            [self.sizes.len(), self.direction.len(), self.paths.len(), self.pages.len(), self.targets.len()];
        lists.iter().any(|given| *given > 0)
            || self.pages_total.is_some()
            || self.daemon
            || self.plot.is_some()
    }

    /// The axes, where so many GPUs are visible.
    pub fn plan(&self, runs: u32, count: u16) -> Outcome<Plan> {
        let or = |given: &[Size], usual: &[u64]| -> Vec<u64> {
            if given.is_empty() { usual.to_vec() } else { given.iter().map(|size| size.0).collect() }
        };
        let mut sizes = or(&self.sizes, &SIZES);
        sizes.sort_unstable();
        sizes.dedup();
        let courses = if self.direction.is_empty() {
            vec![Course::H2d, Course::D2h, Course::Both]
        } else {
            self.direction.clone()
        };
        let mut ways = if self.paths.is_empty() { vec![Way::Best] } else { self.paths.clone() };
        ways.sort_by_key(|way| *way != Way::Best);
        let targets = if self.targets.is_empty() { vec![0] } else { self.targets.clone() };
        if let Some(target) = targets.iter().find(|target| **target >= count) {
            return Err(
                format!("--gpus: {target} does not exist; {count} GPUs are visible, the first is 0").into()
            );
        }
        let (pages, pages_total_bytes) =
            (or(&self.pages, &[64 << 10, 16 << 10]), self.pages_total.map_or(256 << 20, |size| size.0));
        if let Some(page) = pages.iter().find(|page| pages_total_bytes % **page != 0) {
            let (total, page) = (Size(pages_total_bytes), Size(*page));
            return Err(format!("--pages-total: {total} is no multiple of a page of {page}").into());
        }
        let targets = targets.into_iter().map(usize::from).collect();
        Ok(Plan { runs, sizes, courses, ways, pages, pages_total_bytes, targets })
    }
}

impl Plan {
    /// Bytes of each memory of a GPU.
    pub fn bytes_of(&self, gpu: u16) -> u64 {
        let most = self.sizes.iter().copied().max().unwrap_or(0).max(self.pages_total_bytes);
        if self.targets.contains(&usize::from(gpu)) { most } else { most.min(ALL_BYTES_MAX) }
    }

    /// The GPU whose rows are the plain ones.
    pub fn first(&self) -> usize {
        self.targets[0]
    }
}
