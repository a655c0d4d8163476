//! A hostile host of the model NVMe controller: arbitrary registers, doorbells, commands and memory, and a device that
//! fails and vanishes meanwhile.
//!
//! For any input, no code panics, a step does bounded work, and the controller serves an honest host afterwards.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    aryk_nvme_model::hostile::attack(bytes).expect("memory and descriptors");
});
