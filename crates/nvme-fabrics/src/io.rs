//! I/O commands of a target: fields of a submission queue entry, checked against the namespace. NVM Command Set 1.0 §3. Context:
//! the owner of an I/O queue, usually a reactor; nothing here allocates.

use aryk_nvme::spec::entry::{Fuse, SubmissionEntry};
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;

use crate::reservation::{self, Rights};
use crate::subsystem::{AnaState, Commands, CopyLimits, Io, SOURCES_MAX};

/// Bytes of a range of Dataset Management.
const RANGE_LEN: usize = 16;
/// Ranges of one command, at most.
const RANGES_MAX: usize = 256;
/// Bytes of a source of Copy, in descriptor format 0.
const SOURCE_LEN: usize = 32;
/// Bytes of data that a command of reservations may have, at most: hosts may send more than the command reads.
const RESERVE_MAX: u32 = 4096;
/// CDW12: Force Unit Access, and of Write Zeroes: deallocate.
const FUA: u32 = 1 << 30;
const DEALLOCATE: u32 = 1 << 25;
/// CDW11 of Dataset Management: the host wants the ranges deallocated.
const ATTRIBUTE_DEALLOCATE: u32 = 1 << 2;

/// Blocks of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first block.
    pub lba: u64,
    /// Their number, at least 1.
    pub blocks: u32,
}

/// The fields of a Copy. NVM Command Set 1.0 §3.2.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyFields {
    /// The first block that is written.
    pub lba: u64,
    /// The number of sources, at least 1. [`Rules::sources`] reads them from the data.
    pub sources: u16,
    /// FUA.
    pub fua: bool,
}

impl CopyFields {
    /// Reads the fields of a command.
    pub const fn decode(entry: &SubmissionEntry) -> Self {
        let cdw12 = entry.cdw(12);
        Self { lba: entry.cdw10_11(), sources: (cdw12 & 0xff) as u16 + 1, fua: cdw12 & FUA != 0 }
    }
}

/// What a command asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Read.
    Read(Range),
    /// Write; `fua`: the data is durable before the completion.
    Write {
        /// The blocks.
        range: Range,
        /// FUA.
        fua: bool,
    },
    /// Compare, and the first half of a fused compare and write.
    Compare(Range),
    /// Verify: the target reads the blocks, and sends no data.
    Verify {
        /// The blocks.
        range: Range,
        /// Their bytes.
        len: u32,
    },
    /// Write Zeroes.
    WriteZeroes {
        /// The blocks.
        range: Range,
        /// FUA.
        fua: bool,
        /// DEAC: the blocks need no space afterwards.
        may_deallocate: bool,
    },
    /// Flush.
    Flush,
    /// Dataset Management that deallocates so many ranges; [`Rules::ranges`] reads them from the data.
    Deallocate {
        /// The number of ranges, at least 1.
        ranges: u16,
    },
    /// Copy.
    Copy(CopyFields),
    /// Dataset Management that asks for nothing but gives hints.
    Hint,
    /// A command that changes registrations or the reservation; [`reservation::Command::decode`] reads the data.
    Reserve,
    /// Reservation Report, of so many bytes.
    Report {
        /// The bytes.
        len: u32,
    },
    /// Authentication Send, a message of the host's; [`crate::command::Command::decode`] reads the entry, here and below.
    AuthenticationSend,
    /// Authentication Receive, a message for the host.
    AuthenticationReceive,
}

impl Request {
    /// Whether the host sends the data.
    pub const fn takes_data(&self) -> bool {
        matches!(
            self,
            Self::Write { .. }
                | Self::Compare(_)
                | Self::Deallocate { .. }
                | Self::Copy(_)
                | Self::Hint
                | Self::Reserve
                | Self::AuthenticationSend
        )
    }

    /// Whether it is one of an authentication.
    pub const fn is_authentication(&self) -> bool {
        matches!(self, Self::AuthenticationSend | Self::AuthenticationReceive)
    }

    /// Whether a host with these rights may execute the command. NVMe 2.0 §8.19, "Command Behavior in the Presence of a
    /// Reservation".
    pub const fn is_allowed(&self, rights: Rights) -> bool {
        match (self, rights) {
            (
                Self::Reserve | Self::Report { .. } | Self::AuthenticationSend | Self::AuthenticationReceive,
                _,
            )
            | (_, Rights::All) => true,
            (Self::Read(_) | Self::Compare(_) | Self::Verify { .. }, rights) => {
                matches!(rights, Rights::Read)
            }
            (_, Rights::Read | Rights::None) => false,
        }
    }
}

