//! The registry with disks that have no channels: names, claims, removal, resizing and disks made of disks.

use super::*;
use crate::{
    Base, BoxFuture, Bytes, Channel, Decorator, Geometry, Limits, Op, OpSet, OpenError, RemovalState,
};
use aryk_reactor::{Clock, Cx, Engine, Handle, Reactor, RootId, SleepPolicy};
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use uuid::Uuid;

/// A disk without channels.
#[derive(Default)]
struct Disk {
    bases: Vec<Base>,
    /// Blocks that it has less than its first base.
    overhead: Blocks,
    block_size: u32,
    resized: AtomicU64,
    /// Its closing takes longer.
    is_slow: AtomicBool,
}

impl Disk {
    fn plain() -> Arc<Self> {
        Arc::new(Self { block_size: 512, ..Self::default() })
    }
}

impl Device for Disk {
    fn product(&self) -> &'static str {
        "test"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(self.block_size, Blocks(100))
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::ALL
    }

    fn bases(&self) -> Vec<Arc<Bdev>> {
        self.bases.iter().map(|b| Arc::clone(b.bdev())).collect()
    }

    fn base_resized(&self) -> Option<Blocks> {
        self.resized.fetch_add(1, Ordering::Relaxed);
        Some(self.bases[0].bdev().blocks() - self.overhead)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            poll_fn(|_| if self.is_slow.load(Ordering::Relaxed) { Poll::Pending } else { Poll::Ready(()) })
                .await;
            self.bases.iter().for_each(Base::close);
        })
    }

    fn open_channel(&self, _: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Err(OpenError::Unavailable("no channels here".to_owned()))
    }
}

fn add(registry: &Registry, name: &str) -> Arc<Bdev> {
    registry.register(Identity::named(name), Disk::plain()).unwrap()
}

/// A disk made of others.
fn add_on(registry: &Registry, name: &str, bases: &[&str]) -> Result<Arc<Bdev>, Error> {
    let open = |base: &&str| Base::open(registry, base, name);
    let bases = bases.iter().map(open).collect::<Result<_, _>>()?;
    let disk = Disk { bases, overhead: Blocks(1), block_size: 512, ..Disk::default() };
    registry.register(Identity::named(name), Arc::new(disk))
}

fn poll<T>(future: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn now<T>(future: impl Future<Output = T>) -> T {
    match poll(pin!(future)) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("it waits"),
    }
}

fn names_in(registry: &Registry) -> Vec<String> {
    registry.list().iter().map(|b| b.name().to_owned()).collect()
}

#[test]
fn found_by_name_alias_and_uuid_and_by_nothing_else() {
    let registry = Registry::new();
    let uuid = Uuid::from_u128(0xabcd_ef01_2345_6789_abcd_ef01_2345_6789);
    let identity = Identity { name: "Disk".into(), aliases: vec!["lvs/Alias".into()], uuid };
    let bdev = registry.register(identity, Disk::plain()).unwrap();
    let uuid = uuid.to_string();
    for name in ["Disk", "lvs/Alias", &uuid, &uuid.to_uppercase()] {
        assert!(Arc::ptr_eq(&registry.find(name).unwrap(), &bdev), "{name}");
    }
    for name in ["disk", "DISK", "lvs/alias", "Alias", "", &uuid.replace('-', "")] {
        assert_eq!(registry.find(name).unwrap_err(), Error::NotFound(name.to_owned()));
    }
}

