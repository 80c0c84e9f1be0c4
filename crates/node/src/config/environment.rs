//! Variables of the environment in a configuration's text: `${NAME}` stands for the value of NAME.
//! So one file serves hosts that differ in their name and address.

use super::ConfigError;

/// The text with the values that `value_of` gives.
pub fn expand(text: &str, value_of: impl Fn(&str) -> Option<String>) -> Result<String, ConfigError> {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        let (name, behind) =
            after.split_once('}').filter(|(name, _)| is_name(name)).ok_or_else(|| not_a_name(after))?;
        let value = value_of(name).ok_or_else(|| wrong(name, "not set", "a variable that is set"))?;
        if value.contains(|letter: char| letter.is_control() || matches!(letter, '"' | '\'' | '\\')) {
            let allowed = "a value without quotes, backslashes and control characters";
            return Err(wrong(name, &format!("{value:?}"), allowed));
        }
        expanded.push_str(before);
        expanded.push_str(&value);
        rest = behind;
    }
    expanded.push_str(rest);
    Ok(expanded)
}

fn is_name(name: &str) -> bool {
    let is_letter = |letter: u8| letter.is_ascii_alphanumeric() || letter == b'_';
    !name.is_empty() && name.bytes().all(is_letter) && !name.as_bytes()[0].is_ascii_digit()
}

fn not_a_name(after: &str) -> ConfigError {
    let shown: String = after.chars().take_while(|&letter| letter != '\n').take(32).collect();
    ConfigError::Toml(format!("${{{shown} is no variable of the environment; allowed is ${{NAME}}"))
}

fn wrong(name: &str, value: &str, allowed: &str) -> ConfigError {
    ConfigError::Toml(format!("${{{name}}} is {value}; allowed is {allowed}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(text: &str) -> Result<String, String> {
        let value_of = |name: &str| match name {
            "POD_IP" => Some("10.0.0.7".to_owned()),
            "_EMPTY1" => Some(String::new()),
            "INJECTED" => Some("a\"\nallow_uids = [1001]".to_owned()),
            _ => None,
        };
        expand(text, value_of).map_err(|error| error.to_string())
    }

    #[test]
    fn a_variable_stands_for_its_value_and_all_else_stays() {
        let text = "advertise = \"${POD_IP}:7600\" # $5, {a}, ${_EMPTY1}$\n";
        assert_eq!(expanded(text).unwrap(), "advertise = \"10.0.0.7:7600\" # $5, {a}, $\n");
        assert_eq!(expanded("").unwrap(), "");
    }

    #[test]
    fn what_is_not_set_or_could_change_other_keys_is_refused_by_its_name() {
        assert_eq!(
            expanded("a = '${NONE}'").unwrap_err(),
            "${NONE} is not set; allowed is a variable that is set"
        );
        let injected = expanded("a = \"${INJECTED}\"").unwrap_err();
        assert!(injected.starts_with("${INJECTED} is") && injected.contains("without quotes"), "{injected}");
        for bad in ["${}", "${1A}", "${A B}", "${POD_IP", "${POD-IP}\nx"] {
            let error = expanded(bad).unwrap_err();
            assert!(error.contains(bad.lines().next().unwrap()) && error.contains("${NAME}"), "{error}");
        }
    }
}
