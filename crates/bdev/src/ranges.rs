//! Blocks of a disk that one emulated compound request has to itself: no channel, on any reactor, changes them while it runs.
//! And blocks that a module has to itself: no channel reads them either ([`Bdev::exclude`]).
//!
//! A request claims its blocks in the disk's table, in the order of arrival. A short lock protects the table. When no
//! earlier claim has any of its blocks, a message goes to every channel of the disk: the channel puts up a *fence*, which
//! holds off new changes of these blocks, and reports when the changes before it have completed. At the end another message
//! takes the fences down, and only then does the next claim of these blocks have its turn, so that the changes that the
//! fences held off are not overtaken for ever.
//!
//! A claim ends with its channel, whether it has its turn or not: opening and closing channels in a loop leaves nothing in
//! the table.
//!
//! A channel that is opened in between takes over the fences that stand in the table. It is registered as a channel of the
//! disk before it reads the table, and the table has the fences before the messages go out, so that no fence misses a
//! channel.
//!
//! Context: the table any; [`hold`] a task of a reactor.

use crate::bdev::lock;
use crate::cell::{ChannelCell, Command};
use crate::{Bdev, Lba};
use aryk_reactor::{Cx, Local};
use futures_channel::oneshot;
use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::Poll;

/// Blocks that a compound request reads or writes: one range, or two.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Extent(pub [Range<Lba>; 2]);

impl Extent {
    /// One range.
    pub const fn of(blocks: Range<Lba>) -> Self {
        Self([blocks, Lba::ZERO..Lba::ZERO])
    }

    /// Whether some of `blocks` are among them.
    pub fn touches(&self, blocks: &Range<Lba>) -> bool {
        self.0.iter().any(|r| r.start < blocks.end && blocks.start < r.end)
    }
}

/// The requests that a fence holds off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HeldOff {
    /// Changes of its blocks.
    Changes,
    /// Changes and reads of its blocks.
    All,
}

/// Blocks that are someone's, until this is dropped.
#[derive(Debug)]
pub(crate) struct RangeLock {
    _released: oneshot::Sender<()>,
}

/// Claims of a disk that have their blocks at one time. Each has a fence in every channel of the disk, which every change
/// there looks at.
const GRANTED_MAX: usize = 16;

#[derive(Debug)]
struct Claim {
    id: u64,
    extent: Extent,
    held_off: HeldOff,
    /// Fences of it stand, or are being put up.
    is_fenced: bool,
    /// Claims before it that want some of its blocks.
    before: u32,
    /// Present until it has its turn.
    turn: Option<oneshot::Sender<()>>,
}

#[derive(Debug, Default)]
struct Claims {
    next: u64,
    /// In the order of arrival, and so of their ids.
    list: Vec<Claim>,
    /// Those that have had their turn.
    granted: usize,
}

impl Claims {
    fn find(&self, id: u64) -> usize {
        self.list.binary_search_by_key(&id, |c| c.id).expect("a claim is there until its end")
    }
}

/// A disk's table. It holds a few claims of each channel (`bdev_channel/compound.rs`), and is gone through once for each
/// that comes or goes.
#[derive(Debug, Default)]
pub(crate) struct Ranges(Mutex<Claims>);

impl Ranges {
    /// Puts a claim into the table. If the claim has to wait, the receiver resolves when its turn has come.
    fn claim(&self, extent: &Extent, held_off: HeldOff) -> (u64, Option<oneshot::Receiver<()>>) {
        let mut claims = lock(&self.0);
        let id = claims.next;
        claims.next += 1;
        let before = claims.list.iter().filter(|earlier| clash(&earlier.extent, extent)).count() as u32;
        let must_wait = before > 0 || claims.granted == GRANTED_MAX;
        claims.granted += usize::from(!must_wait);
        let (turn, wait) = must_wait.then(oneshot::channel).unzip();
        claims.list.push(Claim { id, extent: extent.clone(), held_off, is_fenced: false, before, turn });
        (id, wait)
    }

    fn set_fenced(&self, id: u64, is_fenced: bool) {
        let mut claims = lock(&self.0);
        let at = claims.find(id);
        assert!(claims.list[at].turn.is_none(), "a claim has fences from its turn on");
        claims.list[at].is_fenced = is_fenced;
    }

