//! What the devices that are served over vhost-user have in common, block or SCSI.
#![forbid(unsafe_code)]

mod endpoint;
mod line;
mod moving;
mod pace;
mod queues;
mod ring;
mod trouble;

pub use endpoint::{Endpoint, EndpointError, Link};
pub use line::{Line, MakeParts, Parts, STOP_GRACE};
pub use moving::{MOVE_PATIENCE, Movable, Move, MoveError, StartFailure};
pub use pace::Pace;
pub use queues::{Host, Mover, NotReady, Queues, Running};
pub use ring::virtqueue;
pub use trouble::{Alarm, Errors, Trouble};
