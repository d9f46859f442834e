//! Collects what the programs print: for each workload and allocator a figure per round, and their median.

use super::calls::Calls;
use super::programs::Workload;
use std::collections::BTreeMap;
use std::process::Output;

/// The figures of one run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Operations: before what is measured, and measured.
    pub warm_up: f64,
    pub ops: f64,
    /// Processor time, user and system, in nanoseconds per operation: what counts on a shared machine.
    pub cpu_ns: f64,
    pub wall_ns: f64,
    pub faults: f64,
    pub peak_kb: f64,
    pub final_kb: f64,
}

impl Run {
    /// What a program printed, if it ended well.
    pub fn of(output: &Output) -> Option<Self> {
        Self::parse(&String::from_utf8_lossy(&output.stdout)).filter(|_| output.status.success())
    }

    /// Parses a line of `name=value`.
    pub fn parse(line: &str) -> Option<Self> {
        let pairs: BTreeMap<&str, &str> = line
            .split_whitespace()
            .filter_map(|word| word.split_once('='))
            .collect();
        let figure = |name| pairs.get(name)?.parse::<f64>().ok();
        let ops = figure("ops")?;
        Some(Self {
            warm_up: figure("warm_up")?,
            ops,
            cpu_ns: (figure("user_ns")? + figure("system_ns")?) / ops,
            wall_ns: figure("wall_ns")? / ops,
            faults: figure("minor_faults")?,
            peak_kb: figure("peak_kb")?,
            final_kb: figure("final_kb")?,
        })
    }
}

/// All runs of one workload on one allocator; none if one of them failed.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    pub runs: Vec<Run>,
    /// `None` if they were not counted.
    pub calls: Option<Calls>,
    /// Per operation; `None` if they were not counted.
    pub instructions: Option<f64>,
}

impl Cell {
    pub fn median(&self, figure: impl Fn(&Run) -> f64) -> Option<f64> {
        median(self.runs.iter().map(figure).collect())
    }

    pub fn cpu(&self) -> Option<f64> {
        self.median(|run| run.cpu_ns)
    }

    /// Of the round in which it took least.
    pub fn least_cpu(&self) -> Option<f64> {
        self.runs.iter().map(|run| run.cpu_ns).min_by(f64::total_cmp)
    }

    /// Half of the distance from the least to the most, as a share of the median.
    pub fn spread(&self) -> Option<f64> {
        let values = || self.runs.iter().map(|run| run.cpu_ns);
        let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
        self.cpu().map(|median| (most - least) / 2.0 / median)
    }
}

/// A row of the table.
#[derive(Debug)]
pub struct Row {
    pub workload: Workload,
    /// By allocator, in the order of the table.
    pub cells: Vec<Cell>,
}

impl Row {
    /// The best of the allocators other than `allocator`: which, and its figure.
    pub fn best_other(&self, allocator: usize, figure: impl Fn(&Cell) -> Option<f64>) -> Option<(usize, f64)> {
        let others = self.cells.iter().enumerate().filter(|(other, _)| *other != allocator);
        let figures = others.filter_map(|(other, cell)| Some((other, figure(cell)?)));
        figures.min_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// The median; `None` without values.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        len if len % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// The geometric mean; `None` without values.
pub fn geometric_mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value.ln(), count + 1.0));
    (count > 0.0).then(|| (sum / count).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read() {
        let line =
            "allocator=x warm_up=2 ops=10 wall_ns=300 user_ns=150 system_ns=50 minor_faults=3 peak_kb=7 final_kb=5";
        let run = Run::parse(line).unwrap();
        assert_eq!((run.warm_up, run.ops), (2.0, 10.0));
        assert_eq!(
            (run.cpu_ns, run.wall_ns, run.faults, run.peak_kb, run.final_kb),
            (20.0, 30.0, 3.0, 7.0, 5.0)
        );
        assert!(Run::parse("ops=10").is_none());
    }

    #[test]
    fn medians_and_means() {
        let run = |cpu_ns| Run {
            cpu_ns,
            ..Run::default()
        };
        let mut cell = Cell {
            runs: vec![run(9.0), run(1.0), run(2.0)],
            ..Cell::default()
        };
        assert_eq!((cell.cpu(), cell.least_cpu()), (Some(2.0), Some(1.0)));
        assert_eq!(cell.spread(), Some(2.0));
        cell.runs.push(run(4.0));
        assert_eq!(cell.cpu(), Some(3.0));
        assert_eq!((Cell::default().cpu(), Cell::default().least_cpu()), (None, None));
        let mean = geometric_mean([1.0, 4.0].into_iter()).unwrap();
        assert!((mean - 2.0).abs() < 1e-12);
    }
}
