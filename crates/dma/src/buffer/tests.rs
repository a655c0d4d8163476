//! Tests of lending buffers.

use super::{Arena, Buffer};

#[test]
fn a_buffer_is_zeroed_aligned_and_writable() {
    let mut buffer = Buffer::new(10_000, 512);
    assert_eq!((buffer.len(), buffer.bytes()), (10_000, &[0; 10_000][..]));
    assert!(buffer.bytes().as_ptr().addr().is_multiple_of(512));
    buffer.write(9_990, b"0123456789");
    assert_eq!(buffer.bytes()[9_990..], *b"0123456789");
    assert_eq!(Buffer::from_slice(b"abc").bytes(), b"abc");
}

#[test]
fn a_loan_reaches_the_same_bytes_wherever_the_buffer_moves() {
    let mut buffer = Buffer::from_slice(b"to be read");
    let sgl = buffer.lend();
    let mut moved = Box::new(buffer);
    let mut seen = [0; 10];
    sgl.read(0, &mut seen);
    assert_eq!(&seen, b"to be read");
    sgl.write(3, b"or");
    moved.reclaim();
    assert_eq!(moved.bytes(), b"to or read");
}

/// The buffer is so large that the allocator would return the memory to the kernel at once, and the access would be fatal.
#[test]
fn a_buffer_that_is_dropped_while_lent_leaks() {
    let mut buffer = Buffer::new(64 << 20, 4096);
    buffer.write(5 << 20, b"still here");
    let sgl = buffer.lend();
    drop(buffer);
    let mut seen = [0; 10];
    sgl.read(5 << 20, &mut seen);
    assert_eq!(&seen, b"still here");
}

#[test]
#[should_panic(expected = "lent to a request")]
fn a_lent_buffer_is_not_lent_again() {
    let mut buffer = Buffer::new(1, 1);
    buffer.lend();
    buffer.lend();
}

#[test]
#[should_panic(expected = "lent to a request")]
fn a_lent_buffer_is_not_read() {
    let mut buffer = Buffer::new(1, 1);
    buffer.lend();
    buffer.bytes();
}

#[test]
#[should_panic(expected = "is not lent")]
fn an_unlent_buffer_is_not_reclaimed() {
    Buffer::new(1, 1).reclaim();
}

#[test]
#[should_panic(expected = "9+2 of 10")]
fn a_write_beyond_the_end_panics() {
    Buffer::new(10, 1).write(9, b"ab");
}

#[test]
fn buffers_of_an_arena_are_separate_and_keep_it_mapped() {
    let (arena, mut buffers) = Arena::new(&[64, 8192, 10, 4096]).unwrap();
    let at = |buffer: &Buffer| buffer.bytes().as_ptr().addr() as u64 - arena.addr();
    assert_eq!(buffers.iter().map(at).collect::<Vec<_>>(), [0, 4096, 12_288, 16_384]);
    assert_eq!(arena.len(), 20_480);
    for (buffer, byte) in buffers.iter_mut().zip(1..) {
        buffer.bytes_mut().fill(byte);
    }
    let lent = buffers[1].lend();
    drop((arena, buffers.split_off(2)));
    assert_eq!(buffers[0].bytes(), [1; 64]);
    drop(buffers);
    let mut seen = [0; 2];
    lent.read(8190, &mut seen);
    assert_eq!(seen, [2; 2]);
}

#[test]
#[should_panic(expected = "without bytes")]
fn an_arena_has_no_empty_buffer() {
    let _ = Arena::new(&[64, 0]);
}
