//! Runs tests in child processes.

#![allow(dead_code, reason = "no program uses all of it")]

use std::process::{Command, Output};
use std::ptr::NonNull;

const CHILD: &str = "PAGEHEAP_TEST_CHILD";

/// The exit status of a child that was late, as on a busy machine: it is run again, twice at most.
pub const LATE: i32 = 75;

/// Whether this process is the child of a test.
pub fn is_one() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Whether this process is the child of that test.
pub fn is_of(test: &str) -> bool {
    std::env::var_os(CHILD).is_some_and(|name| name == test)
}

/// The command that runs one test in a child process: this program again, with that one test selected.
pub fn command(test: &str) -> Command {
    chosen(Command::new(std::env::current_exe().expect("own executable")), test)
}

/// The same for a command that runs this program in some other way, such as under `strace`.
pub fn chosen(mut child: Command, test: &str) -> Command {
    child.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    child.env(CHILD, test);
    child
}

/// Runs the child. Fails if it ran no test: a misspelt name would otherwise seem to pass.
pub fn output(child: &mut Command) -> Output {
    let output = child.output().expect("a child process");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(!said.contains("running 0 tests"), "no such test: {child:?}");
    output
}

/// Whether a child ends well, which is prepared each time. One that says that it was late is run again: one that is
/// late three times is late.
pub fn ends_well_in_time(test: &str, prepare: impl Fn(&mut Command)) -> bool {
    for _ in 0..3 {
        let mut command = command(test);
        prepare(&mut command);
        let output = output(&mut command);
        print!("{}", String::from_utf8_lossy(&output.stdout));
        if output.status.success() {
            return true;
        }
        println!("{output:?}");
        if output.status.code() != Some(LATE) {
            return false;
        }
    }
    false
}

fn run(test: &str) -> Output {
    output(&mut command(test))
}

/// Runs a test in a child, which must succeed.
pub fn runs(test: &str) {
    let output = run(test);
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a test in a child, which must abort with a message that contains `text`. Returns its standard output and that
/// message; in the child, `None`.
pub fn ended(test: &str, text: &str) -> Option<(String, String)> {
    if is_one() {
        return None;
    }
    let output = run(test);
    let [out, said] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(!output.status.success(), "it went on: {said}");
    #[cfg(unix)]
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&output.status),
        Some(6),
        "not an abort: {said}"
    );
    assert!(said.contains("pageheap: ") && said.contains(text), "{said}");
    Some((out, said))
}

/// The same; and the message must name the address that the child has printed. In the child: true.
pub fn aborts(test: &str, text: &str) -> bool {
    let Some((out, said)) = ended(test, text) else {
        return true;
    };
    let address = out
        .lines()
        .find_map(|line| line.split_once("wrong: "))
        .expect("an address")
        .1;
    assert!(said.contains(address), "{said}");
    false
}

/// Prints the address that the message must name.
pub fn wrong<T>(address: NonNull<T>) -> NonNull<T> {
    println!("wrong: {:#x}", address.addr().get());
    address
}
