//! Failures that an NVMe drive reports, up to the sense data of an initiator.

use super::{BLOCK, cdb_16, sense_of};
use crate::initiator::Initiators;
use crate::{Key, Status};
use aryk_bdev::{Access, Bytes, Env, Lba};
use aryk_bdev_nvme::{Config, Controllers, Location};
use aryk_nvme_model::{Model, NamespaceConfig};
use std::sync::Arc;

/// A model of a drive with a namespace of 2 MiB.
fn drive(
    runtime: &tokio::runtime::Runtime,
    env: &Env,
) -> (Arc<Model>, aryk_nvme_model::Running, Controllers) {
    let namespaces = vec![(1, NamespaceConfig::new(4096, 0, 1))];
    let model = Model::new("model", aryk_nvme_model::Config { namespaces, ..Default::default() }).unwrap();
    let running = model.run().unwrap();
    let controllers = Controllers::default();
    let function: Arc<dyn aryk_pci::Function> = Arc::<Model>::clone(&model);
    let config = Config::new("nv", Location::Model(function));
    runtime.block_on(controllers.attach(env, config)).unwrap();
    (model, running, controllers)
}

/// The INFORMATION field has the block that failed (SPC-4, section 4.5.2.2; SBC-3, section 4.18.1), also of a part of the drive.
#[test]
fn sense_data_has_the_block_that_an_nvme_drive_names() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let env = Env::default();
    let (model, running, controllers) = drive(&runtime, &env);
    for lba in [77, 2048 + 5, 2048 + 900] {
        model.with(|model| model.damage(1, lba, 2));
    }
    let check = |name: &str, cases: &[(u64, u32, Option<u64>)]| {
        let mut all = Initiators::new(env.registry(), name, Access::Shared, 1);
        sense_of(&mut all, 0, &[0; 6], &[]);
        for &(lba, blocks, bad) in cases {
            let cdb = cdb_16(0x88, 0, lba, blocks);
            let (outcome, _) = all.run(0, &cdb, &[], blocks as usize * BLOCK);
            let Some(bad) = bad else {
                assert_eq!(outcome.status, Status::Good);
                continue;
            };
            let sense = outcome.sense;
            assert_eq!(
                (sense.key, sense.code, sense.lba),
                (Key::MediumError, (0x11, 0), Some(Lba(bad))),
                "{lba}"
            );
        }
    };
    check("nvn1", &[(70, 7, None), (70, 16, Some(77)), (78, 16, Some(78)), (77, 1, Some(77)), (79, 8, None)]);
    let config = aryk_bdev_split::Config { base: "nvn1".into(), count: 2, bytes: Some(Bytes(1 << 20)) };
    runtime.block_on(aryk_bdev_split::create(&env, config)).unwrap();
    check("nvn1p1", &[(0, 8, Some(5)), (6, 8, Some(6)), (7, 8, None), (890, 64, Some(900))]);
    runtime.block_on(controllers.detach("nv")).unwrap();
    drop(running);
}
