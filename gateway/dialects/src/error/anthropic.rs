//! What does an error look like to Anthropic's clients?
//!
//! `{"type": "error", "error": {"type", "message"}}`, where the type follows the status. Claude Code
//! acts on the message of one error: a prompt that is too long starts its compaction, and a
//! `max_tokens` that does not fit beside the prompt is asked for again, smaller, but only where the
//! API's own words and numbers are found. So an error about the context's length is told in these
//! words, with the numbers found in ours or the node's.

/// The status for one that OpenAI's clients get: no capacity is 529 here, which the SDKs repeat and
/// name `OverloadedError`. A gateway that stops or cannot write stays a 503, for the load balancers
/// before it.
pub(super) fn overloaded() -> u16 {
    529
}

/// The error object.
pub(super) fn body(status: u16, message: &str) -> String {
    let kind = kind(status);
    serde_json::json!({"type": "error", "error": {"type": kind, "message": message}}).to_string()
}

fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}

/// Whether a node's message, told without a code, is about the context's length.
pub(super) fn is_context_length(message: &str) -> bool {
    let about = ["context length", "context size", "context window"];
    let above = ["maximum", "longer", "exceed", "too large", "too long"];
    let has = |words: &[&str]| words.iter().any(|word| message.contains(word));
    has(&about) && has(&above)
}

/// An error about the context's length in the API's words.
pub(super) fn context_length(message: &str) -> String {
    let limit = number(message, LIMIT);
    let prompt = number(message, PROMPT);
    let answer = number(message, ANSWER);
    match (prompt, answer, limit) {
        (Some(prompt), Some(answer), Some(limit)) if prompt < limit => format!(
            "input length and `max_tokens` exceed context limit: {prompt} + {answer} > {limit}, \
             decrease input length or `max_tokens` and try again"
        ),
        (Some(prompt), _, Some(limit)) => {
            format!("prompt is too long: {prompt} tokens > {limit} maximum")
        }
        _ => format!("prompt is too long: {message}"),
    }
}

/// Where a number stands in the messages of this gateway, its engine, vLLM and SGLang.
enum Beside {
    /// At most a few characters behind this.
    After(&'static str),
    /// Right before this.
    Before(&'static str),
}

use Beside::{After, Before};

const LIMIT: &[Beside] = &[
    After("context length is "),
    After("context length of "),
    After("context length ("),
    After("context holds "),
    After("KV pool holds "),
];
const PROMPT: &[Beside] = &[
    Before(" in the prompt"),
    Before(" in the messages"),
    Before(" input tokens"),
    Before(" tokens from the input"),
    After("The input ("),
    After("prompt has "),
    After("prompt alone has "),
    After("The prompt has "),
];
const ANSWER: &[Beside] = &[
    Before(" for the completion"),
    Before(" tokens for the completion"),
    Before(" in the completion"),
    Before(" output tokens"),
    After("too large: "),
    After("asks for "),
];

fn number(message: &str, places: &[Beside]) -> Option<u64> {
    places.iter().find_map(|place| match place {
        After(words) => {
            let (_, rest) = message.split_once(words)?;
            let end = rest.find(|c: char| !c.is_ascii_digit());
            rest[..end.unwrap_or(rest.len())].parse().ok()
        }
        Before(words) => {
            let (before, _) = message.split_once(words)?;
            let start = before.rfind(|c: char| !c.is_ascii_digit());
            before[start.map_or(0, |at| at + 1)..].parse().ok()
        }
    })
}

#[cfg(test)]
mod tests {
    //! Catches a context-length error that Claude Code does not recognise: it would repeat the
    //! request unchanged for as long as its user waits.
    use super::*;

    #[test]
    fn context_length_errors_are_told_in_the_words_that_clients_act_on() {
        let fits = "input length and `max_tokens` exceed context limit: 7000 + 2000 > 8192, \
                    decrease input length or `max_tokens` and try again";
        let long = "prompt is too long: 12039 tokens > 8192 maximum";
        for (message, expected) in [
            (
                "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (7000 in the prompt, 2000 for the completion). Please reduce the length of the prompt or of the completion.",
                fits,
            ),
            (
                "This model's maximum context length is 8192 tokens. However, you requested 44039 tokens (12039 in the messages, 32000 in the completion). Please reduce the length of the messages or completion.",
                long,
            ),
            (
                "'max_tokens' or 'max_completion_tokens' is too large: 2000. This model's maximum context length is 8192 tokens and your request has 7000 input tokens (2000 > 8192 - 7000).",
                fits,
            ),
            (
                "This model's maximum context length is 8192 tokens. However, your request has 12039 input tokens. Please reduce the length of the input messages.",
                long,
            ),
            (
                "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of 9000 tokens: 7000 tokens from the input messages and 2000 tokens for the completion.",
                fits,
            ),
            (
                "The input (12039 tokens) is longer than the model's context length (8192 tokens).",
                long,
            ),
            (
                "This model's context holds 8192 tokens, prompt and answer together; the prompt has 7000 and `max_tokens` asks for 2000. Ask for at most 1192, or shorten the prompt.",
                fits,
            ),
            (
                "This model's context holds 8192 tokens, prompt and answer together; the prompt alone has 12039. Shorten it.",
                long,
            ),
            (
                "the request exceeds the available context size, try increasing it",
                "prompt is too long: the request exceeds the available context size, try increasing it",
            ),
        ] {
            assert!(
                is_context_length(message) || message.contains("context holds"),
                "{message}"
            );
            assert_eq!(context_length(message), expected, "{message}");
        }
    }

    #[test]
    fn other_errors_keep_their_words() {
        for message in [
            "`tools` has 2000 tools; at most 1024 are allowed.",
            "The model's context is described elsewhere.",
            "",
        ] {
            assert!(!is_context_length(message), "{message}");
        }
    }
}
