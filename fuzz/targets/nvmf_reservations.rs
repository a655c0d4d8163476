//! Commands of reservations, of any content, by a few hosts.
//!
//! For any input, no code panics; a command that fails changes nothing; a host loses its registration only by itself, or by a
//! registrant; the reservation has a holder that is registered; and what is stored comes back as it was.
#![no_main]

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::opcode::io;
use aryk_nvme_fabrics::reservation::{Command, DATA_LEN, HostId, REGISTRANTS_MAX, Reservations, Rights};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

const OPCODES: [u8; 3] = [io::RESERVATION_REGISTER, io::RESERVATION_ACQUIRE, io::RESERVATION_RELEASE];
const HOSTS: u8 = 5;

fn check(reservations: &Reservations) {
    let state = reservations.state();
    assert!(state.registrants.len() <= REGISTRANTS_MAX && state.registrants.iter().all(|of| of.key != 0));
    let is_registrant = |host: &HostId| state.registrants.iter().any(|of| of.host == *host);
    if let Some((holder, _)) = &state.holder {
        assert!(is_registrant(holder) && reservations.rights(holder) == Rights::All);
    }
    assert_eq!(Reservations::restored(state.clone()).state(), state);
    let len = 64 * (1 + state.registrants.len());
    assert_eq!(reservations.report(len as u32 + 4).len(), len + 4);
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let mut reservations = Reservations::default();
    while !u.is_empty() {
        let opcode = if u.ratio(15, 16)? { *u.choose(&OPCODES)? } else { u.arbitrary()? };
        let bits: u32 = u.arbitrary()?;
        let cdw10 = if u.arbitrary()? { bits & 0xc000_070f } else { bits };
        let mut data = [0; DATA_LEN];
        // Few keys, so that hosts meet.
        (data[0], data[8]) = (u.int_in_range(0..=3)?, u.int_in_range(0..=3)?);
        let host = [u.int_in_range(0..=HOSTS - 1)?; 16];
        let entry = SubmissionEntry::new(opcode, 1).with_cdw10_11(cdw10, 0);
        let Ok(command) = Command::decode(&entry, &data) else { continue };
        let before = reservations.state().clone();
        let was_registrant = before.registrants.iter().any(|of| of.host == host);
        match reservations.execute(host, command) {
            Err(_) => assert_eq!(reservations.state(), &before),
            Ok(effects) => {
                let now = &reservations.state().registrants;
                let is_gone = |of: &HostId| now.iter().all(|now| now.host != *of);
                let others_gone = before.registrants.iter().any(|of| of.host != host && is_gone(&of.host));
                assert!(was_registrant || !others_gone && reservations.state().holder == before.holder);
                assert!(effects.preempted.iter().all(is_gone));
                assert!(effects.notices.iter().all(|(of, _)| *of != host));
            }
        }
        check(&reservations);
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});