/// A command that may be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The operation.
    pub request: Request,
    /// Its place in a fused compare and write.
    pub fuse: Option<Fuse>,
}

/// What an I/O queue checks for the commands of one namespace.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    blocks: u64,
    block_shift: u8,
    is_read_only: bool,
    commands: Commands,
    copy: CopyLimits,
    transfer_max: u32,
    /// The failure of all commands in this ANA state.
    inaccessible: Option<Code>,
    /// What a reservation leaves to the host.
    rights: Rights,
}

impl Rules {
    /// The rules for a namespace; `None` if there is no such namespace.
    pub fn new(io: &Io, nsid: u32) -> Option<Self> {
        let namespace = io.namespaces.get(&nsid)?;
        let group = io.ana.as_ref().and_then(|ana| ana.groups.get(&namespace.ana_group));
        Some(Self {
            blocks: namespace.blocks,
            block_shift: namespace.block_shift,
            is_read_only: namespace.is_read_only,
            commands: io.commands,
            copy: namespace.copy_limits(),
            transfer_max: io.transfer_max,
            inaccessible: group.and_then(|group| match group.state {
                AnaState::Optimized | AnaState::NonOptimized => None,
                AnaState::Inaccessible => Some(Code::ANA_INACCESSIBLE),
                AnaState::PersistentLoss => Some(Code::ANA_PERSISTENT_LOSS),
                AnaState::Change => Some(Code::ANA_TRANSITION),
            }),
            rights: Rights::All,
        })
    }

    /// The rules for a host with these rights.
    #[must_use]
    pub const fn with_rights(self, rights: Rights) -> Self {
        Self { rights, ..self }
    }

    /// What a reservation leaves to the host.
    pub const fn rights(&self) -> Rights {
        self.rights
    }

    /// Checks a command whose descriptor names `data_len` bytes of data.
    ///
    /// # Errors
    /// The status with which the command fails.
    #[inline]
    pub fn check(&self, entry: &SubmissionEntry, data_len: u32) -> Result<Checked, Code> {
        if let Some(code) = self.inaccessible {
            return Err(code);
        }
        let request = self.request(entry, data_len)?;
        if self.rights != Rights::All && !request.is_allowed(self.rights) {
            return Err(Code::RESERVATION_CONFLICT);
        }
        let fuse = entry.fuse();
        let may_fuse = match (fuse, request) {
            (None, _) => true,
            (Some(Fuse::First), Request::Compare(_)) | (Some(Fuse::Second), Request::Write { .. }) => {
                self.commands.compare_and_write
            }
            _ => false,
        };
        if may_fuse { Ok(Checked { request, fuse }) } else { Err(Code::INVALID_FIELD) }
    }

    #[inline]
    fn request(&self, entry: &SubmissionEntry, data_len: u32) -> Result<Request, Code> {
        let cdw12 = entry.cdw(12);
        let fua = cdw12 & FUA != 0;
        let is_fused = entry.fuse().is_some();
        Ok(match entry.opcode() {
            io::READ => Request::Read(self.transfer(entry, data_len)?),
            io::WRITE => {
                let range = self.transfer(entry, data_len)?;
                self.check_writable()?;
                Request::Write { range, fua }
            }
            io::FLUSH => Request::Flush,
            io::COMPARE if self.commands.compare || is_fused => {
                Request::Compare(self.transfer(entry, data_len)?)
            }
            io::VERIFY if self.commands.verify => {
                if data_len != 0 {
                    return Err(Code::SGL_DATA_LENGTH_INVALID);
                }
                let range = self.range(entry)?;
                Request::Verify { range, len: self.bytes(range)? }
            }
            io::WRITE_ZEROES if self.commands.write_zeroes => {
                let range = self.range(entry)?;
                self.check_writable()?;
                Request::WriteZeroes { range, fua, may_deallocate: cdw12 & DEALLOCATE != 0 }
            }
            io::DATASET_MANAGEMENT if self.commands.deallocate => {
                // NR: the number of ranges, less one.
                let ranges = (entry.cdw(10) & 0xff) as u16 + 1;
                // Linux always sends 4,096 bytes, which is the length of 256 ranges.
                if !(usize::from(ranges) * RANGE_LEN..=RANGES_MAX * RANGE_LEN).contains(&(data_len as usize))
                {
                    return Err(Code::SGL_DATA_LENGTH_INVALID);
                }
                if entry.cdw(11) & ATTRIBUTE_DEALLOCATE == 0 {
                    return Ok(Request::Hint);
                }
                self.check_writable()?;
                Request::Deallocate { ranges }
            }
            io::COPY if self.commands.copy => Request::Copy(self.copy(entry, data_len)?),
            io::RESERVATION_REGISTER | io::RESERVATION_ACQUIRE | io::RESERVATION_RELEASE
                if self.commands.reservations =>
            {
                let is_release = entry.opcode() == io::RESERVATION_RELEASE;
                let least = if is_release { reservation::RELEASE_LEN } else { reservation::DATA_LEN };
                if !(least as u32..=RESERVE_MAX).contains(&data_len) {
                    return Err(Code::SGL_DATA_LENGTH_INVALID);
                }
                Request::Reserve
            }
            io::RESERVATION_REPORT if self.commands.reservations => {
                Request::Report { len: reservation::report_len(entry, data_len)? }
            }
            _ => return Err(Code::INVALID_OPCODE),
        })
    }

