//! Links the program by itself: no start files, no libraries, no relocations left for a loader that is not there.

fn main() {
    let arguments = [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        // The precompiled `core` can unwind and names its helper; this program aborts and never calls it.
        "-Wl,--defsym=rust_eh_personality=0",
    ];
    for argument in arguments {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
