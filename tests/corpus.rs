//! Replays every kept fuzz input on stable, through the functions that the fuzz targets call.

#[path = "../fuzz/src/drive.rs"]
mod drive;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

/// Held by a test that calls drivers: one of them checks a heap that all of its calls share, which nobody may use
/// meanwhile.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of inputs; fails with the names of those that do not pass.
fn replay(target: &str, driver: drive::Driver) -> usize {
    let entries = fs::read_dir(corpus(target)).expect("a target has a folder of inputs");
    let inputs: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be read").path()).collect();
    let fails = |path: &&PathBuf| {
        let input = fs::read(path).expect("an input can be read");
        std::panic::catch_unwind(|| driver(&input)).is_err()
    };
    let failed: Vec<&PathBuf> = inputs.iter().filter(fails).collect();
    assert!(
        failed.is_empty(),
        "{} inputs do not pass, among them {:?}",
        failed.len(),
        failed[0]
    );
    inputs.len()
}

#[test]
fn kept_inputs_pass() {
    if !corpus("").exists() {
        // A packaged crate has no corpus.
        return;
    }
    let _turn = turn();
    let threads = drive::DRIVERS.iter().map(|&(target, driver, _)| {
        std::thread::spawn(move || assert!(replay(target, driver) > 0, "no inputs for {target}"))
    });
    // Unlike a scope, this waits for what a thread does at its end, such as giving back what it keeps.
    Vec::from_iter(threads)
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_folder_for_each_driver_and_no_other() {
    let Ok(entries) = fs::read_dir(corpus("")) else {
        return;
    };
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut folders: Vec<String> = entries.map(|entry| name(entry.expect("it can be read"))).collect();
    let mut drivers: Vec<String> = drive::DRIVERS.iter().map(|(name, ..)| (*name).to_owned()).collect();
    folders.sort();
    drivers.sort();
    assert_eq!(folders, drivers);
}

/// At least eight inputs of each driver have more than a third of the length that they may have: for a heap 20
/// steps.
///
/// Short ones are not enough, whatever they cover. Of 400 random inputs of two steps none finds a `Cache::try_free`
/// that does nothing, and of eight steps none finds a `grow_in_place` that refuses pages it has taken; of 16 steps 47
/// and 3 do, and of 64 steps 215 and 40.
#[test]
fn some_kept_inputs_are_long() {
    if !corpus("").exists() {
        return;
    }
    for &(target, _, most) in drive::DRIVERS {
        let entries = fs::read_dir(corpus(target)).expect("a target has a folder of inputs");
        let lengths = entries.map(|entry| {
            entry
                .expect("it can be read")
                .metadata()
                .expect("it has a length")
                .len()
        });
        let long = lengths.filter(|&len| len > most as u64 / 3).count();
        assert!(
            long >= 8,
            "{long} inputs for {target} have more than a third of {most} bytes"
        );
    }
}

/// Every driver accepts every input: an empty one, and noise of many lengths.
#[test]
fn drivers_take_anything() {
    let _turn = turn();
    std::thread::spawn(give_noise).join().unwrap();
}

fn give_noise() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 32) as u8
    };
    for len in (0..32).chain([50, 100, 200, 500]) {
        let input: Vec<u8> = (0..len).map(|_| noise()).collect();
        drive::DRIVERS.iter().for_each(|(_, driver, _)| driver(&input));
    }
}