#[test]
fn aliases_change_and_free_their_names() {
    let registry = Registry::new();
    let identity = Identity { aliases: vec!["lvs/a".into(), "a".into()], ..Identity::named("a") };
    let bdev = registry.register(identity, Disk::plain()).unwrap();
    let other = registry.register(Identity::named("other"), Disk::plain()).unwrap();
    assert_eq!(registry.set_aliases(&bdev, vec!["other".into()]), Err(Error::Exists("other".into())));
    assert!(registry.find("lvs/a").is_ok(), "a refused change leaves the names");
    registry.set_aliases(&bdev, vec!["lvs/b".into()]).unwrap();
    assert!(Arc::ptr_eq(&registry.find("lvs/b").unwrap(), &bdev));
    assert!(Arc::ptr_eq(&registry.find("a").unwrap(), &bdev), "its name stays");
    assert_eq!(registry.find("lvs/a").unwrap_err(), Error::NotFound("lvs/a".into()));
    registry.set_aliases(&other, vec!["lvs/a".into()]).unwrap();
    now(registry.remove("lvs/b")).unwrap();
    assert_eq!(names_in(&registry), ["other"]);
    assert_eq!(registry.set_aliases(&bdev, Vec::new()), Err(Error::NotFound("a".into())));
    assert!(registry.find("lvs/b").is_err());
}

#[test]
fn no_name_is_given_twice() {
    let registry = Registry::new();
    let identity = Identity { name: "a".into(), aliases: vec!["x".into()], uuid: Uuid::from_u128(1) };
    registry.register(identity, Disk::plain()).unwrap();
    let taken = [
        Identity::named("a"),
        Identity::named("x"),
        Identity { aliases: vec!["a".into()], ..Identity::named("b") },
        Identity { aliases: vec!["y".into(), "x".into()], ..Identity::named("b") },
        Identity { uuid: Uuid::from_u128(1), ..Identity::named("b") },
        Identity::named(Uuid::from_u128(1).to_string()),
    ];
    for identity in taken {
        assert!(matches!(registry.register(identity, Disk::plain()), Err(Error::Exists(_))));
    }
    assert_eq!(names_in(&registry), ["a"], "what was refused leaves nothing behind");
    assert!(registry.register(Identity::named("b"), Disk::plain()).is_ok());
}

#[test]
fn odd_block_sizes_are_refused() {
    let registry = Registry::new();
    for block_size in [0, 1, 256, 513, 520, 4095] {
        let disk = Disk { block_size, ..Disk::default() };
        let refused = registry.register(Identity::named("d"), Arc::new(disk));
        assert_eq!(refused.unwrap_err(), Error::BlockSize(block_size));
    }
}

#[test]
fn removal_waits_for_every_opener_and_is_busy_meanwhile() {
    let registry = Registry::new();
    let bdev = add(&registry, "d");
    let told = Arc::new(Mutex::new(Vec::new()));
    let open = |who: &'static str| {
        let told = Arc::clone(&told);
        registry.open("d", Access::Shared, who, move |event| lock(&told).push((who, event))).unwrap()
    };
    let (a, b) = (open("a"), open("b"));
    let of_b = b.clone();
    let mut removal = pin!(registry.remove("d"));
    assert!(poll(removal.as_mut()).is_pending());
    assert_eq!(*lock(&told), [("a", Event::Removed), ("b", Event::Removed)]);
    assert!(bdev.is_removing());
    let busy = Error::Busy("d".to_owned());
    assert_eq!(registry.open("d", Access::Read, "c", |_| ()).unwrap_err(), busy);
    assert_eq!(now(registry.remove("d")), Err(busy));
    drop((a, b));
    assert!(poll(removal.as_mut()).is_pending(), "a clone is open");
    drop(of_b);
    assert_eq!(poll(removal), Poll::Ready(Ok(())));
    assert_eq!(lock(&told).len(), 2);
    assert_eq!(now(registry.remove("d")), Err(Error::NotFound("d".to_owned())));
    // Its name is free, though someone still refers to it.
    add(&registry, "d");
}

#[test]
fn a_removal_that_is_abandoned_can_be_taken_up_again() {
    let registry = Registry::new();
    add(&registry, "base");
    let above = add_on(&registry, "above", &["base"]).unwrap();
    let opener = registry.open("above", Access::Read, "opener", |_| ()).unwrap();
    assert!(poll(pin!(registry.remove("base"))).is_pending());
    assert!(above.is_removing(), "what it had begun is not undone");
    drop(opener);
    assert_eq!(now(registry.remove("base")), Ok(()));
    assert_eq!(names_in(&registry), [""; 0]);
}

