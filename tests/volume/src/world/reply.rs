//! The ends of requests and commands, compared with the model.

use aryk_volume::{Answer, CommandError, CommandReply, ForeignPiece, Reply, State, Status, Tag, VolumeId};
use aryk_volume_store::Growth;

use super::{InFlight, Open, Pending, World};
use crate::model::Time;
use crate::pattern::{self, UNIT};
use crate::script::Kind;

impl World {
    /// Takes the replies that there are. Returns whether there were any.
    pub(super) fn take_replies(&mut self) -> Result<bool, String> {
        let mut has_any = false;
        while let Some(reply) = self.opened().pool.next_reply() {
            has_any = true;
            self.tick();
            self.replied(reply)?;
        }
        while let Some(reply) = self.opened().pool.next_command_reply() {
            has_any = true;
            self.tick();
            self.commanded(reply)?;
        }
        let Open { pool, store, .. } = self.opened();
        if let Growth::Grown(blobs) = store.growth()
            && u64::from(blobs) > pool.stats().blobs
        {
            pool.grow(blobs);
        }
        Ok(has_any)
    }

    fn replied(&mut self, reply: Reply) -> Result<(), String> {
        let Reply { tag: Tag(tag), status, foreign, extents } = reply;
        let request = self.requests.get(&tag).ok_or("a reply to nothing")?;
        if request.is_located && matches!(status, Status::Ok | Status::Foreign) {
            return self.located(tag, status, extents);
        }
        self.ended(tag, status, foreign)
    }

    /// A request has ended.
    pub(super) fn ended(
        &mut self,
        tag: u64,
        status: Status,
        foreign: Vec<ForeignPiece>,
    ) -> Result<(), String> {
        let mut request = self.requests.remove(&tag).ok_or("a reply to nothing")?;
        self.counts.requests += 1;
        let mut data = request.buffer.take();
        if let Some(data) = &mut data {
            data.reclaim();
        }
        self.check_status(&request, status)?;
        if let (Kind::Read, Status::Ok, Some(data)) = (request.kind, status, &mut data) {
            for piece in &foreign {
                let value = self.images.get(&piece.disk).copied().unwrap_or(u64::MAX);
                for n in 0..piece.units {
                    let at = (piece.at + n) as usize * UNIT;
                    pattern::fill(&mut data.bytes_mut()[at..at + UNIT], value, piece.disk_unit + n);
                }
            }
            self.check_read(&request, data.bytes())?;
        } else if status == Status::Medium && request.is_verification {
            self.refused += 1;
        } else if !foreign.is_empty() {
            return Err(format!("{request:?} has foreign pieces, with {status:?}"));
        }
        self.opened().pool.recycle(foreign);
        self.apply(&request, status == Status::Ok);
        Ok(())
    }

    fn check_status(&mut self, request: &InFlight, status: Status) -> Result<(), String> {
        let is_deleted = self.model(request.volume).is_none() || self.is_deleting(request.volume);
        let is_allowed = match status {
            Status::Ok => true,
            Status::Removed => is_deleted,
            // Others may fill a pool in which space is reserved.
            Status::NoSpace if self.is_thick(request.volume) => self.has_failed(),
            Status::NoSpace if self.shape.is_full => self.has_thick(),
            Status::NoSpace => matches!(request.kind, Kind::Write(_) | Kind::Zero { .. }),
            Status::Aborted => !request.is_verification,
            Status::Medium | Status::ReadOnly => self.has_failed(),
            Status::Invalid | Status::OutOfRange | Status::Foreign => false,
        };
        if is_allowed { Ok(()) } else { Err(format!("{status:?} for {request:?}")) }
    }

