#!/usr/bin/env bash
# Runs published programs' own test suites on the system's allocator and on ours; prints how many tests pass on each.
#
#   benches/peers/real_programs.sh                     all of them
#   benches/peers/real_programs.sh hashbrown ripgrep   only these
#
# Cargo fetches the published sources. Every test binary, and the program itself if there is one, gets a
# `#[global_allocator]` line and one more test, which fails if that line has no effect. Exits with an error if a suite
# passes fewer of its own tests on ours than on the system's allocator.
#
# One test of crossbeam-channel, `select2::main` of `golang`, counts bytes while other tests allocate in the same
# process, and fails now and then: in 6 of 40 runs of that program on ours, in 9 of 40 on the system's, alone never.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
place="$root/benches/peers/target/real"
export CARGO_TERM_COLOR=never CARGO_TARGET_DIR="$place/target"

# Name, version, root of the library or program.
programs='
crossbeam-channel 0.5.17 src/lib.rs
hashbrown         0.17.1 src/lib.rs
ripgrep           15.2.0 crates/core/main.rs
serde_json        1.0.154 src/lib.rs
'

line='#[global_allocator]
static PAGEHEAP: pageheap::GlobalHeap = pageheap::GlobalHeap::new();'
proof='#[test]
fn pageheap_is_the_allocator() {
    assert!(PAGEHEAP.stats().bytes_in_use() > 0);
}'

# Puts the published sources of NAME VERSION into FOLDER.
fetch() {
    local name="$1" version="$2" folder="$3" crate="$place/fetch-$1"
    mkdir -p "$crate/src"
    printf '[package]\nname = "fetch"\nversion = "0.0.0"\nedition = "2024"\n[workspace]\n[dependencies]\n"%s" = "=%s"\n' \
        "$name" "$version" >"$crate/Cargo.toml"
    : >"$crate/src/lib.rs"
    cargo fetch -q --manifest-path "$crate/Cargo.toml"
    rm -rf "$folder"
    cp -r "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/"$name-$version" "$folder"
    grep -q '^\[workspace\]' "$folder/Cargo.toml" || printf '\n[workspace]\n' >>"$folder/Cargo.toml"
}

# Puts our allocator into FOLDER: a dependency, and the lines in the root file and in each test file.
inject() {
    local folder="$1" root_file="$2" test
    printf '\n[dependencies.pageheap]\npath = "%s"\n' "$root" >>"$folder/Cargo.toml"
    if [ "${root_file##*/}" = main.rs ]; then
        printf '\n%s\n#[cfg(test)]\n%s\n' "$line" "$proof" >>"$folder/$root_file"
    else
        printf '\n#[cfg(test)]\n%s\n#[cfg(test)]\n%s\n' "$line" "$proof" >>"$folder/$root_file"
    fi
    cargo metadata -q --no-deps --format-version 1 --manifest-path "$folder/Cargo.toml" |
        grep -o '"kind":\["test"\][^}]*"src_path":"[^"]*"' | sed 's/.*:"//; s/"$//' >"$folder.tests" || true
    while read -r test; do
        if grep -q '^#\[global_allocator\]' "$test"; then
            # The test has a counter in front of the system's allocator; put it in front of ours.
            sed -i 's/\bSystem\.\(alloc\|dealloc\|realloc\)/PAGEHEAP.\1/' "$test"
            printf '\n%s\n%s\n' "${line#*]}" "$proof" >>"$test"
        else
            printf '\n%s\n%s\n' "$line" "$proof" >>"$test"
        fi
    done <"$folder.tests"
}

# Prints the sums of all "test result" lines of the suite in FOLDER, as "passed failed proofs".
suite() {
    (cd "$1" && cargo test --no-fail-fast --tests 2>&1 || true) >"$1.log"
    awk '/^test result:/ { passed += $4; failed += $6 }
         /^test .*pageheap_is_the_allocator \.\.\. ok/ { proofs++ }
         END { print passed + 0, failed + 0, proofs + 0 }' "$1.log"
}

for name in "$@"; do
    grep -q "^$name " <<<"$programs" || { echo "no program is called $name"; exit 2; }
done
mkdir -p "$place"
wrong=0
printf '%-20s %10s %22s %22s\n' program version 'system: passed, failed' 'ours: passed, failed'
while read -r name version root_file; do
    [ -n "$name" ] || continue
    [ "$#" = 0 ] || [[ " $* " == *" $name "* ]] || continue
    fetch "$name" "$version" "$place/$name-system"
    fetch "$name" "$version" "$place/$name-ours"
    inject "$place/$name-ours" "$root_file"
    read -r passed failed _ <<<"$(suite "$place/$name-system")"
    read -r ours_passed ours_failed proofs <<<"$(suite "$place/$name-ours")"
    ours_passed=$((ours_passed - proofs))
    printf '%-20s %10s %14d, %6d %14d, %6d\n' "$name" "$version" "$passed" "$failed" "$ours_passed" "$ours_failed"
    if [ "$ours_passed" -lt "$passed" ] || [ "$ours_passed" = 0 ] || [ "$proofs" = 0 ]; then
        echo "$name: fewer tests pass on ours; see ${place#"$root"/}/$name-ours.log"
        wrong=1
    fi
done <<<"$programs"
exit "$wrong"
