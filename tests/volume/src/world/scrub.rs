//! The scrub, beside all else: it finds damage where there is some, and none elsewhere.

use aryk_volume::{Damage, Scrub, State};

use super::{EVENTS_MAX, Open, World};

/// Bytes of a grant, at most.
const GRANT: u64 = 1 << 20;

impl World {
    /// Now and then starts, continues or stops a pass.
    pub(super) fn scrub_at_random(&mut self) {
        let (chance, bytes) = (self.rng.u32(..1000), self.rng.u64(..GRANT));
        let Open { pool, .. } = self.open.as_mut().expect("the pool is open");
        match chance {
            0 => pool.stop_scrub(),
            1..4 => {
                self.counts.scrubbed += u64::from(pool.scrub() == Scrub::Done);
                pool.start_scrub();
            }
            4..80 => pool.grant_scrub(bytes),
            _ => {}
        }
    }

    /// Nothing is damaged while the disk does what it should.
    pub(super) fn check_scrub(&mut self) -> Result<(), String> {
        if self.has_failed() {
            return Ok(());
        }
        let damage = self.opened().pool.take_scrub_damage();
        if damage.is_empty() { Ok(()) } else { Err(format!("the scrub found {damage:?}")) }
    }

    /// Runs a pass from its beginning to its end, and returns what it found. A pool that is read-only has no passes.
    pub(super) fn scrub_all(&mut self) -> Result<Vec<Damage>, String> {
        let pool = &mut self.opened().pool;
        pool.stop_scrub();
        pool.take_scrub_damage();
        let mut damage = Vec::new();
        for _ in 0..EVENTS_MAX {
            let pool = &mut self.opened().pool;
            damage.append(&mut pool.take_scrub_damage());
            match pool.scrub() {
                Scrub::Running { .. } => pool.grant_scrub(GRANT),
                Scrub::Done => {
                    self.counts.scrubbed += 1;
                    return Ok(damage);
                }
                // It is not started yet, or was stopped at random.
                Scrub::Idle if pool.state() == State::Ready => pool.start_scrub(),
                Scrub::Idle => return Ok(damage),
            }
            self.pump()?;
        }
        Err("the scrub does not end".to_owned())
    }
}
