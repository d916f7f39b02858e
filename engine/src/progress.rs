//! How does a person, or a parent process, see that the model is loading?
//!
//! A bar on a terminal, a line every tenth elsewhere, or JSON lines for a parent that draws its
//! own bar.

use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};

/// Reports load progress on stderr.
#[derive(Debug)]
pub struct Progress {
    form: Form,
    /// The last reported step, so that a step is reported once.
    last: Option<u32>,
}

#[derive(Debug)]
enum Form {
    Bar(ProgressBar),
    Lines,
    Json,
}

/// Steps of a bar and of JSON lines.
const STEPS_FINE: u32 = 100;
/// Steps of plain lines.
const STEPS_COARSE: u32 = 10;

impl Progress {
    /// JSON lines if asked for, else what suits stderr.
    pub fn new(json: bool) -> Self {
        let form = if json {
            Form::Json
        } else if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template("loading model {bar:40} {percent}%");
            let bar = ProgressBar::new(u64::from(STEPS_FINE));
            Form::Bar(style.map_or(bar.clone(), |style| bar.with_style(style)))
        } else {
            Form::Lines
        };
        Self { form, last: None }
    }

    /// Reports the share done, from 0 to 1.
    pub fn report(&mut self, share: f32) {
        let steps = match self.form {
            Form::Bar(_) | Form::Json => STEPS_FINE,
            Form::Lines => STEPS_COARSE,
        };
        let step = (share.clamp(0.0, 1.0) * steps as f32) as u32;
        if self.last == Some(step) {
            return;
        }
        self.last = Some(step);
        let done = step == steps;
        // Nothing depends on stderr being read.
        let mut stderr = std::io::stderr().lock();
        let _ = match &self.form {
            Form::Bar(bar) if done => {
                bar.finish_and_clear();
                Ok(())
            }
            Form::Bar(bar) => {
                bar.set_position(u64::from(step));
                Ok(())
            }
            Form::Lines => writeln!(stderr, "loading model: {}%", step * 100 / steps),
            Form::Json => writeln!(stderr, "{{\"progress\":{:.2}}}", f64::from(step) / 100.0),
        };
    }
}
