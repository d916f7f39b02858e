//! In which form are blocks kept below the pool?

use clap::{Args, ValueEnum};

use crate::kv::store::form::Form;

#[derive(Debug, Args)]
pub(super) struct TierFormArgs {
    /// How blocks are kept in host memory and below: exact, or int8 in about half of the memory, which
    /// changes answers a little; see docs/kv-tiers.md.
    #[arg(long, value_enum, default_value_t = FormFlag::Exact)]
    kv_tier_form: FormFlag,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormFlag {
    Exact,
    Int8,
}

impl TierFormArgs {
    pub(super) fn form(&self) -> Form {
        match self.kv_tier_form {
            FormFlag::Exact => Form::Exact,
            FormFlag::Int8 => Form::Int8,
        }
    }
}
