//! Rows of comma-separated files whose header names the columns.

use super::error::Problem;
use crate::number::tokens_of_text;

/// Where the named columns stand.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Columns<const N: usize> {
    names: [&'static str; N],
    positions: [usize; N],
}

impl<const N: usize> Columns<N> {
    /// Finds the columns in a header line.
    pub(super) fn find(header: &str, names: [&'static str; N]) -> Result<Columns<N>, Problem> {
        let mut positions = [0; N];
        for (position, name) in positions.iter_mut().zip(names) {
            *position = position_of(header, name).ok_or_else(|| Problem::missing(name))?;
        }
        Ok(Columns { names, positions })
    }

    /// The cells of these columns in a row, in the order of the names.
    pub(super) fn cells<'row>(&self, row: &'row str) -> Result<[&'row str; N], Problem> {
        let mut cells = [""; N];
        for ((cell, position), name) in cells.iter_mut().zip(self.positions).zip(self.names) {
            *cell = row.split(',').nth(position).map(bare).ok_or_else(|| Problem::missing(name))?;
        }
        Ok(cells)
    }
}

pub(super) fn position_of(header: &str, name: &str) -> Option<usize> {
    header.split(',').position(|column| bare(column) == name)
}

/// A cell without quotes and blanks around it.
pub(super) fn bare(cell: &str) -> &str {
    cell.trim_matches([' ', '"'])
}

pub(super) fn text_of(line: &[u8]) -> Result<&str, Problem> {
    std::str::from_utf8(line).map_err(|error| Problem::Malformed(error.to_string()))
}

pub(super) fn tokens_in(field: &str, cell: &str) -> Result<u32, Problem> {
    tokens_of_text(cell)
        .ok_or_else(|| Problem::field(field, format!("{cell:?}, allowed a whole number of tokens")))
}

/// A time or another number.
pub(super) fn number_in(field: &str, cell: &str) -> Result<f64, Problem> {
    cell.parse().map_err(|_| Problem::field(field, format!("{cell:?}, allowed a number")))
}
