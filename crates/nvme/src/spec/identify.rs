//! Identify data structures. NVMe 2.0 §5.17; NVM Command Set 1.0 §4.1.5. Raw: nothing here is checked.

use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of every identify data structure.
pub const LEN: usize = 4096;
/// NSID of all namespaces.
pub const ALL_NAMESPACES: u32 = u32::MAX;
/// Namespaces in one active namespace list.
pub const LIST_ENTRIES: usize = LEN / 4;

/// Controller or Namespace Structure: what Identify returns. NVMe 2.0 §5.17.1.
pub mod cns {
    /// A namespace, in the NVM command set's format.
    pub const NAMESPACE: u8 = 0x00;
    /// The controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespace IDs above the given one.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Identification descriptors of a namespace.
    pub const DESCRIPTORS: u8 = 0x03;
    /// The controller, in the format of an I/O command set.
    pub const COMMAND_SET_CONTROLLER: u8 = 0x06;
    /// Allocated namespace IDs above the given one.
    pub const ALLOCATED_NAMESPACES: u8 = 0x10;
    /// An allocated namespace.
    pub const ALLOCATED_NAMESPACE: u8 = 0x11;
    /// Controllers that a namespace is attached to.
    pub const ATTACHED_CONTROLLERS: u8 = 0x12;
}

/// Identify Controller. NVMe 2.0 §5.17.2.1.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "the fields have the specification's names")]
pub struct IdentifyController {
    pub vid: U16,
    pub ssvid: U16,
    pub sn: [u8; 20],
    pub mn: [u8; 40],
    pub fr: [u8; 8],
    pub rab: u8,
    pub ieee: [u8; 3],
    pub cmic: u8,
    pub mdts: u8,
    pub cntlid: U16,
    pub ver: U32,
    pub rtd3r: U32,
    pub rtd3e: U32,
    pub oaes: U32,
    pub ctratt: U32,
    pub rrls: U16,
    reserved_102: [u8; 9],
    pub cntrltype: u8,
    pub fguid: [u8; 16],
    pub crdt: [U16; 3],
    reserved_134: [u8; 122],
    pub oacs: U16,
    pub acl: u8,
    pub aerl: u8,
    pub frmw: u8,
    pub lpa: u8,
    pub elpe: u8,
    pub npss: u8,
    pub avscc: u8,
    pub apsta: u8,
    pub wctemp: U16,
    pub cctemp: U16,
    pub mtfa: U16,
    pub hmpre: U32,
    pub hmmin: U32,
    pub tnvmcap: U128,
    pub unvmcap: U128,
    pub rpmbs: U32,
    pub edstt: U16,
    pub dsto: u8,
    pub fwug: u8,
    pub kas: U16,
    pub hctma: U16,
    pub mntmt: U16,
    pub mxtmt: U16,
    pub sanicap: U32,
    pub hmminds: U32,
    pub hmmaxd: U16,
    pub nsetidmax: U16,
    pub endgidmax: U16,
    pub anatt: u8,
    pub anacap: u8,
    pub anagrpmax: U32,
    pub nanagrpid: U32,
    pub pels: U32,
    pub domain: U16,
    reserved_358: [u8; 10],
    pub megcap: U128,
    reserved_384: [u8; 128],
    pub sqes: u8,
    pub cqes: u8,
    pub maxcmd: U16,
    pub nn: U32,
    pub oncs: U16,
    pub fuses: U16,
    pub fna: u8,
    pub vwc: u8,
    pub awun: U16,
    pub awupf: U16,
    pub icsvscc: u8,
    pub nwpc: u8,
    pub acwu: U16,
    pub ocfs: U16,
    pub sgls: U32,
    pub mnan: U32,
    pub maxdna: U128,
    pub maxcna: U32,
    reserved_564: [u8; 204],
    pub subnqn: [u8; 256],
    reserved_1024: [u8; 768],
    pub ioccsz: U32,
    pub iorcsz: U32,
    pub icdoff: U16,
    pub fcatt: u8,
    pub msdbd: u8,
    pub ofcs: U16,
    reserved_1806: [u8; 242],
    pub psd: [[u8; 32]; 32],
    pub vendor: [u8; 1024],
}

const _: () = {
    assert!(size_of::<IdentifyController>() == LEN);
    assert!(std::mem::offset_of!(IdentifyController, cntrltype) == 111);
    assert!(std::mem::offset_of!(IdentifyController, oacs) == 256);
    assert!(std::mem::offset_of!(IdentifyController, tnvmcap) == 280);
    assert!(std::mem::offset_of!(IdentifyController, kas) == 320);
    assert!(std::mem::offset_of!(IdentifyController, megcap) == 368);
    assert!(std::mem::offset_of!(IdentifyController, sqes) == 512);
    assert!(std::mem::offset_of!(IdentifyController, sgls) == 536);
    assert!(std::mem::offset_of!(IdentifyController, subnqn) == 768);
    assert!(std::mem::offset_of!(IdentifyController, ioccsz) == 1792);
    assert!(std::mem::offset_of!(IdentifyController, psd) == 2048);
};

