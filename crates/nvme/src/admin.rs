//! Admin commands, without what a queue adds to them. NVMe 2.0 §5. Pure; control context.
//!
//! The caller hands a [`Command`] to [`crate::controller::Controller::admin`]. Commands that create or delete queues, configure
//! doorbells or wait for events are the controller's own.

use crate::claims::ControllerInfo;
use crate::spec::entry::SubmissionEntry;
use crate::spec::feature::{self, Select};
use crate::spec::identify::{self, cns};
use crate::spec::opcode::admin;
use crate::spec::security;
use crate::spec::status::{Code, Status};

/// The most data of one admin command, even if MDTS allows more. Most commands have at most 4 KiB; only one command with more is
/// in flight at a time.
pub const DATA_MAX: usize = 128 << 10;

/// Data of an admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// None.
    None,
    /// The controller writes this many bytes, at most [`DATA_MAX`].
    FromController(usize),
    /// The controller reads these bytes, at most [`DATA_MAX`].
    ToController(Vec<u8>),
}

/// An admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// The entry, without CID and data pointer.
    pub entry: SubmissionEntry,
    /// The data.
    pub data: Data,
    /// How long the command may take.
    pub patience: Patience,
}

/// How long an admin command may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Seconds.
    Normal,
    /// Minutes or hours: the command formats, deletes or activates.
    Long,
    /// Until something happens.
    Forever,
}

impl Command {
    const fn plain(entry: SubmissionEntry) -> Self {
        Self { entry, data: Data::None, patience: Patience::Normal }
    }

    const fn reading(entry: SubmissionEntry, len: usize) -> Self {
        Self { entry, data: Data::FromController(len), patience: Patience::Normal }
    }

    fn writing(entry: SubmissionEntry, data: Vec<u8>) -> Self {
        Self { entry, data: Data::ToController(data), patience: Patience::Normal }
    }
}

const fn to_dwords(bytes: usize) -> u32 {
    (bytes / 4) as u32
}

/// Identify, of the structure `cns` of namespace `nsid` in command set `csi`. NVMe 2.0 §5.17.
const fn identify(cns: u8, nsid: u32, csi: u8) -> Command {
    let entry = SubmissionEntry::new(admin::IDENTIFY, nsid).with_cdw10_11(cns as u32, (csi as u32) << 24);
    Command::reading(entry, identify::LEN)
}

/// Identify Controller.
pub const fn identify_controller() -> Command {
    identify(cns::CONTROLLER, 0, 0)
}

/// Identify Controller of the NVM command set.
pub const fn identify_nvm_controller() -> Command {
    identify(cns::COMMAND_SET_CONTROLLER, 0, 0)
}

/// The active namespaces with IDs above `after`.
pub const fn active_namespaces(after: u32) -> Command {
    identify(cns::ACTIVE_NAMESPACES, after, 0)
}

/// The allocated namespaces with IDs above `after`, attached or not.
pub const fn allocated_namespaces(after: u32) -> Command {
    identify(cns::ALLOCATED_NAMESPACES, after, 0)
}

/// Identify Namespace of an active namespace.
pub const fn identify_namespace(nsid: u32) -> Command {
    identify(cns::NAMESPACE, nsid, 0)
}

/// Identify Namespace of an allocated namespace.
pub const fn identify_allocated_namespace(nsid: u32) -> Command {
    identify(cns::ALLOCATED_NAMESPACE, nsid, 0)
}

/// The identification descriptors of a namespace.
pub const fn namespace_descriptors(nsid: u32) -> Command {
    identify(cns::DESCRIPTORS, nsid, 0)
}

/// Get Features. NVMe 2.0 §5.15.
pub const fn get_feature(id: u8, nsid: u32, select: Select, cdw11: u32) -> Command {
    let select = match select {
        Select::Current => 0,
        Select::Default => 1,
        Select::Saved => 2,
        Select::Capabilities => 3,
    };
    Command::plain(
        SubmissionEntry::new(admin::GET_FEATURES, nsid).with_cdw10_11(id as u32 | select << 8, cdw11),
    )
}

