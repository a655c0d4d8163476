//! NVMe qualified names, which name subsystems and hosts. NVMe 2.0 §4.5. Any context.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;

/// Bytes of a name's field, which always ends with a NUL.
pub const FIELD_LEN: usize = 256;
/// Bytes of the longest name.
const LEN_MAX: usize = 223;
/// The name of every discovery subsystem.
pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// The start of a name that has a UUID instead of a domain.
const UUID_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// A valid name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nqn(Box<str>);

/// Why a name is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NqnError {
    /// It is longer than a name may be, or its field has no end.
    #[error("an NQN has at most 223 bytes")]
    TooLong,
    /// It is not UTF-8, or has control characters.
    #[error("an NQN is UTF-8 text without control characters")]
    NotText,
    /// It does not begin with `nqn.` and a date.
    #[error("an NQN begins with nqn.YYYY-MM. and a reversed domain name")]
    NoDate,
    /// Its domain is empty, or has an empty label, or one that does not consist of letters, digits and hyphens.
    #[error("the NQN's domain is not a reversed domain name")]
    Domain,
    /// The text after the domain's colon is empty.
    #[error("the NQN has nothing after its colon")]
    Empty,
    /// The text after `uuid:` is not a UUID.
    #[error("the NQN's UUID is malformed")]
    Uuid,
}

impl Nqn {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this is the name of discovery subsystems.
    pub fn is_discovery(&self) -> bool {
        self.as_str() == DISCOVERY
    }

    /// Reads a field, which a NUL ends.
    ///
    /// # Errors
    /// The field has no NUL, or its text is not a name.
    pub fn decode(field: &[u8; FIELD_LEN]) -> Result<Self, NqnError> {
        let end = field.iter().position(|&byte| byte == 0).ok_or(NqnError::TooLong)?;
        std::str::from_utf8(&field[..end]).map_err(|_| NqnError::NotText)?.parse()
    }

    /// The field, filled with NULs.
    pub fn encode(&self) -> [u8; FIELD_LEN] {
        let mut field = [0; FIELD_LEN];
        field[..self.0.len()].copy_from_slice(self.0.as_bytes());
        field
    }
}

/// A map of names is searched by text.
impl Borrow<str> for Nqn {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Nqn {
    type Err = NqnError;

    fn from_str(name: &str) -> Result<Self, NqnError> {
        if name.len() > LEN_MAX {
            return Err(NqnError::TooLong);
        }
        if name.chars().any(char::is_control) {
            return Err(NqnError::NotText);
        }
        match name.strip_prefix(UUID_PREFIX) {
            Some(uuid) if is_uuid(uuid) => {}
            Some(_) => return Err(NqnError::Uuid),
            None => check_domain(name)?,
        }
        Ok(Self(name.into()))
    }
}

/// Checks `nqn.YYYY-MM.DOMAIN`, which a colon and more text may follow.
fn check_domain(name: &str) -> Result<(), NqnError> {
    let rest = name.strip_prefix("nqn.").ok_or(NqnError::NoDate)?;
    let (date, rest) = rest.split_once('.').ok_or(NqnError::NoDate)?;
    let [year @ .., b'-', m1, m2] = date.as_bytes() else { return Err(NqnError::NoDate) };
    let is_number = |digits: &[u8]| digits.iter().all(u8::is_ascii_digit);
    let month = [*m1, *m2];
    if year.len() != 4 || !is_number(year) || !is_number(&month) || !(*b"01"..=*b"12").contains(&month) {
        return Err(NqnError::NoDate);
    }
    let (domain, own) = match rest.split_once(':') {
        Some((domain, own)) => (domain, Some(own)),
        None => (rest, None),
    };
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        !bytes.is_empty()
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
            && bytes[0] != b'-'
            && bytes[bytes.len() - 1] != b'-'
    };
    if !domain.split('.').all(is_label) {
        return Err(NqnError::Domain);
    }
    if own == Some("") { Err(NqnError::Empty) } else { Ok(()) }
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_forms_are_accepted() {
        let long = format!("nqn.2016-06.io.spdk:{}", "x".repeat(LEN_MAX - 20));
        for name in [
            DISCOVERY,
            "nqn.2016-06.io.spdk:cnode1",
            "nqn.2016-06.io.spdk",
            "nqn.2014-08.org.nvmexpress:uuid:0E4d9f5a-11aa-4c3b-8ad4-0a1b2c3d4e5f",
            "nqn.2020-12.example.a-b:Grün:2",
            &long,
        ] {
            let nqn: Nqn = name.parse().unwrap();
            assert_eq!(Nqn::decode(&nqn.encode()), Ok(nqn.clone()));
            assert_eq!((nqn.as_str(), nqn.is_discovery()), (name, name == DISCOVERY));
        }
    }

    #[test]
    fn other_names_are_refused() {
        let long = format!("nqn.2016-06.io.spdk:{}", "x".repeat(LEN_MAX - 19));
        for (name, error) in [
            (long.as_str(), NqnError::TooLong),
            ("", NqnError::NoDate),
            ("iqn.2016-06.io.spdk:a", NqnError::NoDate),
            ("nqn.2016-6.io.spdk:a", NqnError::NoDate),
            ("nqn.2016-13.io.spdk:a", NqnError::NoDate),
            ("nqn.2016-00.io.spdk:a", NqnError::NoDate),
            ("nqn.16-06.io.spdk:a", NqnError::NoDate),
            ("nqn.2016-06", NqnError::NoDate),
            ("nqn.2016-06.", NqnError::Domain),
            ("nqn.2016-06.:a", NqnError::Domain),
            ("nqn.2016-06.io..spdk:a", NqnError::Domain),
            ("nqn.2016-06.-io.spdk:a", NqnError::Domain),
            ("nqn.2016-06.io-.spdk:a", NqnError::Domain),
            ("nqn.2016-06.i_o.spdk:a", NqnError::Domain),
            ("nqn.2016-06.io.spdk:", NqnError::Empty),
            ("nqn.2016-06.io.spdk:a\n", NqnError::NotText),
            ("nqn.2014-08.org.nvmexpress:uuid:0e4d9f5a", NqnError::Uuid),
            ("nqn.2014-08.org.nvmexpress:uuid:0e4d9f5a-11aa-4c3b-8ad4-0a1b2c3d4e5g", NqnError::Uuid),
        ] {
            assert_eq!(name.parse::<Nqn>(), Err(error), "{name}");
        }
        assert_eq!(Nqn::decode(&[b'n'; FIELD_LEN]), Err(NqnError::TooLong), "a field without an end");
        let mut field = [0; FIELD_LEN];
        field[0] = 0xff;
        assert_eq!(Nqn::decode(&field), Err(NqnError::NotText));
    }
}
