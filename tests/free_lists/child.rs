//! Tests in processes of their own.

use std::process::{Command, Output};

const CHILD: &str = "PAGEHEAP_LISTS_CHILD";

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
