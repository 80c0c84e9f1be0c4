//! Where a page of metrics comes from, and prices, as they are written on the command line.

use super::page::{Series, read};
use forebay_results::output::Error;
use forebay_trace::replay::Transport;
use http::{HeaderMap, Uri};
use std::path::PathBuf;

/// Hours of a month, as clouds count them.
const HOURS_OF_MONTH: f64 = 730.0;

/// A server's page at `/metrics`, or a saved one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Server(Uri),
    File(PathBuf),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineSource {
    pub now: Source,
    pub before: Option<PathBuf>,
    /// Whose requests it has.
    pub tenant: String,
}

impl Source {
    /// The series of the page. A page without any is an error: it is not the right one.
    pub async fn read(&self, transport: &Transport) -> Result<Vec<Series>, Error> {
        let (name, text) = match self {
            Source::Server(uri) => {
                (uri.to_string(), transport.page(uri, "/metrics", &HeaderMap::new()).await)
            }
            Source::File(path) => {
                (path.display().to_string(), std::fs::read_to_string(path).map_err(|error| error.to_string()))
            }
        };
        let series = read(&text.map_err(|why| format!("{name}: {why}"))?);
        if series.is_empty() {
            return Err(format!("{name}: there are no metrics in it").into());
        }
        Ok(series)
    }
}

pub fn source(text: &str) -> Result<Source, String> {
    if !text.contains("://") {
        return Ok(Source::File(text.into()));
    }
    let uri: Uri = text.parse().map_err(|error| format!("'{text}' is no address: {error}"))?;
    Ok(Source::Server(uri))
}

pub fn engine(text: &str) -> Result<EngineSource, String> {
    let mut parts = text.split(',');
    let now = source(parts.next().unwrap_or_default())?;
    let mut engine = EngineSource { now, before: None, tenant: "0".into() };
    for part in parts {
        match part.split_once('=') {
            Some(("before", file)) => engine.before = Some(file.into()),
            Some(("tenant", number)) if number.parse().is_ok_and(|number: u16| number != u16::MAX) => {
                engine.tenant = number.into();
            }
            _ => return Err(format!("'{part}' is not allowed: before=FILE, or tenant=0 to 65534")),
        }
    }
    Ok(engine)
}

pub fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| format!("'{text}' is not allowed: a number above 0"))
}

pub fn per_gib_hour(text: &str) -> Result<f64, String> {
    priced(text, &[("/GiB-hour", 1.0), ("/GiB-month", HOURS_OF_MONTH)])
}

pub fn per_hour(text: &str) -> Result<f64, String> {
    priced(text, &[("/hour", 1.0), ("/month", HOURS_OF_MONTH)])
}

/// A price for one of these units, of so many hours.
fn priced(text: &str, units: &[(&str, f64)]) -> Result<f64, String> {
    let price = units.iter().find_map(|(unit, hours)| {
        let price: f64 = text.strip_suffix(unit)?.parse().ok()?;
        (price.is_finite() && price >= 0.0).then_some(price / hours)
    });
    let names: Vec<&str> = units.iter().map(|(unit, _)| *unit).collect();
    price.ok_or_else(|| format!("'{text}' is not allowed: a number, 0 or more, and {}", names.join(" or ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_have_a_unit_and_are_no_less_than_nothing() {
        assert_eq!((per_gib_hour("0.5/GiB-hour"), per_hour("730/month")), (Ok(0.5), Ok(1.0)));
        assert_eq!(per_gib_hour("1460/GiB-month"), Ok(2.0));
        for bad in ["1", "1/GB-hour", "-1/GiB-hour", "nan/GiB-hour", "/GiB-hour", ""] {
            let why = per_gib_hour(bad).unwrap_err();
            assert!(why.contains(&format!("'{bad}'")) && why.contains("/GiB-hour or /GiB-month"), "{why}");
        }
    }

    #[test]
    fn an_engine_is_an_address_or_a_file_with_what_it_was_before_and_whose_it_is() {
        let file = |name: &str| Source::File(name.into());
        let plain = EngineSource { now: file("a.txt"), before: None, tenant: "0".into() };
        assert_eq!(engine("a.txt"), Ok(plain.clone()));
        let more = EngineSource { before: Some("b".into()), tenant: "7".into(), ..plain };
        assert_eq!(engine("a.txt,before=b,tenant=7"), Ok(more));
        assert!(matches!(engine("http://h:1").unwrap().now, Source::Server(_)));
        for bad in ["a,tenant=65535", "a,tenant=70000", "a,b", "a,since=b"] {
            assert!(engine(bad).unwrap_err().contains("before=FILE, or tenant=0 to 65534"), "{bad}");
        }
    }
}
