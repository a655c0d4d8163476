//! Tests that read the kernel's view of the memory.

use super::*;
use memory::ARENA;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::os::unix::fs::FileExt;
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
    let slice = SecretSlice::filled(5000, [7_u64; 3]).unwrap();
    let flags = flags(slice.as_ptr().addr());
    assert!(["dd", "wf"].iter().all(|flag| flags.iter().any(|has| has == flag)), "{flags:?}");
    assert!(slice.len() == 5000 && slice.iter().all(|value| *value == [7; 3]));
    assert!(SecretSlice::filled(usize::MAX / 2, 0_u64).is_none());
}

/// Passes freed memory on only after it has looked at it.
struct Watched;

thread_local!(static FREED: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) });

// SAFETY: as the system's.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the test has initialized the memory, and gives it up.
        let bytes = unsafe { std::slice::from_raw_parts(memory, layout.size()) }.to_vec();
        FREED.with_borrow_mut(|freed| freed.push(bytes));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[test]
fn a_thread_that_asks_for_it_zeroes_what_it_frees() {
    let freed_of = |bytes: &[u8], grown: usize| {
        let (allocator, layout) = (Wiping(Watched), Layout::array::<u8>(bytes.len()).unwrap());
        // SAFETY: the size is not zero; memory is written within its size, and each is freed once with its layout.
        unsafe {
            let memory = allocator.alloc(layout);
            memory.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            let grown_layout = Layout::array::<u8>(grown).unwrap();
            let memory = allocator.realloc(memory, layout, grown);
            let kept = bytes.len().min(grown);
            assert_eq!(std::slice::from_raw_parts(memory, kept), &bytes[..kept]);
            memory.add(kept).write_bytes(9, grown - kept);
            allocator.dealloc(memory, grown_layout);
        }
        FREED.take()
    };
    assert_eq!(freed_of(b"secret", 8), [b"secret".to_vec(), b"secret\x09\x09".to_vec()]);
    wipe_freed_memory();
    assert_eq!(freed_of(b"secret", 8), [vec![0; 6], vec![0; 8]]);
    assert_eq!(freed_of(b"secret", 3), [vec![0; 6], vec![0; 3]]);
    let other = std::thread::spawn(move || freed_of(b"secret", 6)).join().unwrap();
    assert_eq!(other[0], b"secret");
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
fn the_stack_of_a_computation_is_zeroed() {
    const ROOM: usize = 16 << 10;
    /// The address of an array on the stack, and the sum of its bytes.
    fn compute(byte: u8) -> (usize, u32) {
        let mut array = [byte; ROOM];
        // Its start is the deepest part of the stack, which the search does not use.
        let array = std::hint::black_box(&mut array);
        (array.as_ptr().addr(), array.iter().map(|byte| u32::from(*byte)).sum())
    }
    let found = |address: usize| {
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        let mut bytes = [0; 512];
        memory.read_exact_at(&mut bytes, address as u64).unwrap();
        bytes.iter().filter(|byte| **byte == 0xa5).count()
    };
    // A thread's stack has no other use.
    let (before, after) = std::thread::spawn(move || {
        let (address, _) = std::hint::black_box(compute as fn(u8) -> _)(0xa5);
        let before = found(address);
        let (address, sum) = with_wiped_stack(|| std::hint::black_box(compute as fn(u8) -> _)(0xa5));
        assert_eq!(sum, ROOM as u32 * u32::from(0xa5_u8));
        (before, found(address))
    })
    .join()
    .unwrap();
    assert!(before > 100, "the test finds what is on the stack: {before}");
    assert_eq!(after, 0);
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
