//! Counts the words of source files with many threads on [`GlobalHeap`], shows what the heap did, and draws it.
//!
//! ```text
//!   readers ──(path, text)──▶ counters ──HashMap──▶ mergers ──HashMap──▶ main
//!     read files               one map a file         one map each        one map
//! ```
//!
//! Every text and every map crosses threads: one thread allocates it and another frees it, as in real programs.
//! Without arguments it reads the source files under the current directory, and those of the crates that cargo has
//! downloaded.
//!
//! ```text
//! cargo run --release --example census -- [--threads N] [--top N] [--svg FILE] [PATH...]
//! ```

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use pageheap::{GlobalHeap, Picture};

#[global_allocator]
static HEAP: GlobalHeap = GlobalHeap::new();

const HELP: &str = "\
Counts the words of source files on pageheap's GlobalHeap, and shows what the heap did.

usage: census [--threads N] [--top N] [--svg FILE] [PATH...]

  PATH         files and directories to read; without any, the current directory
               and the sources of the crates that cargo has downloaded
  --threads N  threads that count; as many merge and read [default: one for each CPU]
  --top N      words to show [default: 20]
  --svg FILE   draw the heap's map as a picture, too
  --help       this text";

/// The endings of source files' names.
const EXTENSIONS: &[&str] = &[
    "c", "cc", "cpp", "css", "go", "h", "hpp", "html", "java", "js", "json", "md", "py", "rb", "rs", "S", "sh", "toml",
    "ts", "txt", "yaml", "yml",
];

/// Directories of build outputs.
const SKIPPED: &[&str] = &["target", "node_modules", ".git"];

/// Files read ahead of the counters.
const READ_AHEAD: usize = 64;

/// The map has this many characters in a row, and about this many rows at most.
const COLUMNS: usize = 72;
const ROWS: usize = 24;

/// How often each word occurs.
type Words = HashMap<String, u64>;

struct Options {
    paths: Vec<PathBuf>,
    threads: usize,
    top: usize,
    svg: Option<PathBuf>,
}

/// Why a request cannot be carried out.
struct Refusal(String);

#[derive(Default)]
struct Census {
    words: Words,
    files: u64,
    bytes: u64,
    unreadable: u64,
    lossy: u64,
}

/// A file read.
struct Text {
    text: String,
    bytes: u64,
    lossy: bool,
}

/// A file counted.
struct Count {
    words: Words,
    bytes: u64,
    lossy: bool,
}

fn main() -> ExitCode {
    match Options::parse(std::env::args_os().skip(1))
        .and_then(|options| options.map_or(Ok(()), |options| run(&options)))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(Refusal(why)) => {
            eprintln!("census: {why}");
            ExitCode::from(2)
        }
    }
}

impl Options {
    /// `None` if only help was requested, and has been printed.
    fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Option<Self>, Refusal> {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let mut options = Self {
            paths: Vec::new(),
            threads: cpus,
            top: 20,
            svg: None,
        };
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            match argument.to_str() {
                Some("--help" | "-h") => {
                    println!("{HELP}");
                    return Ok(None);
                }
                Some("--threads") => options.threads = number("--threads", arguments.next())?.clamp(1, 256),
                Some("--top") => options.top = number("--top", arguments.next())?,
                Some("--svg") => {
                    let file = arguments.next();
                    options.svg = Some(file.ok_or_else(|| Refusal("--svg wants a file".into()))?.into());
                }
                Some(unknown) if unknown.starts_with("--") => {
                    return Err(Refusal(format!("unknown option {unknown}; try --help")));
                }
                _ => options.paths.push(argument.into()),
            }
        }
        if let Some(missing) = options.paths.iter().find(|path| !path.exists()) {
            return Err(Refusal(format!("{}: no such file or directory", missing.display())));
        }
        if options.paths.is_empty() {
            options.paths = at_hand();
        }
        Ok(Some(options))
    }
}

