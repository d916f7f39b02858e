//! One HTML page with plots, complete in itself: it loads nothing.

use std::fmt::Write as _;

use super::{Report, table};
use crate::compare::Row;

/// A plot's drawing area, px.
const WIDTH: f64 = 420.0;
/// A bar's share of its line, px.
const LINE: f64 = 20.0;
/// Room for names on the left of bars, px.
const NAMES: f64 = 250.0;
/// Colours that stay apart from each other also for eyes that see fewer.
const COLOURS: &[&str] = &[
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d31", "#7f7f7f",
    "#f0e442", "#000000",
];

const STYLE: &str = "body{font:14px/1.4 sans-serif;margin:2em;max-width:1500px}\
    pre{overflow-x:auto;background:#f6f6f6;padding:1em}svg{margin:0 2em 1em 0;font:12px sans-serif}\
    h2{margin-top:2em}";

/// The page of some scenarios.
pub fn page(reports: &[Report]) -> String {
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <title>Routing policies in simulation</title><style>{STYLE}</style></head><body>\n\
         <h1>Routing policies in simulation</h1>\n\
         <p>Modelled nodes: compare policies with each other, not the milliseconds with a \
         machine's.</p>\n"
    );
    for report in reports {
        let rows = report.best_rows();
        let _ = writeln!(html, "<h2>{}</h2>", escape(&report.scenario));
        let floor = rows.first().map(|row| row.mean.floor_mean_ms);
        let ideal = rows.first().map(|row| row.mean.hit_ratio_ideal);
        bars(&mut html, "Mean TTFT, ms", &rows, floor, |r| {
            r.mean.ttft_mean_ms
        });
        bars(&mut html, "TTFT p99, ms", &rows, None, |r| {
            r.mean.ttft_p99_ms
        });
        bars(&mut html, "Hit ratio", &rows, ideal, |r| r.mean.hit_ratio);
        bars(&mut html, "Completions a second", &rows, None, |r| {
            r.mean.completions_per_s
        });
        bars(
            &mut html,
            "Busiest node over the mean",
            &rows,
            Some(1.0),
            |r| r.mean.balance,
        );
        bars(&mut html, "First token within 10 s", &rows, None, |r| {
            r.mean.within_10s
        });
        curves(&mut html, &rows);
        let _ = writeln!(html, "<pre>{}</pre>", escape(&table(report)));
    }
    html.push_str("</body></html>\n");
    html
}

/// One bar for each policy, and a line at what none can reach or pass.
fn bars(html: &mut String, title: &str, rows: &[&Row], mark: Option<f64>, of: fn(&Row) -> f64) {
    let most = rows
        .iter()
        .map(|row| of(row))
        .chain(mark)
        .fold(0.0, f64::max);
    let scale = if most > 0.0 { WIDTH / most } else { 0.0 };
    let height = LINE * (rows.len() as f64 + 2.0);
    let _ = write!(
        html,
        "<svg width=\"{}\" height=\"{height}\" role=\"img\"><text x=\"0\" y=\"14\" \
         font-weight=\"bold\">{}</text>",
        NAMES + WIDTH + 70.0,
        escape(title)
    );
    for (i, row) in rows.iter().enumerate() {
        let top = LINE * (i as f64 + 1.2);
        let value = of(row);
        let length = value * scale;
        let text = if value < 20.0 {
            format!("{value:.3}")
        } else {
            format!("{value:.0}")
        };
        let _ = write!(
            html,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{NAMES}\" y=\"{top}\" width=\"{length:.1}\" height=\"{}\" fill=\"{}\"/>\
             <text x=\"{:.1}\" y=\"{}\">{text}</text>",
            NAMES - 6.0,
            top + 12.0,
            escape(&row.label),
            LINE - 5.0,
            colour(i),
            NAMES + length + 4.0,
            top + 12.0,
        );
    }
    if let Some(mark) = mark {
        let x = NAMES + mark * scale;
        let _ = write!(
            html,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{LINE}\" y2=\"{height}\" stroke=\"#000\" \
             stroke-dasharray=\"4 3\"/>"
        );
    }
    html.push_str("</svg>\n");
}

/// The share of requests with a first token by then, over a logarithmic time.
fn curves(html: &mut String, rows: &[&Row]) {
    const LEAST_MS: f64 = 10.0;
    const DECADES: f64 = 5.0;
    const HEIGHT: f64 = 300.0;
    const LEFT: f64 = 40.0;
    let x = |ms: f64| {
        let decades = (ms.max(LEAST_MS) / LEAST_MS).log10();
        LEFT + decades / DECADES * WIDTH * 1.5
    };
    let y = |share: f64| 20.0 + HEIGHT * (1.0 - share);
    let width = x(LEAST_MS * 10f64.powf(DECADES)) + NAMES + 60.0;
    let _ = write!(
        html,
        "<svg width=\"{width}\" height=\"{}\" role=\"img\"><text x=\"0\" y=\"12\" \
         font-weight=\"bold\">Requests with a first token within …</text>",
        HEIGHT + 45.0
    );
    for decade in 0..=DECADES as i32 {
        let ms = LEAST_MS * 10f64.powi(decade);
        let (x, low, high) = (x(ms), y(0.0), y(1.0));
        let _ = write!(
            html,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{low}\" y2=\"{high}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{} s</text>",
            low + 16.0,
            ms / 1000.0
        );
    }
    for quarter in 0..=4 {
        let share = f64::from(quarter) / 4.0;
        let _ = write!(
            html,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{share}</text>",
            LEFT - 4.0,
            y(share) + 4.0
        );
    }
    for (i, row) in rows.iter().enumerate() {
        let points: Vec<String> = row
            .ttft_percentiles_ms
            .iter()
            .enumerate()
            .map(|(p, ms)| format!("{:.1},{:.1}", x(*ms), y(p as f64 / 100.0)))
            .collect();
        let _ = write!(
            html,
            "<polyline fill=\"none\" stroke=\"{0}\" stroke-width=\"1.5\" points=\"{1}\"/>\
             <text x=\"{2:.1}\" y=\"{3}\" fill=\"{0}\">{4}</text>",
            colour(i),
            points.join(" "),
            x(LEAST_MS * 10f64.powf(DECADES)) + 20.0,
            36.0 + LINE * i as f64,
            escape(&row.label)
        );
    }
    html.push_str("</svg>\n");
}

fn colour(i: usize) -> &'static str {
    COLOURS[i % COLOURS.len()]
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
