//! What the examples share: a controller that they attach, and time.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aryk_nvme::controller::{Controller, End, Event, Options, PairRequest};
use aryk_nvme::queue::QueuePair;
use aryk_nvme::spec::register::Shutdown;
use aryk_pci::vfio::Vfio;
use aryk_pci::{Address, Function, vfio_user};

/// Opens the function of a PCI address by VFIO, or the one behind a socket by vfio-user.
pub fn open(name: &str) -> Result<Arc<dyn Function>, Box<dyn Error>> {
    Ok(match name.parse::<Address>() {
        Ok(address) => Arc::new(Vfio::new().open(address)?),
        Err(_) => Arc::new(vfio_user::Client::connect(Path::new(name))?),
    })
}

/// A controller that is ready, and one queue pair.
pub struct Attached {
    pub controller: Controller,
    pub pair: QueuePair,
    pub clock: Clock,
}

impl Attached {
    /// Attaches the controller, and creates a pair for `depth` commands without interrupts.
    pub fn new(function: &Arc<dyn Function>, depth: u16) -> Result<Self, Box<dyn Error>> {
        let clock = Clock::start();
        let mut controller = Controller::attach(Arc::clone(function), Options::default(), clock.now())?;
        wait(&mut controller, clock, |event| matches!(event, Event::Ready).then_some(()))?;
        controller.create_pair(PairRequest { depth, vector: None })?;
        let pair = *wait(&mut controller, clock, |event| match event {
            Event::QueueCreated(pair) => Some(pair),
            _ => None,
        })?;
        Ok(Self { controller, pair, clock })
    }

    /// Shuts the controller down; no command is in flight.
    pub fn end(mut self) -> Result<(), Box<dyn Error>> {
        self.controller.shut_down(Shutdown::Normal, self.clock.now());
        self.controller.queue_quiesced(self.pair.qid());
        let is_end = |event| matches!(event, Event::Ended(End::Stopped { .. })).then_some(());
        wait(&mut self.controller, self.clock, is_end)
    }
}

/// Polls the controller until `find` finds an event.
fn wait<T>(
    controller: &mut Controller,
    clock: Clock,
    find: impl Fn(Event) -> Option<T>,
) -> Result<T, Box<dyn Error>> {
    loop {
        match controller.poll(clock.now()) {
            Some(Event::Ended(End::Failed(failure))) => return Err(failure.into()),
            Some(event) => {
                if let Some(found) = find(event) {
                    return Ok(found);
                }
            }
            None => clock.sleep(),
        }
    }
}

/// Time since the start of the program.
#[derive(Clone, Copy)]
pub struct Clock(Instant);

#[expect(clippy::disallowed_methods, reason = "a program without a reactor has the system's clock")]
impl Clock {
    fn start() -> Self {
        Self(Instant::now())
    }

    /// Nanoseconds.
    pub fn now(self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }

    fn sleep(self) {
        std::thread::sleep(Duration::from_micros(100));
    }
}
