//! Tests in processes of their own.

#![allow(dead_code, reason = "no program uses all of it")]

use std::process::{Command, Output};
use std::ptr::NonNull;

const CHILD: &str = "PAGEHEAP_ARENAS_CHILD";

/// Whether this process is one, for one test.
pub fn is_one() -> bool {
    std::env::var_os(CHILD).is_some()
}

fn run(test: &str) -> Output {
    let mut child = Command::new(std::env::current_exe().expect("own executable"));
    child.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    child.env(CHILD, "1").output().expect("a child process")
}

/// Runs a test in a child, which must end well.
pub fn runs(test: &str) {
    let output = run(test);
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a test in a child, which must abort with a message that names the address it has said on its standard output.
/// In the child: true.
pub fn aborts(test: &str, text: &str) -> bool {
    if is_one() {
        return true;
    }
    let output = run(test);
    let (out, said) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
    assert_eq!(signal, Some(6), "not an abort: {said}");
    let address = out
        .lines()
        .find_map(|line| line.split_once("wrong: "))
        .expect("an address")
        .1;
    assert!(
        said.contains("pageheap: ") && said.contains(text) && said.contains(address),
        "{said}"
    );
    false
}

/// Says which address is going to be named.
pub fn wrong<T>(address: NonNull<T>) -> NonNull<T> {
    println!("wrong: {:#x}", address.addr().get());
    address
}