/// Set Features, with a value that a reset keeps if `save`. NVMe 2.0 §5.27.
pub const fn set_feature(id: u8, nsid: u32, cdw11: u32, save: bool) -> Command {
    let save = if save { 1 << 31 } else { 0 };
    Command::plain(SubmissionEntry::new(admin::SET_FEATURES, nsid).with_cdw10_11(id as u32 | save, cdw11))
}

/// Set Features, Host Behavior Support: the host understands CRD. NVMe 2.0 §5.27.1.18.
pub fn enable_retry_delays() -> Command {
    let mut data = vec![0; feature::HOST_BEHAVIOR_LEN];
    data[0] = 1;
    let command = set_feature(feature::HOST_BEHAVIOR_SUPPORT, 0, 0, false);
    Command::writing(command.entry, data)
}

/// Get Log Page: `len` bytes (at most [`DATA_MAX`], a multiple of 4) from `offset` on. `keep` leaves the asynchronous event
/// of this log uncleared (RAE). NVMe 2.0 §5.16.
pub const fn get_log(page: u8, nsid: u32, offset: u64, len: usize, keep: bool) -> Command {
    let len = if len > DATA_MAX { DATA_MAX } else { len };
    let (dwords, rae) = (to_dwords(len).saturating_sub(1), if keep { 1 << 15 } else { 0 });
    let entry = SubmissionEntry::new(admin::GET_LOG_PAGE, nsid)
        .with_cdw10_11(page as u32 | rae | (dwords & 0xffff) << 16, dwords >> 16)
        .with_cdw12_13(offset as u32, (offset >> 32) as u32);
    Command::reading(entry, len)
}

/// The first bytes of TCG Level 0 Discovery, by Security Receive. NVMe 2.0 §5.25.
pub const fn level_0_discovery() -> Command {
    let cdw10 = (security::PROTOCOL as u32) << 24 | (security::COM_ID as u32) << 8;
    let entry = SubmissionEntry::new(admin::SECURITY_RECEIVE, 0).with_cdw10_11(cdw10, 512);
    Command::reading(entry, 512)
}

/// How Format NVM erases. NVMe 2.0 §5.14, CDW10.SES.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Erase {
    /// Not more than the format needs.
    None,
    /// All user data.
    UserData,
    /// The encryption key.
    Cryptographic,
}

/// Format NVM with LBA format `format` (0 to 63), without metadata and protection information. Destroys all data of the
/// namespace, and of all others where FNA says so. NVMe 2.0 §5.14.
pub const fn format(nsid: u32, format: u8, erase: Erase) -> Command {
    let ses = match erase {
        Erase::None => 0,
        Erase::UserData => 1,
        Erase::Cryptographic => 2,
    };
    let (low, high) = (format as u32 & 15, format as u32 >> 4 & 3);
    let entry = SubmissionEntry::new(admin::FORMAT_NVM, nsid).with_cdw10_11(low | high << 12 | ses << 9, 0);
    Command { entry, data: Data::None, patience: Patience::Long }
}

/// Creates a namespace of `blocks` blocks in LBA format `format`. DW0 of the completion is its NSID. NVMe 2.0 §5.23.
pub fn create_namespace(blocks: u64, format: u8, is_shared: bool) -> Command {
    let mut data = vec![0; identify::LEN];
    data[..8].copy_from_slice(&blocks.to_le_bytes());
    data[8..16].copy_from_slice(&blocks.to_le_bytes());
    data[26] = format & 15 | (format >> 4 & 3) << 5;
    data[30] = u8::from(is_shared);
    let entry = SubmissionEntry::new(admin::NAMESPACE_MANAGEMENT, 0);
    Command { patience: Patience::Long, ..Command::writing(entry, data) }
}

/// Deletes a namespace with all its data. NVMe 2.0 §5.23.
pub const fn delete_namespace(nsid: u32) -> Command {
    let entry = SubmissionEntry::new(admin::NAMESPACE_MANAGEMENT, nsid).with_cdw10_11(1, 0);
    Command { entry, data: Data::None, patience: Patience::Long }
}

