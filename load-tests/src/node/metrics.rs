//! What does a node tell in figures?
//!
//! By vLLM's names, which our engine uses too, and by our engine's for what vLLM has no name for:
//! transfers between nodes, and tiers below the pool. Seconds are real ones, since whoever reads them
//! lives in real time.

use std::fmt::Write as _;

use cache_index::block::BLOCK_TOKENS;
use simulate::engine::tiers::Tier;

use super::state::State;

/// Of a process that started then.
pub(super) fn text(state: &State, started_s: f64) -> String {
    let (running, waiting) = state.running_and_waiting();
    let counts = state.counts;
    let handovers = state.handed.counts;
    let (open, tickets) = state.handed.open_and_held();
    let mut text = format!("process_start_time_seconds {started_s}\n");
    let _ = writeln!(
        text,
        "vllm:cache_config_info{{block_size=\"{BLOCK_TOKENS}\",num_gpu_blocks=\"{}\"}} 1",
        state.capacity()
    );
    for (name, value) in [
        ("vllm:kv_cache_usage_perc", state.pool_usage()),
        ("vllm:num_requests_running", running as f64),
        ("vllm:num_requests_waiting", waiting as f64),
        ("vllm:prompt_tokens_total", counts.prompt_tokens as f64),
        ("vllm:prefix_cache_hits_total", counts.cached_tokens as f64),
        ("vllm:generation_tokens_total", counts.answer_tokens as f64),
        (
            "homing:kv_transfers_asked_total",
            handovers.transfers_asked as f64,
        ),
        (
            "homing:kv_transfers_received_total",
            handovers.transfers_received as f64,
        ),
        (
            "homing:kv_transfers_failed_total",
            handovers.transfers_failed as f64,
        ),
        (
            "homing:kv_transfers_sent_total",
            handovers.transfers_sent as f64,
        ),
        (
            "homing:kv_transfer_received_bytes_total",
            handovers.transfer_received_bytes as f64,
        ),
        (
            "homing:kv_tickets_expired_total",
            handovers.tickets_expired as f64,
        ),
        ("homing:kv_handovers", open as f64),
        ("homing:kv_tickets", tickets as f64),
        ("homing:kv_blocks_pinned", state.held_blocks() as f64),
    ] {
        let _ = writeln!(text, "{name} {value}");
    }
    if let Some(host) = state.host() {
        for (name, value) in [
            ("homing:kv_tier_capacity_blocks", host.blocks as f64),
            (
                "homing:kv_tier_blocks",
                state.blocks.count(Tier::Host) as f64,
            ),
            ("homing:kv_tier_block_seconds", state.host_block_s(host)),
        ] {
            let _ = writeln!(text, "{name}{{tier=\"host\"}} {value}");
        }
    }
    text
}