/// Identify Controller of the NVM command set: limits of commands without data. NVM Command Set 1.0 §4.1.5.4.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "the fields have the specification's names")]
pub struct IdentifyNvmController {
    pub vsl: u8,
    pub wzsl: u8,
    pub wusl: u8,
    pub dmrl: u8,
    pub dmrsl: U32,
    pub dmsl: U64,
    reserved_16: [u8; 4080],
}

const _: () = assert!(size_of::<IdentifyNvmController>() == LEN);

/// One LBA format: metadata size, data size as a power of two, relative performance. NVM Command Set 1.0 §4.1.5.1.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "the fields have the specification's names")]
pub struct LbaFormat {
    pub ms: U16,
    pub lbads: u8,
    pub rp: u8,
}

/// Identify Namespace, in the NVM command set's format. NVM Command Set 1.0 §4.1.5.1.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "the fields have the specification's names")]
pub struct IdentifyNamespace {
    pub nsze: U64,
    pub ncap: U64,
    pub nuse: U64,
    pub nsfeat: u8,
    pub nlbaf: u8,
    pub flbas: u8,
    pub mc: u8,
    pub dpc: u8,
    pub dps: u8,
    pub nmic: u8,
    pub rescap: u8,
    pub fpi: u8,
    pub dlfeat: u8,
    pub nawun: U16,
    pub nawupf: U16,
    pub nacwu: U16,
    pub nabsn: U16,
    pub nabo: U16,
    pub nabspf: U16,
    pub noiob: U16,
    pub nvmcap: U128,
    pub npwg: U16,
    pub npwa: U16,
    pub npdg: U16,
    pub npda: U16,
    pub nows: U16,
    pub mssrl: U16,
    pub mcl: U32,
    pub msrc: u8,
    reserved_81: [u8; 11],
    pub anagrpid: U32,
    reserved_96: [u8; 3],
    pub nsattr: u8,
    pub nvmsetid: U16,
    pub endgid: U16,
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    pub lbaf: [LbaFormat; 64],
    pub vendor: [u8; 3712],
}

const _: () = {
    assert!(size_of::<IdentifyNamespace>() == LEN);
    assert!(std::mem::offset_of!(IdentifyNamespace, nvmcap) == 48);
    assert!(std::mem::offset_of!(IdentifyNamespace, mssrl) == 74);
    assert!(std::mem::offset_of!(IdentifyNamespace, anagrpid) == 92);
    assert!(std::mem::offset_of!(IdentifyNamespace, nguid) == 104);
    assert!(std::mem::offset_of!(IdentifyNamespace, lbaf) == 128);
};

/// Command Set Identifier: the I/O command set of a namespace. NVMe 2.0 §5.17.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandSet {
    /// The NVM command set: blocks.
    Nvm,
    /// The Key Value command set.
    KeyValue,
    /// The Zoned Namespace command set.
    Zoned,
    /// An identifier that this crate does not know.
    Unknown(u8),
}

impl CommandSet {
    const fn decode(csi: u8) -> Self {
        match csi {
            0 => Self::Nvm,
            1 => Self::KeyValue,
            2 => Self::Zoned,
            other => Self::Unknown(other),
        }
    }

    const fn encode(self) -> u8 {
        match self {
            Self::Nvm => 0,
            Self::KeyValue => 1,
            Self::Zoned => 2,
            Self::Unknown(csi) => csi,
        }
    }
}

/// Identification descriptors of a namespace; all that the list does not contain is absent. NVMe 2.0 §5.17.2.3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptors {
    /// Type 1: IEEE Extended Unique Identifier.
    pub eui64: Option<[u8; 8]>,
    /// Type 2: Namespace Globally Unique Identifier.
    pub nguid: Option<[u8; 16]>,
    /// Type 3: UUID.
    pub uuid: Option<[u8; 16]>,
    /// Type 4: Command Set Identifier.
    pub command_set: Option<CommandSet>,
}

/// A namespace descriptor that cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("namespace identification descriptor of type NIDT {nidt} with NIDL {nidl} at byte {offset}")]
pub struct BadDescriptor {
    /// The descriptor's type.
    pub nidt: u8,
    /// The descriptor's length.
    pub nidl: u8,
    /// Its first byte in the list.
    pub offset: usize,
}

