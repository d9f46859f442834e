//! The results as tables (for a terminal and in Markdown), as CSV, and as charts.

use super::chart;
use super::figures::{Cell, Row, geometric_mean};
use super::programs::OURS;
use std::fmt::Write as _;

/// Everything that was measured.
#[derive(Debug)]
pub struct Results {
    /// Names, in the order of the cells of a row.
    pub allocators: Vec<String>,
    /// Programs that did not build, and why.
    pub missing: Vec<(String, String)>,
    pub rows: Vec<Row>,
    /// How far apart the processors were, in words.
    pub distance: String,
}

/// Something that is measured; less is better for all of them.
#[derive(Clone, Copy, Debug)]
pub struct Measure {
    pub title: &'static str,
    pub of: fn(&Cell) -> Option<f64>,
}

/// The measure of the verdict.
pub const TIME: Measure = Measure {
    title: "cpu ns/op",
    of: Cell::cpu,
};
/// The same, for the round in which it took least. On a machine that runs at two speeds because of its neighbours, the
/// median of a few rounds is one of the two by chance.
pub const LEAST: Measure = Measure {
    title: "least cpu ns/op",
    of: Cell::least_cpu,
};
pub const INSTRUCTIONS: Measure = Measure {
    title: "instructions/op",
    of: |cell| cell.instructions,
};

/// All of them; the first is also charted.
const MEASURES: [Measure; 8] = [
    TIME,
    LEAST,
    INSTRUCTIONS,
    Measure {
        title: "wall ns/op",
        of: |cell| cell.median(|run| run.wall_ns),
    },
    Measure {
        title: "peak MB",
        of: |cell| cell.median(|run| run.peak_kb * 1.024e-3),
    },
    Measure {
        title: "final MB",
        of: |cell| cell.median(|run| run.final_kb * 1.024e-3),
    },
    Measure {
        title: "minor faults",
        of: |cell| cell.median(|run| run.faults),
    },
    Measure {
        title: "calls/1000 ops",
        of: |cell| Some(cell.calls.as_ref()?.values().fold(0.0, |sum, calls| sum + calls)),
    },
];

/// Cells of text; the first line and the first column are names.
type Grid = Vec<Vec<String>>;

impl Results {
    fn index(&self, allocator: &str) -> Option<usize> {
        self.allocators.iter().position(|name| name == allocator)
    }

    /// An allocator's figure in a row over the best of the others.
    fn ratio(&self, row: &Row, allocator: usize, measure: Measure) -> Option<f64> {
        let own = (measure.of)(row.cells.get(allocator)?)?;
        known(own / row.best_other(allocator, measure.of)?.1)
    }

    /// Ours over the better of the two mimallocs.
    fn to_mimalloc(&self, row: &Row, measure: Measure) -> Option<f64> {
        let figure = |name| (measure.of)(row.cells.get(self.index(name)?)?);
        let theirs = ["mimalloc2", "mimalloc3"].into_iter().filter_map(figure);
        known(figure(OURS)? / theirs.min_by(f64::total_cmp)?)
    }

    /// A line for each workload, and the geometric means of each allocator over the best of the others.
    fn grid(&self, measure: Measure) -> Grid {
        let ours = self.index(OURS);
        let mut head = vec![measure.title.to_owned()];
        head.extend(self.allocators.iter().cloned());
        head.extend(["ours/best", "best other", "ours/mimalloc", "spread"].map(str::to_owned));
        let mut grid = vec![head];
        for row in &self.rows {
            let mut line = vec![row.workload.name.clone()];
            line.extend(row.cells.iter().map(|cell| figure((measure.of)(cell))));
            let best = ours.and_then(|ours| row.best_other(ours, measure.of));
            line.push(figure(ours.and_then(|ours| self.ratio(row, ours, measure))));
            line.push(best.map_or("-".to_owned(), |(best, _)| self.allocators[best].clone()));
            line.push(figure(self.to_mimalloc(row, measure)));
            let spread = ours.and_then(|ours| row.cells[ours].spread());
            let spread = spread.filter(|_| measure.title == TIME.title);
            line.push(spread.map_or("-".to_owned(), |spread| format!("{:.0} %", 100.0 * spread)));
            grid.push(line);
        }
        let mut last = vec!["geometric mean".to_owned()];
        last.extend((0..self.allocators.len()).map(|allocator| self.mean(allocator, measure)));
        last.extend(["", "", "", ""].map(str::to_owned));
        grid.push(last);
        grid
    }

    /// The geometric mean over the best of the others; if rows are left out, in which one of the two is missing or 0,
    /// with the number of those that are in it.
    fn mean(&self, allocator: usize, measure: Measure) -> String {
        let ratios = || self.rows.iter().filter_map(|row| self.ratio(row, allocator, measure));
        let mean = figure(geometric_mean(ratios()));
        match ratios().count() {
            0 => mean,
            count if count == self.rows.len() => mean,
            count => format!("{mean} ({count} rows)"),
        }
    }

