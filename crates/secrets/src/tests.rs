//! Tests that read the kernel's view of the memory.

use super::*;
use memory::ARENA;
use std::sync::{Mutex, PoisonError};

/// Tests that count arenas exclude each other.
static ALONE: Mutex<()> = Mutex::new(());

/// The flags of the mapping with this address, as `/proc/self/smaps` has them.
fn flags(address: usize) -> Vec<String> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut is_inside = false;
    for line in smaps.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16).ok();
        if let Some((from, to)) = range.and_then(|(from, to)| Some((number(from)?, number(to)?))) {
            is_inside = (from..to).contains(&address);
        } else if let (true, Some(flags)) = (is_inside, line.strip_prefix("VmFlags:")) {
            return flags.split_whitespace().map(str::to_owned).collect();
        }
    }
    panic!("no mapping has the address {address:x}");
}

#[test]
fn memory_is_locked_and_left_out_of_dumps_and_children() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let small = SecretBytes::copy_of(b"secret");
    let large = SecretBytes::zeroed(3 * ARENA);
    let boxed = SecretBox::new([0_u8; 700]);
    let before = unlocked_bytes();
    for (what, address) in [("small", small.as_ptr()), ("large", large.as_ptr()), ("boxed", boxed.as_ptr())] {
        let flags = flags(address.addr());
        for flag in ["dd", "wf", "lo"] {
            let has = flags.iter().any(|has| has == flag);
            // A container may forbid to lock any memory; that is counted.
            assert!(has || (flag == "lo" && before > 0), "{what} lacks {flag}: {flags:?}");
        }
    }
    assert_eq!(&*small, b"secret");
}

#[test]
fn freed_memory_is_zero() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Keeps the arena mapped.
    let neighbour = SecretBytes::zeroed(1);
    let secret = SecretBytes::copy_of(&[0xa5; 200]);
    let first = secret.as_ptr();
    drop(secret);
    // The first free units are taken again.
    let next = SecretBytes::zeroed(200);
    assert_eq!(next.as_ptr(), first);
    assert!(next.iter().all(|byte| *byte == 0));
    assert_eq!(*neighbour, [0]);
}

#[test]
fn parts_do_not_overlap() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let lens = || (0..500_usize).map(|number| number * 37 % 900);
    let mut secrets: Vec<SecretBytes> = lens().map(SecretBytes::zeroed).collect();
    for (number, secret) in secrets.iter_mut().enumerate() {
        secret.fill(number as u8);
        assert!(secret.as_ptr().addr().is_multiple_of(64));
    }
    // Every second one is freed, and its place taken by others.
    let mut number = 0;
    secrets.retain(|_| {
        number += 1;
        number % 2 == 1
    });
    let others: Vec<SecretBytes> = lens().map(|len| SecretBytes::copy_of(&vec![0xff; len])).collect();
    for (place, secret) in secrets.iter().enumerate() {
        let number = place * 2;
        assert_eq!(secret.len(), number * 37 % 900);
        assert!(secret.iter().all(|byte| *byte == number as u8), "{number}");
    }
    assert!(others.iter().all(|other| other.iter().all(|byte| *byte == 0xff)));
}

#[test]
fn nothing_prints_a_secret() {
    let mut bytes = SecretBytes::copy_of(b"secret");
    assert_eq!(format!("{bytes:?}"), "SecretBytes(6)");
    bytes.truncate(3);
    assert_eq!(&*bytes, b"sec");
    assert_eq!(format!("{:?}", SecretBox::new([7_u8; 3])), "SecretBox");
}

#[test]
fn a_key_that_the_kernel_does_not_have_is_an_error() {
    let error = read_kernel_key("aryk-test-no-such-key").unwrap_err();
    // Sandboxes forbid the call.
    let expected = [libc::ENOKEY, libc::EPERM, libc::ENOSYS, libc::EACCES];
    assert!(expected.contains(&error.raw_os_error().unwrap()), "{error}");
    assert_eq!(read_kernel_key("a\0b").unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
}