/// Attaches a namespace to controllers, or detaches it. NVMe 2.0 §5.22.
pub fn attach_namespace(nsid: u32, controllers: &[u16], attach: bool) -> Command {
    let mut data = vec![0; identify::LEN];
    let ids = controllers.iter().take(2047);
    data[..2].copy_from_slice(&(ids.len() as u16).to_le_bytes());
    data[2..].as_chunks_mut::<2>().0.iter_mut().zip(ids).for_each(|(to, id)| *to = id.to_le_bytes());
    let select = u32::from(!attach);
    Command::writing(SubmissionEntry::new(admin::NAMESPACE_ATTACHMENT, nsid).with_cdw10_11(select, 0), data)
}

/// A sanitize operation: all user data of the NVM subsystem, in all namespaces and caches, becomes unreadable for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sanitize {
    /// The controller erases all blocks of the media.
    BlockErase,
    /// The controller replaces the keys with which it encrypts the data.
    CryptoErase,
    /// The controller overwrites all data.
    Overwrite {
        /// Passes, 1 to 16.
        passes: u8,
        /// The data, 32 bits.
        pattern: u32,
        /// Each pass has the inverted data of the pass before.
        invert: bool,
    },
    /// No operation: leaves the failure mode after an operation that failed and was started with `unrestricted_exit`.
    ExitFailure,
}

/// A sanitize operation that the controller does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the controller does not support sanitize by {0} (SANICAP)")]
pub struct SanitizeUnsupported(&'static str);

/// Sanitize. The operation starts with the completion of the command, runs in the background, also over resets, and cannot be
/// stopped; [`crate::spec::log::SanitizeStatus`] reports its progress, and [`crate::controller::Event::Sanitize`] its end.
/// With `unrestricted_exit`, a failed operation can be left by [`Sanitize::ExitFailure`]; otherwise only a successful one ends
/// the failure. NVMe 2.0 §5.24.
///
/// # Errors
/// [`SanitizeUnsupported`], also for 0 or more than 16 passes.
pub fn sanitize(
    what: Sanitize,
    unrestricted_exit: bool,
    controller: &ControllerInfo,
) -> Result<Command, SanitizeUnsupported> {
    let has = controller.sanitize;
    let (action, pattern, is_supported, name) = match what {
        Sanitize::ExitFailure => (1, 0, has.block || has.crypto || has.overwrite, "any operation"),
        Sanitize::BlockErase => (2, 0, has.block, "block erase"),
        Sanitize::CryptoErase => (4, 0, has.crypto, "crypto erase"),
        Sanitize::Overwrite { passes, pattern, invert } => {
            // OWPASS: 0 stands for 16.
            let fields = (u32::from(passes) & 15) << 4 | u32::from(invert) << 8;
            (3 | fields, pattern, has.overwrite && (1..=16).contains(&passes), "this overwriting")
        }
    };
    if !is_supported {
        return Err(SanitizeUnsupported(name));
    }
    let exit = if unrestricted_exit { 1 << 3 } else { 0 };
    let entry = SubmissionEntry::new(admin::SANITIZE, 0).with_cdw10_11(action | exit, pattern);
    Ok(Command { entry, data: Data::None, patience: Patience::Long })
}

/// A firmware image in the parts that the controller takes. NVMe 2.0 §5.13.
#[derive(Clone, Debug)]
pub struct FirmwareDownload<'a> {
    image: &'a [u8],
    offset: usize,
    part: usize,
}

/// A firmware image that cannot be downloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadImage {
    /// The controller has no firmware commands.
    #[error("the controller does not support firmware download (OACS bit 2)")]
    Unsupported,
    /// The image is empty, too long, or no multiple of 4 bytes.
    #[error("a firmware image of {0} bytes: it must be a multiple of 4, 4 bytes to 1 GiB")]
    Length(usize),
    /// A part would have to be larger than a transfer.
    #[error(
        "the controller takes firmware in parts of {granularity} bytes only (FWUG); a command transfers at most {most}"
    )]
    Granularity {
        /// Bytes of a part.
        granularity: u32,
        /// Bytes: [`DATA_MAX`], or the controller's MDTS.
        most: u64,
    },
}

