//! Tests with clients that hold, fail and count their calls.

use super::*;
use aryk_dma::{MemTable, Peer, Seg, SgTable, Sgl};
use std::pin::pin;
use std::sync::MutexGuard;
use std::task::{Context, Poll, Wake, Waker};

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

fn until(what: &str, mut is_done: impl FnMut() -> bool) {
    for _ in 0..20_000 {
        if is_done() {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    panic!("waited too long for {what}");
}

#[derive(Default)]
struct Table {
    /// By value.
    registered: BTreeMap<u64, (u64, u64)>,
    next: u64,
    fails: bool,
    /// Ranges that there is room for, if that is limited.
    room: Option<usize>,
    /// Registers with the reserved value.
    is_reserved: bool,
    /// Its registrations wake themselves instead of being done.
    spins: bool,
    holds: bool,
    /// Calls that are held.
    held: Vec<oneshot::Sender<()>>,
    unregistered: u32,
}

/// A client with a table of its own, each of whose ranges gets a value once.
#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Table>>);

impl Fake {
    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.0)
    }

    fn gate(&self) -> Option<oneshot::Receiver<()>> {
        let mut table = self.table();
        table.holds.then(|| {
            let (sender, gate) = oneshot::channel();
            table.held.push(sender);
            gate
        })
    }

    /// Lets all calls go on.
    fn release(&self) {
        let mut table = self.table();
        table.holds = false;
        table.held.clear();
    }
}

impl MemoryClient for Fake {
    fn name(&self) -> &str {
        "fake"
    }

    fn register(&self, memory: DmaRange, _: Arc<str>) -> BoxFuture<'_, Result<u64, RegisterError>> {
        Box::pin(async move {
            if let Some(gate) = self.gate() {
                let _ = gate.await;
            }
            std::future::poll_fn(|context| {
                if !self.table().spins {
                    return Poll::Ready(());
                }
                context.waker().wake_by_ref();
                Poll::Pending
            })
            .await;
            let mut table = self.table();
            if table.fails || table.room.is_some_and(|room| table.registered.len() >= room) {
                return Err(RegisterError::failed("no room"));
            }
            table.next += 1 << 40;
            let value = if table.is_reserved { NO_VALUE } else { table.next };
            table.registered.insert(value, (memory.addr(), memory.len()));
            Ok(value)
        })
    }

    fn unregister(&self, memory: DmaRange, _: Arc<str>, value: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            if let Some(gate) = self.gate() {
                let _ = gate.await;
            }
            let mut table = self.table();
            let range = Some((memory.addr(), memory.len()));
            assert_eq!(table.registered.remove(&value), range, "what is unregistered was registered");
            table.unregistered += 1;
        })
    }
}

const LEN: u64 = 64 << 10;

/// One guest with a region of memory.
struct Guest {
    table: Arc<MemTable>,
    lists: SgTable,
    peer: Peer,
}

impl Guest {
    fn new() -> Self {
        let peer = Peer::default();
        let mapping = Arc::new(Mapping::anonymous(LEN).unwrap().given_by(&peer));
        let region = Region { guest_addr: 0, user_addr: 0, len: LEN, offset: 0, mapping };
        let table = Arc::new(MemTable::new(vec![region]).unwrap());
        Self { lists: SgTable::new(4, Arc::clone(&table)), table, peer }
    }

    /// Announces its memory.
    fn announce(&self, memory: &Memory) -> impl Future<Output = ()> + use<> {
        memory.add(self.table.regions(), "vm")
    }

    fn piece(&mut self, addr: u64, len: u32) -> Seg {
        let mut list = self.lists.begin(0);
        list.push(addr, len).unwrap();
        let piece = list.sgl().as_single().unwrap();
        self.lists.end(0);
        piece
    }

    /// Ends it, and returns its unmapping.
    fn leave(self) -> Peer {
        self.peer
    }
}

/// A place in the client's table that holds the piece.
fn check(fake: &Fake, piece: &Seg, place: Place) {
    let (addr, len) = fake.table().registered[&place.value];
    assert_eq!(addr + place.offset, piece.base() as u64);
    assert!(place.offset + piece.len() as u64 <= len);
}

