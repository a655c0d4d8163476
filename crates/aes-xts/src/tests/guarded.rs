//! Accesses outside of the buffers, found by the processor: each buffer ends, or begins, at a page that nothing may access, and
//! the source is in pages that nothing may write to.

use super::*;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

const PAGE: usize = 4096;
/// The room of a buffer: enough for a full group of sectors in every kernel, and for a rest.
const ROOM: usize = 8 * PAGE;

/// Pages between two pages that nothing may access.
struct Guarded(*mut u8);

impl Guarded {
    fn new() -> Self {
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping replaces none.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), ROOM + 2 * PAGE, access, kind) }.unwrap();
        for guard in [0, PAGE + ROOM] {
            // SAFETY: both guards are pages of the mapping, to which there are no references.
            unsafe { mprotect(base.byte_add(guard), PAGE, MprotectFlags::empty()) }.unwrap();
        }
        Self(base.cast::<u8>().wrapping_add(PAGE))
    }

    /// `len` bytes, of which the last (or first) one is beside a guard.
    fn part(&mut self, len: usize, at_end: bool) -> &mut [u8] {
        assert!(len <= ROOM);
        let start = if at_end { ROOM - len } else { 0 };
        // SAFETY: the bytes are within the room, which this value owns.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }

    fn set_access(&self, access: MprotectFlags) {
        // SAFETY: no reference to the room is in use.
        unsafe { mprotect(self.0.cast(), ROOM, access) }.unwrap();
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping begins a page before the room.
        unsafe { munmap(self.0.sub(PAGE).cast(), ROOM + 2 * PAGE) }.unwrap();
    }
}

/// The sizes of a sector and the numbers of sectors: each number of blocks in a sector up to two groups of any kernel, and
/// numbers of sectors around a group of tweaks.
fn shapes() -> impl Iterator<Item = (usize, usize)> {
    let single = (1..=64).map(|blocks| (blocks * BLOCK, 1));
    let several = [16, 48, 512, 528].into_iter().flat_map(|size| (1..=18).map(move |count| (size, count)));
    let large = [(4096, 1), (4096, 3), (4096, 8), (512, 33), (512, 64), (8192, 2)];
    single.chain(several).chain(large)
}

pub fn check(implementation: Implementation) {
    let (mut src, mut dst) = (Guarded::new(), Guarded::new());
    for key_len in [32, 64] {
        let bytes = noise(21, key_len);
        let Some(key) = key(&bytes, implementation) else { return };
        for (size, count) in shapes() {
            let (len, tweaks) = (size * count, Tweaks { start: 5, step: 1 });
            let plain = noise(len as u64, len);
            let cipher = expected(&bytes, size, tweaks, &plain);
            for (at_end, dst_at_end) in [(true, true), (false, false), (true, false)] {
                for (encrypts, from, to) in [(true, &plain, &cipher), (false, &cipher, &plain)] {
                    src.set_access(MprotectFlags::READ | MprotectFlags::WRITE);
                    src.part(len, at_end).copy_from_slice(from);
                    src.set_access(MprotectFlags::READ);
                    let (from, into) = (&*src.part(len, at_end), dst.part(len, dst_at_end));
                    match encrypts {
                        true => key.encrypt(sector(size), tweaks, from, into).unwrap(),
                        false => key.decrypt(sector(size), tweaks, from, into).unwrap(),
                    }
                    assert!(into == &to[..], "{count} sectors of {size}");
                    into.copy_from_slice(from);
                    match encrypts {
                        true => key.encrypt_in_place(sector(size), tweaks, into).unwrap(),
                        false => key.decrypt_in_place(sector(size), tweaks, into).unwrap(),
                    }
                    assert!(into == &to[..], "{count} sectors of {size}, in place");
                }
            }
        }
    }
}
