//! Images whose metadata lets librbd keep the memory of requests.

use super::{BLOCK, OnStub, config, create, image_of, until};
use crate::Error;
use aryk_bdev::{Access, Status};
use aryk_bdev_conformance::{Bench, Shape};

#[test]
fn an_image_whose_writes_librbd_would_not_copy_is_refused_unless_it_is_only_read() {
    let stub = OnStub::new(BLOCK, 256);
    stub.remove();
    stub.image.script(|script| script.zero_copy = true);
    let mut config = config(&stub.pool, BLOCK);
    let refused = create(&stub.clusters, &stub.env, config.clone()).unwrap_err();
    assert!(matches!(&refused, Error::ZeroCopy(name) if name.ends_with("/image")), "{refused}");
    until("its handle is closed", || stub.image.handles() == 0);
    config.read_only = true;
    create(&stub.clusters, &stub.env, config).unwrap();
    stub.remove();
}

#[test]
fn a_write_has_the_data_of_its_beginning_when_metadata_has_switched_librbds_copy_off() {
    let stub = OnStub::new(BLOCK, 256);
    let image = image_of(&stub.disk);
    until("writes are not copied twice", || !image.must_copy());
    let mut bench = Bench::new();
    let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 16, BLOCK);
    for zero_copy in [true, false] {
        stub.image.script(|script| script.zero_copy = zero_copy);
        stub.image.resize(stub.image.size());
        until("the disk has noticed it", || image.must_copy() == zero_copy);
        stub.image.script(|script| script.holds = true);
        let write = disk.write(1, &[7; BLOCK as usize], Shape::Halves, &mut bench);
        until("librbd has the request", || {
            bench.turn();
            stub.image.held() == 1
        });
        disk.view(write).fill(9);
        stub.image.release();
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
        let mut data = [0; BLOCK as usize];
        stub.image.read(BLOCK.into(), &mut data);
        assert!(data == [7; BLOCK as usize], "librbd copies: {}", !zero_copy);
    }
    disk.close(&mut bench);
    stub.remove();
}
