//! Identify data of a controller. NVMe 2.0 §5.17; NVM Command Set 1.0 §4.1.5. Context: the controller's.

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::identify::{
    CommandSet, Descriptors, IdentifyController, IdentifyNamespace, IdentifyNvmController, LEN, LIST_ENTRIES,
    cns,
};
use aryk_nvme::spec::status::Code;
use zerocopy::{FromZeros, IntoBytes};

use super::{ACL, Controller, Result, event};
use crate::association::ENDS_EARLIER;
use crate::keep_alive;
use crate::property::VERSION;
use crate::sgl::DataBlocks;
use crate::subsystem::{CopyLimits, Io, Namespace, SOURCES_MAX, Service};

/// Bytes of a capsule before its data, and of a response capsule.
const COMMAND_LEN: u32 = 64;
const RESPONSE_LEN: u32 = 16;
/// ONCS.
mod oncs {
    pub(super) const COMPARE: u16 = 1;
    pub(super) const DATASET_MANAGEMENT: u16 = 1 << 2;
    pub(super) const WRITE_ZEROES: u16 = 1 << 3;
    pub(super) const RESERVATIONS: u16 = 1 << 5;
    pub(super) const VERIFY: u16 = 1 << 7;
    pub(super) const COPY: u16 = 1 << 8;
}
/// RESCAP: all types of reservations, and IEKEY as the specification says since 1.3.
const RESCAP: u8 = 0b1111_1110;
/// ANACAP: groups can have all five states.
const ANACAP: u8 = 0x1f;
/// Seconds that a group may be in the state of change.
const ANATT: u8 = 10;

impl Controller {
    pub(super) fn identify(&self, entry: &SubmissionEntry, data: &mut Vec<u8>) -> Result<()> {
        let (structure, nsid) = (entry.cdw(10) as u8, entry.nsid());
        let command_set = (entry.cdw(11) >> 24) as u8;
        match (structure, &self.view.service) {
            (cns::CONTROLLER, _) => data.extend(self.identify_controller().as_bytes()),
            (cns::NAMESPACE, Service::Io(io)) => {
                let mut page = IdentifyNamespace::new_zeroed();
                if let Some(namespace) = find(io, nsid)? {
                    describe(namespace, io, &mut page);
                }
                data.extend(page.as_bytes());
            }
            (cns::ACTIVE_NAMESPACES, Service::Io(io)) => {
                // NSIDs above the given one, of which the last two are no namespaces.
                if nsid >= u32::MAX - 1 {
                    return Err(Code::INVALID_NAMESPACE_OR_FORMAT);
                }
                let active = io.namespaces.range(nsid + 1..).take(LIST_ENTRIES);
                active.for_each(|(nsid, _)| data.extend(nsid.to_le_bytes()));
                data.resize(LEN, 0);
            }
            (cns::DESCRIPTORS, Service::Io(io)) => {
                let namespace = find(io, nsid)?.ok_or(Code::INVALID_NAMESPACE_OR_FORMAT)?;
                let mut list = [0; LEN];
                Descriptors { command_set: Some(CommandSet::Nvm), ..namespace.ids }.encode(&mut list);
                data.extend(list);
            }
            (cns::COMMAND_SET_CONTROLLER, Service::Io(io)) if command_set == 0 => {
                data.extend(nvm_controller(io).as_bytes());
            }
            _ => return Err(Code::INVALID_FIELD),
        }
        Ok(())
    }

    fn identify_controller(&self) -> IdentifyController {
        let view = &self.view;
        let mut page = IdentifyController::new_zeroed();
        put_ascii(&mut page.sn, &view.serial);
        put_ascii(&mut page.mn, &view.model);
        put_ascii(&mut page.fr, &view.firmware);
        page.cntlid.set(self.association.controller_id);
        page.ver.set(VERSION);
        page.oaes.set(event::supported(view));
        // Host identifiers have 128 bits.
        page.ctratt.set(1);
        page.aerl = event::AERL;
        // Get Log Page takes an offset, and lengths above 4 KiB.
        page.lpa = 1 << 2;
        page.maxcmd.set(self.properties.queue_entries_max());
        // SGLs without alignment, with offsets in capsules, and with transport or keyed data blocks.
        page.sgls.set(match view.sgls {
            DataBlocks::Transport => 1 | 1 << 20 | 1 << 21,
            DataBlocks::Keyed => 1 | 1 << 2 | 1 << 20,
        });
        page.kas.set(keep_alive::GRANULARITY);
        page.subnqn = view.nqn.encode();
        page.ioccsz.set(COMMAND_LEN / 16);
        page.iorcsz.set(RESPONSE_LEN / 16);
        page.msdbd = 1;
        match &view.service {
            Service::Discovery(_) => page.cntrltype = 2,
            Service::Io(io) => io_controller(io, &mut page),
        }
        page
    }
}

