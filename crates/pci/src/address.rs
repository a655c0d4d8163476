//! The address of a PCI function on its host. Any context; pure.

use std::fmt;
use std::str::FromStr;

/// Domain, bus, device and function, as `lspci -D` shows them: `0000:3d:00.0`. The domain can be left out when it is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// A text that is no PCI address.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no PCI address: write domain:bus:device.function in hexadecimal, for example 0000:3d:00.0")]
pub struct BadAddress(String);

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        parse(text).ok_or_else(|| BadAddress(text.chars().take(64).collect()))
    }
}

fn parse(text: &str) -> Option<Address> {
    let (text, function) = text.split_once('.')?;
    let (text, device) = text.rsplit_once(':')?;
    let (domain, bus) = text.rsplit_once(':').unwrap_or(("0", text));
    let address = Address {
        domain: hex(domain, 8)?,
        bus: u8::try_from(hex(bus, 2)?).ok()?,
        device: u8::try_from(hex(device, 2)?).ok()?,
        function: u8::try_from(hex(function, 1)?).ok()?,
    };
    (address.device < 32 && address.function < 8).then_some(address)
}

/// A number of up to `digits` hexadecimal digits, without a sign.
fn hex(text: &str, digits: usize) -> Option<u32> {
    let is_number = (1..=digits).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_number.then(|| u32::from_str_radix(text, 16).ok())?
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_shown_as_the_kernel_does() {
        for (text, shown) in [
            ("0000:3d:00.0", "0000:3d:00.0"),
            ("3d:00.1", "0000:3d:00.1"),
            ("10000:E1:1f.7", "10000:e1:1f.7"),
            ("0:0:0.0", "0000:00:00.0"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), shown);
        }
        let bad =
            ["", "3d:00", "3d.0", ":00.0", "0000:3d:20.0", "0000:3d:00.8", "0000:3d:00.00", "0000:13d:00.0"];
        let worse = ["+1:00.0", "0000:3d:00.0 ", "a:0000:3d:00.0", "../../x:0.0", "3d:00.-1", "3d:00."];
        for text in bad.into_iter().chain(worse) {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