#[test]
fn a_disk_is_gone_when_its_device_has_closed_it() {
    let registry = Registry::new();
    add(&registry, "base");
    let above = add_on(&registry, "above", &["base"]).unwrap();
    let is_slow = &above.device_as::<Disk>().unwrap().is_slow;
    is_slow.store(true, Ordering::Relaxed);
    let gone = RefCell::new(Vec::new());
    let tell = |step, name: &str| {
        if step == RemovalStep::Gone {
            gone.borrow_mut().push(name.to_owned());
        }
    };
    assert_eq!(above.removal_state(), None);
    {
        let mut removal = pin!(registry.remove_telling("base", tell));
        assert!(poll(removal.as_mut()).is_pending());
        assert!(poll(removal).is_pending());
        assert_eq!(*gone.borrow(), [""; 0]);
        let base = registry.find("base").unwrap();
        assert_eq!(
            (above.removal_state(), base.removal_state()),
            (Some(RemovalState::Closing), Some(RemovalState::InUse))
        );
        assert_eq!(add_on(&registry, "above", &[]).unwrap_err(), Error::Exists("above".to_owned()));
        assert_eq!(registry.find("base").unwrap().claimed_by().as_deref(), Some("above"));
    }
    assert_eq!(above.removal_state(), Some(RemovalState::Abandoned));
    // The removal was abandoned; a second removal closes the device again.
    is_slow.store(false, Ordering::Relaxed);
    assert_eq!(now(registry.remove_telling("base", tell)), Ok(()));
    assert_eq!(*gone.borrow(), ["above", "base"]);
}

#[test]
fn what_is_made_of_a_disk_goes_first_and_once() {
    let registry = Registry::new();
    add(&registry, "x");
    add(&registry, "y");
    add_on(&registry, "on_x", &["x"]).unwrap();
    let top = add_on(&registry, "top", &["on_x", "y"]).unwrap();
    let above = add_on(&registry, "above", &["top"]).unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let told_above = Arc::clone(&told);
    let opener =
        registry.open("above", Access::Exclusive, "opener", move |e| lock(&told_above).push(e)).unwrap();
    let mut removal = pin!(registry.remove("x"));
    assert!(poll(removal.as_mut()).is_pending());
    assert!(above.is_removing() && !top.is_removing(), "what runs above completes first");
    for doomed in ["x", "on_x", "top", "above"] {
        assert_eq!(
            registry.open(doomed, Access::Read, "late", |_| ()).unwrap_err(),
            Error::Busy(doomed.into())
        );
    }
    drop(opener);
    assert_eq!(poll(removal), Poll::Ready(Ok(())));
    assert_eq!(names_in(&registry), ["y"]);
    assert_eq!(
        registry.find("y").unwrap().claimed_by(),
        None,
        "it was let go of, though `top` is still referred to"
    );
    assert_eq!(*lock(&told), [Event::Removed]);
}

#[test]
fn a_base_waits_for_someone_elses_removal_of_what_is_on_it() {
    let registry = Registry::new();
    add(&registry, "base");
    drop(add_on(&registry, "above", &["base"]).unwrap());
    let opener = registry.open("above", Access::Read, "opener", |_| ()).unwrap();
    let mut above = pin!(registry.remove("above"));
    assert!(poll(above.as_mut()).is_pending());
    let mut base = pin!(registry.remove("base"));
    assert!(poll(base.as_mut()).is_pending());
    drop(opener);
    assert!(poll(base.as_mut()).is_pending(), "`above` is not gone yet");
    assert_eq!(poll(above), Poll::Ready(Ok(())));
    assert_eq!(poll(base), Poll::Ready(Ok(())));
}

