//! A profile as the text of a file: the constants, what they were fitted to, and who said the rest.

use crate::Calibration;
use crate::facts::{Fact, Source};
use forebay_steps::{Profile, ProfileError};
use std::fmt::Write;

/// Where a profile was made.
#[derive(Debug, Clone)]
pub struct Header {
    /// How the profile is called.
    pub name: String,
    /// The engine's address.
    pub target: String,
    /// The program that measured.
    pub version: String,
    /// When, as people write it.
    pub date: String,
}

impl Calibration {
    /// The text of a profile with these constants. What the engine did not tell is taken from
    /// `like`, and each such value says so.
    pub fn profile_text(&self, header: &Header, like: &Profile) -> Result<String, ProfileError> {
        let mut text = String::new();
        // A String refuses nothing.
        let _ = self.write_header(&mut text, header);
        let _ = self.write_model(&mut text, header, like);
        let _ = self.write_costs(&mut text);
        let _ = self.write_limits(&mut text, like);
        // Whoever reads it finds what is written.
        Profile::from_toml(&text)?;
        Ok(text)
    }

    fn write_header(&self, text: &mut String, header: &Header) -> std::fmt::Result {
        let Header { target, version, date, .. } = header;
        writeln!(text, "# Measured by `forebay calibrate` {version} on {date} at {target},")?;
        writeln!(text, "# in {:.0} s. Fit error {:.1} %.", self.seconds, self.fit.error() * 100.0)?;
        writeln!(text, "#")?;
        for line in self.table().lines() {
            writeln!(text, "#   {line}")?;
        }
        if !self.notes.is_empty() {
            writeln!(text, "#")?;
        }
        self.notes.iter().try_for_each(|note| writeln!(text, "# {note}"))?;
        writeln!(text)
    }

    fn write_model(&self, text: &mut String, header: &Header, like: &Profile) -> std::fmt::Result {
        let (facts, model) = (&self.facts, &like.model);
        writeln!(text, "name = {}\n", quoted(&header.name))?;
        writeln!(text, "[model]\nname = {}", quoted(&facts.model))?;
        writeln!(text, "# The engine does not say these three: those of {}.", like.name)?;
        writeln!(text, "layers = {}\nvocab = {}", model.layers, model.vocab)?;
        writeln!(text, "kv_bytes_per_token = {}", model.kv_bytes_per_token)?;
        self.write_fact(text, "max_model_tokens", facts.max_model_tokens, like)
    }

    fn write_costs(&self, text: &mut String) -> std::fmt::Result {
        let (step, api) = (&self.fit.step, &self.fit.api);
        writeln!(text, "\n[step]")?;
        writeln!(text, "linear_us_per_token = {}", number(step.linear_us_per_token))?;
        writeln!(text, "attention_ns_per_pair = {}", number(step.attention_ns_per_pair))?;
        writeln!(text, "kv_read_ns_per_context_token = {}", number(step.kv_read_ns_per_context_token))?;
        writeln!(text, "us_per_request = {}", number(step.us_per_request))?;
        writeln!(text, "# The engine launches its kernels in one of two ways, and this is how long its")?;
        writeln!(text, "# shortest step was; the other way was not measured.")?;
        writeln!(text, "floor_eager_us = {}", number(step.floor_eager_us))?;
        writeln!(text, "floor_graph_us = {}", number(step.floor_graph_us))?;
        writeln!(text, "\n[api]\nus_per_request = {}", number(api.us_per_request))?;
        writeln!(text, "us_per_token = {}", number(api.us_per_token))
    }

    fn write_limits(&self, text: &mut String, like: &Profile) -> std::fmt::Result {
        let facts = &self.facts;
        writeln!(text, "\n[memory]")?;
        self.write_fact(text, "pool_tokens", facts.pool_tokens, like)?;
        self.write_fact(text, "block_tokens", facts.block_tokens, like)?;
        writeln!(text, "\n[scheduler]")?;
        self.write_fact(text, "max_batched_tokens", facts.max_batched_tokens, like)?;
        self.write_fact(text, "max_seqs", facts.max_seqs, like)?;
        writeln!(text, "\n[host_link]\n# Not measured: that of {}.", like.name)?;
        writeln!(text, "gb_per_s = {:?}", like.host_link.gb_per_s)
    }

    fn write_fact(&self, text: &mut String, name: &str, fact: Fact, like: &Profile) -> std::fmt::Result {
        match fact.source {
            Source::Engine => writeln!(text, "# The engine says so.")?,
            Source::Flag => writeln!(text, "# Given on the command line.")?,
            Source::Assumed => writeln!(text, "# Unknown: that of {}.", like.name)?,
        }
        writeln!(text, "{name} = {}", fact.value)
    }

    /// The points: measured, what the model says, and by how much it is off.
    pub fn table(&self) -> String {
        let mut text = format!("{:<42} {:>11} {:>11} {:>7}\n", "", "measured ms", "model ms", "error");
        let model = self.fit.model();
        for (point, error) in self.points.iter().zip(&self.fit.errors) {
            let (measured_ms, model_ms) = (point.measured_us / 1e3, point.predicted_us(&model) / 1e3);
            let error = error * 100.0;
            let name = &point.name;
            let _ = writeln!(text, "{name:<42} {measured_ms:>11.2} {model_ms:>11.2} {error:>+6.1}%");
        }
        text
    }
}

/// Four digits: what was measured has no more.
fn number(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return "0.0".into();
    }
    let digits = (3 - value.abs().log10().floor() as i32).max(1);
    format!("{value:.*}", digits as usize)
}

/// A TOML string.
fn quoted(text: &str) -> String {
    let escaped = text.chars().flat_map(|character| match character {
        '"' | '\\' => vec!['\\', character],
        // None of the others has a place in a name.
        _ if character.is_control() => vec!['?'],
        _ => vec![character],
    });
    format!("\"{}\"", escaped.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_four_digits_and_are_never_whole_ones() {
        assert_eq!(number(21.612_345), "21.61");
        assert_eq!(number(6_820.456), "6820.5");
        assert_eq!(number(0.000_934_56), "0.0009346");
        assert_eq!(number(0.0), "0.0");
        assert_eq!(number(f64::NAN), "0.0");
    }

    #[test]
    fn any_name_is_a_string_of_toml() {
        for name in ["a/b", "say \"hi\"", "back\\slash", "line\nbreak"] {
            let text = format!("name = {}", quoted(name));
            assert!(!text.contains('\n'), "{text}");
        }
        assert_eq!(quoted("a\"b\\"), r#""a\"b\\""#);
    }
}