    fn copy(&self, entry: &SubmissionEntry, data_len: u32) -> Result<CopyFields, Code> {
        let fields = CopyFields::decode(entry);
        self.check_writable()?;
        if self.copy.source == 0 {
            return Err(Code::INVALID_OPCODE);
        }
        // The descriptor format.
        if entry.cdw(12) >> 8 & 0xf != 0 {
            return Err(Code::INVALID_FIELD);
        }
        if fields.sources > SOURCES_MAX {
            return Err(Code::COMMAND_SIZE_LIMIT);
        }
        let lens = usize::from(fields.sources) * SOURCE_LEN..=usize::from(SOURCES_MAX) * SOURCE_LEN;
        if lens.contains(&(data_len as usize)) { Ok(fields) } else { Err(Code::SGL_DATA_LENGTH_INVALID) }
    }

    /// The blocks of a command without data.
    fn range(&self, entry: &SubmissionEntry) -> Result<Range, Code> {
        let range = Range { lba: entry.cdw10_11(), blocks: (entry.cdw(12) & 0xffff) + 1 };
        self.check_range(range)?;
        Ok(range)
    }

    /// The blocks of a command with data.
    fn transfer(&self, entry: &SubmissionEntry, data_len: u32) -> Result<Range, Code> {
        let range = self.range(entry)?;
        if self.bytes(range)? == data_len { Ok(range) } else { Err(Code::SGL_DATA_LENGTH_INVALID) }
    }

    /// The bytes of blocks, which the largest transfer limits.
    fn bytes(&self, range: Range) -> Result<u32, Code> {
        let bytes = u64::from(range.blocks) << self.block_shift;
        let bytes = u32::try_from(bytes).ok().filter(|bytes| *bytes <= self.transfer_max);
        bytes.ok_or(Code::INVALID_FIELD)
    }

    fn check_range(&self, range: Range) -> Result<(), Code> {
        let is_inside = range.lba.checked_add(range.blocks.into()).is_some_and(|end| end <= self.blocks);
        if is_inside { Ok(()) } else { Err(Code::LBA_OUT_OF_RANGE) }
    }

    const fn check_writable(&self) -> Result<(), Code> {
        if self.is_read_only { Err(Code::NAMESPACE_WRITE_PROTECTED) } else { Ok(()) }
    }

    /// The ranges of a [`Request::Deallocate`], from the part of its data that has them. Those without blocks are left out.
    pub fn ranges(&self, data: &[u8]) -> impl Iterator<Item = Result<Range, Code>> {
        let ranges = data.as_chunks::<RANGE_LEN>().0.iter().map(|bytes| {
            let [_, length, low, high] =
                std::array::from_fn(|i| u32::from_le_bytes(std::array::from_fn(|byte| bytes[4 * i + byte])));
            Range { lba: u64::from(low) | u64::from(high) << 32, blocks: length }
        });
        ranges.filter(|range| range.blocks != 0).map(|range| self.check_range(range).map(|()| range))
    }

