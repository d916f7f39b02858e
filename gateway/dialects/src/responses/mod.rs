//! OpenAI Responses: requests in, events out.
//!
//! In the order in which a request travels: `read` (values at their places) and `refuse` (the API's
//! own words); `params`, `format`, `tools` and `items` (what the request says); `request` and
//! `prompt` (what the node is asked); `plan` and `echo` (what the response says of the request);
//! `node`, `output`, `parts`, `calls` and `answer` (what comes back), written by `events`. `kept` has the form
//! in which items are stored.
//!
//! Left out on purpose: looking up what a request continues or refers to, which is the caller's.

mod answer;
mod calls;
mod echo;
mod events;
mod format;
mod items;
mod kept;
mod node;
mod output;
mod params;
mod parts;
mod plan;
mod prompt;
mod read;
mod recalled;
mod refuse;
mod request;
mod tools;

pub use kept::{Ids, kept_items, response_of};
pub use refuse::{
    conversation_not_found, item_not_found, previous_response_not_found, response_not_found,
};
pub use request::{Request, metadata, parse, parse_known};
