//! Filters that have the system refuse calls: from the start of a process, or from now on.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// A call that is refused, with an error.
pub struct Refusal {
    pub call: libc::c_long,
    pub error: i32,
    /// Only if the second argument, which is less than 4 GiB or has an upper half, is at least this.
    pub from: u32,
}

impl Refusal {
    pub const fn new(call: libc::c_long, error: i32) -> Self {
        Self { call, error, from: 0 }
    }
}

fn rule(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

/// Refuses in the calling thread and all it makes; `everywhere`: in all threads there are. No memory is allocated.
fn install(refusals: &[Refusal], everywhere: bool) -> bool {
    use libc::{BPF_ABS, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
    let mut rules = [rule(BPF_RET | BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW); 64];
    let mut len = 0;
    for refusal in refusals {
        // The number of the call at 0; the second argument at 24, its upper half at 28.
        let part = [
            rule(BPF_LD | BPF_W | BPF_ABS, 0, 0, 0),
            rule(BPF_JMP | BPF_JEQ | BPF_K, 0, 5, refusal.call as u32),
            rule(BPF_LD | BPF_W | BPF_ABS, 0, 0, 28),
            rule(BPF_JMP | BPF_JGE | BPF_K, 2, 0, 1),
            rule(BPF_LD | BPF_W | BPF_ABS, 0, 0, 24),
            rule(BPF_JMP | BPF_JGE | BPF_K, 0, 1, refusal.from),
            rule(BPF_RET | BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | refusal.error as u32),
        ];
        rules[len..len + part.len()].copy_from_slice(&part);
        len += part.len();
    }
    let program = libc::sock_fprog {
        len: len as u16 + 1,
        filter: rules.as_mut_ptr(),
    };
    let flags = if everywhere { libc::SECCOMP_FILTER_FLAG_TSYNC } else { 0 };
    // SAFETY: a program of that length, read during the call.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                flags,
                &raw const program,
            ) == 0
    }
}

/// From now on, in all threads.
pub fn refuse(refusals: &[Refusal]) {
    assert!(install(refusals, true));
}

/// From the first instruction of the program on.
pub fn refuse_in(command: &mut Command, refusals: &'static [Refusal]) {
    let before = move || {
        if install(refusals, false) {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        }
    };
    // SAFETY: between fork and exec, system calls only.
    unsafe { command.pre_exec(before) };
}
