//! Filters that make the system refuse calls: from the start of a process, or from now on.

#![allow(dead_code, reason = "no program uses all of it")]

use std::os::unix::process::CommandExt;
use std::process::Command;

/// A system call that is refused, and the error it gets.
pub struct Refusal {
    pub call: libc::c_long,
    pub error: i32,
    /// Refused only if the second argument, below 4 GiB or with a non-zero upper half, is at least this.
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

/// Refuses calls in the calling thread and those it creates; with `everywhere`, in all existing threads. Allocates no
/// memory.
fn install(refusals: &[Refusal], everywhere: bool) -> bool {
    use libc::{BPF_ABS, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
    let mut rules = [rule(BPF_RET | BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW); 64];
    let mut len = 0;
    for refusal in refusals {
        // The call's number is at 0; the second argument at 24, its upper half at 28.
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
    // SAFETY: a program of that length, which is read during the call.
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

/// Refuses from now on in this thread and those it creates.
pub fn refuse_here(refusals: &[Refusal]) {
    assert!(install(refusals, false));
}

/// Refuses from now on, in all threads.
pub fn refuse(refusals: &[Refusal]) {
    assert!(install(refusals, true));
}

/// Refuses from the program's first instruction on.
pub fn refuse_in(command: &mut Command, refusals: &'static [Refusal]) {
    let before = move || {
        if install(refusals, false) {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        }
    };
    // SAFETY: only system calls between fork and exec.
    unsafe { command.pre_exec(before) };
}
