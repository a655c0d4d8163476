//! Claims that are true, false, and random.

use proptest::prelude::*;
use zerocopy::{FromBytes, FromZeros};

use super::*;
use crate::spec::identify::{CommandSet, Descriptors, IdentifyNamespace, LEN};

/// A plain controller.
pub(crate) fn raw_controller() -> IdentifyController {
    let mut raw = IdentifyController::new_zeroed();
    raw.sn = *b"S1                  ";
    raw.mn[..5].copy_from_slice(b"Model");
    raw.fr = *b"1.0     ";
    (raw.sqes, raw.cqes, raw.mdts, raw.vwc) = (0x66, 0x44, 5, 1);
    raw.nn.set(16);
    raw.oncs.set(0x1ff);
    raw.ocfs.set(1);
    raw.fuses.set(1);
    raw
}

/// A plain namespace of 1,000 blocks of 4,096 bytes.
pub(crate) fn raw_namespace() -> IdentifyNamespace {
    let mut raw = IdentifyNamespace::new_zeroed();
    raw.nsze.set(1000);
    raw.ncap.set(1000);
    (raw.nlbaf, raw.flbas) = (1, 1);
    raw.lbaf[0].lbads = 9;
    raw.lbaf[1].lbads = 12;
    raw
}

fn controller(raw: &IdentifyController) -> Result<ControllerInfo, BadClaim> {
    ControllerInfo::check(raw, 0x0002_0000, 4096, 4096, Quirks::default())
}

fn namespace(raw: &IdentifyNamespace) -> Result<Namespace, Unserved> {
    let info = controller(&raw_controller()).unwrap();
    Namespace::check(1, raw, Descriptors::default(), &info, Quirks::default())
}

#[test]
fn capabilities_that_contradict_are_refused_by_name() {
    let good = 0x7f | 20 << 24 | 1 << 37;
    let check = |cap, vs| Capabilities::check(Cap(cap), vs);
    let caps = check(good, 0x0001_0400).unwrap();
    assert_eq!((caps.entries_max, caps.ready_timeout_ms, caps.stride, caps.page), (128, 10_000, 4, 4096));
    assert_eq!(check(good & !0x7f | 99, 0x0002_0000).unwrap().entries_max, 64, "a power of two");
    assert_eq!(check(0xffff | 1 << 37, 0x0001_0000).unwrap().ready_timeout_ms, 500);
    let field = |cap, vs| check(cap, vs).unwrap_err().field;
    assert_eq!(field(good & !0xffff, 0x0001_0400), "CAP.MQES");
    assert_eq!(field(good | 3 << 48 | 2 << 52, 0x0001_0400), "CAP.MPSMIN");
    assert_eq!(field(good | 15 << 48 | 15 << 52, 0x0001_0400), "CAP.MPSMIN");
    assert_eq!(field(good & !(1 << 37), 0x0001_0400), "CAP.CSS");
    assert_eq!(field(good & !(1 << 37) | 1 << 44, 0x0001_0400), "CAP.CSS");
    assert!(check(good | 1 << 43 | 1 << 44, 0x0001_0400).unwrap().all_command_sets, "as QEMU has it");
    assert_eq!(field(good, 0), "VS");
    assert_eq!(field(good, u32::MAX), "VS");
    assert_eq!(field(u64::MAX, 0x0001_0400), "CAP");
}

#[test]
fn a_plain_controller_is_accepted_with_its_limits() {
    let info = controller(&raw_controller()).unwrap();
    assert_eq!((info.serial.as_str(), info.model.as_str(), info.transfer_max), ("S1", "Model", 131_072));
    assert!(info.supported.copy && info.supported.compare_and_write && info.has_write_cache);
    assert!(!info.supported.format && info.host_memory_buffer.is_none());
    let mut raw = raw_controller();
    for (mdts, bytes) in
        [(0, TRANSFER_MAX), (1, 8192), (9, TRANSFER_MAX), (31, TRANSFER_MAX), (255, TRANSFER_MAX)]
    {
        raw.mdts = mdts;
        assert_eq!(controller(&raw).unwrap().transfer_max, bytes, "MDTS {mdts}");
    }
    raw.hmpre.set(16);
    assert_eq!(controller(&raw).unwrap().host_memory_buffer.unwrap().preferred, 65_536);
}

#[test]
fn identify_fields_that_cannot_be_true_are_refused_by_name() {
    let field = |change: &dyn Fn(&mut IdentifyController)| {
        let mut raw = raw_controller();
        change(&mut raw);
        controller(&raw).unwrap_err().field
    };
    assert_eq!(field(&|raw| raw.sqes = 0x77), "SQES");
    assert_eq!(field(&|raw| raw.sqes = 0x54), "SQES");
    assert_eq!(field(&|raw| raw.cqes = 0), "CQES");
    assert_eq!(field(&|raw| raw.nn.set(0)), "NN");
    assert_eq!(field(&|raw| raw.nn.set(u32::MAX)), "NN");
    assert_eq!(field(&|raw| raw.cntrltype = 2), "CNTRLTYPE");
}

