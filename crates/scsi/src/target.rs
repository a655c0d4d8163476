//! Logical unit numbers, and the answers for units that do not exist (SAM-5, section 4.7; SPC-4, section 6.6). Any context; pure.

use crate::cdb::{Command, decode};
use crate::unit::{copy_answer, report_luns};
use crate::{Outcome, Request, Sense, Status, inquiry};

/// The number in a LUN field of a single level, in peripheral device or flat space addressing; `None` for any other field.
#[inline]
pub fn lun_number(field: [u8; 8]) -> Option<u16> {
    let field = u64::from_be_bytes(field);
    let number = (field >> 48) as u16;
    match number >> 14 {
        // The field has a second level.
        _ if field << 16 != 0 => None,
        // Peripheral device addressing has a bus number, which must be 0.
        0 => (number < 0x100).then_some(number),
        1 => Some(number & 0x3fff),
        _ => None,
    }
}

/// The LUN field for a number below 16,384.
pub(crate) fn lun_bytes(number: u16) -> [u8; 8] {
    let flat = if number < 0x100 { 0 } else { 0x40 };
    let [high, low] = number.to_be_bytes();
    [flat | high, low, 0, 0, 0, 0, 0, 0]
}

/// Answers a command to a logical unit that does not exist, in a target that has the units `luns`.
pub fn answer_absent(request: &Request<'_>, luns: &[u16]) -> Outcome {
    let into = request.data_in;
    let answer = match decode(request.cdb) {
        Ok(Command::Inquiry { page: None, allocation }) => {
            Ok(copy_answer(&inquiry::absent(), allocation, into))
        }
        Ok(Command::ReportLuns { select, allocation }) => {
            report_luns(select, luns).map(|data| copy_answer(&data, allocation, into))
        }
        Ok(Command::RequestSense { descriptors, allocation }) => {
            let (bytes, len) =
                if descriptors { Sense::NO_UNIT.descriptors() } else { Sense::NO_UNIT.fixed() };
            Ok(copy_answer(&bytes[..len], allocation, into))
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
    fn lun_numbers_survive_encoding_and_decoding() {
        for number in [0, 1, 255, 256, 1000, 0x3fff] {
            assert_eq!(lun_number(lun_bytes(number)), Some(number));
        }
        assert_eq!(lun_number([0x40, 3, 0, 0, 0, 0, 0, 0]), Some(3), "flat");
        for strange in [[1, 0, 0, 0, 0, 0, 0, 0], [0x80, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0]] {
            assert_eq!(lun_number(strange), None, "a bus number, another format, a second level");
        }
    }
}
