//! REPORT SUPPORTED OPERATION CODES (SPC-4, section 6.35). Any context; pure.

use crate::Sense;
use crate::cdb::{GET_LBA_STATUS, Opcodes, READ_CAPACITY_16, REPORT_OPCODES, op};

/// An opcode, its service action if it has one, and the bits of its CDB that the decoder evaluates, from byte 1 on.
struct Entry(u8, Option<u8>, &'static [u8]);

const LBA_16: [u8; 15] = [0x18, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x04];
const CHECK_16: [u8; 15] = [0x16, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x04];
const SAME_16: [u8; 15] = [0x09, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x04];
const SYNC_16: [u8; 15] = [0x02, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x04];
const CAPACITY_16: [u8; 15] = [0x1f, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0x04];
const STATUS_16: [u8; 15] = [0x1f, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x04];
const COMPARE: [u8; 15] = [0x18, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 255, 0, 0x04];
const LBA_12: [u8; 11] = [0x18, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x04];
const CHECK_12: [u8; 11] = [0x16, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x04];
const LUNS: [u8; 11] = [0, 255, 0, 0, 0, 255, 255, 255, 255, 0, 0x04];
const CODES: [u8; 11] = [0x1f, 0x87, 255, 255, 255, 255, 255, 255, 255, 0, 0x04];
const LBA_10: [u8; 9] = [0x18, 255, 255, 255, 255, 0, 255, 255, 0x04];
const CHECK_10: [u8; 9] = [0x16, 255, 255, 255, 255, 0, 255, 255, 0x04];
const SAME_10: [u8; 9] = [0x08, 255, 255, 255, 255, 0, 255, 255, 0x04];
const SYNC_10: [u8; 9] = [0x02, 255, 255, 255, 255, 0, 255, 255, 0x04];
const LIST_10: [u8; 9] = [0, 0, 0, 0, 0, 0, 255, 255, 0x04];
const RESERVE_IN: [u8; 9] = [0x1f, 0, 0, 0, 0, 0, 255, 255, 0x04];
const RESERVE_OUT: [u8; 9] = [0x1f, 255, 0, 0, 255, 255, 255, 255, 0x04];
const LBA_6: [u8; 5] = [0x1f, 255, 255, 255, 0x04];

const ENTRIES: &[Entry] = &[
    Entry(op::TEST_UNIT_READY, None, &[0, 0, 0, 0, 0x04]),
    Entry(op::REQUEST_SENSE, None, &[0x01, 0, 0, 255, 0x04]),
    Entry(op::READ_6, None, &LBA_6),
    Entry(op::WRITE_6, None, &LBA_6),
    Entry(op::INQUIRY, None, &[0x01, 255, 255, 255, 0x04]),
    Entry(op::MODE_SELECT_6, None, &[0x11, 0, 0, 255, 0x04]),
    Entry(op::MODE_SENSE_6, None, &[0x08, 255, 255, 255, 0x04]),
    Entry(op::START_STOP_UNIT, None, &[0x01, 0, 0, 0xf7, 0x04]),
    Entry(op::READ_CAPACITY_10, None, &[0, 0, 0, 0, 0, 0, 0, 0, 0x04]),
    Entry(op::READ_10, None, &LBA_10),
    Entry(op::WRITE_10, None, &LBA_10),
    Entry(op::VERIFY_10, None, &CHECK_10),
    Entry(op::SYNCHRONIZE_CACHE_10, None, &SYNC_10),
    Entry(op::WRITE_SAME_10, None, &SAME_10),
    Entry(op::UNMAP, None, &LIST_10),
    Entry(op::MODE_SELECT_10, None, &[0x11, 0, 0, 0, 0, 0, 255, 255, 0x04]),
    Entry(op::MODE_SENSE_10, None, &[0x18, 255, 255, 0, 0, 0, 255, 255, 0x04]),
    Entry(op::PERSISTENT_RESERVE_IN, Some(0), &RESERVE_IN),
    Entry(op::PERSISTENT_RESERVE_IN, Some(1), &RESERVE_IN),
    Entry(op::PERSISTENT_RESERVE_IN, Some(2), &RESERVE_IN),
    Entry(op::PERSISTENT_RESERVE_IN, Some(3), &RESERVE_IN),
    Entry(op::PERSISTENT_RESERVE_OUT, Some(0), &RESERVE_OUT),
    Entry(op::PERSISTENT_RESERVE_OUT, Some(1), &RESERVE_OUT),
    Entry(op::PERSISTENT_RESERVE_OUT, Some(2), &RESERVE_OUT),
    Entry(op::PERSISTENT_RESERVE_OUT, Some(3), &RESERVE_OUT),
    Entry(op::PERSISTENT_RESERVE_OUT, Some(4), &RESERVE_OUT),
    Entry(op::PERSISTENT_RESERVE_OUT, Some(5), &RESERVE_OUT),
    Entry(op::PERSISTENT_RESERVE_OUT, Some(6), &RESERVE_OUT),
    Entry(op::PERSISTENT_RESERVE_OUT, Some(7), &RESERVE_OUT),
    Entry(op::READ_16, None, &LBA_16),
    Entry(op::COMPARE_AND_WRITE, None, &COMPARE),
    Entry(op::WRITE_16, None, &LBA_16),
    Entry(op::VERIFY_16, None, &CHECK_16),
    Entry(op::SYNCHRONIZE_CACHE_16, None, &SYNC_16),
    Entry(op::WRITE_SAME_16, None, &SAME_16),
    Entry(op::SERVICE_ACTION_IN_16, Some(READ_CAPACITY_16), &CAPACITY_16),
    Entry(op::SERVICE_ACTION_IN_16, Some(GET_LBA_STATUS), &STATUS_16),
    Entry(op::REPORT_LUNS, None, &LUNS),
    Entry(op::MAINTENANCE_IN, Some(REPORT_OPCODES), &CODES),
    Entry(op::READ_12, None, &LBA_12),
    Entry(op::WRITE_12, None, &LBA_12),
    Entry(op::VERIFY_12, None, &CHECK_12),
];

/// The command timeouts descriptor (section 6.35.4): no timeout is known.
const TIMEOUTS: [u8; 12] = [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// The answer to REPORT SUPPORTED OPERATION CODES.
///
/// # Errors
/// The request names a service action of a command that has none, or omits that of a command that has service actions.
pub(crate) fn report(which: Opcodes, timeouts: bool) -> Result<Vec<u8>, Sense> {
    let (code, action) = match which {
        Opcodes::All => return Ok(all(timeouts)),
        Opcodes::One(code) if has_actions(code) => return Err(Sense::in_cdb_bit(2, 2)),
        Opcodes::Action(code, _) if is_there(code) && !has_actions(code) => {
            return Err(Sense::in_cdb_bit(2, 2));
        }
        Opcodes::One(code) => (code, None),
        Opcodes::Action(code, action) => (code, Some(action)),
        // A request for an opcode without a service action holds 0 as service action (table 182).
        Opcodes::Either(code, action) => (code, (has_actions(code) || action != 0).then_some(action)),
    };
    let found = ENTRIES.iter().find(|e| e.0 == code && e.1.map(u16::from) == action);
    Ok(match found {
        None => vec![0, 0x01, 0, 0],
        Some(Entry(code, action, usage)) => {
            let mut data = vec![0, 0x03 | u8::from(timeouts) << 7, 0, usage.len() as u8 + 1, *code];
            data.extend_from_slice(usage);
            // The service action field of the CDB holds the service action itself.
            if let Some(action) = action {
                data[5] = data[5] & 0xe0 | action;
            }
            data.extend_from_slice(if timeouts { &TIMEOUTS } else { &[] });
            data
        }
    })
}

fn is_there(code: u8) -> bool {
    ENTRIES.iter().any(|e| e.0 == code)
}

fn has_actions(code: u8) -> bool {
    ENTRIES.iter().any(|e| e.0 == code && e.1.is_some())
}

fn all(timeouts: bool) -> Vec<u8> {
    let mut list = Vec::new();
    for Entry(code, action, usage) in ENTRIES {
        let flags = u8::from(timeouts) << 1 | u8::from(action.is_some());
        list.extend([*code, 0, 0, action.unwrap_or(0), 0, flags, 0, usage.len() as u8 + 1]);
        list.extend_from_slice(if timeouts { &TIMEOUTS } else { &[] });
    }
    let mut data = (list.len() as u32).to_be_bytes().to_vec();
    data.extend(list);
    data
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cdb::decode;

    /// The table lists exactly the opcodes and service actions that the decoder accepts.
    #[test]
    fn the_table_lists_what_the_decoder_accepts() {
        for code in 0..=255u8 {
            for action in 0..32u8 {
                let mut cdb = [0; 16];
                (cdb[0], cdb[1]) = (code, action);
                let reserves = matches!(code, op::PERSISTENT_RESERVE_IN | op::PERSISTENT_RESERVE_OUT);
                let listed = ENTRIES.iter().any(|e| e.0 == code && e.1.is_none_or(|a| a == action));
                let decoded = decode(&cdb);
                if has_actions(code) && !reserves {
                    assert_eq!(decoded.is_ok(), listed, "{code:#x} {action:#x}");
                } else {
                    assert_eq!(decoded != Err(Sense::OPCODE), is_there(code), "{code:#x}");
                }
            }
        }
    }

    #[test]
    fn one_opcode_is_reported_with_its_bits() {
        let data = report(Opcodes::One(op::READ_10), true).unwrap();
        assert_eq!(data[..14], [0, 0x83, 0, 10, 0x28, 0x18, 255, 255, 255, 255, 0, 255, 255, 4]);
        assert_eq!(data[14..], TIMEOUTS);
        assert_eq!(report(Opcodes::One(0xff), false), Ok(vec![0, 1, 0, 0]));
        assert_eq!(report(Opcodes::One(op::MAINTENANCE_IN), false), Err(Sense::in_cdb_bit(2, 2)));
        assert_eq!(report(Opcodes::Action(op::READ_10, 0), false), Err(Sense::in_cdb_bit(2, 2)));
        let action = report(Opcodes::Either(op::SERVICE_ACTION_IN_16, 0x10), false).unwrap();
        assert_eq!(action[..6], [0, 3, 0, 16, 0x9e, 0x10]);
        assert_eq!(report(Opcodes::Either(op::READ_10, 1), false), Ok(vec![0, 1, 0, 0]));
        let all = report(Opcodes::All, false).unwrap();
        assert_eq!(all[..4], (ENTRIES.len() as u32 * 8).to_be_bytes());
    }
}