#[test]
fn namespaces_of_unserved_kinds_are_refused_by_kind() {
    let refusal = |change: &dyn Fn(&mut IdentifyNamespace)| {
        let mut raw = raw_namespace();
        change(&mut raw);
        namespace(&raw).unwrap_err()
    };
    assert_eq!(refusal(&|raw| raw.lbaf[1].lbads = 255), Unserved::BlockSize(255));
    assert_eq!(refusal(&|raw| raw.lbaf[1].lbads = 0), Unserved::BlockSize(0));
    assert_eq!(refusal(&|raw| raw.lbaf[1].ms.set(8)), Unserved::Metadata { bytes: 8, interleaved: false });
    assert!(
        refusal(&|raw| (raw.lbaf[1].ms, raw.flbas) = (64.into(), 0x11))
            .to_string()
            .contains("64 bytes of interleaved metadata")
    );
    assert_eq!(refusal(&|raw| raw.dps = 3), Unserved::Protection(3));
    assert_eq!(refusal(&|raw| (raw.nsze, raw.ncap) = (0.into(), 0.into())), Unserved::Inactive);
    let field = |change| match refusal(change) {
        Unserved::BadClaim(claim) => claim.field,
        other => panic!("{other}"),
    };
    assert_eq!(field(&|raw| raw.nsze.set(0)), "NSZE");
    assert_eq!(field(&|raw| raw.nsze.set(u64::MAX)), "NSZE");
    assert_eq!(field(&|raw| raw.nsze.set(1 << 51)), "NSZE");
    assert_eq!(field(&|raw| raw.ncap.set(1001)), "NCAP");
    assert_eq!(field(&|raw| raw.nlbaf = 64), "NLBAF");
    assert_eq!(field(&|raw| raw.flbas = 2), "FLBAS");
    let info = controller(&raw_controller()).unwrap();
    for set in [CommandSet::Zoned, CommandSet::KeyValue, CommandSet::Unknown(9)] {
        let descriptors = Descriptors { command_set: Some(set), ..Descriptors::default() };
        let refused = Namespace::check(1, &raw_namespace(), descriptors, &info, Quirks::default());
        assert_eq!(refused, Err(Unserved::CommandSet(set)));
    }
}

#[test]
fn claims_that_the_driver_does_not_use_refuse_nothing() {
    let mut raw = raw_controller();
    (raw.wctemp, raw.cctemp) = (400.into(), 300.into());
    assert!(controller(&raw).is_ok(), "temperatures");
    let mut raw = raw_namespace();
    raw.nuse.set(1001);
    assert_eq!(namespace(&raw).unwrap().used, 1000, "more blocks in use than there are");
}

#[test]
fn a_block_that_no_transfer_carries_is_refused() {
    let mut raw = raw_controller();
    raw.mdts = 1;
    let info = controller(&raw).unwrap();
    let mut raw = raw_namespace();
    let check = |raw: &_| Namespace::check(1, raw, Descriptors::default(), &info, Quirks::default());
    raw.lbaf[1].lbads = 13;
    assert_eq!((info.transfer_max, check(&raw).map(|namespace| namespace.block_size())), (8192, Ok(8192)));
    raw.lbaf[1].lbads = 14;
    assert!(matches!(check(&raw), Err(Unserved::BadClaim(BadClaim { field: "MDTS", .. }))));
}

#[test]
fn atomic_units_come_from_the_namespace_only_where_it_says_so() {
    let mut raw = raw_namespace();
    (raw.nawupf, raw.nabspf, raw.noiob) = (7.into(), 15.into(), 32.into());
    let plain = namespace(&raw).unwrap();
    assert_eq!((plain.atomic_power_fail, plain.atomic_boundary, plain.optimal_boundary), (1, None, 32));
    raw.nsfeat = 2;
    let own = namespace(&raw).unwrap();
    assert_eq!((own.atomic_power_fail, own.atomic_boundary), (8, Some((16, 0))));
    assert_eq!((own.bytes(), own.block_size()), (4_096_000, 4096));
}

proptest! {
    /// Any bytes are refused, or give values that the driver can compute with.
    #[test]
    fn any_identify_data_is_refused_or_bounded(
        seed in any::<u64>(),
        density in 1_u32..64,
        keep in any::<bool>(),
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bytes = [[0; LEN], [0; LEN]];
        if keep {
            bytes = [zerocopy::transmute!(raw_controller()), zerocopy::transmute!(raw_namespace())];
        }
        for byte in bytes.as_flattened_mut() {
            if random.u32(..density) == 0 {
                *byte = random.u8(..);
            }
        }
        let raw = IdentifyController::read_from_bytes(&bytes[0]).unwrap();
        let info = controller(&raw).unwrap_or_else(|_| controller(&raw_controller()).unwrap());
        prop_assert!((4096..=TRANSFER_MAX).contains(&info.transfer_max));
        let raw = IdentifyNamespace::read_from_bytes(&bytes[1]).unwrap();
        let descriptors = Descriptors::decode(&bytes[0]).unwrap_or_default();
        if let Ok(namespace) = Namespace::check(1, &raw, descriptors, &info, Quirks::default()) {
            prop_assert!(namespace.bytes() <= i64::MAX as u64 && namespace.blocks > 0);
            prop_assert!(namespace.atomic_power_fail > 0 && namespace.copy_ranges_max > 0);
        }
    }
}
