//! Reactors: each runs the work of one core, decides its order, and decides when the core sleeps.
//!
//! A **reactor** is one OS thread, on one core, in a loop of turns ([`Reactor::turn`]). On it live:
//! - **roots** ([`Root`]): each owns the top of a tree of channels, and is polled only when it was *woken*, or while it is
//!   *promoted* (its front-end's queue is being polled);
//! - **drivers** ([`Driver`]): each is shared by the channels of a device on this reactor, and is reaped and flushed once a turn
//!   while it has work; io_uring is one of them;
//! - **pollers**: functions that run every turn, or at a period;
//! - **tasks**: futures, for long or rare work.
//!
//! Roots, pollers and tasks belong to a **thread**: a name, a set of cores and an account of busy time.
//!
//! All of these belong to the reactor's OS thread alone and need no lock. Other threads send the reactor messages through its
//! [`Handle`]: closures that the reactor runs at the start of a turn. Code that runs on the reactor gets its state as [`Cx`].
//!
//! A reactor reads the time, on which each decision of a turn depends, from a [`Clock`] that is passed in, so that a test can
//! run reactors step by step in virtual time.
#![forbid(unsafe_code)]

mod account;
mod background;
mod bell;
mod blocking;
mod clock;
mod commands;
mod cores;
mod cx;
mod drivers;
mod executor;
mod group;
mod handle;
mod invariants;
mod kernel;
mod mailbox;
mod moving;
mod outbox;
mod outgoing;
mod reactor;
mod ring_clients;
mod root;
mod sleep;
mod socket;
mod sync;
mod thread;
mod timers;
mod trace;
mod watchdog;

pub use account::ReactorStats;
pub use async_task::Task;
pub use background::{Background, BackgroundTask, Budget, TaskStats, Turns};
pub use bell::Bell;
pub use clock::{Clock, Nanos};
pub use commands::{Commands, LocalGroups};
pub use cores::{CoreSet, ParseCoreSetError};
pub use cx::Cx;
pub use drivers::{DriverId, DriverKey, DriverRef, DriverStats};
pub use executor::Local;
pub use group::{ChangeError, Ending, Hold, Options, ReactorList, Reactors, StartError};
pub use handle::{Gone, Handle, RootRef};
pub use kernel::{Engine, WatchId};
pub use moving::{MOVE_PATIENCE, MoveError, Order, PREPARE_PATIENCE};
pub use outbox::Outbox;
pub use reactor::{Reactor, Step};
pub use ring_clients::RingClient;
pub use root::{Armed, Driver, PollerId, Root, RootId};
pub use sleep::SleepPolicy;
pub use socket::{Socket, SocketEvent};
pub use thread::{Moving, Polled, PollerStats, Runs, ThreadId, ThreadStats};
pub use timers::TimerId;
pub use trace::{Layer, Point, Record, TraceReader, Traced};
