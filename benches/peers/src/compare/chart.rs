//! Charts as SVG text: a dot for each allocator on a scale of "times the best", and lines over time.

use std::fmt::Write as _;

/// Ours first and strongest, the others in different hues.
const COLOURS: [&str; 10] = [
    "#d62728", "#7f7f7f", "#1f77b4", "#17becf", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#bcbd22",
];

const WIDTH: f64 = 960.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 130.0;

fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

fn open(height: f64, title: &str, below: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"16\">{title}</text>\n\
         <text x=\"{LEFT}\" y=\"42\" fill=\"#666\">{below}</text>\n"
    )
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, colour: &str, words: &str) {
    writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{words}</text>"
    )
    .expect("a string");
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    let ((x1, y1), (x2, y2)) = (from, to);
    writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
    )
    .expect("a string");
}

fn legend(svg: &mut String, names: &[String]) {
    for (index, name) in names.iter().enumerate() {
        let y = 70.0 + 20.0 * index as f64;
        writeln!(
            svg,
            "<circle cx=\"{}\" cy=\"{y}\" r=\"5\" fill=\"{}\"/>",
            WIDTH - RIGHT + 20.0,
            colour(index)
        )
        .expect("a string");
        text(svg, WIDTH - RIGHT + 32.0, y + 4.0, "start", "black", name);
    }
}

/// A row for each workload, a dot for each allocator: its figure over the best of the row, on a logarithmic scale up
/// to 30. What lies beyond is drawn at the end.
pub fn dots(title: &str, below: &str, names: &[String], rows: &[(String, Vec<Option<f64>>)]) -> String {
    const END: f64 = 30.0;
    let bottom = 60.0 + 26.0 * rows.len() as f64;
    let height = (bottom + 30.0).max(80.0 + 20.0 * names.len() as f64);
    let x = |ratio: f64| LEFT + ratio.clamp(1.0, END).ln() / END.ln() * (WIDTH - LEFT - RIGHT);
    let mut svg = open(height, title, below);
    for mark in [1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0] {
        line(&mut svg, (x(mark), 56.0), (x(mark), bottom), "#ddd");
        text(&mut svg, x(mark), bottom + 16.0, "middle", "#666", &format!("{mark}x"));
    }
    for (index, (name, figures)) in rows.iter().enumerate() {
        let y = 72.0 + 26.0 * index as f64;
        text(&mut svg, LEFT - 8.0, y + 4.0, "end", "black", name);
        line(&mut svg, (LEFT, y), (WIDTH - RIGHT, y), "#eee");
        let best = figures.iter().flatten().copied().fold(f64::INFINITY, f64::min);
        // Ours is drawn last, on top.
        for (allocator, figure) in figures.iter().enumerate().rev() {
            let Some(figure) = figure else { continue };
            let radius = if allocator == 0 { 6 } else { 4 };
            let (x, fill) = (x(figure / best), colour(allocator));
            writeln!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{fill}\" fill-opacity=\"0.85\"/>"
            )
            .expect("a string");
        }
    }
    legend(&mut svg, names);
    svg.push_str("</svg>\n");
    svg
}

/// A line for each allocator: megabytes over seconds. `lines` are of (seconds, megabytes).
pub fn lines(title: &str, below: &str, names: &[String], lines: &[Vec<(f64, f64)>]) -> String {
    let (height, bottom) = (440.0, 400.0);
    let points = || lines.iter().flatten();
    let first = points().map(|point| point.0).fold(0.0, f64::min);
    let last = points().map(|point| point.0).fold(1.0, f64::max);
    let most = points().map(|point| point.1).fold(1.0, f64::max);
    let x = |seconds: f64| LEFT + (seconds - first) / (last - first) * (WIDTH - LEFT - RIGHT);
    let y = |size: f64| bottom - size / most * (bottom - 60.0);
    let mut svg = open(height, title, below);
    let step = if last - first > 12.0 { 2 } else { 1 };
    for second in (first.ceil() as i32..=last as i32).step_by(step) {
        line(&mut svg, (x(second.into()), 56.0), (x(second.into()), bottom), "#eee");
        text(
            &mut svg,
            x(second.into()),
            bottom + 16.0,
            "middle",
            "#666",
            &format!("{second} s"),
        );
    }
    let round = 10_f64.powf(most.log10().floor());
    let step = if most / round > 4.0 { round } else { round / 2.0 };
    for mark in 0..=(most / step) as u32 {
        let size = f64::from(mark) * step;
        line(&mut svg, (LEFT, y(size)), (WIDTH - RIGHT, y(size)), "#eee");
        text(
            &mut svg,
            LEFT - 8.0,
            y(size) + 4.0,
            "end",
            "#666",
            &format!("{size:.0} MB"),
        );
    }
    line(&mut svg, (x(0.0), 56.0), (x(0.0), bottom), "#999");
    for (index, points) in lines.iter().enumerate().rev() {
        let points: Vec<String> = points
            .iter()
            .map(|(at, size)| format!("{:.1},{:.1}", x(*at), y(*size)))
            .collect();
        let width = if index == 0 { 3.0 } else { 1.6 };
        writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\"/>",
            points.join(" "),
            colour(index)
        )
        .expect("a string");
    }
    legend(&mut svg, names);
    svg.push_str("</svg>\n");
    svg
}
