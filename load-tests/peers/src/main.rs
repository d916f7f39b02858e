//! What do the crates that do the same as ours do with the same input?
//!
//! `homing-peers [FLAGS]` measures the index beside its peers ([`bench`]); `homing-peers policy NAME`
//! routes as a peer does, for a simulator that speaks the ext: protocol ([`policy`]); `homing-peers store`
//! measures the disk tier beside foyer ([`store`]).

mod bench;
mod policy;
mod store;
mod workload;

use std::alloc::System;
use std::process::ExitCode;

use cap::Cap;

#[global_allocator]
static ALLOCATED: Cap<System> = Cap::new(System, usize::MAX);

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).peekable();
    let which = arguments.next_if(|name| matches!(&**name, "policy" | "store"));
    let done = match which.as_deref() {
        Some("policy") => policy::policy(arguments),
        Some(_) => store::store(arguments),
        None => bench::bench(arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(wrong) => {
            eprintln!("homing-peers: {wrong}");
            ExitCode::FAILURE
        }
    }
}