fn number(option: &str, value: Option<OsString>) -> Result<usize, Refusal> {
    let value = value.ok_or_else(|| Refusal(format!("{option} wants a number")))?;
    let number = value.to_str().and_then(|value| value.parse().ok());
    number.ok_or_else(|| Refusal(format!("{option} wants a number, not {}", value.display())))
}

/// The current directory, and where cargo unpacks crates.
fn at_hand() -> Vec<PathBuf> {
    let home = |variable: &str| std::env::var_os(variable).map(PathBuf::from);
    let cargo = home("CARGO_HOME").or_else(|| home("HOME").map(|home| home.join(".cargo")));
    let sources = cargo.map(|cargo| cargo.join("registry").join("src"));
    let mut paths = vec![PathBuf::from(".")];
    paths.extend(sources.filter(|sources| sources.is_dir()));
    paths
}

fn run(options: &Options) -> Result<(), Refusal> {
    let began = Instant::now();
    let mut files = Vec::new();
    for path in &options.paths {
        // A file named on the command line is read whatever its ending.
        if path.is_file() {
            files.push(path.clone());
        } else {
            collect(path, &mut files);
        }
    }
    let census = take(files, options.threads);
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{}",
        Report {
            census: &census,
            options,
            seconds
        }
    );
    draw(options.svg.as_deref())
}

/// Draws the heap as it is now: as text, and as an SVG picture if requested.
fn draw(svg: Option<&Path>) -> Result<(), Refusal> {
    let pages = HEAP.stats().pages;
    let picture = Picture::new(pages.grown.0.div_ceil(COLUMNS * ROWS), COLUMNS);
    let (cell, mut text) = (picture.pages * pages.page_bytes, String::new());
    picture.text(HEAP.map(), &mut text).expect("a string takes all");
    println!(
        "the map      {} KiB a sign: # spans, = runs, c cached, . free, blank released, m tables\n{text}",
        cell >> 10
    );
    let Some(path) = svg else { return Ok(()) };
    // The text is in the heap too by now, so the picture shows another moment.
    let (mut drawn, pages) = (String::with_capacity(1 << 16), HEAP.stats().pages);
    let mib = |pages: usize, bytes: usize| (pages * bytes) >> 20;
    let title = format!(
        "census: {} MiB in use of {}",
        mib(pages.in_use.0, pages.page_bytes),
        mib(pages.grown.0, pages.page_bytes)
    );
    let map = HEAP.map();
    picture
        .svg(&title, pages.grown.0, map, &mut drawn)
        .expect("a string takes all");
    std::fs::write(path, drawn).map_err(|error| Refusal(format!("{}: {error}", path.display())))
}

/// The source files under a directory. Directories that cannot be listed are skipped.
fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = directory.read_dir() else { return };
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && SKIPPED.iter().any(|&skipped| name == skipped) => {}
            Ok(kind) if kind.is_dir() => collect(&path, files),
            Ok(kind) if kind.is_file() => {
                let extension = path.extension().and_then(|extension| extension.to_str());
                if extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) {
                    files.push(path);
                }
            }
            _ => {}
        }
    }
}

/// Reads, counts and merges, each on threads of its own.
fn take(files: Vec<PathBuf>, threads: usize) -> Census {
    let files = Mutex::new(files.into_iter());
    let (texts, counted) = sync_channel::<Option<Text>>(READ_AHEAD);
    let (done, merged) = channel::<Census>();
    let counted = Mutex::new(counted);
    let (files, counted) = (&files, &counted);
    thread::scope(|scope| {
        for _ in 0..threads {
            let texts = texts.clone();
            scope.spawn(move || read(files, &texts));
            let (counts, to_merge) = sync_channel::<Option<Count>>(READ_AHEAD);
            scope.spawn(move || count(counted, &counts));
            let done = done.clone();
            scope.spawn(move || merge(&to_merge, &done));
        }
        drop((texts, done));
        merged.into_iter().fold(Census::default(), Census::join)
    })
}

