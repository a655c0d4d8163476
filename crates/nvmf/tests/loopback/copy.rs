//! Copies on a disk in memory: what is on the disk afterwards, and what hosts get for copies that cannot be.

use crate::host::{Connection, Options};
use crate::pattern;
use crate::raw::{Raw, capsule, capsule_with, command, pdu};
use crate::target::{BLOCK, BLOCKS, Running, SUBSYSTEM};
use aryk_bdev::{
    Blocks, Channel, Completion, Device, Geometry, Identity, Io, Limits, OpSet, OpenError, Outbox, Status,
    Tag,
};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::identify::{IdentifyController, IdentifyNamespace, IdentifyNvmController, cns};
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::tcp::{H2cData, Header, R2t};
use aryk_nvmf::NewNamespace;
use aryk_reactor::{Cx, RootId};
use std::sync::Arc;
use zerocopy::FromBytes;

/// Sources: first block, number of blocks.
type Sources<'a> = &'a [(usize, usize)];

fn data(of: Sources<'_>) -> Vec<u8> {
    let source = |&(lba, blocks): &(usize, usize)| {
        let (lba, blocks) = ((lba as u64).to_le_bytes(), ((blocks - 1) as u16).to_le_bytes());
        [&[0; 8], &lba[..], &blocks, &[0; 14]].concat()
    };
    of.iter().flat_map(source).collect()
}

fn copy(to: usize, of: Sources<'_>) -> SubmissionEntry {
    SubmissionEntry::new(io::COPY, 1).with_cdw10_11(to as u32, 0).with_cdw12_13(of.len() as u32 - 1, 0)
}

/// The disk after a copy, whose sources are copied one after the other.
fn copied(disk: &mut [u8], mut to: usize, of: Sources<'_>) {
    for &(lba, blocks) in of {
        disk.copy_within(lba * BLOCK..(lba + blocks) * BLOCK, to * BLOCK);
        to += blocks;
    }
}

fn write_all(queue: &mut Connection, disk: &[u8]) {
    for (place, bytes) in disk.chunks(32 * BLOCK).enumerate() {
        queue.write(place as u64 * 32, bytes).unwrap();
    }
}

fn read_all(queue: &mut Connection) -> Vec<u8> {
    (0..BLOCKS / 32).flat_map(|place| queue.read(place as u64 * 32, 32).unwrap()).collect()
}

#[test]
fn blocks_are_copied_in_the_order_of_the_sources() {
    let target = Running::start();
    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut queue = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let mut disk = pattern(BLOCKS, 3);
    write_all(&mut queue, &disk);
    let single: Vec<(usize, usize)> = (0..32).map(|lba| (31 - lba, 1)).collect();
    for (to, of) in [
        (40, &[(0, 1)][..]),
        (50, &[(3, 2), (20, 5), (9, 1)]),
        // The ranges overlap, forwards and backwards; a later source has what an earlier one has written.
        (11, &[(10, 20)]),
        (10, &[(11, 20)]),
        (5, &[(5, 5)]),
        (0, &[(60, 4), (0, 4), (2, 4)]),
        (32, &single),
        (0, &[(0, BLOCKS)]),
    ] {
        queue.run(copy(to, of), &data(of), 0).unwrap();
        copied(&mut disk, to, of);
        assert!(read_all(&mut queue) == disk, "{of:?} to {to}");
    }
    target.stop();
}

