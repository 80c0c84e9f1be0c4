//! What a page of metrics promises to those who read it: names, types, help and labels, without
//! the numbers. Tests compare it with a file that is kept beside them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Set, the file is written anew instead of compared.
const BLESS: &str = "FOREBAY_BLESS";

#[derive(Default)]
struct Family<'a> {
    kind: &'a str,
    help: &'a str,
    /// The samples' names after the family's, each with its labels.
    samples: BTreeSet<String>,
}

/// Asserts that a page in Prometheus's text format promises what stands in `file`, all of it.
///
/// # Panics
/// Where it does not, or where the page is not in that format.
pub fn assert_promises(page: &str, file: &Path) {
    let promises = promises(page).join("");
    if std::env::var_os(BLESS).is_some() {
        std::fs::write(file, &promises).expect("the file of promises can be written");
    }
    let kept = std::fs::read_to_string(file).expect("there is a file of promises");
    assert!(kept == promises, "{} has\n{kept}and the page\n{promises}", file.display());
}

/// Asserts that a page promises nothing that does not stand in `file`.
///
/// # Panics
/// Where it does, or where the page is not in Prometheus's text format.
pub fn assert_promises_no_more(page: &str, file: &Path) {
    let kept = std::fs::read_to_string(file).expect("there is a file of promises");
    for (name, family) in families(page) {
        let head = format!("{name} {}\n    {}\n", family.kind, family.help);
        let (_, after) = kept.split_once(&head).unwrap_or_else(|| panic!("{head} is new"));
        let known: Vec<&str> = after.lines().map_while(|line| line.strip_prefix("    ")).collect();
        let new = family.samples.iter().find(|sample| !known.contains(&sample.as_str()));
        assert!(new.is_none(), "{name}{new:?} is new beside {known:?}");
    }
}

fn promises(page: &str) -> Vec<String> {
    let text = |(name, family): (&str, Family<'_>)| {
        let samples: String = family.samples.iter().map(|sample| format!("    {sample}\n")).collect();
        format!("{name} {}\n    {}\n{samples}", family.kind, family.help)
    };
    families(page).into_iter().map(text).collect()
}

fn families(page: &str) -> BTreeMap<&str, Family<'_>> {
    let mut families: BTreeMap<&str, Family<'_>> = BTreeMap::new();
    for line in page.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            families.entry(name).or_default().help = help;
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            families.entry(name).or_default().kind = kind;
        } else {
            let end = line.find(['{', ' ']).unwrap_or_else(|| panic!("{line:?} is no sample"));
            let name = &line[..end];
            let of = ["_bucket", "_sum", "_count"].iter().find_map(|end| {
                let family = name.strip_suffix(end)?;
                families.get(family).is_some_and(|family| family.kind == "histogram").then_some(family)
            });
            let of = of.unwrap_or(name);
            let family = families.get_mut(of).unwrap_or_else(|| panic!("{name} has no type"));
            family.samples.insert(format!("{}{{{}}}", &name[of.len()..], labels(&line[end..]).join(",")));
        }
    }
    families
}

/// The names of labels in `{name="value",...} number`. A value may hold anything.
fn labels(sample: &str) -> Vec<&str> {
    let (mut names, mut name_at, mut is_quoted, mut is_escaped) = (Vec::new(), 0, false, false);
    for (at, character) in sample.char_indices() {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            _ if is_quoted => {}
            '{' | ',' => name_at = at + 1,
            '=' => names.push(&sample[name_at..at]),
            '}' | ' ' => break,
            _ => {}
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_types_help_and_labels_are_promised_and_numbers_are_not() {
        let page = "# HELP b_total B's.\n# TYPE b_total counter\nb_total{a=\"x\\\",c=\",d=\"2\"} 1\nb_total 7\n\
                    # HELP a A.\n# TYPE a histogram\na_bucket{le=\"1\"} 2\na_bucket{le=\"+Inf\"} 2\na_sum 3\n\
                    a_count 2\n";
        let promised = "a histogram\n    A.\n    _bucket{le}\n    _count{}\n    _sum{}\n\
                        b_total counter\n    B's.\n    {a,d}\n    {}\n";
        assert_eq!(promises(page).join(""), promised);
    }
}