    /// A table for a terminal.
    pub fn text(&self, measure: Measure) -> String {
        let grid = self.grid(measure);
        let width = |column: usize| grid.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..grid[0].len()).map(width).collect();
        let mut text = String::new();
        for line in &grid {
            for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
                match column {
                    0 => write!(text, "{cell:width$}"),
                    _ => write!(text, "  {cell:>width$}"),
                }
                .expect("a string");
            }
            text.push('\n');
        }
        for (name, reason) in &self.missing {
            writeln!(text, "{name}: could not be built here: {reason}").expect("a string");
        }
        text
    }

    /// All figures that were measured, in Markdown.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        let measured = |measure: &Measure| {
            self.rows
                .iter()
                .any(|row| row.cells.iter().any(|cell| (measure.of)(cell).is_some()))
        };
        for measure in MEASURES.into_iter().filter(measured) {
            writeln!(text, "## {}\n", measure.title).expect("a string");
            for (index, line) in self.grid(measure).into_iter().enumerate() {
                writeln!(text, "| {} |", line.join(" | ")).expect("a string");
                if index == 0 {
                    writeln!(text, "|---{}|", "|--:".repeat(line.len() - 1)).expect("a string");
                }
            }
            text.push('\n');
        }
        for (name, reason) in &self.missing {
            writeln!(text, "{name} could not be built here: {reason}\n").expect("a string");
        }
        writeln!(text, "{}", self.distance).expect("a string");
        text
    }

    /// A chart for each group, as (file name, SVG).
    pub fn pictures(&self) -> Vec<(String, String)> {
        let mut groups: Vec<&str> = self.rows.iter().map(|row| row.workload.group.as_str()).collect();
        groups.dedup();
        let picture = |group: &&str| {
            let rows = self.rows.iter().filter(|row| row.workload.group == **group);
            let rows: Vec<_> = rows
                .map(|row| (row.workload.name.clone(), row.cells.iter().map(Cell::cpu).collect()))
                .collect();
            let below = "Processor time an operation, over the best allocator of the row. Left is better.";
            let svg = chart::dots(&format!("Workloads: {group}"), below, &self.allocators, &rows);
            (format!("peers-{group}.svg"), svg)
        };
        groups.iter().map(picture).collect()
    }

    /// One line for each workload and allocator.
    pub fn csv(&self) -> String {
        let mut text = String::from("group,workload,allocator,rounds,spread,ops/s");
        MEASURES
            .iter()
            .for_each(|measure| write!(text, ",{}", measure.title).expect("a string"));
        text.push('\n');
        for row in &self.rows {
            for (name, cell) in self.allocators.iter().zip(&row.cells) {
                let (group, workload, rounds) = (&row.workload.group, &row.workload.name, cell.runs.len());
                let wall = cell.median(|run| run.wall_ns);
                let (spread, speed) = (number(cell.spread()), number(wall.map(|wall| 1e9 / wall)));
                write!(text, "{group},{workload},{name},{rounds},{spread},{speed}").expect("a string");
                for measure in MEASURES {
                    write!(text, ",{}", number((measure.of)(cell))).expect("a string");
                }
                text.push('\n');
            }
        }
        text
    }
}

/// A ratio, unless one of its figures is 0.
fn known(ratio: f64) -> Option<f64> {
    (ratio.is_finite() && ratio > 0.0).then_some(ratio)
}

/// For machines.
fn number(value: Option<f64>) -> String {
    value.map_or(String::new(), |value| {
        format!("{:.*}", if value < 1000.0 { 3 } else { 0 }, value)
    })
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

#[cfg(test)]
mod tests {
    use super::super::figures::Run;
    use super::super::programs::Workload;
    use super::*;

    fn results() -> Results {
        let cell = |cpu_ns| Cell {
            runs: vec![Run {
                cpu_ns,
                peak_kb: 1000.0,
                ..Run::default()
            }],
            ..Cell::default()
        };
        let workload = Workload {
            group: "g".to_owned(),
            name: "w".to_owned(),
            ops: 1,
        };
        Results {
            allocators: [OURS, "mimalloc2", "glibc"].map(str::to_owned).to_vec(),
            missing: vec![("talc".to_owned(), "no compiler".to_owned())],
            distance: String::new(),
            rows: vec![Row {
                workload,
                cells: vec![cell(3.0), cell(2.0), cell(6.0)],
            }],
        }
    }

    #[test]
    fn ours_is_held_against_the_best_of_the_others() {
        let lines: Vec<Vec<String>> = results().grid(TIME);
        assert_eq!(
            lines[1],
            ["w", "3.00", "2.00", "6.00", "1.50", "mimalloc2", "1.50", "0 %"]
        );
        assert_eq!(lines[2][..4], ["geometric mean", "1.50", "0.67", "3.00"]);
        assert!(
            results()
                .text(TIME)
                .contains("talc: could not be built here: no compiler")
        );
    }

    #[test]
    fn a_mean_says_what_it_leaves_out() {
        let mut results = results();
        let (mut second, mut third) = (results.rows[0].cells.clone(), results.rows[0].cells.clone());
        second[1].runs[0].cpu_ns = 0.0;
        third[2].runs.clear();
        for cells in [second, third] {
            let workload = results.rows[0].workload.clone();
            results.rows.push(Row { workload, cells });
        }
        let lines: Vec<Vec<String>> = results.grid(TIME);
        // 3 over 2, over 0 and over 2; 6 over 2, over 0, and missing.
        assert_eq!(lines[2][4..7], ["-", "mimalloc2", "-"]);
        assert_eq!(lines[4][1..4], ["1.50 (2 rows)", "0.67 (2 rows)", "3.00 (1 rows)"]);
    }

    #[test]
    fn what_was_not_measured_has_no_table() {
        let text = results().markdown();
        assert!(
            text.contains("## cpu ns/op") && text.contains("## peak MB") && !text.contains("## calls"),
            "{text}"
        );
        assert_eq!(results().csv().lines().count(), 4);
        let heading = results().csv().lines().next().map(|line| line.split(',').count());
        assert_eq!(heading, Some(6 + MEASURES.len()));
    }
}
