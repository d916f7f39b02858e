//! What can be wrong with a model file, and with a request to run it.
//!
//! Two types because two people read them: a [`ModelError`] is for whoever chose the file and
//! names what the file lacks; a [`ForwardError`] is a bug in the caller (the scheduler), so it
//! carries the numbers that do not fit.

use std::path::PathBuf;

/// Why a model file cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file cannot be opened or mapped.
    #[error("cannot open the model {path}: {source}")]
    Open {
        /// The path as it was given.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The header is not that of a GGUF file, or a tensor lies past the end (a truncated file).
    #[error("{path} is not a whole GGUF file: {source}")]
    Header {
        /// The path as it was given.
        path: PathBuf,
        /// What the header's reader found.
        source: prompt::gguf::GgufError,
    },
    /// A folder in Hugging Face's layout that cannot be used.
    #[error("the model {path}: {source}")]
    Checkpoint {
        /// The folder as it was given.
        path: PathBuf,
        /// What is wrong with it.
        source: prompt::checkpoint::CheckpointError,
    },
    /// A model of a family that has no forward pass here.
    #[error("the model's architecture is {found:?}; this engine runs: llama, qwen2, qwen3")]
    Architecture {
        /// `general.architecture` as the file has it.
        found: String,
    },
    /// A hyperparameter is missing or of the wrong type.
    #[error("the model's metadata lacks a usable {key}")]
    Metadata {
        /// The metadata key.
        key: String,
    },
    /// A hyperparameter has a value this engine cannot run.
    #[error("the model's {key} is {found}; it must be {allowed}")]
    Value {
        /// The metadata key.
        key: String,
        /// What the file says.
        found: String,
        /// What would do.
        allowed: String,
    },
    /// A weight is not in the file.
    #[error("the model has no tensor {name}; the file is incomplete or of another family")]
    TensorMissing {
        /// The tensor's name.
        name: String,
    },
    /// A weight that the family's forward pass knows nothing of: the answers would be wrong.
    #[error("the model has a tensor {name} that {architecture} models are not known to have")]
    TensorUnknown {
        /// The tensor's name.
        name: String,
        /// The family.
        architecture: &'static str,
    },
    /// A weight has another shape than the hyperparameters imply.
    #[error("tensor {name} has the shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// The tensor's name.
        name: String,
        /// The shape in the file, innermost first.
        found: Vec<u64>,
        /// The shape that the metadata implies, innermost first.
        expected: Vec<u64>,
    },
    /// A weight is stored in a format that is not read here.
    #[error(
        "tensor {name} is stored as {found}; this engine reads F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K"
    )]
    TensorType {
        /// The tensor's name.
        name: String,
        /// The format.
        found: String,
    },
    /// Norm weights or biases that would make every answer nonsense.
    #[error(
        "tensor {name} has values that are not finite; the file is damaged, or the model was trained badly"
    )]
    NotFinite {
        /// The tensor's name.
        name: String,
    },
    /// A kernel variant was asked for that this processor cannot run.
    #[error("this processor cannot run the {wanted} kernels")]
    Variant {
        /// The variant's name.
        wanted: &'static str,
    },
    /// More ranks than there are parts to hand out.
    #[error("a model of {units} {what} cannot span {ranks} ranks")]
    Ranks {
        /// What is handed out.
        what: &'static str,
        /// How many there are.
        units: usize,
        /// Ranks asked for.
        ranks: usize,
    },
    /// A weight cannot be cut for this rank.
    #[error("tensor {name} cannot be cut: {source}")]
    Shard {
        /// The tensor's name.
        name: String,
        /// Why not.
        source: crate::ops::shard::ShardError,
    },
    /// The options make no sense.
    #[error("{what} must be {allowed}")]
    Options {
        /// The option.
        what: &'static str,
        /// What would do.
        allowed: &'static str,
    },
}

/// Why a batch cannot be run. Nothing was written when this is returned.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForwardError {
    /// A sequence without tokens.
    #[error("sequence {sequence} of the batch has no tokens")]
    Empty {
        /// Index into the batch.
        sequence: usize,
    },
    /// A token id past the vocabulary.
    #[error("sequence {sequence}: token {token} is past the vocabulary of {vocab}")]
    Token {
        /// Index into the batch.
        sequence: usize,
        /// The offending id.
        token: u32,
        /// The vocabulary's size.
        vocab: usize,
    },
    /// The sequence grows past the model's context.
    #[error("sequence {sequence}: position {end} is past the context of {context}")]
    Context {
        /// Index into the batch.
        sequence: usize,
        /// The position after the last token.
        end: usize,
        /// The model's context.
        context: usize,
    },
    /// The block table is shorter than the sequence.
    #[error("sequence {sequence}: {have} blocks cannot hold {end} tokens")]
    BlocksShort {
        /// Index into the batch.
        sequence: usize,
        /// Blocks given.
        have: usize,
        /// The position after the last token.
        end: usize,
    },
    /// A block id past the pool.
    #[error("sequence {sequence}: block {block} is past the pool of {pool}")]
    Block {
        /// Index into the batch.
        sequence: usize,
        /// The offending id.
        block: u32,
        /// Blocks in the pool.
        pool: usize,
    },
    /// A block that an earlier place of the batch writes too.
    #[error("sequence {sequence}: block {block} is written twice in one pass")]
    BlockTwice {
        /// Index into the batch.
        sequence: usize,
        /// The offending id.
        block: u32,
    },
    /// More rows of logits asked for than the sequence has tokens.
    #[error("sequence {sequence}: {wanted} rows of logits from {tokens} tokens")]
    Logits {
        /// Index into the batch.
        sequence: usize,
        /// Rows asked for.
        wanted: usize,
        /// Tokens given.
        tokens: usize,
    },
    /// Hidden states asked for of a layer that the model does not have.
    #[error("hidden states of layer {layer} are asked for; the last is {last}")]
    Capture {
        /// The layer.
        layer: usize,
        /// The last one there is: after the output norm.
        last: usize,
    },
    /// Another rank of the group has failed; the group cannot run any more.
    #[error("a rank of this node has failed; the node must be restarted")]
    RankLost,
}