#[test]
fn a_host_learns_the_limits_which_are_kept() {
    let target = Running::start();
    let (mut admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let page = IdentifyController::read_from_bytes(&admin_queue.identify(cns::CONTROLLER, 0)).unwrap();
    assert_eq!((page.oncs.get() >> 7, page.ocfs.get()), (0b11, 1));
    let page = admin_queue.identify(cns::COMMAND_SET_CONTROLLER, 0);
    assert_eq!(IdentifyNvmController::read_from_bytes(&page).unwrap().vsl, 5, "128 KiB");
    let page = IdentifyNamespace::read_from_bytes(&admin_queue.identify(cns::NAMESPACE, 1)).unwrap();
    assert_eq!((page.mssrl.get(), page.mcl.get(), page.msrc), (256, 1024, 127));

    let mut queue = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let disk = pattern(BLOCKS, 5);
    write_all(&mut queue, &disk);
    let (limit, outside) = (Err(Code::COMMAND_SIZE_LIMIT), Err(Code::LBA_OUT_OF_RANGE));
    for (to, of, code) in [
        (0, &[(1, 1), (0, 257)][..], limit),
        (0, &[(1, 64); 17], limit),
        (0, &[(1, 65_536); 128], limit),
        (0, &[(1, 1), (BLOCKS - 1, 2)], outside),
        (0, &[(1, 1), (usize::MAX, 1)], outside),
        (BLOCKS - 1, &[(1, 1), (1, 1)], outside),
    ] {
        assert_eq!(queue.run(copy(to, of), &data(of), 0).map(drop), code, "{of:?} to {to}");
    }
    let one = data(&[(1, 1)]);
    for (cdw12, data, code) in [
        (1, &one[..], Code::SGL_DATA_LENGTH_INVALID),
        (0, &one[..28], Code::SGL_DATA_LENGTH_INVALID),
        (0, &[0; 4128], Code::SGL_DATA_LENGTH_INVALID),
        (1 << 8, &one, Code::INVALID_FIELD),
        (255, &[0; 8192], Code::COMMAND_SIZE_LIMIT),
    ] {
        let entry = SubmissionEntry::new(io::COPY, 1).with_cdw12_13(cdw12, 0);
        assert_eq!(queue.run(entry, data, 0).map(drop), Err(code), "{cdw12:#x}");
    }
    assert!(read_all(&mut queue) == disk, "nothing was copied");
    target.stop();
}

#[test]
fn sources_come_by_an_r2t_or_not_at_all() {
    let target = Running::start();
    let (_queue, id) = Raw::admin(target.address);
    let mut queue = Raw::io(target.address, id, 1, 16);
    queue.send(&capsule_with(command(1, io::WRITE, 5, 1, 0), &[7; BLOCK]));
    assert!(queue.completion().unwrap().status().is_success());
    let of = data(&[(0, 1), (5, 1)]);
    let len = of.len() as u32;
    let request = |queue: &mut Raw| {
        queue.send(&capsule(command(2, io::COPY, 20, 2, len)));
        match queue.receive() {
            Some((Header::R2t(R2t { tag, .. }), _)) => tag,
            other => panic!("{other:?}"),
        }
    };
    let tag = request(&mut queue);
    let header = H2cData { cid: 2, tag, offset: 0, len, is_last: true };
    queue.send(&pdu(&Header::H2cData(header), &of));
    let completion = queue.completion().unwrap();
    assert_eq!((completion.status().code(), completion.result()), (Code::SUCCESS, 0));
    let read = queue.run(command(3, io::READ, 20, 2, 2 * BLOCK as u32));
    assert_eq!(read, (Code::SUCCESS, [[0; BLOCK], [7; BLOCK]].concat()));
    // A host that goes leaves nothing.
    request(&mut queue);
    drop(queue);
    target.stop();
}

#[test]
fn a_namespace_goes_while_its_blocks_are_copied() {
    let target = Running::start();
    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let all = [(0, 8); 128];
    for round in 0..10 {
        let mut queue = Connection::io(target.address, Options::default(), id, 1 + round, 1).unwrap();
        let copies: Vec<u16> =
            (0..15).map(|_| queue.submit(copy(8, &all[..7]), &data(&all[..7]), 0)).collect();
        target.run(async |target| target.remove_namespace(SUBSYSTEM, 1).await.unwrap());
        for cid in copies {
            let ended = queue.wait(cid).map(drop);
            let is_expected = match ended {
                Ok(()) => true,
                Err(code) => [Code::ABORT_REQUESTED, Code::INVALID_NAMESPACE_OR_FORMAT].contains(&code),
            };
            assert!(is_expected, "{ended:?}");
        }
        target.run(async |target| {
            assert_eq!(target.add_namespace(SUBSYSTEM, "disk", NewNamespace::default()).await.unwrap(), 1);
        });
        queue.run(copy(8, &all[..7]), &data(&all[..7]), 0).unwrap();
    }
    target.stop();
}

/// A disk that other hosts share, and that does not copy by itself.
struct SharedDisk;

struct Done(Outbox);

impl Device for SharedDisk {
    fn product(&self) -> &'static str {
        "shared"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK as u32, Blocks(8))
    }

    fn limits(&self) -> Limits {
        Limits { is_shared: true, ..Limits::default() }
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(Done(Outbox::new(root))))
    }
}

impl Channel for Done {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.0.push(io.tag, Status::Ok, cx);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.0.take(out);
    }
}

#[test]
fn a_namespace_whose_disk_cannot_copy_says_so() {
    let target = Running::start();
    target.env().registry().register(Identity::named("shared"), Arc::new(SharedDisk)).unwrap();
    target.run(async |target| {
        target.remove_namespace(SUBSYSTEM, 1).await.unwrap();
        target.add_namespace(SUBSYSTEM, "shared", NewNamespace::default()).await.unwrap();
    });
    let (mut admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let page = IdentifyNamespace::read_from_bytes(&admin_queue.identify(cns::NAMESPACE, 1)).unwrap();
    assert_eq!((page.mssrl.get(), page.mcl.get(), page.msrc), (0, 0, 0));
    let mut queue = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let refused = queue.run(copy(4, &[(0, 1)]), &data(&[(0, 1)]), 0);
    assert_eq!(refused.map(drop), Err(Code::INVALID_OPCODE));
    assert_eq!(queue.command(io::VERIFY, 0, 8, &[], 0), Ok(Vec::new()));
    target.stop();
}
