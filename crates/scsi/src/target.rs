//! Logical unit numbers, and the answers of those that are not there (SAM-5, section 4.7; SPC-4, section 6.6). Any context; pure.

use crate::cdb::{Command, decode};
use crate::unit::{give, report_luns};
use crate::{Outcome, Request, Sense, Status, inquiry};

/// The number in a LUN field, if it is one of a single level: by peripheral device or flat addressing.
#[inline]
pub fn lun_number(field: [u8; 8]) -> Option<u16> {
    let field = u64::from_be_bytes(field);
    let number = (field >> 48) as u16;
    match number >> 14 {
        // There are levels below.
        _ if field << 16 != 0 => None,
        // Peripheral device addressing has a bus number too.
        0 => (number < 0x100).then_some(number),
        1 => Some(number & 0x3fff),
        _ => None,
    }
}

/// The field of a number below 16,384.
pub(crate) fn lun_bytes(number: u16) -> [u8; 8] {
    let flat = if number < 0x100 { 0 } else { 0x40 };
    let [high, low] = number.to_be_bytes();
    [flat | high, low, 0, 0, 0, 0, 0, 0]
}

/// Answers a command to a logical unit that is not there, in a target that has these.
pub fn answer_absent(request: &Request<'_>, luns: &[u16]) -> Outcome {
    let into = request.data_in;
    let answer = match decode(request.cdb) {
        Ok(Command::Inquiry { page: None, allocation }) => Ok(give(&inquiry::absent(), allocation, into)),
        Ok(Command::ReportLuns { select, allocation }) => {
            report_luns(select, luns).map(|data| give(&data, allocation, into))
        }
        Ok(Command::RequestSense { descriptors, allocation }) => {
            let (bytes, len) =
                if descriptors { Sense::NO_UNIT.descriptors() } else { Sense::NO_UNIT.fixed() };
            Ok(give(&bytes[..len], allocation, into))
        }
        _ => Err(Sense::NO_UNIT),
    };
    match answer {
        Ok(moved) => Outcome::good(request.tag, moved),
        Err(sense) => Outcome { status: Status::CheckCondition, sense, ..Outcome::good(request.tag, 0) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back() {
        for number in [0, 1, 255, 256, 1000, 0x3fff] {
            assert_eq!(lun_number(lun_bytes(number)), Some(number));
        }
        assert_eq!(lun_number([0x40, 3, 0, 0, 0, 0, 0, 0]), Some(3), "flat");
        for strange in [[1, 0, 0, 0, 0, 0, 0, 0], [0x80, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0]] {
            assert_eq!(lun_number(strange), None, "a bus, a format, a second level");
        }
    }
}