#[test]
fn nothing_is_made_of_a_disk_that_is_being_removed() {
    let registry = Registry::new();
    add(&registry, "base");
    // Its maker has opened the base, and registers only after the removal has begun.
    let base = Base::open(&registry, "base", "late").unwrap();
    let mut removal = pin!(registry.remove("base"));
    assert!(poll(removal.as_mut()).is_pending());
    let disk = Disk { bases: vec![base], block_size: 512, ..Disk::default() };
    let refused = registry.register(Identity::named("late"), Arc::new(disk));
    assert_eq!(refused.unwrap_err(), Error::Busy("base".to_owned()));
    assert_eq!(poll(removal), Poll::Ready(Ok(())));
    assert_eq!(add_on(&registry, "later", &["base"]).unwrap_err(), Error::NotFound("base".to_owned()));
}

/// A disk that never has a reactor ready.
#[derive(Default)]
struct Unready(AtomicU64);

impl Device for Unready {
    fn product(&self) -> &'static str {
        "test"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(512, Blocks(100))
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::ALL
    }

    fn prepare(&self, _: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(std::future::pending())
    }

    fn open_channel(&self, _: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Err(OpenError::Unavailable("no channels here".to_owned()))
    }
}

#[test]
fn bases_prepare_reactors_until_their_removal_begins() {
    let registry = Registry::new();
    let base = registry.register(Identity::named("base"), Arc::new(Unready::default())).unwrap();
    let above = add_on(&registry, "above", &["base"]).unwrap();
    let mut reactor = Reactor::new(0, SleepPolicy::Poll, Engine::Epoll, Clock::Monotonic).unwrap();
    let reactor = reactor.cx().handle().clone();
    let opener = registry.open("above", Access::Read, "opener", |_| ()).unwrap();
    assert!(poll(pin!(opener.prepare(&reactor))).is_pending(), "and is cancelled");
    let mut removal = pin!(registry.remove("base"));
    {
        let mut prepared = pin!(opener.prepare(&reactor));
        assert!(poll(prepared.as_mut()).is_pending());
        assert_eq!(base.device_as::<Unready>().unwrap().0.load(Ordering::Relaxed), 2);
        assert!(poll(removal.as_mut()).is_pending(), "it is open");
        assert!(above.is_removing() && !base.is_removing());
        assert_eq!(poll(prepared), Poll::Ready(Err(OpenError::Removed)));
    }
    drop(opener);
    assert_eq!(poll(removal), Poll::Ready(Ok(())));
}

#[test]
fn nobody_writes_to_a_frozen_disk() {
    let registry = Registry::new();
    add(&registry, "a");
    let open = |access, owner: &str| registry.open("a", access, owner, |_| ());
    let claimed = |owner: &str| Error::Claimed { name: "a".to_owned(), owner: owner.to_owned() };
    let first = open(Access::Frozen, "first").unwrap();
    let second = open(Access::Frozen, "second").unwrap();
    let _reader = open(Access::Read, "reader").unwrap();
    let _probe = open(Access::Probe, "probe").unwrap();
    assert_eq!(registry.find("a").unwrap().openers().len(), 3, "a probe is no user");
    assert_eq!(open(Access::Shared, "writer").unwrap_err(), claimed("first"));
    drop(first);
    assert_eq!(open(Access::Exclusive, "writer").unwrap_err(), claimed("second"));
    assert_eq!(registry.find("a").unwrap().writers(), 0);
    drop(second);
    let _writer = open(Access::Shared, "writer").unwrap();
    assert_eq!(open(Access::Frozen, "third").unwrap_err(), claimed("writer"));
}

