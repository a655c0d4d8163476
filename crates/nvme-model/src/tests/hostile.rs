//! Hostile hosts of many seeds.

use crate::hostile::attack;
use proptest::prelude::{any, prop};
use proptest::{prop_assert, proptest};

proptest! {
    #[test]
    fn no_host_makes_the_model_panic_or_hang(bytes in prop::collection::vec(any::<u8>(), 0..6000)) {
        prop_assert!(attack(&bytes).is_ok());
    }
}
