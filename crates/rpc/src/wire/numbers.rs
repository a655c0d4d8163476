//! Integers in the forms that clients write: `2048`, `2.048e3`, `2048.0`. Any context.

use std::borrow::Cow;

/// Rewrites integers of a JSON text without fraction and exponent, as integer decoders require. Other numbers stay as they are,
/// and the decoders refuse them.
pub fn whole(json: &str) -> Cow<'_, str> {
    let (mut out, mut copied, mut at) = (String::new(), 0, 0);
    let bytes = json.as_bytes();
    while at < bytes.len() {
        match bytes[at] {
            b'"' => at = end_of_string(bytes, at),
            b'-' | b'0'..=b'9' => {
                let is_part = |b: &u8| matches!(b, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9');
                let end = at + bytes[at..].iter().take_while(|b| is_part(b)).count();
                if let Some(number) = as_integer(&json[at..end]) {
                    out.push_str(&json[copied..at]);
                    out.push_str(&number);
                    copied = end;
                }
                at = end;
            }
            _ => at += 1,
        }
    }
    if copied == 0 { Cow::Borrowed(json) } else { Cow::Owned(out + &json[copied..]) }
}

/// The position after the closing quotation mark of the string that begins at `at`.
fn end_of_string(bytes: &[u8], at: usize) -> usize {
    let mut at = at + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// The digits of an integer that is written with a fraction or an exponent; `None` if it has neither, is not an integer, or has
/// more than 20 digits.
fn as_integer(number: &str) -> Option<String> {
    let (sign, rest) = number.strip_prefix('-').map_or(("", number), |rest| ("-", rest));
    let (mantissa, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if mantissa == number.trim_start_matches('-') && fraction.is_empty() {
        return None;
    }
    let exponent: i64 = exponent.parse().ok()?;
    let mut digits = format!("{whole}{fraction}");
    let mut shift = exponent.checked_sub(i64::try_from(fraction.len()).ok()?)?;
    while shift < 0 && digits.ends_with('0') {
        digits.pop();
        shift += 1;
    }
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return Some("0".into());
    }
    let zeroes = usize::try_from(shift).ok().filter(|zeroes| digits.len().saturating_add(*zeroes) <= 20)?;
    Some(format!("{sign}{digits}{:0<zeroes$}", ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_lose_fraction_and_exponent() {
        for (json, expected) in [
            ("2.048e3", "2048"),
            ("2048.0", "2048"),
            ("[20480E-1,5]", "[2048,5]"),
            ("{\"a\":1e+1,\"b\":\"1e1\",\"c\\\"1e1\":-3.0}", "{\"a\":10,\"b\":\"1e1\",\"c\\\"1e1\":-3}"),
            ("0.0e99", "0"),
            ("-0.0", "0"),
            ("18.446744073709551615e18", "18446744073709551615"),
        ] {
            assert_eq!(whole(json), expected);
        }
    }

    #[test]
    fn other_text_is_unchanged() {
        for json in [
            "",
            "7",
            "-7",
            "1.5",
            "1e-1",
            "1e21",
            "1e999999999999999999999",
            "\"1e1",
            "\"\\",
            "true",
            "-",
            "1e",
            "1.2.3",
        ] {
            assert_eq!(whole(json), json);
        }
    }
}
