//! The idle test from outside: resident size over time of a process that filled memory, freed it and is silent.
//!
//! The size is read from `/proc/PID/statm` every 20 ms, so the process itself does nothing at all. When it ends, it
//! reports the processor time that its allocator spent meanwhile (in a thread of its own, if it has one).

use super::chart;
use super::programs::Program;
use super::table::figure;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{fs, thread};

/// The scenarios, and their descriptions in charts.
pub const SCENARIOS: &[(&str, &str)] = &[
    ("json", "a JSON tree of 480 MB, parsed and dropped"),
    ("syn", "syntax trees of two threads, freed by a third"),
    (
        "mixed-1t",
        "256 MiB of small, medium and large blocks, freed at random by one thread",
    ),
    (
        "mixed-4t",
        "256 MiB of small, medium and large blocks, freed at random by four threads",
    ),
    ("asleep", "a thread asleep with full caches"),
    (
        "thinned",
        "128 MiB in blocks of 1 to 32 KiB, of which one in eight stays",
    ),
];

/// The measurements of one process.
#[derive(Clone, Debug)]
pub struct Track {
    /// Seconds since everything was freed (negative before that), and resident megabytes (10^6 bytes).
    pub points: Vec<(f64, f64)>,
    /// Processor milliseconds during the silence.
    pub cpu_ms: f64,
}

impl Track {
    fn at(&self, seconds: f64) -> f64 {
        let later = self.points.iter().find(|point| point.0 >= seconds);
        later.or(self.points.last()).map_or(0.0, |point| point.1)
    }

    fn peak(&self) -> f64 {
        self.points.iter().fold(0.0, |peak, point| point.1.max(peak))
    }
}

fn resident_mb(pid: u32) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: f64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4096.0 / 1e6)
}

/// Runs one scenario on one allocator. `None` if it fails, or takes much longer than the silence.
pub fn track(program: &Program, scenario: &str, silence: Duration, patience: Duration) -> Option<Track> {
    let (silence, last) = (silence.as_secs_f64(), Instant::now() + silence + patience);
    let mut command = program.command();
    command
        .args(["idle", scenario, &silence.to_string()])
        .stdout(Stdio::piped());
    let mut child = command.spawn().expect("a program that was built can run");
    let output = BufReader::new(child.stdout.take().expect("it is piped"));
    let (sender, receiver) = mpsc::channel();
    let reader = thread::spawn(move || {
        let lines = output.lines().map_while(Result::ok);
        lines.for_each(|line| sender.send((Instant::now(), line)).unwrap_or_default());
    });
    let mut seen: Vec<(Instant, f64)> = Vec::new();
    while child.try_wait().ok()?.is_none() {
        if Instant::now() > last {
            child.kill().and_then(|()| child.wait()).ok()?;
            return None;
        }
        seen.extend(
            resident_mb(child.id())
                .map(|size| (Instant::now(), size))
                .filter(|(_, size)| *size > 0.0),
        );
        thread::sleep(Duration::from_millis(20));
    }
    reader.join().ok()?;
    let said: Vec<(Instant, String)> = receiver.into_iter().collect();
    let when = |word| said.iter().find(|(_, line)| line == word).map(|(at, _)| *at);
    let (freed, end) = (when("freed")?, when("end")?);
    let seconds = |at: Instant| {
        let before = freed.saturating_duration_since(at).as_secs_f64();
        at.saturating_duration_since(freed).as_secs_f64() - before
    };
    let cpu = said
        .iter()
        .find_map(|(_, line)| line.strip_prefix("cpu_ns=")?.parse::<f64>().ok())?;
    Some(Track {
        points: seen
            .into_iter()
            .filter(|(at, _)| *at <= end)
            .map(|(at, size)| (seconds(at), size))
            // The end mark may be read late: anything beyond the silence is the end of the process.
            .filter(|(at, _)| *at <= silence)
            .collect(),
        cpu_ms: cpu / 1e6,
    })
}