    /// Takes a claim out, and gives those their turn that only it was in the way of.
    fn release(&self, id: u64) {
        let mut claims = lock(&self.0);
        let at = claims.find(id);
        let Claims { list, granted, .. } = &mut *claims;
        let released = list.remove(at);
        let had_turn = released.turn.is_none();
        assert!(*granted >= usize::from(had_turn), "each claim that has had its turn is counted");
        *granted -= usize::from(had_turn);
        for later in list[at..].iter_mut().filter(|later| clash(&released.extent, &later.extent)) {
            assert!(later.before > 0, "a claim counts those before it that want its blocks");
            later.before -= 1;
        }
        for claim in list {
            if *granted == GRANTED_MAX {
                break;
            }
            if claim.before == 0
                && let Some(turn) = claim.turn.take()
            {
                *granted += 1;
                // Its task ends early only with its reactor.
                let _ = turn.send(());
            }
        }
    }

    /// Claims that stand.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        lock(&self.0).list.len()
    }

    /// The fences that stand.
    pub fn fences(&self) -> Vec<(u64, Extent, HeldOff)> {
        let claims = lock(&self.0);
        let standing = claims.list.iter().filter(|c| c.is_fenced);
        standing.map(|c| (c.id, c.extent.clone(), c.held_off)).collect()
    }
}

fn clash(a: &Extent, b: &Extent) -> bool {
    b.0.iter().any(|range| a.touches(range))
}

/// A claim that stands in the table, until this is dropped: also by a reactor that ends before its task.
struct Standing {
    bdev: Arc<Bdev>,
    id: u64,
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.bdev.ranges().release(self.id);
    }
}

/// A request's wish for blocks. Dropping it ends the claim, unless the blocks are granted.
pub(crate) type Wanted = oneshot::Sender<Infallible>;

/// Resolves when [`Wanted`] is dropped.
pub(crate) type Unwanted = oneshot::Receiver<Infallible>;

/// A wish for blocks, and what resolves at its end.
pub(crate) fn want() -> (Wanted, Unwanted) {
    oneshot::channel()
}

/// Waits until `event` is sent or its sender is dropped. Returns false if `unwanted` resolves first.
async fn comes(mut event: oneshot::Receiver<()>, unwanted: &mut Unwanted) -> bool {
    std::future::poll_fn(|context| {
        if Pin::new(&mut *unwanted).poll(context).is_ready() {
            return Poll::Ready(false);
        }
        Pin::new(&mut event).poll(context).map(|_| true)
    })
    .await
}

/// Waits until the blocks of `extent` are the caller's, says so by `grant`, and waits until the lock that this is given is
/// dropped. A claim that becomes unwanted before the grant ends at once.
pub(crate) async fn hold(
    bdev: Arc<Bdev>,
    (extent, held_off): (Extent, HeldOff),
    mut unwanted: Unwanted,
    grant: impl FnOnce(RangeLock),
) {
    let (id, turn) = bdev.ranges().claim(&extent, held_off);
    let standing = Standing { bdev, id };
    let bdev = &standing.bdev;
    if let Some(turn) = turn
        && !comes(turn, &mut unwanted).await
    {
        return;
    }
    bdev.ranges().set_fenced(id, true);
    let put_up = move |cell: &Rc<ChannelCell>, cx: &mut Cx| {
        let (quiet, is_quiet) = oneshot::channel();
        cell.command(Command::Fence { id, extent: extent.clone(), held_off, quiet }, cx);
        is_quiet
    };
    let mut is_wanted = true;
    for is_quiet in bdev.for_each_channel(put_up).await {
        // A channel that was closed in between has nothing in flight.
        is_wanted = is_wanted && comes(is_quiet, &mut unwanted).await;
    }
    if is_wanted {
        let (sender, released) = oneshot::channel();
        grant(RangeLock { _released: sender });
        // It is dropped, not sent.
        let _ = released.await;
    }
    bdev.ranges().set_fenced(id, false);
    bdev.for_each_channel(move |cell, cx| cell.command(Command::Unfence(id), cx)).await;
}

impl Bdev {
    /// Waits until every change of `blocks` that was submitted before has completed. Changes that are submitted during that
    /// time wait too, and are sent afterwards. Any context.
    pub async fn settle(self: &Arc<Self>, blocks: Range<Lba>) {
        let used = lock(self.places()).iter().find(|p| p.channels > 0).map(|p| p.reactor.clone());
        let Some(reactor) = used else { return };
        let bdev = Arc::clone(self);
        // A task of a reactor goes on to its end though the caller stops waiting, and would leave fences standing.
        let start = move |cx: &mut Cx| {
            let (done, wait) = oneshot::channel::<()>();
            let task = async move {
                let (_wanted, unwanted) = want();
                hold(bdev, (Extent::of(blocks), HeldOff::Changes), unwanted, drop).await;
                drop(done);
            };
            cx.local().spawn(task).detach();
            wait
        };
        if let Ok(wait) = reactor.call(start).await {
            // The sender is dropped at the end.
            let _ = wait.await;
        }
    }

