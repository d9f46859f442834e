//! Requests of many threads in one pool: messages of tag, length and value are built in it, and dropped in bulk.
//!
//! ```sh
//! cargo run --release --example request_pool
//! ```
//!
//! Four threads build the messages of a batch and pass them on as handles, which borrow nothing. The batch is sent
//! (added up), the pool is reset, and handles of the previous batch are recognised as stale. For comparison there is
//! the same with a `Vec` for each message.

use std::time::{Duration, Instant};

use pageheap::arena::{ArenaConfig, ArenaError, Handle, Pool};

const THREADS: usize = 4;
const REQUESTS: usize = 4_000;
const BATCHES: usize = 50;

/// The fields of a request: tag, and the length of its value.
fn fields(request: usize) -> impl Iterator<Item = (u8, usize)> {
    (0..4).map(move |field| (field as u8, (request * 31 + field * 97) % 400))
}

fn length(request: usize) -> usize {
    fields(request).map(|(_, len)| 3 + len).sum()
}

/// Writes a request's fields: tag, length in two bytes, value.
fn write(message: &mut [u8], request: usize) {
    let mut rest = message;
    for (tag, len) in fields(request) {
        let (field, behind) = rest.split_at_mut(3 + len);
        field[0] = tag;
        field[1..3].copy_from_slice(&(len as u16).to_le_bytes());
        field[3..].fill(request as u8);
        rest = behind;
    }
}

/// Reads a message. Returns the number of fields, and the sum of their lengths.
fn read(mut message: &[u8]) -> (usize, usize) {
    let (mut fields, mut bytes) = (0, 0);
    while let [_, low, high, rest @ ..] = message {
        let len = usize::from(u16::from_le_bytes([*low, *high]));
        (fields, bytes) = (fields + 1, bytes + len);
        message = &rest[len..];
    }
    (fields, bytes)
}

/// Each thread's share of a batch, built by `build`.
fn batch<M: Send>(build: impl Fn(usize, &mut Vec<u8>) -> M + Sync) -> Vec<M> {
    std::thread::scope(|scope| {
        let build = &build;
        let work = |thread| {
            move || {
                let mut scratch = Vec::new();
                let requests = (thread..REQUESTS).step_by(THREADS);
                requests.map(|request| build(request, &mut scratch)).collect::<Vec<M>>()
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(work(thread))).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().expect("no panic"))
            .collect()
    })
}

/// Builds a message in scratch memory, and copies it to its place in the pool.
fn pooled(pool: &Pool, request: usize, scratch: &mut Vec<u8>) -> Result<Handle<[u8]>, ArenaError> {
    scratch.resize(length(request), 0);
    write(scratch, request);
    pool.insert_slice(scratch)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut pool = Pool::with_config(ArenaConfig::new().limit(64 << 20).slab(1 << 20).prealloc(4 << 20))?;
    let (mut build, mut forget) = (Duration::ZERO, Duration::ZERO);
    let mut old: Option<Handle<[u8]>> = None;
    let expected: usize = (0..REQUESTS).map(|request| length(request) - 12).sum();
    for _ in 0..BATCHES {
        let begin = Instant::now();
        let messages = batch(|request, scratch| pooled(&pool, request, scratch));
        build += begin.elapsed();
        let mut sent = 0;
        for message in &messages {
            let (fields, bytes) = read(pool.get((*message)?)?);
            assert_eq!(fields, 4);
            sent += bytes;
        }
        assert_eq!(sent, expected);
        if let Some(old) = old {
            assert!(pool.get(old).is_err(), "a handle of the batch before is stale");
        }
        old = messages.first().and_then(|first| first.as_ref().ok().copied());
        let begin = Instant::now();
        pool.reset();
        forget += begin.elapsed();
    }
    let (mut build_vec, mut forget_vec) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..BATCHES {
        let begin = Instant::now();
        let messages = batch(|request, scratch| {
            scratch.resize(length(request), 0);
            write(scratch, request);
            scratch.clone()
        });
        build_vec += begin.elapsed();
        assert_eq!(messages.iter().map(|message| read(message).1).sum::<usize>(), expected);
        let begin = Instant::now();
        drop(messages);
        forget_vec += begin.elapsed();
    }
    let each = |time: Duration| time.as_nanos() as f64 / (BATCHES * REQUESTS) as f64;
    println!("{BATCHES} batches of {REQUESTS} messages by {THREADS} threads");
    println!(
        "  Pool   {:>7.1} ns to build, {:>7.3} ns to forget, a message",
        each(build),
        each(forget)
    );
    println!(
        "  Vec    {:>7.1} ns to build, {:>7.3} ns to forget, a message",
        each(build_vec),
        each(forget_vec)
    );
    println!("{}", pool.stats());
    Ok(())
}
