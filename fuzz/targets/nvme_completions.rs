//! Hostile completions of an NVMe queue pair: any entries, at any places, between submissions, resets and late commands.
//!
//! For any input, no code panics, each command ends once at most, and a pair that met an impossible completion ends no command
//! until its reset.
#![no_main]

use std::collections::HashSet;

use aryk_nvme::data::Piece;
use aryk_nvme::queue::scripted::{QID, Scripted};
use aryk_nvme::queue::{Fate, LateStep};
use aryk_nvme::spec::entry::SubmissionEntry;
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

struct Harness {
    rig: Scripted,
    /// Commands in flight, by token.
    in_flight: HashSet<u64>,
    next_token: u64,
    now: u64,
    cids: Vec<u16>,
}

impl Harness {
    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=7)? {
            0 | 1 => self.submit(u)?,
            2 => {
                // A completion that is right, unless the command has ended.
                let cid = *u.choose(&self.cids)?;
                self.rig.post(cid, QID, u.int_in_range(0..=7)?, u.arbitrary()?);
            }
            3 => self.rig.post(u.arbitrary()?, u.int_in_range(2..=4)?, u.arbitrary()?, u.arbitrary()?),
            4 => self.rig.scribble(u.arbitrary()?, u.arbitrary()?),
            5 => self.reap(u.arbitrary()?),
            6 => self.late(u.int_in_range(0..=200)?),
            _ => self.reset(u.arbitrary()?),
        }
        assert_eq!(usize::from(self.rig.pair.in_flight()), self.in_flight.len());
        Ok(())
    }

    fn submit(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let pieces =
            [Piece { iova: u.arbitrary()?, len: u.arbitrary()? }, Piece { iova: u.arbitrary()?, len: 4096 }];
        let data = &pieces[..u.int_in_range(0..=2)?];
        let entry = SubmissionEntry::new(u.arbitrary()?, 1);
        if let Ok(cid) = self.rig.pair.submit(entry, data, self.next_token, self.now) {
            self.in_flight.insert(self.next_token);
            self.cids.push(cid);
        }
        self.next_token += 1;
        self.rig.pair.flush();
        Ok(())
    }

    fn reap(&mut self, limit: u16) {
        let had_error = self.rig.pair.error().is_some();
        let in_flight = &mut self.in_flight;
        let reaped = self.rig.pair.reap(limit, |completed| {
            assert!(!had_error, "a broken pair ends no command");
            assert!(in_flight.remove(&completed.token), "a command ended twice");
        });
        assert!(reaped.is_ok_and(|count| count <= limit) || self.rig.pair.error().is_some());
    }

    fn late(&mut self, time: u64) {
        self.now += time;
        let (now, in_flight) = (self.now, &self.in_flight);
        self.rig.pair.late(now, 8, |late| {
            assert!(in_flight.contains(&late.token) && late.waited >= 100);
            assert!(late.step == LateStep::Abort || late.waited >= 150);
        });
    }

    fn reset(&mut self, keep: u8) {
        let in_flight = &mut self.in_flight;
        self.rig.reset(self.now, |unfinished| {
            if keep >> (unfinished.token % 8) & 1 != 0 {
                return Fate::Resubmit;
            }
            assert!(in_flight.remove(&unfinished.token));
            Fate::Fail
        });
        assert!(self.rig.pair.is_running());
    }
}

fuzz_target!(|data: &[u8]| {
    let mut u = Unstructured::new(data);
    let rig = Scripted::new(7, 8);
    let mut harness = Harness { rig, in_flight: HashSet::new(), next_token: 0, now: 0, cids: vec![0] };
    while !u.is_empty() && harness.step(&mut u).is_ok() {}
});
