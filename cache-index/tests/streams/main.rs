//! Event streams against the index, from outside: random ones beside the slow twin, broken ones
//! through the tracker, hostile ones, a real one from vLLM, and the published hash vectors.

mod concurrent;
mod differential;
mod engine;
mod hostile;
mod recovery;
mod vectors;
mod vllm_capture;
