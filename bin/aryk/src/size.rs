//! Sizes in the notation of the command line.

use serde::de::{Deserializer, Error, Unexpected, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

const UNITS: [(&str, u32); 5] = [("P", 50), ("T", 40), ("G", 30), ("M", 20), ("K", 10)];

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    /// Parses `20G`, `20GiB`, `1.5g`, `4096` as powers of 1024, like most tools, and `20GB` as powers of 1000, like vendors of
    /// disks.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            "a size is a number with K, M, G, T or P: 20G or 20GiB (powers of 1024), 20GB (powers of 1000)"
                .to_owned()
        };
        let upper = text.trim().to_ascii_uppercase();
        let end = upper.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(upper.len());
        let (number, unit) = upper.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let places = u32::try_from(fraction.len())
            .ok()
            .filter(|places| (1..=18).contains(places))
            .ok_or_else(wrong)?;
        let (whole, fraction): (u64, u64) = match (whole.parse(), fraction.parse()) {
            (Ok(whole), Ok(fraction)) => (whole, fraction),
            _ => return Err(wrong()),
        };
        let bytes = bytes_of(unit).ok_or_else(wrong)?;
        let (part, of) = (u128::from(fraction) * bytes, 10_u128.pow(places));
        if !part.is_multiple_of(of) {
            return Err(format!(
                "{text} is not a whole number of bytes: use a smaller unit, without a fraction"
            ));
        }
        let all = u128::from(whole) * bytes + part / of;
        all.try_into().map(Self).map_err(|_| format!("{text} is too large"))
    }
}

/// The bytes of a unit, in upper case.
fn bytes_of(unit: &str) -> Option<u128> {
    if matches!(unit, "" | "B") {
        return Some(1);
    }
    let (letter, rest) = unit.split_at_checked(1)?;
    let (_, shift) = UNITS.iter().find(|(name, _)| *name == letter)?;
    match rest {
        "" | "IB" => Some(1 << shift),
        "B" => Some(1000_u128.pow(shift / 10)),
        _ => None,
    }
}

impl fmt::Display for Size {
    /// Formats the size in the largest unit with a number of at least 1, with one decimal if it is not an integer.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((unit, shift)) = UNITS.iter().find(|(_, shift)| self.0 >> shift > 0) else {
            return write!(f, "{}B", self.0);
        };
        let whole = self.0 >> shift;
        let tenth = (u128::from(self.0 - (whole << shift)) * 10) >> shift;
        match tenth {
            0 => write!(f, "{whole}{unit}"),
            _ => write!(f, "{whole}.{tenth}{unit}"),
        }
    }
}

impl Serialize for Size {
    /// Writes the size without loss: in a unit only if it is a multiple of that unit.
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let is_whole = |shift: &u32| self.0 > 0 && self.0.trailing_zeros() >= *shift;
        match UNITS.iter().find(|(_, shift)| is_whole(shift)) {
            Some((unit, shift)) => to.collect_str(&format_args!("{}{unit}", self.0 >> shift)),
            None => to.serialize_u64(self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    /// Reads a text such as "20G", or a number of bytes.
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Sizes;
        impl Visitor<'_> for Sizes {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"20G\", or a number of bytes")
            }
            fn visit_u64<E: Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size(bytes))
            }
            fn visit_i64<E: Error>(self, bytes: i64) -> Result<Size, E> {
                let negative = |_| E::invalid_value(Unexpected::Signed(bytes), &self);
                bytes.try_into().map(Size).map_err(negative)
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }
        }
        from.deserialize_any(Sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_parse() {
        let known = [
            ("4096", 4096),
            ("20G", 20 << 30),
            ("20GiB", 20 << 30),
            ("512m", 512 << 20),
            ("1t", 1 << 40),
            ("10GB", 10_000_000_000),
            ("1kb", 1000),
            ("1.5G", 3 << 29),
            ("0.5KiB", 512),
            ("1.25TB", 1_250_000_000_000),
            ("512B", 512),
        ];
        for (text, bytes) in known {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in [
            "",
            "G",
            "20GG",
            "-1",
            "1.3G",
            "1.",
            ".5G",
            "1.2.3G",
            "20X",
            "20Gi",
            "20 G",
            "16384P",
            "99999999999999999999",
        ] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_print() {
        let known = [
            (0, "0B"),
            (1023, "1023B"),
            (1024, "1K"),
            (1536, "1.5K"),
            (20 << 30, "20G"),
            (u64::MAX, "16383.9P"),
        ];
        for (bytes, text) in known {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }

    #[test]
    fn sizes_in_files() {
        for (text, bytes) in [("\"20G\"", 20 << 30), ("512", 512), ("\"1536\"", 1536)] {
            assert_eq!(serde_json::from_str::<Size>(text).unwrap(), Size(bytes), "{text}");
        }
        for text in ["-1", "\"much\"", "1.5", "null"] {
            assert!(serde_json::from_str::<Size>(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn sizes_are_written_without_loss(bytes: u64) {
            let text = serde_json::to_string(&Size(bytes)).unwrap();
            prop_assert_eq!(serde_json::from_str::<Size>(&text).unwrap(), Size(bytes));
        }

        #[test]
        fn sizes_with_a_unit_are_written_as_they_parse(number in 1_u64..1024, unit in 0_usize..5) {
            let text = format!("{number}{}", UNITS[unit].0);
            prop_assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
    }
}