impl<'a> FirmwareDownload<'a> {
    /// The parts of `image`.
    ///
    /// # Errors
    /// [`BadImage`].
    pub fn new(image: &'a [u8], controller: &ControllerInfo) -> Result<Self, BadImage> {
        if !controller.supported.firmware {
            return Err(BadImage::Unsupported);
        }
        if image.is_empty() || !image.len().is_multiple_of(4) || image.len() > 1 << 30 {
            return Err(BadImage::Length(image.len()));
        }
        let granularity = controller.firmware_granularity;
        let most = controller.transfer_max.min(DATA_MAX as u64);
        if u64::from(granularity) > most {
            return Err(BadImage::Granularity { granularity, most });
        }
        Ok(Self { image, offset: 0, part: granularity as usize })
    }
}

impl Iterator for FirmwareDownload<'_> {
    type Item = Command;

    /// The command for the next part; the caller awaits each before it sends the next.
    fn next(&mut self) -> Option<Command> {
        let rest = self.image.get(self.offset..).filter(|rest| !rest.is_empty())?;
        let part = &rest[..rest.len().min(self.part)];
        let entry = SubmissionEntry::new(admin::FIRMWARE_DOWNLOAD, 0)
            .with_cdw10_11(to_dwords(part.len()) - 1, to_dwords(self.offset));
        self.offset += part.len();
        Some(Command::writing(entry, part.to_vec()))
    }
}

/// What Firmware Commit does. NVMe 2.0 §5.12, CDW10.CA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// Stores the downloaded image in the slot.
    Store,
    /// Stores the image, and activates it at the next reset.
    StoreAndActivate,
    /// Activates the slot's image at the next reset.
    Activate,
    /// Activates the slot's image now, without a reset.
    ActivateNow,
}

/// Firmware Commit of a slot (1 to 7; 0 lets the controller choose).
pub const fn commit_firmware(slot: u8, what: Commit) -> Command {
    let action = match what {
        Commit::Store => 0,
        Commit::StoreAndActivate => 1,
        Commit::Activate => 2,
        Commit::ActivateNow => 3,
    };
    let cdw10 = slot as u32 & 7 | action << 3;
    let entry = SubmissionEntry::new(admin::FIRMWARE_COMMIT, 0).with_cdw10_11(cdw10, 0);
    Command { entry, data: Data::None, patience: Patience::Long }
}

/// The step that the owner takes after a Firmware Commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    Done,
    /// A controller reset activates the image.
    ControllerReset,
    /// A reset of the NVM subsystem activates the image.
    SubsystemReset,
    /// A reset of the PCI function, or a power cycle, activates the image.
    ConventionalReset,
    /// The commit failed.
    Failed(Status),
}

impl Activation {
    /// Decodes the status of a Firmware Commit; three of its status codes are successes.
    pub const fn decode(status: Status) -> Self {
        match status.code() {
            Code::SUCCESS => Self::Done,
            Code::FIRMWARE_NEEDS_CONTROLLER_RESET => Self::ControllerReset,
            Code::FIRMWARE_NEEDS_SUBSYSTEM_RESET => Self::SubsystemReset,
            Code::FIRMWARE_NEEDS_CONVENTIONAL_RESET => Self::ConventionalReset,
            _ => Self::Failed(status),
        }
    }
}

/// Abort of a command of submission queue `sqid`. Bit 0 of DW0 of the completion is 0 if the command was aborted. NVMe 2.0 §5.1.
pub(crate) const fn abort(sqid: u16, cid: u16) -> Command {
    let cdw10 = sqid as u32 | (cid as u32) << 16;
    Command::plain(SubmissionEntry::new(admin::ABORT, 0).with_cdw10_11(cdw10, 0))
}

/// Asynchronous Event Request. NVMe 2.0 §5.2.
pub(crate) const fn async_event() -> Command {
    let entry = SubmissionEntry::new(admin::ASYNC_EVENT_REQUEST, 0);
    Command { entry, data: Data::None, patience: Patience::Forever }
}

