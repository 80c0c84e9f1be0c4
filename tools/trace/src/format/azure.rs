//! Azure's CSV (AzureLLMInferenceTrace): a header, then TIMESTAMP, ContextTokens and
//! GeneratedTokens. Times are dates, so the reader makes them count from the earliest. There is no
//! prefix information, and each row is a session of its own.

use super::check::{Names, check};
use super::csv::{Columns, text_of, tokens_in};
use super::error::Problem;
use super::parser::LineParser;
use crate::request::TraceRequest;

const TIME: &str = "TIMESTAMP";
const INPUT: &str = "ContextTokens";
const OUTPUT: &str = "GeneratedTokens";
const NAMES: Names = Names { input: INPUT, output: OUTPUT, blocks: "", other_size: "" };

const MICROS_PER_DAY: i64 = 86_400_000_000;

#[derive(Default)]
pub(super) struct Azure {
    columns: Option<Columns<3>>,
}

/// Whether a line is the header of this format.
pub(super) fn is_header(text: &str) -> bool {
    columns(text).is_ok()
}

fn columns(header: &str) -> Result<Columns<3>, Problem> {
    Columns::find(header, [TIME, INPUT, OUTPUT])
}

impl LineParser for Azure {
    /// Arrivals count from 1970.
    fn parse(&mut self, text: &[u8], number: u64) -> Result<Option<TraceRequest>, Problem> {
        let text = text_of(text)?;
        let Some(found) = &self.columns else {
            self.columns = Some(columns(text)?);
            return Ok(None);
        };
        let [time, input, output] = found.cells(text)?;
        let arrival_us = timestamp_us(time).ok_or_else(|| {
            Problem::field(TIME, format!("{time:?}, allowed such as 2023-11-16 18:17:03.9799600"))
        })?;
        let request = TraceRequest {
            session: format!("line-{number}"),
            arrival_us,
            input_tokens: tokens_in(INPUT, input)?,
            output_tokens: tokens_in(OUTPUT, output)?,
            ..TraceRequest::default()
        };
        check(request, &NAMES).map(Some)
    }
}

/// Microseconds since 1970 of `2023-11-16 18:17:03.9799600`, with any fraction or none, in UTC
/// whether it says so (`Z`, `+00:00`) or not.
fn timestamp_us(text: &str) -> Option<u64> {
    let text = text.strip_suffix('Z').or_else(|| text.strip_suffix("+00:00")).unwrap_or(text);
    let (day, time) = text.split_once([' ', 'T'])?;
    let (year, month, day) = three(day, '-')?;
    let (whole, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let (hour, minute, second) = three(whole, ':')?;
    let in_range = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && (hour < 24 && minute < 60 && second < 60);
    let micros: String = fraction.chars().chain("000000".chars()).take(6).collect();
    if !in_range || !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let second_of_day = (hour * 60 + minute) * 60 + second;
    let micros = days_since_1970(year, month, day) * MICROS_PER_DAY
        + second_of_day * 1_000_000
        + micros.parse::<i64>().ok()?;
    u64::try_from(micros).ok()
}

fn three(text: &str, separator: char) -> Option<(i64, i64, i64)> {
    let mut parts = text.split(separator).map(|part| {
        part.bytes().all(|digit| digit.is_ascii_digit()).then(|| part.parse::<i64>().ok()).flatten()
    });
    let three = (parts.next()??, parts.next()??, parts.next()??);
    parts.next().is_none().then_some(three)
}

/// Days from civil, after H. Hinnant, "chrono-Compatible Low-Level Date Algorithms".
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year / 400, year % 400);
    let month_from_march = (month + 9) % 12;
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::{days_since_1970, timestamp_us};

    #[test]
    fn days_are_counted_as_the_calendar_does() {
        assert_eq!(days_since_1970(1970, 1, 1), 0);
        assert_eq!(days_since_1970(2000, 2, 29), 11_016);
        assert_eq!(days_since_1970(2023, 11, 16), 19_677);
    }

    #[test]
    fn timestamps_of_the_published_files_are_understood() {
        let first = timestamp_us("2023-11-16 18:17:03.9799600").unwrap();
        assert_eq!(first, 1_700_158_623_979_960);
        assert_eq!(timestamp_us("2023-11-16 18:17:04"), Some(1_700_158_624_000_000));
        assert_eq!(timestamp_us("2024-05-10 00:00:00.009930+00:00"), Some(1_715_299_200_009_930));
    }

    #[test]
    fn what_is_no_timestamp_is_refused() {
        for wrong in [
            "",
            "2023-11-16",
            "2023-13-16 00:00:00",
            "2023-11-16 24:00:00",
            "2023-11-16 1:2",
            "x y",
            "1-1-1 ::",
        ] {
            assert_eq!(timestamp_us(wrong), None, "{wrong}");
        }
        assert_eq!(timestamp_us("2023-11-16 00:00:00.12x"), None);
        assert_eq!(timestamp_us("2023-11-16 00:00:00.+1"), None);
    }
}