    /// Waits until no request reads or changes `blocks`, except for flushes, and makes later requests wait until the returned
    /// value is dropped. A task of a reactor. Dropping the future ends the wait.
    pub async fn exclude(self: &Arc<Self>, blocks: Range<Lba>, local: &Local) -> Exclusion {
        let (wanted, unwanted) = want();
        let (granted, grant) = oneshot::channel();
        // If nothing waits any more, the lock is dropped.
        let keep = move |lock| drop(granted.send(lock));
        local.spawn(hold(Arc::clone(self), (Extent::of(blocks), HeldOff::All), unwanted, keep)).detach();
        let lock = grant.await.expect("the claim is wanted");
        Exclusion { _lock: lock, _wanted: wanted }
    }
}

/// Blocks that no request reads or changes, until this is dropped ([`Bdev::exclude`]).
#[derive(Debug)]
pub struct Exclusion {
    _lock: RangeLock,
    _wanted: Wanted,
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGES: HeldOff = HeldOff::Changes;

    fn lbas(range: Range<u64>) -> Range<Lba> {
        Lba(range.start)..Lba(range.end)
    }

    fn extent(range: Range<u64>) -> Extent {
        Extent::of(lbas(range))
    }

    #[test]
    fn claims_have_their_turns_in_order() {
        let ranges = Ranges::default();
        let (a, turn) = ranges.claim(&extent(0..10), CHANGES);
        assert!(turn.is_none());
        assert!(ranges.claim(&extent(10..20), CHANGES).1.is_none(), "they do not overlap");
        let (b, Some(mut b_turn)) = ranges.claim(&Extent([lbas(5..6), lbas(30..40)]), CHANGES) else {
            panic!("a is in the way")
        };
        let (c, Some(mut c_turn)) = ranges.claim(&extent(39..41), CHANGES) else { panic!("b is in the way") };
        ranges.release(a);
        assert_eq!((b_turn.try_recv(), c_turn.try_recv()), (Ok(Some(())), Ok(None)));
        ranges.release(b);
        assert_eq!(c_turn.try_recv(), Ok(Some(())));
        assert_eq!(ranges.fences(), []);
        ranges.set_fenced(c, true);
        assert_eq!(ranges.fences(), [(c, extent(39..41), CHANGES)]);
    }

    #[test]
    fn so_many_have_their_turn_at_one_time_and_the_others_in_order() {
        let ranges = Ranges::default();
        let mut claims: Vec<_> =
            (0..3 * GRANTED_MAX as u64).map(|i| ranges.claim(&extent(i..i + 1), CHANGES)).collect();
        let waits = claims.iter().filter(|(_, turn)| turn.is_some()).count();
        assert_eq!(waits, 2 * GRANTED_MAX, "though none is in another's way");
        // One of those that wait leaves: it had no turn to give.
        let (id, _) = claims.remove(GRANTED_MAX);
        ranges.release(id);
        let mut has_turn = |i: usize| claims[i].1.as_mut().is_none_or(|turn| turn.try_recv() == Ok(Some(())));
        assert!(!has_turn(GRANTED_MAX));
        ranges.release(3);
        assert!(has_turn(GRANTED_MAX) && !has_turn(GRANTED_MAX + 1));
    }

    #[test]
    fn releasing_looks_at_each_claim_once() {
        // None is in another's way: with a look at all pairs for each release this takes minutes.
        let ranges = Ranges::default();
        let claims: Vec<_> = (0..8192).map(|i| ranges.claim(&extent(i..i + 1), CHANGES)).collect();
        for (id, mut turn) in claims {
            let has_turn = turn.as_mut().is_none_or(|turn| turn.try_recv() == Ok(Some(())));
            assert!(has_turn, "claim {id} has its turn after those before it");
            ranges.release(id);
        }
        assert!(lock(&ranges.0).list.is_empty() && lock(&ranges.0).granted == 0);
    }

    #[test]
    fn an_empty_range_touches_nothing() {
        assert!(!extent(3..7).touches(&lbas(7..9)) && !extent(3..7).touches(&lbas(0..3)));
        assert!(extent(3..7).touches(&lbas(6..9)) && extent(3..7).touches(&lbas(4..5)));
        assert!(!extent(3..7).touches(&lbas(0..0)));
    }
}
