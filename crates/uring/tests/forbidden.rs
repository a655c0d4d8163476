//! Tests that where a seccomp filter forbids io_uring, as in containers, the creation of a ring fails, and signals still work.

use aryk_uring::{Ring, Signaller};

/// Makes `io_uring_setup` fail with EPERM, permanently for the calling thread.
fn forbid_io_uring() {
    let statement = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut program = [
        // The number of the system call is the first word of the filter's input.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_io_uring_setup as u32, 0, 1),
        statement(libc::BPF_RET | libc::BPF_K, refuse, 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the kernel copies the program, which lives until the calls have returned.
    let results = unsafe {
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter),
        ]
    };
    assert_eq!(results, [0, 0], "{}", std::io::Error::last_os_error());
}

#[test]
fn no_ring_is_an_error_and_signals_still_work() {
    std::thread::spawn(|| {
        drop(Ring::new(4).expect("io_uring is allowed before the filter"));
        forbid_io_uring();
        let error = Ring::new(4).expect_err("io_uring is forbidden");
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        assert!(Signaller::new().is_bounded());
    })
    .join()
    .expect("the thread's assertions hold");
}