    fn check_read(&mut self, request: &InFlight, data: &[u8]) -> Result<(), String> {
        let Some(model) = self.volumes.iter().find(|model| model.id == request.volume) else { return Ok(()) };
        let grain = model.grain as usize;
        for (n, cell) in data.chunks(grain * UNIT).enumerate() {
            let first = request.units.0 + (n * grain) as u64;
            let place = || format!("unit {first} of {} ({:?})", model.name, model.id);
            let mut seen = None;
            for (unit, bytes) in (first..).zip(cell.chunks(UNIT)) {
                let Some(value) = pattern::value(bytes, unit) else {
                    return Err(format!("{}: garbage {:02x?} at unit {unit}", place(), &bytes[..24]));
                };
                // A foreign disk may end within a block.
                let is_below = unit >= model.below.units && seen == Some(model.below.value);
                if seen.is_some_and(|seen| seen != value) && !is_below {
                    return Err(format!("{}: {seen:?} and {value:#x} in one block", place()));
                }
                seen = seen.or(Some(value));
            }
            let value = seen.expect("a block has a unit");
            let began = request.began;
            let checked = model.check(first, value, began);
            if checked.is_err() && self.is_in_doubt(request.volume, first) {
                continue;
            }
            checked
                .map_err(|what| format!("{}: read {value:#x} by the request of {began}: {what}", place()))?;
            self.counts.values += 1;
            if request.is_verification {
                self.observed.push((request.volume, first, value));
            }
        }
        Ok(())
    }

    /// What the end of a request means for later reads.
    fn apply(&mut self, request: &InFlight, is_ok: bool) {
        let (now, oldest) = (self.now, self.oldest());
        let Some(model) = self.model(request.volume) else { return };
        let (units, began) = (request.units, request.began);
        match request.kind {
            Kind::Write(fua) | Kind::Zero { fua, .. } => {
                let replaces = match request.kind {
                    _ if !is_ok => (0, 0),
                    // The parts of blocks at both ends may keep what they have.
                    Kind::Zero { whole_blocks: true, .. } => (units.0.next_multiple_of(8), units.1 / 8 * 8),
                    _ => units,
                };
                model.end(began, replaces, now);
                if fua && is_ok {
                    model.persist_one(began, oldest);
                }
            }
            Kind::Flush if is_ok => model.persist(began, oldest),
            Kind::Flush | Kind::Read => {}
        }
    }

    fn commanded(&mut self, reply: CommandReply) -> Result<(), String> {
        let CommandReply { tag: Tag(tag), result } = reply;
        let pending = self.commands.remove(&tag).ok_or("a reply to no command")?;
        self.counts.commands += 1;
        let answer = match result {
            Ok(answer) => answer,
            Err(error) => {
                self.check_refusal(&pending, &error)?;
                let is_change = !matches!(
                    pending,
                    Pending::Inflate(_) | Pending::SetThick(_) | Pending::Changed { .. } | Pending::Check
                );
                if error == CommandError::Medium && is_change {
                    self.unsure.push(pending);
                }
                return Ok(());
            }
        };
        match (pending, answer) {
            (Pending::Create(mut model), Answer::Volume(id)) => {
                model.id = id;
                self.volumes.push(*model);
            }
            (Pending::Delete(id), Answer::Done) => self.volumes.retain(|model| model.id != id),
            (Pending::Snapshot { of, names, began }, Answer::Volumes(ids)) if ids.len() == of.len() => {
                self.add_snapshots(&of, &names, &ids, began);
            }
            (Pending::Resize(id, units), Answer::Done) => {
                if let Some(model) = self.model(id) {
                    model.resize(units);
                }
            }
            (Pending::Rename(id, name), Answer::Done) => {
                if let Some(model) = self.model(id) {
                    model.name = name;
                }
            }
            (Pending::Revert { volume, snapshot, .. }, Answer::Done) => self.reverted(volume, snapshot),
            (Pending::Adopt { volume, from, began }, Answer::Done) => self.adopted(volume, from, Some(began)),
            (Pending::Inflate(_) | Pending::SetThick(_), Answer::Done) => {}
            (Pending::Changed { since, until }, Answer::Changed(blocks)) => {
                return self.check_changed(since, until, &blocks);
            }
            (Pending::Check, Answer::Check(report)) => {
                if !report.is_clean() && !self.has_failed() {
                    return Err(format!("the check found {report:?}"));
                }
                self.reported = report.damage.len();
            }
            (pending, answer) => return Err(format!("{answer:?} for {pending:?}")),
        }
        Ok(())
    }

