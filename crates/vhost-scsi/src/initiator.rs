//! The initiator port name of a controller. Disks store it with each reservation, to recognize the holder. Any context; pure.

use std::fmt;
use std::str::FromStr;

/// An initiator port name: an NAA identifier of 64 bits, written `naa.` and 16 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Initiator(pub(crate) u64);

/// The text is not an initiator port name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("an initiator's name is `naa.` and 16 hexadecimal digits, the first of them 2, 3 or 5")]
pub struct BadInitiator;

impl Initiator {
    /// Derives the name for a controller without a configured one: locally assigned (NAA 3h), always the same for the same
    /// controller name.
    pub(crate) fn of(controller: &str) -> Self {
        // FNV-1a. Never change it: disks store initiators' names that were derived with it.
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = controller.bytes().fold(0xcbf2_9ce4_8422_2325, step);
        Self(3 << 60 | hash & (u64::MAX >> 4))
    }
}

impl fmt::Display for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "naa.{:016x}", self.0)
    }
}

impl FromStr for Initiator {
    type Err = BadInitiator;

    fn from_str(text: &str) -> Result<Self, BadInitiator> {
        let digits = text.strip_prefix("naa.").filter(|digits| digits.len() == 16).ok_or(BadInitiator)?;
        if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(BadInitiator);
        }
        let name = u64::from_str_radix(digits, 16).map_err(|_| BadInitiator)?;
        // Identifiers of 64 bits: IEEE extended, locally assigned, IEEE registered (SPC-4, section 7.8.6.6).
        if matches!(name >> 60, 2 | 3 | 5) { Ok(Self(name)) } else { Err(BadInitiator) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_to_what_they_display() {
        let own = Initiator::of("vm1");
        assert_eq!(own.to_string().parse(), Ok(own));
        assert_eq!("naa.5000c500a1b2c3d4".parse::<Initiator>().unwrap().to_string(), "naa.5000c500a1b2c3d4");
        for bad in [
            "",
            "naa.",
            "5000c500a1b2c3d4",
            "naa.0000c500a1b2c3d4",
            "naa.+000c500a1b2c3d4",
            "naa.5000c500a1b2c3d",
        ] {
            assert_eq!(bad.parse::<Initiator>(), Err(BadInitiator), "{bad}");
        }
    }

    #[test]
    fn a_derived_name_never_changes() {
        // Disks have stored this name.
        assert_eq!(Initiator::of("vm1").to_string(), "naa.38f65f194ec59887");
        assert_ne!(Initiator::of("vm1"), Initiator::of("vm2"));
    }
}
