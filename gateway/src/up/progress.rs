//! What does a person see while models load?
//!
//! One bar a node on stderr, moved by the engine's own progress lines; nothing where stderr is no
//! terminal or a script asked for JSON.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::plan::Plan;

/// A bar counts thousandths.
const WHOLE: u64 = 1000;

/// The bars of all nodes.
pub(super) struct Progress {
    bars: Vec<ProgressBar>,
    all: MultiProgress,
}

impl Progress {
    pub(super) fn new(plan: &Plan, hidden: bool) -> Self {
        let all = MultiProgress::new();
        if hidden {
            all.set_draw_target(ProgressDrawTarget::hidden());
        }
        let style = ProgressStyle::with_template("{prefix} loads {msg} [{bar:30}] {percent:>3} %")
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> ");
        let bar = |id: &String| {
            all.add(ProgressBar::new(WHOLE))
                .with_style(style.clone())
                .with_prefix(id.clone())
                .with_message(plan.model.clone())
        };
        let bars = plan.nodes.iter().map(|node| bar(&node.id)).collect();
        Self { bars, all }
    }

    /// A node has loaded this share of its model.
    pub(super) fn set(&self, node: usize, share: f64) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped to 0..=1000"
        )]
        let position = (share.clamp(0.0, 1.0) * 1000.0) as u64;
        if let Some(bar) = self.bars.get(node) {
            bar.set_position(position);
        }
    }

    /// Takes the bars off the terminal.
    pub(super) fn finish(&self) {
        for bar in &self.bars {
            bar.finish_and_clear();
        }
        // A terminal that is gone needs no clearing.
        let _ = self.all.clear();
    }
}
