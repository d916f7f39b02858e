//! Which tokens does the request become, and does it fit?
//!
//! Template, tokenizer and block hashes are the gateway's own code (crates `prompt` and
//! `cache-index`), so both count the same tokens and name the same blocks. A form that is demanded
//! of the answer is compiled here (`constraint`), and the budget is held against the shortest
//! answer of that form.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use answer::Syntax;
use cache_index::block::{BlockHash, Namespace, hash_chain};
use prompt::{ChatInput, PromptBuilder, PromptError, SegmentCache};

use super::constraint::{Constraints, Formats};
use super::{Dialect, Embedding, Generation, Parallel, Source, Task, Tokenization};
use crate::engine::{HandOver, Job, KEEP_MAX, Pooling, Remote, TakeOver, Work};
use crate::error::{ApiError, Kind};
use crate::kv::table::Scope;
use crate::kv::transfer::auth::prompt_digest;

/// Text and tokens of known segments that are kept for reuse: some hundred long conversations.
const SEGMENT_CACHE_BYTES_MAX: usize = 32 << 20;
/// How long a prefilled prompt's blocks stay pinned: vLLM's lease.
const HOLD: Duration = Duration::from_secs(30);
/// Tokens at a prompt's end that are looked at for an opened block of reasoning: its marker, spelt
/// in several tokens where the vocabulary has none for it, and white space.
const END_TOKENS: usize = 12;

/// The model as requests see it.
pub struct Served {
    /// The id in `/v1/models`.
    pub model_id: Arc<str>,
    /// Prompt and answer together, in tokens.
    pub max_model_len: usize,
    /// Names this life of the process, for holders of its blocks.
    pub boot_id: String,
    prompts: Arc<PromptBuilder>,
    segments: SegmentCache,
    formats: Formats,
    constraints: Constraints,
    pooling: Pooling,
    width: usize,
}

/// What a served model is made of.
#[derive(Debug)]
pub struct ServedParts {
    /// The id in `/v1/models`.
    pub model_id: Arc<str>,
    /// Prompt and answer together, in tokens.
    pub max_model_len: usize,
    /// Names this life of the process.
    pub boot_id: String,
    /// Tokenizer and template.
    pub prompts: Arc<PromptBuilder>,
    /// How answers are written.
    pub formats: Formats,
    /// How tokens' vectors become one, where a request does not say.
    pub pooling: Pooling,
    /// Numbers in a vector.
    pub width: usize,
}

/// How an answer's text is read.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Which forms are looked for.
    pub syntax: Syntax,
    /// The names of the tools that were offered.
    pub offered: Arc<[String]>,
    /// Calls past these are dropped.
    pub calls: Parallel,
}

impl Reading {
    /// Whether there is anything to look for.
    pub fn is_plain(&self) -> bool {
        self.syntax.tools.is_none() && self.syntax.reasoning.is_none()
    }
}

/// Jobs, and what their prompt is called.
pub struct Prepared {
    /// For the engine: one for each choice.
    pub jobs: Vec<Job>,
    /// The hash of the prompt's last full block.
    pub last_block: Option<BlockHash>,
    /// How the answers are read.
    pub reading: Reading,
    /// What each answer's text begins with.
    pub echo: String,
}

/// Who asks, and since when.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Named in logs.
    pub request_id: Arc<str>,
    /// When, for timeouts.
    pub at: Instant,
    /// When, for templates that print the date.
    pub unix_seconds: i64,
    /// For how much longer than others its blocks are wanted.
    pub keep: Duration,
    /// Leading tokens of the prompt that slow tiers are expected to hold.
    pub prefetch_tokens: usize,
}

impl Served {
    /// Serves what the parts are of.
    pub fn new(parts: ServedParts) -> Self {
        let constraints = Constraints::new(&parts.prompts);
        Self {
            model_id: parts.model_id,
            max_model_len: parts.max_model_len,
            boot_id: parts.boot_id,
            prompts: parts.prompts,
            segments: SegmentCache::new(SEGMENT_CACHE_BYTES_MAX),
            formats: parts.formats,
            constraints,
            pooling: parts.pooling,
            width: parts.width,
        }
    }

    /// Token ids are below this.
    pub fn vocab(&self) -> usize {
        self.prompts.tokenizer().vocab_size()
    }

