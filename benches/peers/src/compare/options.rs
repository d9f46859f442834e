//! The command line's options.

use super::programs::{ALLOCATORS, VARIANTS, Workload};
use std::path::PathBuf;
use std::time::Duration;

/// What `--help` prints.
pub const USAGE: &str = "\
compare [OPTION]...                 builds each allocator's program, runs the workloads by turns, prints the table
compare --idle SECONDS [OPTION]...  the idle test instead: free all memory, and be silent for so long
compare --latency [OPTION]...       the latency test instead: how long single calls take, as percentiles

  --allocators A,B    only these: pageheap, glibc, mimalloc2, mimalloc3, jemalloc, snmalloc, rpmalloc, rusty_alloc,
                      talc, tcmalloc, pageheap-no-thread
  --groups G,H        only these: pairs, random, bulk, growth, threads, handoff, programs, shapes, crowds, scaling,
                      sawtooth
  --workloads V,W     only these, or these too (target/peers/pageheap lists them)
  --rounds N          runs of each workload on each allocator (3)
  --patience SECONDS  the longest a run may take (60); ten times as long if it is counted
  --built             build nothing: use what was built before
  --calls             count system calls too (strace)
  --instructions      count instructions too (callgrind)
  --out DIR           write peers.md, peers.csv and a picture of each group there
";

#[derive(Debug)]
pub struct Options {
    pub allocators: Vec<String>,
    /// If both are empty, all of both.
    pub groups: Vec<String>,
    pub workloads: Vec<String>,
    pub rounds: usize,
    /// The longest a run may take. If one takes longer, or fails, its cell stays empty, and the terminal says so.
    pub patience: Duration,
    /// The programs exist: build none.
    pub built: bool,
    /// Count system calls too.
    pub calls: bool,
    /// Count instructions too.
    pub instructions: bool,
    /// Run the idle test instead, with so much silence.
    pub idle: Option<Duration>,
    /// Run the latency test instead.
    pub latency: bool,
    /// Where the results go, besides the terminal.
    pub out: Option<PathBuf>,
}

impl Options {
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            allocators: ALLOCATORS.iter().map(|(name, _)| (*name).to_owned()).collect(),
            groups: Vec::new(),
            workloads: Vec::new(),
            rounds: 3,
            patience: Duration::from_secs(60),
            built: false,
            calls: false,
            instructions: false,
            idle: None,
            latency: false,
            out: None,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            let list = |text: String| text.split(',').map(str::to_owned).collect();
            match arg.as_str() {
                "--allocators" => options.allocators = list(value()?),
                "--groups" => options.groups = list(value()?),
                "--workloads" => options.workloads = list(value()?),
                "--rounds" => options.rounds = value()?.parse().map_err(|_| "--rounds needs a number")?,
                "--patience" => options.patience = seconds(&value()?).ok_or("--patience needs seconds")?,
                "--idle" => options.idle = Some(seconds(&value()?).ok_or("--idle needs seconds")?),
                "--latency" => options.latency = true,
                "--built" => options.built = true,
                "--calls" => options.calls = true,
                "--instructions" => options.instructions = true,
                "--out" => options.out = Some(value()?.into()),
                other => return Err(format!("no option is called {other} (--help lists them)")),
            }
        }
        let known = |name: &&String| {
            let variants = VARIANTS.iter().map(|(known, _)| *known);
            ALLOCATORS
                .iter()
                .map(|(known, _)| *known)
                .chain(variants)
                .any(|known| known == name.as_str())
        };
        let unknown = options.allocators.iter().find(|name| !known(name));
        unknown.map_or(Ok(()), |name| {
            Err(format!("no allocator is called {name} (--help lists them)"))
        })?;
        if options.rounds == 0 {
            return Err("--rounds needs a number above zero".to_owned());
        }
        Ok(options)
    }

    /// Refuses groups and workloads that are none: a word misspelt would leave rows out of the means.
    pub fn check_names(&self, known: &[Workload]) -> Result<(), String> {
        for name in &self.groups {
            if known.iter().all(|workload| workload.group != *name) {
                return Err(format!("no group is called {name} (--help lists them)"));
            }
        }
        for name in &self.workloads {
            if known.iter().all(|workload| workload.name != *name) {
                return Err(format!(
                    "no workload is called {name} (target/peers/pageheap lists them)"
                ));
            }
        }
        Ok(())
    }

    pub fn wants(&self, group: &str, workload: &str) -> bool {
        let none = self.groups.is_empty() && self.workloads.is_empty();
        none || self.groups.iter().any(|name| name == group) || self.workloads.iter().any(|name| name == workload)
    }
}

fn seconds(text: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(text.parse().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &str) -> Result<Options, String> {
        Options::parse(words.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn options_are_read_or_refused() {
        let options = parse("--groups a,b --rounds 7 --built --allocators glibc,talc --patience 2.5").unwrap();
        assert_eq!(options.patience, Duration::from_millis(2500));
        assert!(options.wants("b", "x") && !options.wants("c", "x") && options.built && options.rounds == 7);
        assert_eq!(options.allocators, ["glibc", "talc"]);
        assert!(parse("").unwrap().wants("any", "any"));
        let allocators = ALLOCATORS.iter().map(|(name, _)| *name);
        for name in allocators.chain(VARIANTS.iter().map(|(name, _)| *name)) {
            assert!(USAGE.contains(name), "{name} is not in the help");
        }
        let known = [("a", "x"), ("b", "y")].map(|(group, name)| Workload {
            group: group.to_owned(),
            name: name.to_owned(),
            ops: 1,
        });
        assert!(options.check_names(&known).is_ok());
        for wrong in ["--groups a,c", "--groups x", "--workloads x,z", "--workloads a"] {
            assert!(parse(wrong).unwrap().check_names(&known).is_err(), "{wrong}");
        }
        for wrong in
            "--rounds|--rounds x|--rounds 0|--idle -1|--idle nan|--patience -1|--what|--allocators nobody".split('|')
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
