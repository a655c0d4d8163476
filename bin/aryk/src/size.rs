//! Sizes as people write them: powers of 1024.

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

    /// `20G`, `20GiB`, `512m`, `4096`. `GB` is refused: some mean 10⁹ by it, some 2³⁰.
    fn from_str(text: &str) -> Result<Self, String> {
        let upper = text.trim().to_ascii_uppercase();
        let digits = upper.len() - upper.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = upper.split_at(digits);
        let wrong = || "a size is a number with K, M, G, T or P (powers of 1024), such as 20G".to_owned();
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let unit = unit.strip_suffix("IB").unwrap_or(unit);
        let shift = match UNITS.iter().find(|(name, _)| *name == unit) {
            Some((_, shift)) => *shift,
            None if unit.is_empty() => 0,
            None => return Err(wrong()),
        };
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| format!("{text} is too large"))
    }
}

impl fmt::Display for Size {
    /// In the largest unit that leaves a number of at least 1, with one decimal if it is not whole.
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
    /// Without loss: in a unit only if it is a whole number of them.
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let is_whole = |shift: &u32| self.0 > 0 && self.0.trailing_zeros() >= *shift;
        match UNITS.iter().find(|(_, shift)| is_whole(shift)) {
            Some((unit, shift)) => to.collect_str(&format_args!("{}{unit}", self.0 >> shift)),
            None => to.serialize_u64(self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    /// Text as people write it, or a number of bytes.
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
    fn as_people_write_them() {
        let known =
            [("4096", 4096), ("20G", 20 << 30), ("20GiB", 20 << 30), ("512m", 512 << 20), ("1t", 1 << 40)];
        for (text, bytes) in known {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "G", "20GB", "-1", "1.5G", "20X", "20 G", "16384P", "99999999999999999999"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn as_people_read_them() {
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
    fn in_files() {
        for (text, bytes) in [("\"20G\"", 20 << 30), ("512", 512), ("\"1536\"", 1536)] {
            assert_eq!(serde_json::from_str::<Size>(text).unwrap(), Size(bytes), "{text}");
        }
        for text in ["-1", "\"much\"", "1.5", "null"] {
            assert!(serde_json::from_str::<Size>(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn files_keep_every_byte(bytes: u64) {
            let text = serde_json::to_string(&Size(bytes)).unwrap();
            prop_assert_eq!(serde_json::from_str::<Size>(&text).unwrap(), Size(bytes));
        }

        #[test]
        fn whole_sizes_survive(number in 1_u64..1024, unit in 0_usize..5) {
            let text = format!("{number}{}", UNITS[unit].0);
            prop_assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
    }
}
