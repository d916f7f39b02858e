//! Does the ledger keep every record, whatever happens to process, disk and database?
//!
//! Black box over `gateway::ledger` and `gateway::report`: records go in, processes are killed,
//! bytes are damaged, disks fill up; rows are compared with what was acknowledged.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers fail their test")]

mod crash;
mod damage;
mod full_disk;
mod projection;
mod support;
