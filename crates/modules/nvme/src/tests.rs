//! The module on a model controller.

mod away;
mod broken_pair;
mod conformance;
mod counters;
mod emptying;
mod injection;
mod locked;
mod lost_blocks;
mod memory;
mod odd;
mod operator;
mod options;
mod pulled;
mod recovery;
mod replay;
mod shrink;
mod sleep;
mod sleep_policies;
mod tools;
mod waking;

use crate::{Config, Controllers, Dma, Location};
use aryk_bdev::{Bdev, Env};
use aryk_bdev_conformance::block_on;
use aryk_nvme_model::{Model, Running};
use std::sync::Arc;

/// A model that runs in a thread, and its controller's disks.
struct OnModel {
    env: Env,
    controllers: Controllers,
    model: Arc<Model>,
    disks: Vec<Arc<Bdev>>,
    _running: Running,
}

impl OnModel {
    fn new(model: aryk_nvme_model::Config, dma: Dma) -> Self {
        Self::with(Env::default(), model, |config| config.dma = dma)
    }

    fn with(env: Env, model: aryk_nvme_model::Config, change: impl FnOnce(&mut Config)) -> Self {
        Self::behind(env, model, Arc::<Model>::clone, change)
    }

    /// A controller behind a function of the test.
    fn behind<F: aryk_pci::Function>(
        env: Env,
        model: aryk_nvme_model::Config,
        function: impl FnOnce(&Arc<Model>) -> Arc<F>,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let model = Model::new("model", model).unwrap();
        let running = model.run().unwrap();
        let controllers = Controllers::default();
        let mut config = Config::new("nv", Location::Model(function(&model)));
        change(&mut config);
        let disks = block_on(controllers.attach(&env, config)).unwrap();
        Self { env, controllers, model, disks, _running: running }
    }

    /// Waits, in real time, until something happened in another thread.
    fn until(what: &str, mut is_done: impl FnMut() -> bool) {
        for _ in 0..20_000 {
            if is_done() {
                return;
            }
            pause();
        }
        panic!("{what}: not within 20 s");
    }
}

impl Drop for OnModel {
    fn drop(&mut self) {
        let violations = self.model.with(|model| model.violations().clone());
        if std::thread::panicking() {
            eprintln!("{violations:?}");
            return;
        }
        assert_eq!(violations.count, 0, "{:?}", violations.first);
        block_on(self.controllers.detach("nv")).unwrap();
        assert!(self.controllers.list().is_empty());
    }
}

#[expect(clippy::disallowed_methods, reason = "a test waits for another thread")]
fn pause() {
    std::thread::sleep(std::time::Duration::from_millis(1));
}