/// One scenario on all allocators.
#[derive(Debug)]
pub struct Scene {
    pub scenario: &'static str,
    pub about: &'static str,
    /// `None`: it failed.
    pub tracks: Vec<Option<Track>>,
}

pub fn scenes(programs: &[Program], silence: Duration, patience: Duration) -> Vec<Scene> {
    let scene = |&(scenario, about)| {
        let tracks = programs.iter().map(|program| {
            eprint!("\ridle {scenario}: {:16}", program.allocator);
            let track = track(program, scenario, silence, patience);
            if track.is_none() {
                eprintln!("\n{} failed", program.allocator);
            }
            track
        });
        Scene {
            scenario,
            about,
            tracks: tracks.collect(),
        }
    };
    let scenes = SCENARIOS.iter().map(scene).collect();
    eprintln!();
    scenes
}

/// Megabytes at the peak and after some times of silence, and the cost of the silence.
pub fn text(names: &[String], scenes: &[Scene]) -> String {
    let mut text = String::new();
    for Scene {
        scenario,
        about,
        tracks,
    } in scenes
    {
        writeln!(text, "{scenario}: {about}").expect("a string");
        writeln!(
            text,
            "{:14}{:>10}{:>10}{:>10}{:>10}{:>10}{:>12}",
            "MB", "peak", "freed", "0.5 s", "2 s", "end", "cpu ms"
        )
        .expect("a string");
        for (name, track) in names.iter().zip(tracks) {
            let Some(track) = track else {
                writeln!(text, "{name:14}    failed").expect("a string");
                continue;
            };
            write!(text, "{name:14}").expect("a string");
            for size in [
                track.peak(),
                track.at(0.0),
                track.at(0.5),
                track.at(2.0),
                track.at(f64::INFINITY),
            ] {
                write!(text, "{size:>10.1}").expect("a string");
            }
            writeln!(text, "{:>12}", figure(Some(track.cpu_ms))).expect("a string");
        }
    }
    text
}

pub fn csv(names: &[String], scenes: &[Scene]) -> String {
    let mut text = String::from("scenario,allocator,seconds_since_freed,resident_mb\n");
    for scene in scenes {
        for (name, track) in names.iter().zip(&scene.tracks) {
            for (at, size) in track.iter().flat_map(|track| thinned(&track.points)) {
                writeln!(text, "{},{name},{at:.2},{size:.2}", scene.scenario).expect("a string");
            }
        }
    }
    text
}

/// Drops points that add nothing: those within half a second and a hundredth of the last one kept. Where the size
/// changes, the point before stays too, so that a step stays a step.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut kept: Vec<(f64, f64)> = Vec::new();
    for (index, point) in points.iter().enumerate() {
        let changed = kept.last().is_none_or(|last| (point.1 - last.1).abs() > last.1 / 100.0);
        if changed && index > 0 && kept.last() != Some(&points[index - 1]) {
            kept.push(points[index - 1]);
        }
        if changed || kept.last().is_none_or(|last| point.0 - last.0 > 0.5) || index + 1 == points.len() {
            kept.push(*point);
        }
    }
    kept
}

pub fn svg(names: &[String], scene: &Scene) -> String {
    // Includes the last second before, which led to it.
    let recent = |track: &Track| {
        thinned(&track.points)
            .into_iter()
            .filter(|point| point.0 > -1.0)
            .collect()
    };
    let lines = scene
        .tracks
        .iter()
        .map(|track| track.as_ref().map_or(Vec::new(), recent));
    let lines: Vec<Vec<(f64, f64)>> = lines.collect();
    let title = format!("Resident size after {}", scene.about);
    chart::lines(
        &title,
        "Freed at 0 s; from then on no call into the allocator.",
        names,
        &lines,
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_step_stays_a_step() {
        let points: Vec<(f64, f64)> = (0..100)
            .map(|at| (f64::from(at) / 100.0, if at < 50 { 10.0 } else { 20.0 }))
            .collect();
        let thinned = super::thinned(&points);
        assert_eq!(thinned, [(0.0, 10.0), (0.49, 10.0), (0.5, 20.0), (0.99, 20.0)]);
    }
}