    /// A token's text as far as it is whole characters, that of a control token included.
    pub fn token_text(&self, token: u32) -> Cow<'_, str> {
        String::from_utf8_lossy(self.token_bytes(token))
    }

    /// A token's bytes; for a control token those of its name.
    pub fn token_bytes(&self, token: u32) -> &[u8] {
        let tokenizer = self.prompts.tokenizer();
        match tokenizer.token_bytes(token) {
            [] => tokenizer.token_text(token).as_bytes(),
            bytes => bytes,
        }
    }

    /// The text of tokens, control tokens included.
    pub fn text(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| self.token_bytes(*token))
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Turns a checked request into jobs. Costs time in proportion to the prompt, and up to a
    /// second where a form is demanded.
    pub fn prepare(&self, request: Generation, arrival: &Arrival) -> Result<Prepared, ApiError> {
        let prompt = self.tokens(&request.source, arrival.unix_seconds)?;
        let output_max = self.output_max(&request, prompt.len())?;
        let reading = self.reading(&request, &prompt);
        let compiled = match request.task {
            // The node that goes on keeps the form.
            Task::Prefill | Task::HandOver(_) => None,
            Task::Answer | Task::TakeOver(_) => {
                let constraints = &self.constraints;
                constraints.compile(&request, &self.formats, &reading)?
            }
        };
        if let Some(compiled) = &compiled {
            check_budget(compiled.shortest_tokens(), output_max, &request)?;
        }
        let chain = self.chain(&prompt, request.cache_salt.as_deref());
        let last_block = chain.1.last().copied();
        let echo = if request.echo {
            self.echo(&request.source, &prompt)
        } else {
            String::new()
        };
        let (work, remote) = halves(&request, &chain.1, &prompt);
        let (choices, output_max) = match request.task {
            Task::HandOver(_) => (1, 1),
            Task::Answer | Task::Prefill | Task::TakeOver(_) => (request.choices, output_max),
        };
        let job = |choice: usize| {
            let (scope, chain) = chain.clone();
            let mut job = Job::generate(prompt.clone(), chain, scope, output_max);
            job.request_id = Arc::clone(&arrival.request_id);
            job.output_min = request.output_min;
            job.sampling = request.sampling.clone();
            job.sampling.seed = job.sampling.seed.wrapping_add(choice as u64);
            job.stops.clone_from(&request.stops);
            job.stop_tokens = self.stop_tokens(&request);
            job.constraint = compiled.as_ref().map(constrain::Compiled::start);
            job.priority = request.priority;
            job.keep = arrival.keep.min(KEEP_MAX);
            job.prefetch_tokens = arrival.prefetch_tokens;
            job.deadline = request.timeout.map(|timeout| arrival.at + timeout);
            job.logprobs = request.logprobs;
            job.token_ids = request.token_ids;
            job.show_markers = !reading.is_plain();
            job.work = work;
            if choice == 0 {
                // The others share what it brings.
                job.remote = remote.clone();
            }
            job
        };
        Ok(Prepared {
            jobs: (0..choices).map(job).collect(),
            last_block,
            reading,
            echo,
        })
    }

    /// Turns a checked request for vectors into jobs, in order.
    pub fn prepare_embedding(
        &self,
        request: &Embedding,
        arrival: &Arrival,
    ) -> Result<Vec<Job>, ApiError> {
        if let Some(asked) = request.dimensions.filter(|asked| *asked != self.width) {
            let width = self.width;
            let message = format!(
                "`dimensions` is {asked}; this model's vectors have {width}. Leave it out."
            );
            return Err(ApiError::field("dimensions", message));
        }
        let pooling = request.pooling.unwrap_or(self.pooling);
        let job = |(at, source): (usize, &Source)| {
            let param = format!("input[{at}]");
            let prompt = self
                .tokens(source, arrival.unix_seconds)
                .map_err(|error| error.with_param(&*param))?;
            let (found, most) = (prompt.len(), self.max_model_len);
            if found > most {
                let message =
                    format!("`{param}` has {found} tokens; this model's context holds {most}.");
                return Err(too_long(&param, message));
            }
            // Nothing is taken from the cache: a mean needs every token's own vector.
            let (scope, _) = self.chain(&[], request.cache_salt.as_deref());
            let mut job = Job::generate(prompt, Vec::new(), scope, 1);
            job.request_id = Arc::clone(&arrival.request_id);
            job.priority = request.priority;
            job.deadline = request.timeout.map(|timeout| arrival.at + timeout);
            job.work = Work::Embed(pooling);
            Ok(job)
        };
        request.inputs.iter().enumerate().map(job).collect()
    }

    /// The tokens of a text or a conversation.
    pub fn tokenize(
        &self,
        request: &Tokenization,
        unix_seconds: i64,
    ) -> Result<Vec<u32>, ApiError> {
        match &request.source {
            Source::Text(text) if !request.add_special_tokens => {
                Ok(self.prompts.tokenizer().encode_with_specials(text))
            }
            Source::Text(text) => Ok(self.prompts.completion(text, &self.segments)),
            source => self.tokens(source, unix_seconds),
        }
    }

    fn chain(&self, prompt: &[u32], salt: Option<&str>) -> (Scope, Vec<BlockHash>) {
        let salt: Option<Arc<str>> = salt.map(Arc::from);
        let namespace = Namespace::new(&self.model_id, None, salt.as_deref());
        let chain = hash_chain(&namespace, prompt);
        (Scope { namespace, salt }, chain)
    }

    /// A demanded form says when it ends, and says it with the model's own end tokens.
    fn stop_tokens(&self, request: &Generation) -> Vec<u32> {
        let mut stop_tokens = request.stop_token_ids.clone();
        if !request.ignore_eos || request.is_constrained() {
            stop_tokens.extend_from_slice(self.prompts.tokenizer().eos_ids());
        }
        stop_tokens
    }

    fn reading(&self, request: &Generation, prompt: &[u32]) -> Reading {
        let mut syntax = Syntax::default();
        if request.dialect == Dialect::Chat {
            syntax.tools = request.tools.are_parsed().then_some(self.formats.tools);
            syntax.reasoning = self.formats.reasoning;
            syntax.opened = syntax.reasoning.is_some_and(|reasoning| {
                let end = &prompt[prompt.len().saturating_sub(END_TOKENS)..];
                reasoning.is_open_at_end_of(&self.text(end))
            });
        }
        let offered = request.tools.offered.iter();
        Reading {
            syntax,
            offered: offered.map(|tool| tool.name.clone()).collect(),
            calls: request.tools.parallel,
        }
    }

    fn echo(&self, source: &Source, prompt: &[u32]) -> String {
        match source {
            Source::Text(text) => text.clone(),
            Source::Chat { .. } | Source::Tokens(_) => self.text(prompt),
        }
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
        if request.output_min > room {
            let message = format!(
                "`min_tokens` is {}, and after the prompt of {prompt_tokens} tokens this model's \
                 context has room for {room}.",
                request.output_min
            );
            return Err(too_long("min_tokens", message));
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

/// What this node does for a request, and what another one has to do with it.
fn halves(request: &Generation, chain: &[BlockHash], prompt: &[u32]) -> (Work, Remote) {
    match &request.task {
        Task::Answer => (Work::Generate, Remote::None),
        Task::Prefill => (Work::PrefillOnly { hold: HOLD }, Remote::None),
        Task::HandOver(to) => {
            let hand_over = HandOver {
                id: to.id,
                receiver: Arc::clone(&to.receiver),
                prompt: prompt_digest(chain, prompt),
                hold: to.timeout,
            };
            // A first token that a form has a say in is chosen by the node that keeps the form.
            let work = if request.is_constrained() {
                Work::PrefillOnly { hold: to.timeout }
            } else {
                Work::Generate
            };
            (work, Remote::HandOver(hand_over))
        }
        Task::TakeOver(from) => {
            let take_over = TakeOver {
                id: from.id,
                sender: Arc::clone(&from.sender),
                endpoints: from.endpoints.clone(),
                prompt: prompt_digest(chain, prompt),
                chain: chain.to_vec(),
                timeout: from.timeout,
                total: from.total,
                on_failure: from.on_failure,
            };
            (Work::Generate, Remote::TakeOver(Box::new(take_over)))
        }
    }
}

/// Refuses a budget that no answer of the demanded form fits into.
fn check_budget(shortest: usize, budget: usize, request: &Generation) -> Result<(), ApiError> {
    if shortest <= budget {
        return Ok(());
    }
    let (field, why) = match request.output_max {
        Some(asked) => (asked.field, "allowed"),
        None => (
            source_field(&request.source),
            "what the context has room for",
        ),
    };
    let message = format!(
        "The shortest answer of the demanded form has {shortest} tokens; {budget} are {why}. Ask \
         for `max_tokens` of at least {shortest}."
    );
    let error = ApiError::new(Kind::Invalid, "budget_too_small", message);
    Err(error.with_param(field))
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
