//! From a file to a model that runs: the op set, the rank's part, the weights, the KV pool.

use super::config::ModelConfig;
use super::decoder::Decoder;
use super::error::ModelError;
use super::file::ModelFile;
use super::part::Part;
use super::pass::PassCheck;
use super::{Model, ModelOptions, OpsKind, Variant, weights};
use crate::ops::Ops;
#[cfg(target_arch = "x86_64")]
use crate::ops::cpu::{Avx2, Avx512};
use crate::ops::cpu::{CpuOps, Portable};
use crate::ops::reference::ReferenceOps;
use crate::parallel::{Alone, Collectives, Threads};

impl Model {
    /// Packs the weights and sets up KV pool and threads. `progress` is called with the share
    /// done, from 0 to 1.
    pub fn load(
        file: &ModelFile,
        options: &ModelOptions,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Model, ModelError> {
        Model::load_on(Variant::best(), file, options, progress)
    }

    /// As [`Model::load`], but on a given instruction set instead of the best one. It matters
    /// to [`OpsKind::Cpu`] alone.
    pub fn load_on(
        variant: Variant,
        file: &ModelFile,
        options: &ModelOptions,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Model, ModelError> {
        Loading::new(file, options)?.run(variant, Alone, progress)
    }

    /// As [`Model::load`], but one rank's part of the model, which runs only together with the
    /// others of its group.
    pub fn load_rank(
        file: &ModelFile,
        options: &ModelOptions,
        rank: Threads,
    ) -> Result<Model, ModelError> {
        Loading::new(file, options)?.run(Variant::best(), rank, &mut |_| ())
    }
}

/// What is known before an op set is chosen.
struct Loading<'a> {
    file: &'a ModelFile,
    config: ModelConfig,
    options: &'a ModelOptions,
}

impl<'a> Loading<'a> {
    fn new(file: &'a ModelFile, options: &'a ModelOptions) -> Result<Loading<'a>, ModelError> {
        if options.threads == 0 || options.kv_blocks == 0 || options.kv_blocks > u32::MAX as usize {
            let what = if options.threads == 0 {
                "threads"
            } else {
                "kv_blocks"
            };
            return Err(ModelError::Options {
                what,
                allowed: "at least 1 and below 2^32",
            });
        }
        Ok(Loading {
            file,
            config: Model::config(file.header())?,
            options,
        })
    }

    fn run<C: Collectives + 'static>(
        self,
        variant: Variant,
        ranks: C,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Model, ModelError> {
        let threads = self.options.threads;
        if self.options.ops == OpsKind::Reference {
            return self.run_on(ReferenceOps::new(threads), ranks, progress);
        }
        let missing = || ModelError::Variant {
            wanted: variant.as_str(),
        };
        match variant {
            #[cfg(target_arch = "x86_64")]
            Variant::Avx512 => {
                let ops = CpuOps::<Avx512>::new(threads).ok_or_else(missing)?;
                self.run_on(ops, ranks, progress)
            }
            #[cfg(target_arch = "x86_64")]
            Variant::Avx2 => {
                let ops = CpuOps::<Avx2>::new(threads).ok_or_else(missing)?;
                self.run_on(ops, ranks, progress)
            }
            #[cfg(not(target_arch = "x86_64"))]
            Variant::Avx512 | Variant::Avx2 => Err(missing()),
            Variant::Portable => {
                let ops = CpuOps::<Portable>::new(threads).ok_or_else(missing)?;
                self.run_on(ops, ranks, progress)
            }
        }
    }

    fn run_on<O: Ops + 'static, C: Collectives + 'static>(
        self,
        mut ops: O,
        ranks: C,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Model, ModelError> {
        let Loading {
            file,
            config,
            options,
        } = self;
        let part = Part::of(&config, ranks.rank())?;
        let weights = weights::load(file, (&config, &part), &mut ops, progress)?;
        let model = Decoder::new(config, part, (ops, weights), options.kv_blocks, ranks);
        Ok(Model {
            config,
            kv_blocks: options.kv_blocks,
            check: PassCheck::new(options.kv_blocks),
            weight_bytes: model.weight_bytes(),
            runner: Box::new(model),
        })
    }
}
