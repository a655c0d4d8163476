//! Controllers that lie: each lie is refused by the field's name, or has no effect.

use aryk_nvme::claims::Unserved;
use aryk_nvme::controller::{Options, SECOND};
use aryk_nvme::queue::Timeouts;
use aryk_nvme::spec::register::{CAP, VS};
use aryk_nvme_model::{Config, Hostile, NamespaceConfig, Patch};

use super::rig::{MS, Nobody, Note, Rig, options};
use super::traffic::{Traffic, run};

/// Identify structures by CNS.
const NAMESPACE: u8 = 0;
const CONTROLLER: u8 = 1;
const LIST: u8 = 2;

/// Attaches a controller whose identify data has these bytes, until it is ready or has ended.
fn attach(cns: u8, offset: usize, bytes: &[u8]) -> Rig {
    let mut rig = Rig::with_options(Config { nn: 64, ..Config::default() }, options()).unwrap();
    let patch = Patch { cns, offset, bytes: bytes.to_vec() };
    rig.model.with(|model| model.faults().patch_identify(patch));
    rig.run_until(&mut Nobody, 30 * SECOND, |rig| rig.is_ended || rig.controller.is_ready());
    rig
}

#[test]
fn lies_about_the_controller_end_the_attach_by_name() {
    let cases: [(usize, &[u8], &str); 5] = [
        (512, &[0x77], "the controller claims SQES 0x77: submission entries have 64 bytes"),
        (513, &[0x33], "the controller claims CQES 0x33: completion entries have 16 bytes"),
        (516, &[0; 4], "the controller claims NN 0x0: namespace IDs go from 1 to FFFFFFFDh"),
        (516, &[0xff; 4], "the controller claims NN 0xffffffff: namespace IDs go from 1 to FFFFFFFDh"),
        (111, &[3], "the controller claims CNTRLTYPE 0x3: not an I/O controller"),
    ];
    for (offset, bytes, expected) in cases {
        let rig = attach(CONTROLLER, offset, bytes);
        assert_eq!(rig.end(), Some(expected));
        rig.assert_clean();
    }
}

#[test]
fn registers_that_contradict_refuse_the_attach() {
    for (offset, value, expected) in [
        (CAP, 0x3c00_0000, "CAP.MQES"),
        (CAP + 4, 0x20 | 5 << 16, "CAP.MPSMIN"),
        (CAP + 4, 0, "CAP.CSS"),
        (VS, 0, "VS"),
        (VS, u32::MAX, "VS"),
    ] {
        let model = aryk_nvme_model::Model::new("model", Config::default()).unwrap();
        model.with(|model| model.faults().set_register(offset, value));
        let failure = aryk_nvme::controller::Controller::attach(model, options(), 0).unwrap_err();
        assert!(failure.to_string().contains(expected), "{failure}");
    }
}

#[test]
fn namespaces_that_are_not_served_are_named_and_the_others_are() {
    let config = |change: &dyn Fn(&mut NamespaceConfig)| {
        let mut namespace = NamespaceConfig::new(128, 1, 1);
        change(&mut namespace);
        namespace
    };
    let namespaces = vec![
        (1, config(&|_| {})),
        (2, config(&|namespace| namespace.csi = 2)),
        (3, config(&|namespace| namespace.csi = 1)),
        (4, config(&|namespace| namespace.format = 3)),
        (5, config(&|namespace| (namespace.format, namespace.extended_lba) = (4, true))),
        (6, config(&|namespace| namespace.format = 5)),
    ];
    let rig = Rig::ready(Config { namespaces, ..Config::default() }, &[]);
    let texts: Vec<String> = rig
        .controller
        .namespaces()
        .iter()
        .map(|listed| match &listed.namespace {
            Ok(namespace) => format!("{} bytes", namespace.block_size()),
            Err(unserved) => unserved.to_string(),
        })
        .collect();
    assert_eq!(
        texts,
        [
            "4096 bytes",
            "the namespace has the command set Zoned, only NVM (blocks) is served",
            "the namespace has the command set KeyValue, only NVM (blocks) is served",
            "the namespace's format has 8 bytes of separate metadata per block: format it without (`--lbaf` with ms:0)",
            "the namespace's format has 64 bytes of interleaved metadata per block: format it without (`--lbaf` with ms:0)",
            "16384 bytes",
        ]
    );
}