/// Keep Alive. NVMe 2.0 §5.18.
pub(crate) const fn keep_alive() -> Command {
    Command::plain(SubmissionEntry::new(admin::KEEP_ALIVE, 0))
}

/// Doorbell Buffer Config, with the addresses of both buffers. NVMe 2.0 §5.8.
pub(crate) const fn doorbell_buffers(doorbells: u64, event_indices: u64) -> Command {
    Command::plain(SubmissionEntry::new(admin::DOORBELL_BUFFER_CONFIG, 0).with_prps(doorbells, event_indices))
}

/// Create I/O Completion Queue, contiguous at `iova`, with interrupts on `vector` if there is one. NVMe 2.0 §5.4.
pub(crate) const fn create_cq(qid: u16, entries: u32, iova: u64, vector: Option<u16>) -> Command {
    let (iv, ien) = match vector {
        Some(vector) => (vector as u32, 2),
        None => (0, 0),
    };
    let entry = SubmissionEntry::new(admin::CREATE_CQ, 0)
        .with_prps(iova, 0)
        .with_cdw10_11(qid as u32 | (entries - 1) << 16, 1 | ien | iv << 16);
    Command::plain(entry)
}

/// Create I/O Submission Queue, contiguous at `iova`, with the completion queue of the same number. NVMe 2.0 §5.5.
pub(crate) const fn create_sq(qid: u16, entries: u32, iova: u64) -> Command {
    let entry = SubmissionEntry::new(admin::CREATE_SQ, 0)
        .with_prps(iova, 0)
        .with_cdw10_11(qid as u32 | (entries - 1) << 16, 1 | (qid as u32) << 16);
    Command::plain(entry)
}

/// Delete I/O Submission Queue. NVMe 2.0 §5.7.
pub(crate) const fn delete_sq(qid: u16) -> Command {
    Command::plain(SubmissionEntry::new(admin::DELETE_SQ, 0).with_cdw10_11(qid as u32, 0))
}