#[test]
fn a_piece_is_found_in_the_range_of_its_guest_by_each_client() {
    let (memory, mut early, mut later) = (Memory::default(), Guest::new(), Guest::new());
    // Present before the first client.
    block_on(early.announce(&memory));
    let fakes = [Fake::default(), Fake::default()];
    fakes[1].table().next = 7;
    let attach = |fake: &Fake| block_on(memory.attach(fake.clone())).unwrap();
    let attached = fakes.each_ref().map(attach);
    block_on(later.announce(&memory));
    // Announced again with an unchanged mapping: nothing happens.
    block_on(later.announce(&memory));
    for (fake, attachment) in fakes.iter().zip(&attached) {
        let mut lookup = attachment.lookup();
        for is_early in [true, false, true] {
            let guest = if is_early { &mut early } else { &mut later };
            for (addr, len) in [(0, 512), (4097, 3), (LEN - 1, 1), (0, LEN as u32)] {
                let piece = guest.piece(addr, len);
                check(fake, &piece, lookup.translate(&piece).expect("registered"));
            }
        }
        let mut ours = aryk_dma::Buffer::new(512, 512);
        let sgl: Sgl = ours.lend();
        assert_eq!(lookup.translate(&sgl.as_single().unwrap()), None, "the daemon's own memory");
        ours.reclaim();
        assert_eq!(fake.table().registered.len(), 2);
    }
    let info = memory.clients();
    assert!(info.iter().all(|c| (c.registered, c.bounced, c.failed) == (2, 1, 0)), "{info:?}");
}

#[test]
fn memory_that_cannot_be_registered_has_no_value_and_is_counted() {
    let (memory, mut guest, fake) = (Memory::default(), Guest::new(), Fake::default());
    let attached = block_on(memory.attach(fake.clone())).unwrap();
    fake.table().fails = true;
    block_on(guest.announce(&memory));
    let (mut lookup, piece) = (attached.lookup(), guest.piece(0, 512));
    assert_eq!((lookup.translate(&piece), lookup.translate(&piece)), (None, None));
    let info = memory.clients().remove(0);
    assert_eq!((info.failed, info.registered, info.bounced), (1, 0, 2));
    let reason = Some("no room".to_owned());
    let without =
        MemoryWithout { client: "fake".to_owned(), owner: "vm".to_owned(), len: LEN, bounced: 2, reason };
    assert_eq!(memory.without_value(9), [without]);
    let peer = guest.leave();
    until("the memory to be unmapped", || {
        peer.awaiting_unmap() == (0, 0) && memory.without_value(1).is_empty()
    });
    assert_eq!(fake.table().unregistered, 0, "it was not registered");
}

#[test]
fn a_registration_that_takes_long_is_awaited_with_patience_and_takes_effect_later() {
    let (memory, mut guest, fake) = (Memory::default(), Guest::new(), Fake::default());
    memory.set_patience(Duration::from_millis(30));
    let attached = block_on(memory.attach(fake.clone())).unwrap();
    fake.table().holds = true;
    block_on(guest.announce(&memory));
    let info = memory.clients().remove(0);
    assert_eq!((info.registering, info.registered, info.late), (1, 0, 1));
    let (mut lookup, piece) = (attached.lookup(), guest.piece(0, 512));
    assert_eq!(lookup.translate(&piece), None);
    // Also for a client that comes now, while another is stuck.
    memory.set_patience(Duration::from_secs(20));
    let other = Fake::default();
    let second = block_on(memory.attach(other.clone())).unwrap();
    check(&other, &piece, second.lookup().translate(&piece).expect("the other client is not stuck"));
    fake.release();
    until("the value", || lookup.translate(&piece).is_some());
    check(&fake, &piece, lookup.translate(&piece).unwrap());
}