    /// Which refusals are right.
    fn check_refusal(&mut self, pending: &Pending, error: &CommandError) -> Result<(), String> {
        let is_wrong = match error {
            CommandError::NotFound => match pending {
                Pending::Inflate(id)
                | Pending::Delete(id)
                | Pending::Rename(id, _)
                | Pending::SetThick(id)
                | Pending::Resize(id, _) => self.model(*id).is_some() && !self.is_deleting(*id),
                Pending::Check => true,
                _ => false,
            },
            CommandError::Busy => matches!(pending, Pending::Check),
            CommandError::NoSpace => {
                matches!(pending, Pending::Delete(_) | Pending::Check | Pending::Rename(..))
            }
            CommandError::NotReservable { .. } => !matches!(
                pending,
                Pending::Create(_)
                    | Pending::Resize(..)
                    | Pending::Revert { .. }
                    | Pending::Snapshot { .. }
                    | Pending::SetThick(_)
            ),
            CommandError::WrongKind(_) => {
                !matches!(pending, Pending::Changed { .. } | Pending::Revert { .. })
            }
            CommandError::Invalid(_) => !matches!(pending, Pending::Changed { .. } | Pending::Revert { .. }),
            CommandError::Exists => true,
            CommandError::ReadOnly | CommandError::Medium => !self.has_failed(),
        };
        if is_wrong { Err(format!("{pending:?} is refused: {error:?}")) } else { Ok(()) }
    }

    /// Whether the pool has reserved space for the volume.
    fn is_thick(&self, volume: VolumeId) -> bool {
        let pool = &self.open.as_ref().expect("the pool is open").pool;
        pool.volumes().any(|(id, found)| id == volume && found.is_thick)
    }

    /// Whether the pool has reserved space for any volume.
    fn has_thick(&self) -> bool {
        let pool = &self.open.as_ref().expect("the pool is open").pool;
        pool.volumes().any(|(_, volume)| volume.is_thick)
    }

    fn is_deleting(&self, id: VolumeId) -> bool {
        self.unresolved().any(|pending| matches!(pending, Pending::Delete(of) if *of == id))
    }

    pub(super) fn add_snapshots(&mut self, of: &[VolumeId], names: &[String], ids: &[VolumeId], began: u64) {
        let oldest = self.oldest();
        for ((volume, name), id) in of.iter().zip(names).zip(ids) {
            let Some(model) = self.model(*volume) else { continue };
            let mut copy = model.copy_since(name.clone(), began);
            (copy.id, copy.of, copy.group) = (*id, Some(*volume), Some(began));
            // A snapshot is durable, and so is what it has.
            model.persist(began, oldest);
            self.volumes.push(copy);
        }
    }

    pub(super) fn reverted(&mut self, volume: VolumeId, snapshot: VolumeId) {
        let Some(content) = self.volumes.iter().find(|model| model.id == snapshot).cloned() else { return };
        if let Some(model) = self.model(volume) {
            model.revert_to(&content);
        }
    }

    /// A volume has the content of another one, which has ended: what that had ended before `began` is durable.
    pub(super) fn adopted(&mut self, volume: VolumeId, from: VolumeId, began: Option<Time>) {
        let oldest = self.oldest();
        let Some(at) = self.volumes.iter().position(|model| model.id == from) else { return };
        self.counts.adopted += 1;
        let mut content = self.volumes.swap_remove(at);
        if let Some(began) = began {
            content.persist(began, oldest);
        }
        self.volumes
            .iter_mut()
            .filter(|model| model.of == Some(from))
            .for_each(|model| model.of = Some(volume));
        if let Some(model) = self.model(volume) {
            model.adopt(content);
        }
    }

    /// Every block that differs is in the list.
    fn check_changed(
        &mut self,
        since: VolumeId,
        until: VolumeId,
        blocks: &[(u64, u64)],
    ) -> Result<(), String> {
        let find = |id| self.volumes.iter().find(|model| model.id == id);
        let (Some(old), Some(new)) = (find(since), find(until)) else { return Ok(()) };
        for unit in old.units_with_history().chain(new.units_with_history()).filter(|&unit| unit < new.units)
        {
            let values = (old.settled_value(unit), new.settled_value(unit));
            let (Some(before), Some(after)) = values else { continue };
            let block = unit / 8;
            let is_listed = blocks.iter().any(|&(first, count)| first <= block && block < first + count);
            if before != after && unit < old.units && !is_listed {
                return Err(format!(
                    "block {block} of {until:?} differs from {since:?}, and is not in {blocks:?}"
                ));
            }
        }
        let is_sorted = blocks.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0);
        if is_sorted { Ok(()) } else { Err(format!("changed blocks are not in order: {blocks:?}")) }
    }

    /// Whether the pool has stopped to write, as it may after faults.
    pub(super) fn is_read_only(&mut self) -> bool {
        matches!(self.opened().pool.state(), State::ReadOnly(_))
    }
}
