//! How does a person see that a model is coming? A bar on a terminal, a line every tenth elsewhere.

use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};

use super::reference::Reference;

/// Plain lines of a whole fetch.
const LINES: u64 = 10;

/// Reports on stderr.
pub(super) struct Progress {
    form: Form,
    name: String,
    done: u64,
    total: u64,
    /// The last line that was written.
    last: u64,
}

enum Form {
    Bar(ProgressBar),
    Lines,
    Quiet,
}

impl Progress {
    pub(super) fn new(reference: &Reference, files: usize, total: u64) -> Self {
        let name = reference.to_string();
        let form = if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template(
                "{msg} {bar:30} {bytes} of {total_bytes}, {bytes_per_sec}, {eta}",
            );
            let bar = ProgressBar::new(total).with_message(format!("fetching {name}"));
            Form::Bar(style.map_or(bar.clone(), |style| bar.with_style(style)))
        } else {
            say(&format!(
                "fetching {name}: files: {files}, {} MB",
                megabytes(total)
            ));
            Form::Lines
        };
        Self {
            form,
            name,
            done: 0,
            total,
            last: 0,
        }
    }

    /// For small files before it is known how much there is.
    pub(super) fn quiet() -> Self {
        Self {
            form: Form::Quiet,
            name: String::new(),
            done: 0,
            total: 0,
            last: 0,
        }
    }

    pub(super) fn add(&mut self, bytes: u64) {
        self.done += bytes;
        match &self.form {
            Form::Bar(bar) => bar.set_position(self.done),
            Form::Lines => {
                let line = self.line();
                if line > self.last {
                    self.last = line;
                    let (done, total) = (megabytes(self.done), megabytes(self.total));
                    say(&format!(
                        "fetching {}: {}%, {done} of {total} MB",
                        self.name,
                        line * 100 / LINES
                    ));
                }
            }
            Form::Quiet => {}
        }
    }

    /// What has to come once more.
    pub(super) fn take_back(&mut self, bytes: u64) {
        self.done = self.done.saturating_sub(bytes);
        self.last = self.line();
    }

    /// How many lines are due; none where nobody knows how much there is.
    fn line(&self) -> u64 {
        (self.done * LINES).checked_div(self.total).unwrap_or(0)
    }

    pub(super) fn finish(self) {
        if let Form::Bar(bar) = self.form {
            bar.finish_and_clear();
        }
    }
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e6)
}

fn say(line: &str) {
    // Nothing depends on stderr being read.
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