impl Descriptors {
    /// Decodes a list, which ends with a descriptor of length 0 or with the data. Unknown types are skipped; identifiers of
    /// zeroes count as absent.
    ///
    /// # Errors
    /// A known type has another length than the specification's, or a descriptor goes beyond the data.
    pub fn decode(list: &[u8]) -> Result<Self, BadDescriptor> {
        let mut found = Self::default();
        let mut offset = 0;
        while let Some([nidt, nidl, _, _]) = list.get(offset..offset + 4) {
            let (nidt, nidl) = (*nidt, *nidl);
            if nidl == 0 {
                break;
            }
            let bad = BadDescriptor { nidt, nidl, offset };
            let end = offset + 4 + usize::from(nidl);
            let nid = list.get(offset + 4..end).ok_or(bad)?;
            match nidt {
                1 => found.eui64 = present(nid.try_into().map_err(|_| bad)?),
                2 => found.nguid = present(nid.try_into().map_err(|_| bad)?),
                3 => found.uuid = present(nid.try_into().map_err(|_| bad)?),
                4 => {
                    let [csi] = nid else { return Err(bad) };
                    found.command_set = Some(CommandSet::decode(*csi));
                }
                _ => {}
            }
            offset = end;
        }
        Ok(found)
    }

    /// Writes the list: EUI-64, NGUID, UUID, command set, as far as they are present. Leaves the rest of `list` as it is.
    pub fn encode(&self, list: &mut [u8; LEN]) {
        let command_set = self.command_set.map(|set| [set.encode()]);
        let ids: [(u8, Option<&[u8]>); 4] = [
            (1, self.eui64.as_ref().map(|id| &id[..])),
            (2, self.nguid.as_ref().map(|id| &id[..])),
            (3, self.uuid.as_ref().map(|id| &id[..])),
            (4, command_set.as_ref().map(|id| &id[..])),
        ];
        let mut offset = 0;
        for (nidt, nid) in ids.iter().filter_map(|(nidt, nid)| Some((*nidt, (*nid)?))) {
            list[offset..offset + 4].copy_from_slice(&[nidt, nid.len() as u8, 0, 0]);
            list[offset + 4..offset + 4 + nid.len()].copy_from_slice(nid);
            offset += 4 + nid.len();
        }
    }
}

/// `id`, unless it is all zeroes, which stands for "none".
pub fn present<const N: usize>(id: [u8; N]) -> Option<[u8; N]> {
    (id != [0; N]).then_some(id)
}

/// The text of an ASCII field: without the padding, each unprintable byte as `?`.
pub fn text(field: &[u8]) -> String {
    let end = field.iter().rposition(|&b| b != b' ' && b != 0).map_or(0, |last| last + 1);
    let printable = |&b: &u8| if (b' '..=b'~').contains(&b) { char::from(b) } else { '?' };
    field[..end].iter().map(printable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_found_in_any_order_and_unknown_ones_skipped() {
        let mut list = vec![9, 3, 0, 0, 1, 2, 3, 4, 1, 0, 0, 2];
        list.extend([2, 16, 0, 0].iter().chain(&[0xa0; 16]));
        list.extend([3, 16, 0, 0].iter().chain(&[0; 16]));
        list.resize(4096, 0);
        let found = Descriptors::decode(&list).unwrap();
        assert_eq!(found.command_set, Some(CommandSet::Zoned));
        assert_eq!((found.nguid, found.uuid, found.eui64), (Some([0xa0; 16]), None, None));
    }

    #[test]
    fn descriptors_of_a_wrong_length_or_beyond_the_data_are_refused() {
        let bad = |nidt, nidl, offset| Err(BadDescriptor { nidt, nidl, offset });
        assert_eq!(Descriptors::decode(&[1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), bad(1, 7, 0));
        assert_eq!(Descriptors::decode(&[9, 1, 0, 0, 0, 2, 16, 0, 0, 1]), bad(2, 16, 5));
        assert_eq!(Descriptors::decode(&[0xff; 4096]), bad(0xff, 0xff, 3885));
        assert_eq!(Descriptors::decode(&[1, 8, 0]), Ok(Descriptors::default()), "cut in its header");
    }

    #[test]
    fn descriptors_are_read_as_they_were_written() {
        let full = Descriptors {
            eui64: Some([1; 8]),
            nguid: Some([2; 16]),
            uuid: Some([3; 16]),
            command_set: Some(CommandSet::Zoned),
        };
        for descriptors in [full, Descriptors { eui64: None, uuid: None, ..full }, Descriptors::default()] {
            let mut list = [0; LEN];
            descriptors.encode(&mut list);
            assert_eq!(Descriptors::decode(&list), Ok(descriptors));
        }
    }

    #[test]
    fn text_fields_lose_padding_and_control_characters() {
        assert_eq!(text(b"Model\x1b 1  \0 "), "Model? 1");
        assert_eq!(text(&[b' '; 20]), "");
    }
}
