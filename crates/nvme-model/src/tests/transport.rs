//! The model as a PCI function: configuration space, mappings, a thread that runs it, and vfio-user.

use super::host::{Host, command, is_ok};
use crate::{Config, Data, Model, nvm};
use aryk_dma::Mapping;
use aryk_pci::{Function, PciError, vfio_user};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

#[test]
fn configuration_space_is_that_of_an_nvme_controller() {
    let model = Model::new("model", Config::default()).unwrap();
    let mut header = [0; 64];
    model.read_config(0, &mut header).unwrap();
    assert_eq!(header[9..12], [2, 8, 1], "class 01 08 02");
    let mut at = u16::from(header[0x34]);
    let mut seen = Vec::new();
    while at != 0 {
        let mut capability = [0; 12];
        model.read_config(at, &mut capability).unwrap();
        seen.push(capability[0]);
        if capability[0] == 0x11 {
            assert_eq!(u16::from_le_bytes([capability[2], capability[3]]) & 0x7ff, 16, "17 vectors");
        }
        at = u16::from(capability[1]);
    }
    assert_eq!(seen, [0x01, 0x11, 0x10]);
    model.write_config(4, &[0xff, 0xff]).unwrap();
    let mut command = [0; 2];
    model.read_config(4, &mut command).unwrap();
    assert_eq!(command, [0b110, 0]);
    assert!(model.write_config(0xfff, &[0; 2]).is_err());
}

#[test]
fn mappings_are_whole_pages_that_do_not_overlap() {
    use vfio_user::Served as _;
    let model = Model::new("model", Config::default()).unwrap();
    let mapping = Arc::new(Mapping::anonymous(16384).unwrap());
    let range = |offset, len| mapping.dma_range(offset, len).unwrap();
    assert!(model.map(&range(0, 100)).is_err());
    let first = model.map(&range(0, 8192)).unwrap();
    let second = model.map(&range(0, 8192)).unwrap();
    assert!(second >= first + 8192);
    assert!(model.map_at(first + 4096, &range(0, 4096)).is_err());
    model.map_at(first - 4096, &range(0, 4096)).unwrap();
    assert!(matches!(model.unmap(first, 4096), Err(PciError::NotMapped { .. })));
    model.unmap(first, 8192).unwrap();
    assert!(model.unmap(first, 8192).is_err());
    assert_eq!(model.with(|c| c.mappings()), 2);
    assert!(model.map_registers(0, 4096).is_err());
    assert!(model.map_registers(0x1000, 1 << 20).is_err());
}

#[test]
fn memory_that_is_freed_while_mapped_is_a_violation() {
    let mut host = Host::ready(Config::default());
    let gone = Arc::new(Mapping::anonymous(4096).unwrap());
    let iova = host.model.map(&gone.dma_range(0, 4096).unwrap()).unwrap();
    drop(gone);
    let read = super::host::with_prps(super::host::io(nvm::READ, 1, 0, 1), iova, 0);
    assert_eq!(super::host::status(&host.run(read)), (0, 4));
    host.model.with(|c| assert_eq!(c.violations().first, [crate::Violation::Freed { iova }]));
}

#[test]
fn a_thread_runs_the_model_while_others_use_it() {
    let mut host = Host::ready(Config { data: Data::KeptDurable, ..Config::default() });
    let running = host.model.run().unwrap();
    let flush = command(nvm::FLUSH, 1, [0; 6]);
    for round in 0..2000_u16 {
        let cid = host.submit(1, flush);
        let done = loop {
            match host.reap(1) {
                Some(done) => break done,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!((done.cid.get(), is_ok(&done)), (cid, true), "round {round}");
        // Calls of other threads get the lock.
        assert_eq!(host.reg32(0x1c), 1);
    }
    drop(running);
    host.submit(1, flush);
    std::thread::yield_now();
    assert!(host.reap(1).is_none(), "the thread has ended");
    assert!(is_ok(&host.wait(1)), "and a step goes on from there");
    host.assert_clean();
}

#[test]
fn the_model_is_served_over_vfio_user_to_one_client_after_the_other() {
    let directory = std::env::temp_dir().join(format!("aryk-nvme-model-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("socket");
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let model = Model::new("served", Config::default()).unwrap();
    let served = Arc::clone(&model);
    let server = std::thread::spawn(move || {
        for _ in 0..2 {
            let (client, _) = listener.accept().unwrap();
            vfio_user::serve(client, &*served).unwrap();
        }
    });
    for round in 0..2_u8 {
        let client: Arc<dyn Function> = Arc::new(vfio_user::Client::connect(&path).unwrap());
        let mut host = Host::over(Arc::clone(&client), Arc::clone(&model), 4);
        host.enable();
        host.create_queue(1, 16);
        if round == 1 {
            assert_eq!(host.read_block(5), 1, "the data of the first client");
        }
        assert!(is_ok(&host.write_block(5, round + 1, 1 << 30)));
        assert_eq!(host.read_block(5), round + 1);
        host.assert_clean();
        drop(host);
        drop(client);
        // The server resets the controller after its client has gone.
        while model.with(|c| c.mappings()) > 0 {
            std::thread::yield_now();
        }
    }
    server.join().unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
}
