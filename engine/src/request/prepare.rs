//! Which tokens does the request become, and does it fit?
//!
//! Template, tokenizer and block hashes are the gateway's own code (crates `prompt` and
//! `cache-index`), so both count the same tokens and name the same blocks.

use std::sync::Arc;

use cache_index::block::{BlockHash, Namespace, hash_chain};
use prompt::{ChatInput, PromptBuilder, PromptError, SegmentCache};

use super::{Generation, Source};
use crate::engine::Job;
use crate::error::{ApiError, Kind};
use crate::kv::table::Scope;

/// Text and tokens of known segments that are kept for reuse: some hundred long conversations.
const SEGMENT_CACHE_BYTES_MAX: usize = 32 << 20;

/// The model as requests see it.
#[derive(Debug)]
pub struct Served {
    /// The id in `/v1/models`.
    pub model_id: Arc<str>,
    /// Prompt and answer together, in tokens.
    pub max_model_len: usize,
    prompts: Arc<PromptBuilder>,
    segments: SegmentCache,
}

/// A job and what its prompt is called.
#[derive(Debug)]
pub struct Prepared {
    /// For the engine.
    pub job: Job,
    /// The hash of the prompt's last full block.
    pub last_block: Option<BlockHash>,
}

impl Served {
    /// A model under the id it is served as.
    pub fn new(model_id: Arc<str>, max_model_len: usize, prompts: Arc<PromptBuilder>) -> Self {
        let segments = SegmentCache::new(SEGMENT_CACHE_BYTES_MAX);
        Self {
            model_id,
            max_model_len,
            prompts,
            segments,
        }
    }

    /// Token ids are below this.
    pub fn vocab(&self) -> usize {
        self.prompts.tokenizer().vocab_size()
    }

    /// Turns a checked request into a job. Costs time in proportion to the prompt.
    pub fn prepare(
        &self,
        request: Generation,
        request_id: Arc<str>,
        unix_seconds: i64,
    ) -> Result<Prepared, ApiError> {
        let prompt = self.tokens(&request.source, unix_seconds)?;
        let output_max = self.output_max(&request, prompt.len())?;
        let salt: Option<Arc<str>> = request.cache_salt.as_deref().map(Arc::from);
        let namespace = Namespace::new(&self.model_id, None, salt.as_deref());
        let chain = hash_chain(&namespace, &prompt);
        let last_block = chain.last().copied();
        let mut stop_tokens = request.stop_token_ids;
        if !request.ignore_eos {
            stop_tokens.extend_from_slice(self.prompts.tokenizer().eos_ids());
        }
        let job = Job {
            request_id,
            sampling: request.sampling,
            stops: request.stops,
            stop_tokens,
            ..Job::generate(prompt, chain, Scope { namespace, salt }, output_max)
        };
        Ok(Prepared { job, last_block })
    }

    fn tokens(&self, source: &Source, unix_seconds: i64) -> Result<Vec<u32>, ApiError> {
        let tokens = match source {
            Source::Tokens(tokens) => tokens.clone(),
            Source::Text(text) => self.prompts.completion(text, &self.segments),
            Source::Chat {
                messages,
                tools,
                template_kwargs,
            } => {
                let input = ChatInput {
                    messages,
                    tools: tools.as_ref(),
                    template_kwargs: template_kwargs.as_ref(),
                    unix_seconds,
                };
                self.prompts
                    .chat(&input, &self.segments)
                    .map_err(prompt_error)?
            }
        };
        if tokens.is_empty() {
            return Err(ApiError::field(
                "prompt",
                "The prompt is empty; send some text.",
            ));
        }
        Ok(tokens)
    }

    /// Tokens the answer may have: as many as asked for, or as the context has room for.
    fn output_max(&self, request: &Generation, prompt_tokens: usize) -> Result<usize, ApiError> {
        let room = self.max_model_len.saturating_sub(prompt_tokens);
        let max = self.max_model_len;
        if room == 0 {
            let message = format!(
                "This model's context holds {max} tokens, prompt and answer together; the prompt \
                 alone has {prompt_tokens}. Shorten it."
            );
            return Err(too_long(source_field(&request.source), message));
        }
        match request.output_max {
            None => Ok(room),
            Some(asked) if asked.tokens <= room => Ok(asked.tokens),
            Some(asked) => {
                let message = format!(
                    "This model's context holds {max} tokens, prompt and answer together; the \
                     prompt has {prompt_tokens} and `{}` asks for {}. Ask for at most {room}, or \
                     shorten the prompt.",
                    asked.field, asked.tokens
                );
                Err(too_long(asked.field, message))
            }
        }
    }
}

fn too_long(param: &str, message: String) -> ApiError {
    ApiError::new(Kind::Invalid, "context_length_exceeded", message).with_param(param)
}

fn source_field(source: &Source) -> &'static str {
    match source {
        Source::Chat { .. } => "messages",
        Source::Text(_) => "prompt",
        Source::Tokens(_) => "prompt_token_ids",
    }
}

fn prompt_error(error: PromptError) -> ApiError {
    ApiError::field(error.param(), error.to_string())
}
