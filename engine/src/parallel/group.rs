//! The ranks of one node as the step loop sees them: one thing that runs a pass.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::collectives::{Breaker, Threads};
use crate::kv::store::form::Form;
use crate::model::{
    ForwardError, Model, ModelError, ModelFile, ModelOptions, Pass, PassOutput, Watch,
};

/// All ranks of a node.
#[derive(Debug)]
pub struct RankGroup {
    /// Rank 0, whose output is the group's.
    first: Model,
    others: Vec<Other>,
    /// `None` for a group of one.
    breaker: Option<Breaker>,
    broken: bool,
    /// How blocks are kept below the pool.
    form: Form,
    /// A block on its way there or back.
    body: Vec<u8>,
}

/// A rank beside the first.
#[derive(Debug)]
struct Other {
    model: Model,
    /// The same as the first rank's; nobody reads it.
    output: PassOutput,
}

impl RankGroup {
    /// A group of one: what serves today.
    pub fn alone(model: Model) -> RankGroup {
        RankGroup {
            first: model,
            others: Vec::new(),
            breaker: None,
            broken: false,
            form: Form::Exact,
            body: Vec::new(),
        }
    }

    /// A group of `ranks` inside this process, each with `options.threads` threads and with
    /// `options.kv_blocks` blocks of its own heads. Models that cannot be cut so are refused.
    pub fn in_process(
        ranks: usize,
        file: &ModelFile,
        options: &ModelOptions,
    ) -> Result<RankGroup, ModelError> {
        let threads = Threads::group(ranks);
        let breaker = threads.first().map(Threads::breaker);
        let mut models = threads
            .into_iter()
            .map(|rank| Model::load_rank(file, options, rank));
        let Some(first) = models.next() else {
            return Err(ModelError::Options {
                what: "ranks",
                allowed: "at least 1",
            });
        };
        let first = first?;
        let others = models.map(|model| {
            Ok(Other {
                model: model?,
                output: PassOutput::default(),
            })
        });
        Ok(RankGroup {
            first,
            others: others.collect::<Result<_, ModelError>>()?,
            breaker,
            broken: false,
            form: Form::Exact,
            body: Vec::new(),
        })
    }

    /// The same, whose blocks are kept in this form below the pool.
    pub fn keeping(self, form: Form) -> RankGroup {
        RankGroup { form, ..self }
    }

    pub(crate) fn form(&self) -> Form {
        self.form
    }

    /// Room for a block's bytes.
    pub(crate) fn take_body(&mut self) -> Vec<u8> {
        let bytes = self
            .all()
            .map(|rank| rank.block_layout().body_bytes())
            .sum();
        let mut body = std::mem::take(&mut self.body);
        body.resize(bytes, 0);
        body
    }

    pub(crate) fn give_body(&mut self, body: Vec<u8>) {
        self.body = body;
    }

    /// Runs a pass on all ranks.
    pub fn run(&mut self, pass: &Pass<'_>, output: &mut PassOutput) -> Result<(), ForwardError> {
        self.run_watched(pass, output, &mut |_, _| ())
    }

    /// The same; a rank alone tells of each layer as it is computed, several tell of none.
    pub fn run_watched(
        &mut self,
        pass: &Pass<'_>,
        output: &mut PassOutput,
        watch: &mut Watch<'_>,
    ) -> Result<(), ForwardError> {
        let Some(breaker) = &self.breaker else {
            return self.first.run_watched(pass, output, watch);
        };
        if self.broken {
            return Err(ForwardError::RankLost);
        }
        // A rank that fails must not leave the others at a meeting point.
        let guarded = |model: &mut Model, output: &mut PassOutput| {
            let result = catch_unwind(AssertUnwindSafe(|| model.run(pass, output)));
            result.unwrap_or_else(|_| {
                breaker.break_up();
                Err(ForwardError::RankLost)
            })
        };
        let (first, others) = (&mut self.first, &mut self.others);
        let results: Vec<Result<(), ForwardError>> = std::thread::scope(|scope| {
            let others: Vec<_> = others
                .iter_mut()
                .map(|other| scope.spawn(|| guarded(&mut other.model, &mut other.output)))
                .collect();
            let first = guarded(first, output);
            let joined = others
                .into_iter()
                .map(|rank| rank.join().unwrap_or(Err(ForwardError::RankLost)));
            std::iter::once(first).chain(joined).collect()
        });
        self.broken |= results.contains(&Err(ForwardError::RankLost));
        results.into_iter().collect()
    }

    /// Every rank in order, to look at.
    pub fn all(&self) -> impl Iterator<Item = &Model> {
        std::iter::once(&self.first).chain(self.others.iter().map(|other| &other.model))
    }

    /// The first rank, which knows the model's shape.
    pub fn first(&self) -> &Model {
        &self.first
    }

    /// Every rank in order, for what is done to each one's own KV.
    pub fn ranks(&mut self) -> impl Iterator<Item = &mut Model> {
        std::iter::once(&mut self.first).chain(self.others.iter_mut().map(|other| &mut other.model))
    }
}
