//! How many tokens of prompts went through the tokenizer, and how many were known?
//!
//! The segment caches count; this reads them when somebody asks. Of a known conversation's turn
//! only the new part should be encoded (and what is too short to remember, such as line ends).

use std::sync::{Arc, Mutex, PoisonError};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, Opts, Registry};

use super::{Model, Prompts};

const NAME: &str = "homing_prompt_tokens_total";
const HELP: &str = "Tokens of prompts' text by model and whether they were known or encoded";

struct TokenCollector {
    models: Vec<Arc<Model>>,
    tokens: IntCounterVec,
    /// Two scrapes at once would add the same difference twice.
    reading: Mutex<()>,
}

impl Prompts {
    /// Adds what the models' tokenizers did to a registry.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        registry.register(Box::new(TokenCollector {
            models: self.models.clone(),
            tokens: IntCounterVec::new(Opts::new(NAME, HELP), &["model", "known"])?,
            reading: Mutex::new(()),
        }))
    }
}

impl TokenCollector {
    fn read(&self) {
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        for model in &self.models {
            let Some((_, segments)) = &model.exact else {
                continue;
            };
            let counts = segments.counts();
            for (known, now) in [("yes", counts.reused_tokens), ("no", counts.encoded_tokens)] {
                let counter = self.tokens.with_label_values(&[&*model.id, known]);
                counter.inc_by(now.saturating_sub(counter.get()));
            }
        }
    }
}

impl Collector for TokenCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.tokens.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.read();
        self.tokens.collect()
    }
}
