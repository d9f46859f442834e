//! Two programs, round by round: how much faster is the first than the second, and how sure is that?
//!
//! ```text
//!   round      1     2     3     4     5  …                          with: the first program, without: the second
//!   with      10.1   9.9  10.0  14.0  10.2  ns                       a round's two runs are neighbours in time, so
//!   without   10.0  10.0  10.1  13.8  10.0  ns                       what the machine does meets both
//!   ratio     0.99  1.01  1.01  0.99  0.98      sorted: 0.98 … 1.01, the median between the ranks of the interval
//! ```
//!
//! The ratio is one of speeds: the second program's processor time over the first's. The interval is that of the sign
//! test: whatever the distribution of the ratios, the true median lies below the k-th least ratio with the probability
//! that as many coin tosses show heads less than k times. k is the largest number for which both ends together have a
//! probability of at most a twentieth. Fewer than six rounds allow no statement.
//!
//! Worked: with 15 rounds the interval runs from the 4th least to the 4th largest ratio.

use super::figures::{Row, geometric_mean};
use std::fmt::Write as _;

/// A row's ratio of speeds, and the interval that contains it in nineteen of twenty cases.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

/// The largest k with 2 · P(heads < k) ≤ 0.05. 0: no such k.
fn rank(rounds: usize) -> usize {
    let (mut below, mut chance) = (0.0, 0.5_f64.powi(rounds as i32));
    for heads in 0..=rounds {
        below += chance;
        if 2.0 * below > 0.05 {
            return heads;
        }
        chance *= (rounds - heads) as f64 / (heads + 1) as f64;
    }
    0
}

impl Ratio {
    pub fn of(mut ratios: Vec<f64>) -> Option<Self> {
        let rank = rank(ratios.len());
        ratios.sort_by(f64::total_cmp);
        let (least, most) = (*ratios.get(rank.checked_sub(1)?)?, ratios[ratios.len() - rank]);
        let middle = ratios.len() / 2;
        let median = if ratios.len() % 2 == 1 {
            ratios[middle]
        } else {
            (ratios[middle - 1] + ratios[middle]) / 2.0
        };
        Some(Self { median, least, most })
    }

    /// The ratio of the two programs of a row.
    pub fn of_row(row: &Row) -> Option<Self> {
        let [with, without] = row.cells.as_slice() else {
            return None;
        };
        // A run that failed leaves its neighbour without a partner, and pairs the later runs wrongly.
        if with.runs.len() != without.runs.len() {
            return None;
        }
        let pairs = with.runs.iter().zip(&without.runs);
        Self::of(pairs.map(|(with, without)| without.cpu_ns / with.cpu_ns).collect())
    }
}

/// A line for each row; at the end the mean, and the rows that are certainly slower than `aim`.
pub fn text(names: &[String], rows: &[Row], aim: f64) -> String {
    let mut text = format!("speed of {} over that of {}, by rounds\n", names[0], names[1]);
    let found = || rows.iter().filter_map(|row| Some((row, Ratio::of_row(row)?)));
    for (row, Ratio { median, least, most }) in found() {
        let surely = if most < aim { "below" } else { "" };
        let name = &row.workload.name;
        writeln!(text, "{name:24}{median:>8.3}  {least:.3} to {most:.3}  {surely}").expect("a string");
    }
    let Some(mean) = geometric_mean(found().map(|(_, ratio)| ratio.median)) else {
        text.push_str("too few rounds for an interval: six are needed\n");
        return text;
    };
    let below = found().filter(|(_, ratio)| ratio.most < aim).count();
    let count = found().count();
    writeln!(text, "{count} rows, mean {mean:.3}; surely below {aim}: {below}").expect("a string");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_those_of_the_sign_test() {
        let ranks = [5, 6, 9, 12, 15, 20, 25, 30].map(rank);
        assert_eq!(ranks, [0, 1, 2, 3, 4, 6, 8, 10]);
    }

    #[test]
    fn a_ratio_lies_between_its_ranks() {
        let ratios = (1..=15).rev().map(f64::from).collect();
        let (median, least, most) = (8.0, 4.0, 12.0);
        assert_eq!(Ratio::of(ratios), Some(Ratio { median, least, most }));
        assert_eq!(Ratio::of(vec![1.0; 5]), None);
        assert!(Ratio::of(vec![1.0; 6]).is_some());
        let names = ["a", "b"].map(str::to_owned);
        assert!(text(&names, &[], 0.98).ends_with("six are needed\n"));
    }
}
