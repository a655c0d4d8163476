//! Drives that are pulled out without notice: the kernel makes the next open wait.

use super::OnModel;
use super::odd::Odd;
use super::recovery::{BLOCK, slow, write_all};
use crate::{Config as Attach, Controllers, Dma, Location, Phase};
use aryk_bdev::{Access, Env, Status};
use aryk_bdev_conformance::{Bench, Opener, block_on};
use aryk_nvme_model::{Model, Running};
use aryk_pci::Function;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

/// A drive, and its controller.
struct Drive {
    env: Env,
    controllers: Controllers,
    model: Arc<Model>,
    function: Arc<Odd>,
    _running: Running,
}

impl Drive {
    fn new(grace: Duration) -> Self {
        let model = Model::new("model", slow()).unwrap();
        let running = model.run().unwrap();
        let function = Arc::new(Odd::slow(&model));
        let (env, controllers) = (Env::default(), Controllers::default());
        let location = Location::Model(Arc::<Odd>::clone(&function) as Arc<dyn Function>);
        let attach = Attach { grace, dma: Dma::Bounce, ..Attach::new("nv", location) };
        block_on(controllers.attach(&env, attach)).unwrap();
        Self { env, controllers, model, function, _running: running }
    }

    /// Pulls the drive out under writes. The next open waits until the guard is dropped.
    fn pull_out(&self, bench: &mut Bench) -> (Opener, MutexGuard<'_, ()>) {
        let mut disk = bench.open(self.env.registry(), "nvn1", Access::Exclusive, 128, 8 * BLOCK);
        write_all(&mut disk, 1, bench);
        let stuck = self.function.config_space.lock().unwrap();
        self.model.with(|model| model.pull_out());
        let controller = self.controllers.find("nv").unwrap();
        bench.until("the loss to be noticed", || controller.info().phase == Phase::Away);
        (disk, stuck)
    }
}

#[test]
fn the_grace_time_ends_although_the_kernel_waits_for_the_drive() {
    let drive = Drive::new(Duration::from_millis(300));
    let mut bench = Bench::new();
    let (mut disk, stuck) = drive.pull_out(&mut bench);
    let outcomes = disk.drain(&mut bench);
    assert!(outcomes.iter().any(|outcome| outcome.status == Status::Removed), "{outcomes:?}");
    disk.close(&mut bench);
    bench.until("the removal", || {
        drive.env.registry().list().is_empty() && drive.controllers.list().is_empty()
    });
    drop(stuck);
}

#[test]
fn an_attach_is_answered_that_a_disable_ends() {
    let drive = Drive::new(Duration::from_secs(600));
    let mut bench = Bench::new();
    bench.wait("the detach", drive.controllers.detach("nv")).unwrap();
    let stuck = drive.function.config_space.lock().unwrap();
    let location = Location::Model(Arc::<Odd>::clone(&drive.function) as Arc<dyn Function>);
    let (env, controllers) = (drive.env.clone(), drive.controllers.clone());
    let attach =
        std::thread::spawn(move || block_on(controllers.attach(&env, Attach::new("again", location))));
    OnModel::until("the controller to be listed", || drive.controllers.find("again").is_ok());
    let controller = drive.controllers.find("again").unwrap();
    bench.wait("the answer to a disable", controller.disable()).unwrap();
    let error = attach.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("disabled"), "{error}");
    drop(stuck);
    OnModel::until("the end of the controller", || drive.controllers.list().is_empty());
}

#[test]
fn callers_do_not_wait_for_a_drive_that_the_kernel_waits_for() {
    let drive = Drive::new(Duration::from_secs(600));
    let mut bench = Bench::new();
    let (mut disk, stuck) = drive.pull_out(&mut bench);
    let controller = drive.controllers.find("nv").unwrap();
    bench.wait("the answer to a disable", controller.disable()).unwrap();
    assert_eq!(controller.info().phase, Phase::Disabled);
    drop(stuck);
    drive.model.with(|model| model.plug_in());
    // The open that was given up succeeds meanwhile, and is closed.
    bench.wait("the answer to an enable", controller.enable()).unwrap();
    let outcomes = disk.drain(&mut bench);
    assert!(outcomes.iter().all(|outcome| outcome.status.is_ok()), "{outcomes:?}");
    disk.close(&mut bench);

    let (mut disk, stuck) = drive.pull_out(&mut bench);
    let controllers = drive.controllers.clone();
    let detach = std::thread::spawn(move || block_on(controllers.detach("nv")));
    let outcomes = disk.drain(&mut bench);
    assert!(outcomes.iter().any(|outcome| outcome.status == Status::Removed), "{outcomes:?}");
    disk.close(&mut bench);
    OnModel::until("the answer to a detach", || {
        bench.turn();
        detach.is_finished()
    });
    detach.join().unwrap().unwrap();
    drop(stuck);
}
