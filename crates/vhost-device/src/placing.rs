//! Orders to a controller's queues to run on other reactors. Control context.

use crate::controller::{Controller, Kind};
use crate::moving::Moved;
use crate::queue::DeviceQueue;
use aryk_reactor::{CoreSet, Gone, Handle, Hold, MOVE_PATIENCE, MoveError, Order, PREPARE_PATIENCE};
use std::rc::Rc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::timeout;

impl<K: Kind> Controller<K> {
    /// Begins to carry out an order for the queue whose thread has that number. `None` if no queue has that thread. The order is
    /// carried out to its end, also if the result is dropped.
    pub fn order(self: &Rc<Self>, thread: u64, order: Order) -> Option<JoinHandle<Result<(), MoveError>>> {
        let index = self.queues().of_thread(thread)?;
        let this = Rc::clone(self);
        Some(tokio::task::spawn_local(async move {
            match order {
                Order::Stay(cores) => this.stay_on(index, cores).await,
                Order::Move(to, patience) => this.go(index, to, patience).await,
            }
        }))
    }

    async fn stay_on(&self, index: u16, cores: CoreSet) -> Result<(), MoveError> {
        let (queues, reactors) = (self.queues(), self.reactors());
        if !reactors.is_any_on(&cores) {
            return Err(MoveError::Cores(cores));
        }
        let queue = queues.get(index).ok_or(MoveError::Ending)?;
        if !cores.contains(queue.handle().core()) {
            self.go(index, reactors.least_loaded(Some(&cores)), MOVE_PATIENCE).await?;
        }
        let _still = queues.hold_still().await;
        let queue = queues.get(index).ok_or(MoveError::Ending)?;
        let set = queue.call(move |queue, cx| cx.set_thread_cores(queue.guest().thread(), cores)).await;
        set.map_err(|Gone| MoveError::Ending)
    }

    async fn go(&self, index: u16, to: Hold, patience: Duration) -> Result<(), MoveError> {
        let queues = self.queues();
        if *queues.get(index).ok_or(MoveError::Ending)?.handle() == *to {
            return Ok(());
        }
        // The queue runs while its disks prepare the other reactor.
        let _still = timeout(PREPARE_PATIENCE, self.hold_prepared(index, &to))
            .await
            .map_err(|_| MoveError::NotReady)?
            .map_err(|error| MoveError::Open(error.to_string()))?;
        let queue = queues.get(index).ok_or(MoveError::Ending)?;
        if *queue.handle() == *to {
            return Ok(());
        }
        // The queue may come back.
        let _home = self.reactors().hold(queue.handle()).ok_or(MoveError::Ending)?;
        let there = (Handle::clone(&to), self.kind().disks());
        let begun = queue.call(move |queue, cx| queue.begin_move(there, patience, cx)).await;
        let ends = begun.ok().flatten().ok_or(MoveError::Ending)?;
        match ends.await {
            Ok(Moved::There(root)) => {
                queues.has_moved(index, root).await;
                Ok(())
            }
            Ok(Moved::Back(root, why)) => {
                queues.has_moved(index, root).await;
                Err(MoveError::Open(why))
            }
            Ok(Moved::TooSlow) => Err(MoveError::TooSlow),
            Err(_) => {
                if let Some(session) = self.session() {
                    session.end(format!("queue {index} was lost on its way to another core"));
                }
                Err(MoveError::Ending)
            }
        }
    }
}
