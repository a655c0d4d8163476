//! What the devices that are served over vhost-user have in common: their controllers, and the queues of these.
#![forbid(unsafe_code)]

mod controller;
mod controllers;
mod endpoint;
mod guest_queue;
mod moving;
mod pace;
mod placing;
mod queue;
mod queues;
mod ring;
mod trouble;

pub use controller::{Controller, Kind, NotReady, Settings, StartError};
pub use controllers::{Controllers, Error, Info, Options, QUEUES_MAX};
pub use endpoint::{EndpointError, Link};
pub use guest_queue::{GuestQueue, Parts};
pub use moving::{Move, Moved};
pub use pace::Pace;
pub use queue::DeviceQueue;
pub use queues::Queues;
pub use trouble::{Alarm, Errors, Trouble};