#[test]
fn sizes_at_the_limits_are_refused_by_name() {
    let claim = |offset, bytes: &[u8]| {
        let rig = attach(NAMESPACE, offset, bytes);
        match rig.controller.namespaces()[0].namespace.clone().unwrap_err() {
            Unserved::BadClaim(claim) => claim.field.to_owned(),
            other => other.to_string(),
        }
    };
    assert_eq!(claim(0, &[0xff; 8]), "NSZE");
    assert_eq!(claim(0, &[0; 8]), "NSZE");
    assert_eq!(claim(8, &[0xff; 8]), "NCAP");
    assert_eq!(
        claim(132, &[0, 0, 255, 0]),
        "the namespace has blocks of 2^255 bytes; 2^9 to 2^16 are served"
    );
    assert_eq!(claim(26, &[0x0f]), "FLBAS");
    assert_eq!(attach(NAMESPACE, 0, &[0; 16]).controller.namespaces(), [], "not active");
}

#[test]
fn lists_that_do_not_ascend_are_refused() {
    for ids in [[2_u32, 1], [1, 1], [u32::MAX, 0], [u32::MAX - 1, 0]] {
        let rig = attach(LIST, 0, &ids.map(u32::to_le_bytes).concat());
        assert!(rig.end().unwrap().contains("active namespace list"), "{:?}", rig.notes);
    }
    // A list that never ends.
    let endless: Vec<u8> = (1..=1024_u32).flat_map(u32::to_le_bytes).collect();
    let rig = attach(LIST, 0, &endless);
    assert!(rig.end().unwrap().contains("active namespace list"), "{:?}", rig.notes);
}

#[test]
fn a_host_memory_buffer_is_refused_and_the_controller_served() {
    let rig = attach(CONTROLLER, 272, &[0, 16, 0, 0, 0, 8, 0, 0]);
    let buffer = rig.controller.info().unwrap().host_memory_buffer.unwrap();
    assert_eq!((buffer.preferred, buffer.minimum), (16 << 20, 8 << 20));
}

#[test]
fn random_lies_never_hang_or_panic() {
    let (mut ready, mut refused) = (0, 0);
    for seed in 0..300 {
        let hostile = Hostile {
            identify: seed % 2 == 0,
            logs: seed % 3 == 0,
            features: seed % 5 < 2,
            registers: seed % 7 == 0,
            events: seed % 11 == 0,
        };
        let options =
            Options { io: Timeouts { command: 100 * MS, grace: 50 * MS }, admin: 200 * MS, ..options() };
        let config =
            Config { seed, namespaces: vec![(1, NamespaceConfig::new(2048, 0, 1))], ..Config::default() };
        let model = aryk_nvme_model::Model::new("model", config.clone()).unwrap();
        model.with(|model| model.faults().hostile = hostile);
        let Some(mut rig) = Rig::on(model, options) else {
            refused += 1;
            continue;
        };
        rig.run_until(&mut Nobody, 600 * SECOND, |rig| rig.is_ended || rig.controller.is_ready());
        if rig.is_ended {
            refused += 1;
            continue;
        }
        ready += 1;
        rig.run_for(&mut Nobody, SECOND, MS);
    }
    assert!(ready > 20 && refused > 20, "{ready} ready, {refused} refused");
}

#[test]
fn hostile_logs_and_features_do_not_disturb_io() {
    for seed in 0..10 {
        let mut rig = Rig::ready(Config { seed, oacs: 0, ..Config::default() }, &[16]);
        rig.model.with(|model| {
            model.faults().hostile = Hostile { logs: true, features: true, ..Hostile::default() }
        });
        let mut traffic = Traffic::new(&rig, seed, 16);
        for change in 0..10 {
            rig.model.with(|model| model.add_namespace(2 + change % 4, NamespaceConfig::new(64, 0, 9)));
            run(&mut rig, &mut traffic, 16, 100);
        }
        assert!(!rig.notes.iter().any(|note| matches!(note, Note::Quiesce(_))), "{:?}", rig.notes);
        rig.assert_clean();
    }
}
