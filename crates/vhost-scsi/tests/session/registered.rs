//! A device that accesses guests' memory by itself (DMA) and is created after the guest has connected.

use super::{Guest, Host, REQUEST, SOON, cdb_16, greet, run, unit, with};
use aryk_bdev::Blocks;
use aryk_bdev_conformance::{Behaviour, Container, Iommu, create_dma_disk};
use aryk_front_end::{Format, Memory};

fn write_and_read(guest: &mut Guest, byte: u8) {
    let write = guest.command(unit(0), &cdb_16(0x8a, 0, 16), &[byte; 8192], 0);
    assert_eq!((write.response, write.status), (0, 0));
    let read = guest.command(unit(0), &cdb_16(0x88, 0, 16), &[], 8192);
    assert_eq!((read.response, read.status, read.data), (0, 0, vec![byte; 8192]));
}

#[test]
fn a_late_device_maps_the_memory_of_connected_guests_before_its_first_use() {
    run(async {
        let host = Host::new(0);
        host.create("vm", false).unwrap();
        let guest = host.guest("vm", Format::Split).await;
        let iommu = Iommu::new(Behaviour { delay_us_max: 20_000, ..Behaviour::default() });
        let container = Container::attach(host.env.memory(), iommu.clone()).await.unwrap();
        assert_eq!(iommu.mapped(), 1, "the memory that the guest announced before");
        create_dma_disk(&host.env, "dma", Blocks(2048), container).unwrap();
        host.scsi.add_target("vm", Some(0), "dma").await.unwrap();
        let (guest, ()) = with(guest, |guest| {
            greet(guest, 0);
            write_and_read(guest, 1);
            // The guest announces a new table: the first region stays and keeps its IOVA.
            let more = Memory::new(1 << 20).expect("memory");
            guest.share(Some(&more));
            write_and_read(guest, 2);
            guest.submit_to_more(1, unit(0), &cdb_16(0x88, 0, 1), 512);
            assert_eq!(guest.take(REQUEST, SOON).map(|taken| taken.0), Some(1));
            guest.share(None);
            write_and_read(guest, 3);
        })
        .await;
        let accesses = iommu.accesses();
        assert!(accesses.direct >= 7, "{accesses:?}");
        assert_eq!((accesses.bounced, accesses.violations, accesses.begun), (0, 0, 2), "{accesses:?}");
        drop(guest);
        host.controllers.delete_all().await;
        tokio::time::timeout(SOON, host.env.registry().remove("dma")).await.expect("soon").unwrap();
        assert_eq!((iommu.mapped(), iommu.accesses().ended), (0, 2));
    });
}
