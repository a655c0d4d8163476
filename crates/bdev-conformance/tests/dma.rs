//! Disks whose device accesses requests' memory by itself: alone and below other disks, with an IOMMU that takes its time and an
//! IOMMU that fails.

use aryk_bdev::{Blocks, Env, Identity, Registry};
use aryk_bdev_conformance::{Behaviour, Container, Fixture, Iommu, block_on, conformance, create_dma_disk};

struct Dma {
    env: Env,
    iommu: Iommu,
    behaviour: Behaviour,
}

impl Fixture for Dma {
    fn registry(&self) -> &Registry {
        self.env.registry()
    }
}

impl Dma {
    fn new(name: &str, behaviour: Behaviour) -> Self {
        let (env, iommu) = (Env::default(), Iommu::new(behaviour));
        let container = block_on(Container::attach(env.memory(), iommu.clone())).expect("the first client");
        create_dma_disk(&env, name, Blocks(8192), container).expect("it can be made");
        Self { env, iommu, behaviour }
    }

    fn passthru(self, base: &str, name: &str) -> Self {
        let config = aryk_bdev_passthru::Config { identity: Identity::named(name), base: base.to_owned() };
        aryk_bdev_passthru::create(&self.env, config).expect("it can be made");
        self
    }
}

impl Drop for Dma {
    fn drop(&mut self) {
        let accesses = self.iommu.accesses();
        assert_eq!(accesses.violations, 0, "{accesses:?}");
        if self.behaviour.fails_every == 1 {
            assert_eq!(accesses.direct, 0, "{accesses:?}");
        }
    }
}

mod alone {
    use super::*;
    conformance!(|| Dma::new("disk", Behaviour { delay_us_max: 2000, ..Behaviour::default() }));
}

mod without_room {
    use super::*;
    conformance!(|| Dma::new("disk", Behaviour { fails_every: 1, ..Behaviour::default() }));
}

mod below_a_decorator {
    use super::*;
    conformance!(|| Dma::new("base", Behaviour::default()).passthru("base", "disk"));
}
