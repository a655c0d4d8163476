//! What the devices that are served over vhost-user have in common, block or SCSI.
#![forbid(unsafe_code)]

mod endpoint;
mod line;
mod pace;
mod ring;
mod trouble;

pub use endpoint::{Endpoint, EndpointError, Link};
pub use line::{Line, Parts, STOP_GRACE};
pub use pace::Pace;
pub use ring::virtqueue;
pub use trouble::{Alarm, Errors, Trouble};