/// Delete I/O Completion Queue. NVMe 2.0 §5.6.
pub(crate) const fn delete_cq(qid: u16) -> Command {
    Command::plain(SubmissionEntry::new(admin::DELETE_CQ, 0).with_cdw10_11(qid as u32, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::tests::raw_controller;
    use crate::quirks::Quirks;
    use crate::spec::log;

    fn dwords(command: &Command) -> [u32; 3] {
        [command.entry.cdw(10), command.entry.cdw(11), command.entry.cdw(12)]
    }

    #[test]
    fn commands_have_their_fields_where_the_specification_puts_them() {
        assert_eq!(dwords(&get_log(log::SMART, u32::MAX, 0, 512, true))[0], 2 | 1 << 15 | 127 << 16);
        assert_eq!(dwords(&get_log(1, 0, 64, 1 << 20, false)), [1 | 0x7fff << 16, 0, 64]);
        assert_eq!(dwords(&create_cq(3, 1024, 0x1000, Some(2))), [3 | 1023 << 16, 3 | 2 << 16, 0]);
        assert_eq!(dwords(&create_cq(3, 65_536, 0x1000, None)), [3 | 0xffff << 16, 1, 0]);
        assert_eq!(dwords(&create_sq(3, 2, 0x1000)), [3 | 1 << 16, 1 | 3 << 16, 0]);
        assert_eq!(dwords(&abort(5, 0xbeef))[0], 5 | 0xbeef << 16);
        assert_eq!(dwords(&format(1, 0x12, Erase::UserData))[0], 2 | 1 << 12 | 1 << 9);
        assert_eq!(dwords(&commit_firmware(2, Commit::ActivateNow))[0], 2 | 3 << 3);
        assert_eq!(dwords(&level_0_discovery())[0], 0x0100_0100);
        assert_eq!(dwords(&get_feature(6, 0, Select::Saved, 0))[0], 6 | 2 << 8);
        assert_eq!(dwords(&set_feature(6, 0, 1, true))[..2], [6 | 1 << 31, 1]);
        let Data::ToController(data) = attach_namespace(1, &[7, 0x102], false).data else {
            panic!("no data")
        };
        assert_eq!(data[..6], [2, 0, 7, 0, 2, 1]);
        let Data::ToController(data) = create_namespace(0x1234, 0x21, true).data else { panic!("no data") };
        assert_eq!((&data[..2], data[26], data[30]), (&[0x34, 0x12][..], 1 | 2 << 5, 1));
    }

    #[test]
    fn sanitize_has_its_operations_where_the_controller_has_them() {
        let mut raw = raw_controller();
        let info = |raw: &_| ControllerInfo::check(raw, 0x0002_0000, 4096, 4096, Quirks::default()).unwrap();
        let fields = |what, exit, raw: &_| sanitize(what, exit, &info(raw)).map(|command| dwords(&command));
        let overwrite = |passes| Sanitize::Overwrite { passes, pattern: 0xdead_beef, invert: true };
        for what in [Sanitize::BlockErase, Sanitize::CryptoErase, overwrite(1), Sanitize::ExitFailure] {
            fields(what, false, &raw).unwrap_err();
        }
        raw.sanicap.set(0b111);
        assert_eq!(fields(Sanitize::BlockErase, false, &raw).unwrap(), [2, 0, 0]);
        assert_eq!(fields(Sanitize::CryptoErase, true, &raw).unwrap(), [4 | 8, 0, 0]);
        assert_eq!(fields(Sanitize::ExitFailure, false, &raw).unwrap(), [1, 0, 0]);
        assert_eq!(fields(overwrite(3), false, &raw).unwrap(), [3 | 3 << 4 | 1 << 8, 0xdead_beef, 0]);
        assert_eq!(fields(overwrite(16), false, &raw).unwrap()[0], 3 | 1 << 8);
        assert!(fields(overwrite(0), false, &raw).is_err() && fields(overwrite(17), false, &raw).is_err());
        raw.sanicap.set(0b001);
        assert!(fields(Sanitize::CryptoErase, false, &raw).is_ok());
        let refused = fields(Sanitize::BlockErase, false, &raw).unwrap_err();
        assert_eq!(refused.to_string(), "the controller does not support sanitize by block erase (SANICAP)");
    }

    #[test]
    fn a_firmware_image_is_sent_whole_and_in_order() {
        let mut raw = raw_controller();
        let info = |raw: &_| ControllerInfo::check(raw, 0x0002_0000, 4096, 4096, Quirks::default()).unwrap();
        let image: Vec<u8> = (0..10_000_u32).map(|i| i as u8).collect();
        assert_eq!(FirmwareDownload::new(&image, &info(&raw)).unwrap_err(), BadImage::Unsupported);
        raw.oacs.set(4);
        let (mut sent, mut next) = (Vec::new(), 0);
        for command in FirmwareDownload::new(&image, &info(&raw)).unwrap() {
            let Data::ToController(part) = command.data else { panic!("no data") };
            assert_eq!((command.entry.cdw(10), command.entry.cdw(11)), (part.len() as u32 / 4 - 1, next));
            next += part.len() as u32 / 4;
            sent.extend(part);
        }
        assert_eq!(sent, image);
        assert_eq!(FirmwareDownload::new(&image[1..], &info(&raw)).unwrap_err(), BadImage::Length(9999));
        // Parts of 8 KiB, and at most as much as the controller transfers: MDTS of 32 KiB.
        (raw.fwug, raw.mdts) = (2, 3);
        let parts: Vec<_> = FirmwareDownload::new(&image, &info(&raw)).unwrap().collect();
        assert_eq!(parts.iter().map(|part| part.entry.cdw(10)).collect::<Vec<_>>(), [2047, 451]);
        raw.fwug = 9;
        let refused = BadImage::Granularity { granularity: 36_864, most: 32_768 };
        assert_eq!(FirmwareDownload::new(&image, &info(&raw)).unwrap_err(), refused);
        (raw.fwug, raw.mdts) = (33, 0);
        let refused = BadImage::Granularity { granularity: 135_168, most: 131_072 };
        assert_eq!(FirmwareDownload::new(&image, &info(&raw)).unwrap_err(), refused);
    }
}
