//! The Responses dialect from the outside: requests in, the node's words out, events back.

mod support;

mod answers;
mod fuzz;
mod kept;
mod malformed;
mod prompts;
mod streams;
mod tools;