    /// The sources of a [`Request::Copy`], from its data.
    pub fn sources(fields: CopyFields, data: &[u8]) -> impl Iterator<Item = Range> {
        data.as_chunks::<SOURCE_LEN>().0.iter().take(fields.sources.into()).map(|bytes| Range {
            lba: u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 + byte])),
            // NLB: the number of blocks, less one.
            blocks: u32::from(u16::from_le_bytes([bytes[16], bytes[17]])) + 1,
        })
    }

    /// Checks the lengths and the blocks of a [`Request::Copy`] with this data.
    ///
    /// # Errors
    /// The status with which the command fails.
    pub fn check_copy(&self, fields: CopyFields, data: &[u8]) -> Result<(), Code> {
        let sources = || Self::sources(fields, data);
        // Of at most 256 sources, which have 16 bits each.
        let all = sources().map(|source| source.blocks).sum();
        if all > self.copy.all || sources().any(|source| source.blocks > self.copy.source.into()) {
            return Err(Code::COMMAND_SIZE_LIMIT);
        }
        sources().try_for_each(|source| self.check_range(source))?;
        self.check_range(Range { lba: fields.lba, blocks: all })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subsystem::{Ana, AnaGroup, Namespace};
    use aryk_nvme::spec::identify::Descriptors;
    use std::collections::BTreeMap;

    const ALL: Commands = Commands {
        compare: true,
        compare_and_write: true,
        deallocate: true,
        write_zeroes: true,
        verify: true,
        copy: true,
        reservations: true,
    };

    /// Namespace 1 has 1,000 blocks of 4 KiB, and group 1.
    fn subsystem(commands: Commands, is_read_only: bool, state: Option<AnaState>) -> Io {
        let namespace = Namespace {
            blocks: 1000,
            block_shift: 12,
            ids: Descriptors::default(),
            ana_group: 1,
            is_read_only,
            copy_blocks: 300,
            optimal_write_blocks: 1,
            can_persist: false,
            persists: false,
        };
        let ana = |state| {
            let groups = BTreeMap::from([(1, AnaGroup { state, changes: 0 })]);
            Ana { group_max: 1, groups, changes: 0 }
        };
        Io {
            nsid_max: 4,
            namespaces: BTreeMap::from([(1, namespace)]),
            ana: state.map(ana),
            transfer_max: 128 << 10,
            in_capsule_max: 4096,
            queues: 1,
            commands,
            retry_delays: [0; 3],
        }
    }

    fn rules() -> Rules {
        Rules::new(&subsystem(ALL, false, None), 1).unwrap()
    }

    fn command(opcode: u8, lba: u64, blocks: u32, flags: u32) -> SubmissionEntry {
        SubmissionEntry::new(opcode, 1)
            .with_cdw10_11(lba as u32, (lba >> 32) as u32)
            .with_cdw12_13((blocks - 1) | flags, 0)
    }

    fn request(entry: SubmissionEntry, data_len: u32) -> Result<Request, Code> {
        rules().check(&entry, data_len).map(|checked| checked.request)
    }

    #[test]
    fn commands_are_decoded() {
        let range = Range { lba: 990, blocks: 10 };
        let bytes = 10 << 12;
        assert_eq!(request(command(io::READ, 990, 10, 0), bytes), Ok(Request::Read(range)));
        let write = |fua| Ok(Request::Write { range, fua });
        assert_eq!(request(command(io::WRITE, 990, 10, 0), bytes), write(false));
        assert_eq!(request(command(io::WRITE, 990, 10, FUA), bytes), write(true));
        assert_eq!(request(command(io::COMPARE, 990, 10, 0), bytes), Ok(Request::Compare(range)));
        let verify = Request::Verify { range, len: bytes };
        assert_eq!(request(command(io::VERIFY, 990, 10, 0), 0), Ok(verify));
        assert!(!verify.takes_data());
        let zeroes = |fua, may_deallocate| Ok(Request::WriteZeroes { range, fua, may_deallocate });
        assert_eq!(request(command(io::WRITE_ZEROES, 990, 10, 0), 0), zeroes(false, false));
        assert_eq!(request(command(io::WRITE_ZEROES, 990, 10, FUA | DEALLOCATE), 0), zeroes(true, true));
        assert_eq!(request(SubmissionEntry::new(io::FLUSH, 1), 0), Ok(Request::Flush));
        let copy = |flags| command(io::COPY, 990, 128, flags);
        let copied = |fua| Ok(Request::Copy(CopyFields { lba: 990, sources: 128, fua }));
        assert_eq!((request(copy(0), 4096), request(copy(FUA), 4096)), (copied(false), copied(true)));
        let management = |ranges: u32, attributes| {
            SubmissionEntry::new(io::DATASET_MANAGEMENT, 1).with_cdw10_11(ranges - 1, attributes)
        };
        assert_eq!(request(management(256, 4), 4096), Ok(Request::Deallocate { ranges: 256 }));
        assert_eq!(request(management(2, 3), 32), Ok(Request::Hint));
        assert_eq!(request(management(2, 4), 4096), Ok(Request::Deallocate { ranges: 2 }));
        for len in [16, 4112] {
            assert_eq!(request(management(2, 4), len), Err(Code::SGL_DATA_LENGTH_INVALID));
        }
        assert!(Request::Hint.takes_data() && !Request::Read(range).takes_data());
    }

    #[test]
    fn ranges_and_lengths_are_checked() {
        let read = |lba, blocks, len| request(command(io::READ, lba, blocks, 0), len);
        for (lba, blocks) in [(991, 10), (1000, 1), (u64::MAX, 1), (u64::MAX - 9, 10)] {
            assert_eq!(read(lba, blocks, blocks << 12), Err(Code::LBA_OUT_OF_RANGE), "{lba}");
        }
        assert_eq!(request(command(io::WRITE_ZEROES, 0, 65536, 0), 0), Err(Code::LBA_OUT_OF_RANGE));
        assert_eq!((read(0, 32, 32 << 12).is_ok(), read(0, 33, 33 << 12)), (true, Err(Code::INVALID_FIELD)));
        for len in [0, 4092, 8192] {
            assert_eq!(read(0, 1, len), Err(Code::SGL_DATA_LENGTH_INVALID));
        }
        let verify = |lba, blocks, len| request(command(io::VERIFY, lba, blocks, 0), len);
        assert_eq!((verify(0, 32, 0).is_ok(), verify(0, 33, 0)), (true, Err(Code::INVALID_FIELD)));
        assert_eq!(verify(991, 10, 0), Err(Code::LBA_OUT_OF_RANGE));
        assert_eq!(verify(0, 1, 4096), Err(Code::SGL_DATA_LENGTH_INVALID), "there is no data");
    }

    #[test]
    fn a_namespace_that_is_read_only_inaccessible_or_absent_fails_commands() {
        let with = |is_read_only, state| Rules::new(&subsystem(ALL, is_read_only, state), 1).unwrap();
        let read_only = with(true, None);
        let management = SubmissionEntry::new(io::DATASET_MANAGEMENT, 1).with_cdw10_11(0, 4);
        for (entry, len) in [
            (command(io::WRITE, 0, 1, 0), 4096),
            (command(io::WRITE_ZEROES, 0, 1, 0), 0),
            (command(io::COPY, 0, 1, 0), 32),
            (management, 16),
        ] {
            assert_eq!(read_only.check(&entry, len), Err(Code::NAMESPACE_WRITE_PROTECTED));
        }
        let read = command(io::READ, 0, 1, 0);
        assert!(read_only.check(&read, 4096).is_ok());
        for (state, expected) in [
            (AnaState::Optimized, None),
            (AnaState::NonOptimized, None),
            (AnaState::Inaccessible, Some(Code::ANA_INACCESSIBLE)),
            (AnaState::PersistentLoss, Some(Code::ANA_PERSISTENT_LOSS)),
            (AnaState::Change, Some(Code::ANA_TRANSITION)),
        ] {
            assert_eq!(with(false, Some(state)).check(&read, 4096).err(), expected);
        }
        assert!(Rules::new(&subsystem(ALL, false, None), 2).is_none());
    }

    #[test]
    fn commands_that_the_target_lacks_are_refused() {
        let few = Rules::new(&subsystem(Commands::default(), false, None), 1).unwrap();
        let management = SubmissionEntry::new(io::DATASET_MANAGEMENT, 1).with_cdw10_11(0, 4);
        for (entry, len) in [
            (command(io::COMPARE, 0, 1, 0), 4096),
            (command(io::WRITE_ZEROES, 0, 1, 0), 0),
            (command(io::VERIFY, 0, 1, 0), 0),
            (command(io::COPY, 0, 1, 0), 32),
            (management, 16),
        ] {
            assert_eq!(few.check(&entry, len), Err(Code::INVALID_OPCODE));
        }
        assert_eq!(request(SubmissionEntry::new(0x7e, 1), 0), Err(Code::INVALID_OPCODE));

        let (first, second) = (
            command(io::COMPARE, 0, 1, 0).with_fuse(Fuse::First),
            command(io::WRITE, 0, 1, 0).with_fuse(Fuse::Second),
        );
        for (entry, fuse) in [(first, Fuse::First), (second, Fuse::Second)] {
            assert_eq!(rules().check(&entry, 4096).unwrap().fuse, Some(fuse));
            assert_eq!(few.check(&entry, 4096), Err(Code::INVALID_FIELD));
        }
        assert_eq!(rules().check(&second.with_fuse(Fuse::First), 4096), Err(Code::INVALID_FIELD));
        let read = command(io::READ, 0, 1, 0).with_fuse(Fuse::First);
        assert_eq!(rules().check(&read, 4096), Err(Code::INVALID_FIELD));
    }

    #[test]
    fn ranges_to_deallocate_are_read_from_the_data() {
        let mut data = Vec::new();
        for (lba, blocks) in [(5_u64, 10_u32), (7, 0), (1 << 32, 1), (999, 1), (999, 2)] {
            data.extend([0; 4]);
            data.extend(blocks.to_le_bytes());
            data.extend(lba.to_le_bytes());
        }
        let outside = Err(Code::LBA_OUT_OF_RANGE);
        let expected =
            [Ok(Range { lba: 5, blocks: 10 }), outside, Ok(Range { lba: 999, blocks: 1 }), outside];
        assert!(rules().ranges(&data).eq(expected));
    }

    /// The data of a Copy with these sources.
    fn sources(of: &[(u64, u16)]) -> Vec<u8> {
        let source = |&(lba, blocks): &(u64, u16)| {
            [&[0xff; 8], &lba.to_le_bytes()[..], &(blocks - 1).to_le_bytes(), &[0xff; 14]].concat()
        };
        of.iter().flat_map(source).collect()
    }

    #[test]
    fn a_copy_has_a_known_format_and_all_its_sources() {
        let with = |sources, flags, len| request(command(io::COPY, 0, sources, flags), len);
        assert!(with(1, 0, 32).is_ok() && with(1, 0, 4096).is_ok() && with(2, 0xf << 12, 64).is_ok());
        assert_eq!(with(1, 1 << 8, 40), Err(Code::INVALID_FIELD));
        assert_eq!(
            (with(129, 0, 4128), with(256, 0, 8192)),
            (Err(Code::COMMAND_SIZE_LIMIT), Err(Code::COMMAND_SIZE_LIMIT))
        );
        for (sources, len) in [(1, 0), (2, 32), (128, 4064), (1, 4128)] {
            assert_eq!(with(sources, 0, len), Err(Code::SGL_DATA_LENGTH_INVALID));
        }
        let mut io = subsystem(ALL, false, None);
        io.namespaces.get_mut(&1).unwrap().copy_blocks = 0;
        let cannot = Rules::new(&io, 1).unwrap();
        assert_eq!(cannot.check(&command(io::COPY, 0, 1, 0), 32), Err(Code::INVALID_OPCODE));
    }

    #[test]
    fn sources_of_a_copy_keep_the_limits_and_the_namespace() {
        let check = |lba, of: &[(u64, u16)]| {
            let fields = CopyFields { lba, sources: of.len() as u16, fua: false };
            // What follows the sources is none.
            let data = [sources(of), sources(&[(u64::MAX, u16::MAX); 3])].concat();
            assert!(
                Rules::sources(fields, &data)
                    .eq(of.iter().map(|&(lba, blocks)| Range { lba, blocks: blocks.into() }))
            );
            rules().check_copy(fields, &data)
        };
        // A MiB of each, and 4 MiB of all, in blocks of 4 KiB.
        assert_eq!(check(0, &[(0, 256), (744, 256), (5, 256), (6, 232)]), Ok(()));
        assert_eq!(check(0, &[(1, 8); 125]), Ok(()));
        let (limit, outside) = (Err(Code::COMMAND_SIZE_LIMIT), Err(Code::LBA_OUT_OF_RANGE));
        assert_eq!(check(0, &[(0, 1), (0, 257)]), limit);
        assert_eq!(check(0, &[(0, 205); 5]), limit);
        assert_eq!(check(0, &[(0, u16::MAX); 128]), limit);
        assert_eq!(check(0, &[(0, 1), (745, 256)]), outside);
        assert_eq!((check(0, &[(u64::MAX, 1)]), check(u64::MAX, &[(0, 1)])), (outside, outside));
        assert_eq!((check(998, &[(0, 1), (0, 1)]), check(998, &[(0, 1); 3])), (Ok(()), outside));
    }
}
