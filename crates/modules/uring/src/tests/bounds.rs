//! Tests of the bounds on the bytes that one turn copies, and on the bytes that are submitted to the kernel at one time.

use super::harness::{MIB, STRICT, disk_directory, sparse};
use crate::channel::FileChannel;
use crate::{Config, Direct, Forced};
use aryk_bdev::{Blocks, Channel, Completion, Io, Lba, Op, Status, Tag};
use aryk_dma::Buffer;
use aryk_reactor::{Clock, CoreSet, Cx, Engine, Reactor, Root, RootRef, SleepPolicy};
use std::convert::Infallible;
use std::sync::Arc;

/// The module's channel without the block layer above it, which has its own bounds.
struct Bare {
    channel: FileChannel,
    done: Vec<Completion>,
}

impl Root for Bare {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let before = self.done.len();
        self.channel.poll(cx, &mut self.done);
        self.done.len() > before
    }
}

fn bare(engine: Engine, forced: Forced, direct: Direct) -> (Reactor, RootRef<Bare>, tempfile::TempDir) {
    let dir = disk_directory();
    let config = Config { direct, ..sparse(dir.path(), 8 * MIB) };
    let store = Arc::new(crate::open::open(&config, forced).unwrap().store);
    store.enter().unwrap();
    let mut reactor = Reactor::new(0, SleepPolicy::Poll, engine, Clock::Monotonic).unwrap();
    let cx = reactor.cx();
    let thread = cx.add_thread("test", CoreSet::allowed());
    let Ok(root) = cx.add_root(thread, "bare", |id, cx| {
        Ok::<_, Infallible>(Bare { channel: FileChannel::new(&store, id, cx), done: Vec::new() })
    });
    (reactor, root, dir)
}

fn request(op: Op, number: u32, buffer: &mut Buffer, (skew, bytes): (u32, u32)) -> Io {
    let blocks = u64::from(bytes) / 512;
    let (tag, lba) = (Tag(number.into()), u64::from(number) * blocks);
    let data = buffer.lend().slice(skew, bytes);
    Io {
        tag,
        op,
        fua: false,
        may_unmap: false,
        lba: Lba(lba),
        blocks: Blocks(blocks),
        source: Lba::ZERO,
        data,
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the sleep lets other threads answer")]
fn copied_bytes_are_spread_over_turns() {
    const READS: u32 = 32;
    const BYTES: u32 = 128 << 10;
    let forced = Forced { alignment: Some(STRICT), blocking: true };
    let (mut reactor, root, _dir) = bare(Engine::Epoll, forced, Direct::Auto);
    let mut buffers: Vec<Buffer> = (0..READS).map(|_| Buffer::new(BYTES as usize + 512, 4096)).collect();
    let cx = reactor.cx();
    let bare = cx.root::<Bare>(root.id()).unwrap();
    for (number, buffer) in (0..).zip(&mut buffers) {
        bare.borrow_mut().channel.submit(&request(Op::Read, number, buffer, (512, BYTES)), cx);
    }
    std::thread::sleep(std::time::Duration::from_millis(500));
    let mut turns = Vec::new();
    while bare.borrow().done.len() < READS as usize {
        let before = bare.borrow().done.len();
        reactor.turn();
        turns.push(bare.borrow().done.len() - before);
    }
    assert!(bare.borrow().done.iter().all(|completion| completion.status == Status::Ok));
    assert!(turns.iter().all(|answers| *answers <= 8), "{turns:?} of 128 KiB each");
    buffers.iter_mut().for_each(Buffer::reclaim);
    reactor.cx().remove_root(root.id());
    drop(bare);
    reactor.turn();
}

#[test]
fn queued_bytes_are_submitted_at_a_limit() {
    const BYTES: u32 = 512 << 10;
    let forced = Forced { alignment: None, blocking: false };
    let (mut reactor, root, _dir) = bare(Engine::IoUring, forced, Direct::Never);
    let mut buffers: Vec<Buffer> = (0..3).map(|_| Buffer::new(BYTES as usize, 4096)).collect();
    let cx = reactor.cx();
    let bare = cx.root::<Bare>(root.id()).unwrap();
    let mut left = Vec::new();
    for (number, buffer) in (0..).zip(&mut buffers) {
        bare.borrow_mut().channel.submit(&request(Op::Write, number, buffer, (0, BYTES)), cx);
        left.push(cx.ring().unwrap().unsubmitted_bytes());
    }
    assert_eq!(left, [BYTES.into(), 0, BYTES.into()]);
    while bare.borrow().done.len() < buffers.len() {
        reactor.turn();
    }
    buffers.iter_mut().for_each(Buffer::reclaim);
    reactor.cx().remove_root(root.id());
    drop(bare);
    reactor.turn();
}
