//! The modules that need nothing but memory, alone and on top of each other.

use aryk_bdev::{Blocks, Env, Identity, Registry};
use aryk_bdev_conformance::{Features, Fixture, conformance};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

struct Stack {
    env: Env,
    features: Features,
    /// The disk at the bottom, if it can be resized.
    null: Option<&'static str>,
}

impl Fixture for Stack {
    fn registry(&self) -> &Registry {
        self.env.registry()
    }

    fn features(&self) -> Features {
        self.features
    }

    fn resize(&self, blocks: Blocks) -> bool {
        self.null.is_some_and(|name| aryk_bdev_null::resize(self.env.registry(), name, blocks).is_ok())
    }
}

/// Polls a future that is ready at once.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("it waits"),
    }
}

impl Stack {
    const BLOCKS: Blocks = Blocks(8192);

    fn malloc(name: &'static str, block_size: u32) -> Self {
        let env = Env::default();
        let config = aryk_bdev_malloc::Config {
            identity: Identity::named(name),
            block_size,
            physical_block_size: block_size,
            blocks: Self::BLOCKS,
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&env, config).expect("it can be made");
        Self { env, features: Features { data: true, unmap_zeroes: true }, null: None }
    }

    fn null(name: &'static str) -> Self {
        let env = Env::default();
        let config = aryk_bdev_null::Config {
            identity: Identity::named(name),
            block_size: 512,
            physical_block_size: 4096,
            blocks: Self::BLOCKS,
        };
        aryk_bdev_null::create(&env, config).expect("it can be made");
        Self { env, features: Features { data: false, unmap_zeroes: false }, null: Some(name) }
    }

    fn passthru(self, base: &str, name: &str) -> Self {
        let config = aryk_bdev_passthru::Config { identity: Identity::named(name), base: base.to_owned() };
        aryk_bdev_passthru::create(&self.env, config).expect("it can be made");
        self
    }

    fn delay(self, base: &str, name: &str, us: u64) -> Self {
        let config = aryk_bdev_delay::Config {
            identity: Identity::named(name),
            base: base.to_owned(),
            avg_read_us: us,
            p99_read_us: 3 * us,
            avg_write_us: us / 2,
            p99_write_us: us,
        };
        aryk_bdev_delay::create(&self.env, config).expect("it can be made");
        self
    }

    /// The last of three parts of the disk.
    fn split(self, base: &str) -> Self {
        let config = aryk_bdev_split::Config { base: base.to_owned(), count: 3, bytes: None };
        let parts = now(aryk_bdev_split::create(&self.env, config)).expect("it can be cut");
        assert_eq!(parts.len(), 3);
        // The parts do not grow with the disk.
        Self { null: None, ..self }
    }

    fn error(self, base: &str, name: &str) -> Self {
        let config = aryk_bdev_error::Config { identity: Identity::named(name), base: base.to_owned() };
        aryk_bdev_error::create(&self.env, config).expect("it can be made");
        self
    }
}

mod null {
    use super::*;
    conformance!(|| Stack::null("disk"));
}

mod malloc {
    use super::*;
    conformance!(|| Stack::malloc("disk", 512));
}

mod malloc_of_4096 {
    use super::*;
    conformance!(|| Stack::malloc("disk", 4096));
}

mod passthru {
    use super::*;
    conformance!(|| Stack::malloc("base", 512).passthru("base", "disk"));
}

mod delay {
    use super::*;
    conformance!(|| Stack::malloc("base", 512).delay("base", "disk", 20));
}

mod error {
    use super::*;
    conformance!(|| Stack::malloc("base", 512).error("base", "disk"));
}

mod split {
    use super::*;
    conformance!(|| Stack::malloc("base", 512).split("base").passthru("basep2", "disk"));
}

mod split_of_null {
    use super::*;
    conformance!(|| Stack::null("base").split("base").passthru("basep0", "disk"));
}

mod three_on_malloc {
    use super::*;
    conformance!(|| {
        Stack::malloc("base", 512).error("base", "e").delay("e", "d", 5).passthru("d", "disk")
    });
}

mod three_on_null {
    use super::*;
    conformance!(|| Stack::null("base").passthru("base", "a").delay("a", "b", 0).error("b", "disk"));
}