#[test]
fn a_client_that_attaches_is_awaited_with_the_same_patience() {
    let (memory, guest, fake) = (Memory::default(), Guest::new(), Fake::default());
    memory.set_patience(Duration::from_millis(30));
    block_on(guest.announce(&memory));
    fake.table().holds = true;
    let attached = block_on(memory.attach(fake.clone())).unwrap();
    assert_eq!(memory.clients()[0].late, 1);
    // It detaches before the registration is over, which is then undone.
    let mut detaching = pin!(attached.detach());
    assert!(detaching.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    fake.release();
    block_on(detaching);
    assert!(fake.table().registered.is_empty());
    assert_eq!(fake.table().unregistered, 1);
}

#[test]
fn memory_stays_mapped_and_counted_until_each_client_has_unregistered_it() {
    let (memory, guest, fakes) = (Memory::default(), Guest::new(), [Fake::default(), Fake::default()]);
    let attached = fakes.each_ref().map(|fake| block_on(memory.attach(fake.clone())).unwrap());
    block_on(guest.announce(&memory));
    fakes[1].table().holds = true;
    let peer = guest.leave();
    until("the first to unregister", || fakes[0].table().unregistered == 1);
    until("the second to be asked", || !fakes[1].table().held.is_empty());
    assert_eq!(peer.awaiting_unmap(), (LEN, 1), "the second has not finished");
    assert_eq!(memory.clients()[1].unregistering, 1);
    fakes[1].release();
    until("the unmapping", || peer.awaiting_unmap() == (0, 0));
    drop(attached);
}

#[test]
fn memory_that_leaves_during_its_registration_is_unregistered_after_it() {
    let (memory, guest, fake) = (Memory::default(), Guest::new(), Fake::default());
    memory.set_patience(Duration::from_millis(1));
    let _attached = block_on(memory.attach(fake.clone())).unwrap();
    fake.table().holds = true;
    block_on(guest.announce(&memory));
    let peer = guest.leave();
    until("the range to end", || memory.without_value(1).is_empty());
    assert_eq!((peer.awaiting_unmap(), fake.table().unregistered), ((LEN, 1), 0));
    fake.release();
    until("the unmapping", || peer.awaiting_unmap() == (0, 0));
    let table = fake.table();
    assert!(table.registered.is_empty() && table.unregistered == 1);
}

#[test]
fn the_number_of_clients_is_limited_and_a_detached_client_makes_room_when_it_is_done() {
    let (memory, mut guest) = (Memory::default(), Guest::new());
    block_on(guest.announce(&memory));
    let attach = || {
        let fake = Fake::default();
        (fake.clone(), block_on(memory.attach(fake)).unwrap())
    };
    let mut attached: Vec<_> = std::iter::repeat_with(attach).take(MEMORY_CLIENTS_MAX).collect();
    let refused = block_on(memory.attach(Fake::default()));
    assert!(matches!(refused, Err(MemoryError::TooManyClients)), "{refused:?}");

    let (fake, attachment) = attached.swap_remove(3);
    let (mut lookup, piece) = (attachment.lookup(), guest.piece(0, 512));
    check(&fake, &piece, lookup.translate(&piece).unwrap());
    drop(attachment);
    assert_eq!(lookup.translate(&piece), None, "a channel that has not been closed yet");
    until("the client to unregister", || fake.table().unregistered == 1);
    let refused = block_on(memory.attach(Fake::default()));
    assert!(
        matches!(refused, Err(MemoryError::TooManyClients)),
        "its channel could use the next one's values"
    );
    drop(lookup);
    until("the place", || block_on(memory.attach(Fake::default())).is_ok());
}

/// Guests come and go on two threads, while each looks its own memory up.
#[test]
fn what_is_found_is_registered_while_guests_come_and_go() {
    let memory = Memory::default();
    let fake = Fake::default();
    let attached = block_on(memory.attach(fake.clone())).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let mut lookup = attached.lookup();
            let (memory, fake) = (&memory, &fake);
            scope.spawn(move || {
                let mut found = 0;
                for _ in 0..300 {
                    let mut guest = Guest::new();
                    block_on(guest.announce(memory));
                    for at in 0..16 {
                        let piece = guest.piece(at * 4096, 4096);
                        // The lock of all ranges may be taken by another thread.
                        if let Some(place) = lookup.translate(&piece) {
                            check(fake, &piece, place);
                            found += 1;
                        }
                    }
                }
                assert!(found > 300 * 8, "{found} pieces were found");
            });
        }
    });
    until("all memory to leave", || fake.table().registered.is_empty());
    assert_eq!(fake.table().unregistered, 900);
    until("all counts to be in balance", || {
        let info = memory.clients().remove(0);
        (info.registering, info.registered, info.unregistering) == (0, 0, 0)
    });
}

/// The kernel soon maps a guest's memory where another guest's was.
#[test]
fn an_address_that_is_mapped_again_is_looked_up_anew() {
    let (memory, fake) = (Memory::default(), Fake::default());
    let attached = block_on(memory.attach(fake.clone())).unwrap();
    let (mut lookup, mut addrs) = (attached.lookup(), std::collections::BTreeSet::new());
    for _ in 0..50 {
        let mut guest = Guest::new();
        block_on(guest.announce(&memory));
        let piece = guest.piece(0, 512);
        check(&fake, &piece, lookup.translate(&piece).expect("registered"));
        addrs.insert(piece.base() as usize);
        let peer = guest.leave();
        until("the unmapping", || peer.awaiting_unmap() == (0, 0) && fake.table().registered.is_empty());
    }
    assert!(addrs.len() < 50, "no address was mapped again");
}