#[test]
fn making_a_disk_claims_its_base() {
    let registry = Registry::new();
    add(&registry, "base");
    let above = add_on(&registry, "above", &["base"]).unwrap();
    assert_eq!(registry.find("base").unwrap().claimed_by().as_deref(), Some("above"));
    let claimed = Error::Claimed { name: "base".to_owned(), owner: "above".to_owned() };
    assert_eq!(add_on(&registry, "other", &["base"]).unwrap_err(), claimed);
    // A failure lets go of what was opened.
    add(&registry, "free");
    assert!(matches!(add_on(&registry, "above", &["free"]), Err(Error::Exists(_))));
    assert!(matches!(add_on(&registry, "x", &["free", "base"]), Err(Error::Claimed { .. })));
    assert_eq!(registry.find("free").unwrap().claimed_by(), None);
    assert_eq!(now(registry.remove("above")), Ok(()));
    assert_eq!(registry.find("base").unwrap().claimed_by(), None);
    drop(above);
}

#[test]
fn resizing_reaches_openers_and_all_disks_above_once() {
    let registry = Registry::new();
    add(&registry, "base");
    let mid = add_on(&registry, "mid", &["base"]).unwrap();
    let top = add_on(&registry, "top", &["mid"]).unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let told_top = Arc::clone(&told);
    let _opener = registry.open("top", Access::Read, "opener", move |e| lock(&told_top).push(e)).unwrap();
    registry.resized("base", Blocks(200)).unwrap();
    registry.resized("base", Blocks(200)).unwrap();
    assert_eq!((mid.blocks(), top.blocks(), top.geometry().blocks), (Blocks(199), Blocks(198), Blocks(198)));
    assert_eq!(*lock(&told), [Event::Resized { blocks: Blocks(198) }]);
    assert_eq!(registry.resized("nothing", Blocks(1)), Err(Error::NotFound("nothing".to_owned())));
}

#[test]
fn the_bytes_of_a_disk_fit_64_bits() {
    struct Huge(Blocks);
    impl Device for Huge {
        fn product(&self) -> &'static str {
            "huge"
        }

        fn geometry(&self) -> Geometry {
            Geometry::plain(512, self.0)
        }

        fn limits(&self) -> Limits {
            Limits::default()
        }

        fn ops(&self) -> OpSet {
            OpSet::ALL
        }

        fn open_channel(&self, _: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
            Err(OpenError::Removed)
        }
    }
    let registry = Registry::new();
    let most = Bytes::MAX.whole_blocks(512);
    let too_large = Error::TooLarge { blocks: most + Blocks(1), block_size: 512 };
    let refused = registry.register(Identity::named("a"), Arc::new(Huge(most + Blocks(1))));
    assert_eq!(refused.unwrap_err(), too_large);
    let disk = registry.register(Identity::named("a"), Arc::new(Huge(most))).unwrap();
    assert_eq!(registry.resized("a", most + Blocks(1)), Err(too_large));
    assert_eq!((disk.blocks(), registry.resized("a", Blocks(1))), (most, Ok(())));
}

/// A disk whose base has blocks that are half as large, keeps some of them for itself, and can be read only.
struct Coarse(Base);

impl Decorator for Coarse {
    fn product(&self) -> &'static str {
        "coarse"
    }

    fn base(&self) -> &Base {
        &self.0
    }

    fn geometry(&self) -> Geometry {
        let base = self.0.bdev().geometry();
        Geometry { block_size: 2 * base.block_size, blocks: base.blocks / 2 - Blocks(5), ..base }
    }

    fn limits(&self) -> Limits {
        Limits { depth: 3, ..self.0.bdev().device().limits() }
    }

    fn ops(&self) -> OpSet {
        OpSet::of(&[Op::Read])
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn open_channel(&self, _: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Err(OpenError::Unavailable("no channels here".to_owned()))
    }
}