/// Takes files one by one. A file that cannot be read is passed on as `None`.
fn read(files: &Mutex<impl Iterator<Item = PathBuf>>, texts: &SyncSender<Option<Text>>) {
    let next = || files.lock().unwrap_or_else(PoisonError::into_inner).next();
    while let Some(path) = next() {
        let text = std::fs::read(path).ok().map(|bytes| {
            let length = bytes.len() as u64;
            match String::from_utf8(bytes) {
                Ok(text) => Text {
                    text,
                    bytes: length,
                    lossy: false,
                },
                Err(error) => Text {
                    text: String::from_utf8_lossy(error.as_bytes()).into_owned(),
                    bytes: length,
                    lossy: true,
                },
            }
        });
        if texts.send(text).is_err() {
            break;
        }
    }
}

fn count(texts: &Mutex<Receiver<Option<Text>>>, counts: &SyncSender<Option<Count>>) {
    let next = || texts.lock().unwrap_or_else(PoisonError::into_inner).recv();
    while let Ok(text) = next() {
        let count = text.map(|text| {
            let mut words = Words::new();
            for word in words_of(&text.text) {
                *words.entry(word.to_owned()).or_default() += 1;
            }
            Count {
                words,
                bytes: text.bytes,
                lossy: text.lossy,
            }
        });
        if counts.send(count).is_err() {
            break;
        }
    }
}

fn merge(counts: &Receiver<Option<Count>>, done: &Sender<Census>) {
    let mut census = Census::default();
    for count in counts {
        match count {
            Some(count) => census.add(count),
            None => census.unreadable += 1,
        }
    }
    // The send fails only if the main thread is gone, and then nobody needs the result.
    let _ = done.send(census);
}

/// Identifiers: a letter or an underscore, then letters, digits and underscores.
fn words_of(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| word.starts_with(|c: char| c.is_alphabetic() || c == '_'))
}

impl Census {
    fn add(&mut self, count: Count) {
        self.files += 1;
        self.bytes += count.bytes;
        self.lossy += u64::from(count.lossy);
        self.add_words(count.words);
    }

    fn add_words(&mut self, words: Words) {
        for (word, times) in words {
            *self.words.entry(word).or_default() += times;
        }
    }

    fn join(mut self, mut other: Self) -> Self {
        if self.words.len() < other.words.len() {
            std::mem::swap(&mut self, &mut other);
        }
        self.add_words(other.words);
        self.files += other.files;
        self.bytes += other.bytes;
        self.unreadable += other.unreadable;
        self.lossy += other.lossy;
        self
    }

    /// The `count` most frequent words; equally frequent ones in alphabetical order.
    fn top(&self, count: usize) -> Vec<(&str, u64)> {
        let mut words: Vec<_> = self.words.iter().map(|(word, &times)| (word.as_str(), times)).collect();
        words.sort_unstable_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        words.truncate(count);
        words
    }
}

struct Report<'a> {
    census: &'a Census,
    options: &'a Options,
    seconds: f64,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (census, seconds) = (self.census, self.seconds);
        let megabytes = census.bytes as f64 / 1e6;
        writeln!(f, "files        {:>12}", grouped(census.files))?;
        writeln!(f, "bytes        {:>12}", grouped(census.bytes))?;
        writeln!(f, "words        {:>12}", grouped(census.words.values().sum()))?;
        writeln!(f, "distinct     {:>12}", grouped(census.words.len() as u64))?;
        if census.unreadable + census.lossy > 0 {
            let (unreadable, lossy) = (grouped(census.unreadable), grouped(census.lossy));
            writeln!(
                f,
                "skipped      {unreadable:>12} unreadable; {lossy} not UTF-8, read with replacements"
            )?;
        }
        let threads = self.options.threads;
        let speed = megabytes / seconds.max(1e-9);
        writeln!(
            f,
            "time         {seconds:>11.3}s   {speed:.1} MB/s, {threads} × 3 threads\n"
        )?;
        for (word, times) in census.top(self.options.top) {
            writeln!(f, "{:>12}  {word}", grouped(times))?;
        }
        writeln!(f, "\nthe heap")?;
        let text = HEAP.stats().to_string();
        text.lines().try_for_each(|line| writeln!(f, "  {line}"))
    }
}

/// A number with a comma after every three digits.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
