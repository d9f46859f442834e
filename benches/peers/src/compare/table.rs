//! The results as text, as Markdown and as CSV.

use super::figures::{Cell, Row, geometric_mean};
use super::programs::OURS;
use std::fmt::Write as _;

/// Everything that was measured.
#[derive(Debug)]
pub struct Results {
    /// Names, in the order of the cells of a row.
    pub allocators: Vec<String>,
    /// What did not build, and why.
    pub missing: Vec<(String, String)>,
    pub rows: Vec<Row>,
}

impl Results {
    pub fn index(&self, allocator: &str) -> Option<usize> {
        self.allocators.iter().position(|name| name == allocator)
    }

    /// An allocator's figure in a row over the best of the others.
    pub fn ratio(&self, row: &Row, allocator: usize, figure: impl Fn(&Cell) -> Option<f64>) -> Option<f64> {
        let own = figure(row.cells.get(allocator)?)?;
        Some(own / row.best_other(allocator, figure)?.1)
    }

    /// The geometric mean of that over all rows.
    pub fn mean(&self, allocator: usize, figure: impl Fn(&Cell) -> Option<f64>) -> Option<f64> {
        geometric_mean(self.rows.iter().filter_map(|row| self.ratio(row, allocator, &figure)))
    }

    /// Ours over the better of the two mimallocs.
    fn to_mimalloc(&self, row: &Row) -> Option<f64> {
        let ours = row.cpu(self.index(OURS)?)?;
        let theirs = ["mimalloc2", "mimalloc3"]
            .into_iter()
            .filter_map(|name| row.cpu(self.index(name)?));
        theirs.min_by(f64::total_cmp).map(|theirs| ours / theirs)
    }

    /// Processor time an operation by allocator, ours against the others.
    pub fn text(&self) -> String {
        let mut text = format!("{:18}", "cpu ns/op");
        for name in &self.allocators {
            write!(text, "{name:>12}").expect("a string");
        }
        text.push_str("  ours/best (of)         ours/mimalloc\n");
        for row in &self.rows {
            write!(text, "{:18}", row.workload).expect("a string");
            for cell in &row.cells {
                text.push_str(&format!("{:>12}", figure(cell.cpu())));
            }
            text.push_str(&self.verdict(row));
            text.push('\n');
        }
        for (title, mean) in self.means() {
            write!(text, "{title:18}").expect("a string");
            mean.iter()
                .for_each(|mean| text.push_str(&format!("{:>12}", figure(*mean))));
            text.push('\n');
        }
        for (name, reason) in &self.missing {
            writeln!(text, "{name}: could not be built here: {reason}").expect("a string");
        }
        text
    }

    fn verdict(&self, row: &Row) -> String {
        let Some(ours) = self.index(OURS) else {
            return String::new();
        };
        let ratio = figure(self.ratio(row, ours, Cell::cpu));
        let best = row
            .best_other(ours, Cell::cpu)
            .map_or("-", |(best, _)| &self.allocators[best]);
        format!(
            "  {ratio:>6} {:16} {:>8}",
            format!("({best})"),
            figure(self.to_mimalloc(row))
        )
    }

    /// Over all workloads, each allocator over the best of the others: time and peak resident size.
    pub fn means(&self) -> [(&'static str, Vec<Option<f64>>); 2] {
        let all = |figure: fn(&Cell) -> Option<f64>| {
            (0..self.allocators.len())
                .map(|allocator| self.mean(allocator, figure))
                .collect()
        };
        [
            ("geomean cpu", all(Cell::cpu)),
            ("geomean peak", all(|cell| cell.median(|run| run.peak_kb))),
        ]
    }

    /// One line for each workload and allocator.
    pub fn csv(&self) -> String {
        let mut text = String::from(
            "group,workload,allocator,rounds,cpu_ns_per_op,spread,ops_per_s,minor_faults,peak_kb,final_kb,calls\n",
        );
        for row in &self.rows {
            for (name, cell) in self.allocators.iter().zip(&row.cells) {
                let wall = cell.median(|run| run.wall_ns);
                let calls = cell.calls.as_ref().map(|calls| calls.values().sum::<u64>());
                writeln!(
                    text,
                    "{},{},{name},{},{},{},{},{},{},{},{}",
                    row.group,
                    row.workload,
                    cell.runs.len(),
                    number(cell.cpu(), 3),
                    number(cell.spread(), 3),
                    number(wall.map(|wall| 1e9 / wall), 0),
                    number(cell.median(|run| run.faults), 0),
                    number(cell.median(|run| run.peak_kb), 0),
                    number(cell.median(|run| run.final_kb), 0),
                    calls.map_or(String::new(), |calls| calls.to_string()),
                )
                .expect("a string");
            }
        }
        text
    }
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or(String::new(), |value| format!("{value:.digits$}"))
}

/// About three digits.
pub fn figure(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value >= 1e6 => format!("{:.2}M", value / 1e6),
        Some(value) if value >= 1e4 => format!("{:.1}k", value / 1e3),
        Some(value) if value >= 100.0 => format!("{value:.0}"),
        Some(value) if value >= 10.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.2}"),
    }
}