fn is_ready(future: impl Future<Output = ()>) -> bool {
    pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

#[test]
fn a_client_that_is_overdue_is_not_awaited_until_it_has_caught_up() {
    let (memory, fake) = (Memory::default(), Fake::default());
    memory.set_patience(Duration::from_millis(30));
    let (_attached, guests) =
        (block_on(memory.attach(fake.clone())).unwrap(), [(); 20].map(|()| Guest::new()));
    fake.table().holds = true;
    block_on(guests[0].announce(&memory));
    assert!(guests[1..].iter().all(|guest| is_ready(guest.announce(&memory))), "nobody waits for it again");
    // Also after the patience with those.
    let overdue = || lock(&memory.0.clients)[0].upgrade().unwrap().overdue.load(Ordering::Relaxed);
    until("those to be overdue, too", || overdue() == 20);
    let (info, later) = (memory.clients().remove(0), Guest::new());
    assert_eq!((info.registering, info.registered, info.late), (20, 0, 1));
    assert!(is_ready(later.announce(&memory)));
    fake.release();
    until("all values", || memory.clients()[0].registered == 21);
    // Only the client that holds its registrations is late, not one whose executor waits for a processor.
    memory.set_patience(Duration::from_secs(1));
    // By the time that the executor runs the next registration, the last of those has ended.
    let _other = block_on(memory.attach(Fake::default())).unwrap();
    fake.table().holds = true;
    let next = Guest::new();
    block_on(next.announce(&memory));
    let late: Vec<_> = memory.clients().iter().map(|client| client.late).collect();
    assert_eq!(late, [2, 0], "it is awaited again, and only it is late");
    fake.release();
}

#[test]
fn the_patience_ends_while_a_registration_keeps_waking_itself() {
    let (memory, guest, fake) = (Memory::default(), Guest::new(), Fake::default());
    memory.set_patience(Duration::from_millis(30));
    let _attached = block_on(memory.attach(fake.clone())).unwrap();
    fake.table().spins = true;
    let mut wait = pin!(guest.announce(&memory));
    until("the patience to end", || wait.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    assert_eq!(memory.clients()[0].late, 1);
    fake.table().spins = false;
}

#[test]
fn what_could_not_be_registered_is_tried_again_when_there_may_be_room() {
    let (memory, fake, first, mut second) = (Memory::default(), Fake::default(), Guest::new(), Guest::new());
    let attached = block_on(memory.attach(fake.clone())).unwrap();
    fake.table().room = Some(1);
    block_on(first.announce(&memory));
    let others = [(); 3].map(|()| Guest::new());
    block_on(second.announce(&memory));
    others.iter().for_each(|guest| block_on(guest.announce(&memory)));
    let client = lock(&memory.0.clients)[0].upgrade().unwrap();
    let failed = || (lock(&client.failed).ranges.len(), client.info().failed);
    assert_eq!(failed(), (4, 4));
    first.leave();
    until("all to be tried once", || failed().1 >= 7);
    until("the retry to end", || !lock(&client.failed).is_retrying);
    assert_eq!((failed(), client.info().registered), ((3, 7), 1), "one has the room of the first");
    // Which one depends on the addresses.
    let registered = fake.table().registered.values().next().unwrap().0;
    let piece = second.piece(0, 512);
    let is_second = registered == piece.base() as u64;
    assert_eq!(attached.lookup().translate(&piece).is_some(), is_second);
    // What has left is not tried again, or kept.
    drop((second, others));
    until("all to leave", || failed().0 == 0 && fake.table().registered.is_empty());
    let last = Guest::new();
    fake.table().fails = true;
    block_on(last.announce(&memory));
    assert_eq!(failed().0, 1);
    drop(client);
    block_on(attached.detach());
    assert!(memory.clients().is_empty(), "a failed range does not hold the client");
}

#[test]
fn a_reserved_value_is_a_failure_and_is_unregistered() {
    let (memory, mut guest, fake) = (Memory::default(), Guest::new(), Fake::default());
    let attached = block_on(memory.attach(fake.clone())).unwrap();
    fake.table().is_reserved = true;
    block_on(guest.announce(&memory));
    until("the registration to be undone", || fake.table().unregistered == 1);
    assert_eq!(attached.lookup().translate(&guest.piece(0, 512)), None);
    until("the counts", || memory.clients()[0].unregistering == 0);
    let info = memory.clients().remove(0);
    assert_eq!((info.failed, info.registering, info.registered), (1, 0, 0));
    let peer = guest.leave();
    until("the unmapping", || peer.awaiting_unmap() == (0, 0));
}

/// A client that reports the thread on which it is dropped.
struct Ending(std::sync::mpsc::Sender<Option<String>>);

impl MemoryClient for Ending {
    fn name(&self) -> &str {
        "ending"
    }

    fn register(&self, memory: DmaRange, _: Arc<str>) -> BoxFuture<'_, Result<u64, RegisterError>> {
        Box::pin(async move { Ok(memory.addr()) })
    }

    fn unregister(&self, _: DmaRange, _: Arc<str>, _: u64) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.send(std::thread::current().name().map(str::to_owned));
    }
}

#[test]
fn a_client_is_dropped_on_the_thread_of_its_futures() {
    let (sender, dropped) = std::sync::mpsc::channel();
    let memory = Memory::default();
    let attached = block_on(memory.attach(Ending(sender))).unwrap();
    let lookup = attached.lookup();
    drop(attached);
    // Its channel is the last to use it.
    drop(lookup);
    let thread = dropped.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!(thread.as_deref(), Some("memory"));
}