/// What only I/O controllers report.
fn io_controller(io: &Io, page: &mut IdentifyController) {
    page.cntrltype = 1;
    page.vendor[..ENDS_EARLIER.len()].copy_from_slice(&ENDS_EARLIER);
    // The subsystem has several ports and controllers, and may report ANA.
    page.cmic = 0b11 | u8::from(io.ana.is_some()) << 3;
    page.mdts = transfer_max(io);
    page.acl = ACL;
    (page.sqes, page.cqes) = (0x66, 0x44);
    page.nn.set(io.nsid_max);
    page.mnan.set(io.nsid_max);
    let command = |is_supported: bool, bit: u16| if is_supported { bit } else { 0 };
    page.oncs.set(
        command(io.commands.compare, oncs::COMPARE)
            | command(io.commands.deallocate, oncs::DATASET_MANAGEMENT)
            | command(io.commands.write_zeroes, oncs::WRITE_ZEROES)
            | command(io.commands.reservations, oncs::RESERVATIONS)
            | command(io.commands.verify, oncs::VERIFY)
            | command(io.commands.copy, oncs::COPY),
    );
    // Descriptor format 0.
    page.ocfs.set(io.commands.copy.into());
    page.fuses.set(io.commands.compare_and_write.into());
    // There may be a cache, and Flush does not take the NSID of all namespaces.
    page.vwc = 0b101;
    page.ioccsz.set((COMMAND_LEN + io.in_capsule_max) / 16);
    for (field, delay) in page.crdt.iter_mut().zip(io.retry_delays) {
        field.set(delay);
    }
    if let Some(ana) = &io.ana {
        (page.anacap, page.anatt) = (ANACAP, ANATT);
        page.anagrpmax.set(ana.group_max);
        page.nanagrpid.set(ana.group_max);
    }
}

/// The largest transfer, as MDTS and similar fields have it: a power of two of pages.
const fn transfer_max(io: &Io) -> u8 {
    (io.transfer_max / 4096).ilog2() as u8
}

/// The limits of the NVM command set's commands without data. Only Verify has one.
fn nvm_controller(io: &Io) -> IdentifyNvmController {
    let mut page = IdentifyNvmController::new_zeroed();
    if io.commands.verify {
        page.vsl = transfer_max(io);
    }
    page
}

/// The namespace with this NSID; `None` for a valid NSID without a namespace.
fn find(io: &Io, nsid: u32) -> Result<Option<&Namespace>> {
    if nsid == 0 || nsid > io.nsid_max {
        Err(Code::INVALID_NAMESPACE_OR_FORMAT)
    } else {
        Ok(io.namespaces.get(&nsid))
    }
}

fn describe(namespace: &Namespace, io: &Io, page: &mut IdentifyNamespace) {
    page.nsze.set(namespace.blocks);
    page.ncap.set(namespace.blocks);
    page.nuse.set(namespace.blocks);
    page.lbaf[0].lbads = namespace.block_shift;
    // Several controllers use the namespace.
    page.nmic = 1;
    if io.commands.reservations {
        page.rescap = RESCAP | u8::from(namespace.can_persist);
    }
    if io.commands.write_zeroes && io.commands.deallocate {
        // Write Zeroes may deallocate.
        page.dlfeat = 1 << 3;
    }
    if namespace.optimal_write_blocks > 1 {
        page.nsfeat = 1 << 4;
        let last = namespace.optimal_write_blocks - 1;
        [&mut page.npwg, &mut page.npwa, &mut page.npdg, &mut page.npda, &mut page.nows]
            .into_iter()
            .for_each(|field| field.set(last));
    }
    if io.commands.copy && namespace.copy_blocks > 0 {
        let CopyLimits { source, all } = namespace.copy_limits();
        page.mssrl.set(source);
        page.mcl.set(all);
        page.msrc = (SOURCES_MAX - 1) as u8;
    }
    page.anagrpid.set(namespace.ana_group);
    page.nsattr = namespace.is_read_only.into();
    page.nguid = namespace.ids.nguid.unwrap_or_default();
    page.eui64 = namespace.ids.eui64.unwrap_or_default();
}

/// Writes as much of `text` as fits, padded with blanks; other bytes than printable ASCII become `?`.
fn put_ascii(field: &mut [u8], text: &str) {
    field.fill(b' ');
    for (byte, character) in field.iter_mut().zip(text.chars()) {
        *byte = if matches!(character, ' '..='~') { character as u8 } else { b'?' };
    }
}
