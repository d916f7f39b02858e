//! Event streams against the index, from outside: random ones beside the slow twin, broken ones
//! through the tracker, and a real one from vLLM.

mod concurrent;
mod differential;
mod engine;
mod recovery;
mod vllm_capture;