#[test]
fn a_decorator_may_have_a_shape_of_its_own() {
    let registry = Registry::new();
    add(&registry, "base");
    let coarse = Coarse(Base::open(&registry, "base", "coarse").unwrap());
    let coarse = registry.register(Identity::named("coarse"), Arc::new(coarse)).unwrap();
    assert_eq!((coarse.geometry().block_size, coarse.blocks()), (1024, Blocks(45)));
    assert_eq!(coarse.device().limits(), Limits { depth: 3, ..Limits::default() });
    assert_eq!(coarse.device().ops(), OpSet::of(&[Op::Read]));
    assert!(!registry.open("coarse", Access::Shared, "opener", |_| ()).unwrap().is_writable());
    registry.resized("base", Blocks(200)).unwrap();
    assert_eq!((coarse.blocks(), coarse.geometry().blocks), (Blocks(95), Blocks(95)));
    assert_eq!(now(registry.remove("coarse")), Ok(()));
    assert_eq!(registry.find("base").unwrap().claimed_by(), None);
}

#[test]
fn a_disk_without_channels_is_reset_and_counted_at_once() {
    let registry = Registry::new();
    let bdev = add(&registry, "d");
    assert!(now(bdev.reset()) && now(bdev.reset()));
    assert_eq!(now(bdev.stats()), crate::Stats::default());
    assert!(bdev.device_as::<Disk>().is_some_and(|d| d.block_size == 512));
}

#[test]
fn observers_are_told_of_all_disks_in_order() {
    let (registry, told) = (Registry::new(), Arc::new(Mutex::new(Vec::new())));
    let seen = Arc::clone(&told);
    registry.register(Identity::named("before"), Disk::plain()).unwrap();
    registry.observe(move |change, bdev| lock(&seen).push((change, bdev.name().to_owned())));
    registry.register(Identity::named("a"), Disk::plain()).unwrap();
    registry.register(Identity::named("a"), Disk::plain()).unwrap_err();
    registry.resized("a", Blocks(100)).unwrap();
    registry.resized("a", Blocks(7)).unwrap();
    assert!(pin!(registry.remove("a")).poll(&mut Context::from_waker(Waker::noop())).is_ready());
    let of_a = |change| (change, "a".to_owned());
    assert_eq!(*lock(&told), [Change::Added, Change::Resized, Change::Removed].map(of_a));
}

#[test]
fn observers_are_told_when_the_store_of_a_disk_is_away_and_back() {
    let (registry, told) = (Registry::new(), Arc::new(Mutex::new(Vec::new())));
    let seen = Arc::clone(&told);
    let (base, other) = (add(&registry, "base"), add(&registry, "other"));
    let above = add_on(&registry, "above", &["base"]).unwrap();
    let both = add_on(&registry, "both", &["above", "other"]).unwrap();
    registry.observe(move |change, bdev| lock(&seen).push((change, bdev.name().to_owned())));
    let of =
        |change, names: &[&str]| names.iter().map(|name| (change, (*name).to_owned())).collect::<Vec<_>>();

    (0..2).for_each(|_| registry.stalled("base", true).unwrap());
    assert_eq!(std::mem::take(&mut *lock(&told)), of(Change::Stalled, &["base", "above"]), "each once");
    assert_eq!([&base, &above, &both, &other].map(|bdev| bdev.is_stalled()), [true, true, false, false]);
    // The module of a disk with several bases decides for it.
    registry.stalled("both", true).unwrap();
    // A disk that is made later is stalled from the beginning.
    now(registry.remove("both")).unwrap();
    now(registry.remove("above")).unwrap();
    let later = add_on(&registry, "later", &["base"]).unwrap();
    let expected = [
        of(Change::Stalled, &["both"]),
        of(Change::Removed, &["both", "above"]),
        of(Change::Added, &["later"]),
        of(Change::Stalled, &["later"]),
    ];
    assert_eq!(std::mem::take(&mut *lock(&told)), expected.concat());
    registry.stalled("base", false).unwrap();
    assert_eq!(*lock(&told), of(Change::Resumed, &["base", "later"]));
    assert!(!base.is_stalled() && !later.is_stalled());
    assert_eq!(registry.stalled("none", true), Err(Error::NotFound("none".into())));
}
