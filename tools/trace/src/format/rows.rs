//! Two CSV formats whose rows are requests of their own, without sessions and prefix information:
//! Azure's (AzureLLMInferenceTrace), whose times are dates, and BurstGPT's, whose times are seconds
//! and in which a response of no tokens is a request that failed. Other columns are ignored.

use super::check::{FieldNames, check, micros};
use super::csv::{Columns, number_in, text_of, tokens_in};
use super::error::Problem;
use super::lines::LineParser;
use crate::request::TraceRequest;

const MICROS_PER_DAY: i64 = 86_400_000_000;

/// The columns of one of the formats: the time, the prompt's tokens, the answer's tokens.
type Header = [&'static str; 3];
const AZURE: Header = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];
const BURSTGPT: Header = ["Timestamp", "Request tokens", "Response tokens"];

pub(super) struct Rows {
    header: Header,
    /// Times are in units of so many seconds; `None` where they are dates.
    unit_s: Option<f64>,
    columns: Option<Columns<3>>,
}

/// Whether a line is the header of Azure's format.
pub(super) fn is_azure(text: &str) -> bool {
    Columns::find(text, AZURE).is_ok()
}

/// Whether a line is the header of BurstGPT's format.
pub(super) fn is_burstgpt(text: &str) -> bool {
    Columns::find(text, BURSTGPT).is_ok()
}

impl Rows {
    /// Azure's, whose arrivals count from 1970.
    pub(super) fn azure() -> Rows {
        Rows { header: AZURE, unit_s: None, columns: None }
    }

    /// BurstGPT's, with times in units of `unit_s` seconds.
    pub(super) fn burstgpt(unit_s: f64) -> Rows {
        Rows { header: BURSTGPT, unit_s: Some(unit_s), columns: None }
    }

    fn time_us(&self, cell: &str) -> Result<u64, Problem> {
        let field = self.header[0];
        match self.unit_s {
            Some(unit_s) => micros(field, number_in(field, cell)?, unit_s),
            None => timestamp_us(cell).ok_or_else(|| {
                Problem::field(field, format!("{cell:?}, allowed such as 2023-11-16 18:17:03.9799600"))
            }),
        }
    }
}

impl LineParser for Rows {
    fn parse(&mut self, text: &[u8], number: u64) -> Result<Option<TraceRequest>, Problem> {
        let text = text_of(text)?;
        let Some(columns) = &self.columns else {
            self.columns = Some(Columns::find(text, self.header)?);
            return Ok(None);
        };
        let [time, input, output] = columns.cells(text)?;
        let [_, input_name, output_name] = self.header;
        let request = TraceRequest {
            session: format!("line-{number}"),
            arrival_us: self.time_us(time)?,
            input_tokens: tokens_in(input_name, input)?,
            output_tokens: tokens_in(output_name, output)?,
            ..TraceRequest::default()
        };
        check(request, &FieldNames { input: input_name, output: output_name, blocks: "", other_size: "" })
            .map(Some)
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
