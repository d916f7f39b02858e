//! A fleet for tests of decisions: nodes that stand, serve a model, and hold parts of a prompt,
//! without a socket between.

use std::sync::Arc;

use cache_index::event::{EngineHash, EventBatch, ExtraKeys, GroupKind, KvEvent};
use cache_index::ids::NodeId;
use cache_index::trust::Trust;
use policies::view::NodeState;

use super::Fleet;
use crate::config::NodeConfig;

impl Fleet {
    /// So many nodes, all of them down.
    pub(crate) fn of(nodes: usize) -> Arc<Self> {
        let config = |at: usize| NodeConfig {
            id: NodeId::new(&format!("n{at}")),
            addr: ([127, 0, 0, 1], 9).into(),
            host: "127.0.0.1:9".to_owned(),
            events: None,
            replay: None,
            region: "local".to_owned(),
            duty: crate::config::Duty::default(),
            fetch_ms_per_block: policies::view::FetchCosts::default(),
        };
        Self::new(&(0..nodes).map(config).collect::<Vec<_>>())
    }

    /// All nodes serve the model; each holds more of the prompt's beginning than the one before.
    pub(crate) fn stand(&self, model: &str, salt: &str, prompt: &[u32]) {
        let model: Arc<str> = model.into();
        self.issue_salt(salt);
        let index = self.index(&model);
        index.issue_salt(salt);
        let nodes = self.nodes();
        for (at, node) in nodes.iter().enumerate() {
            node.set_facts(|facts| {
                facts.state = NodeState::Up;
                facts.context_max = 1 << 20;
                facts.pool_blocks = 100_000;
            });
            node.model.send_replace(Some(Arc::clone(&model)));
            let blocks = prompt.len() / 16 * (at + 1) / nodes.len();
            // An engine's own hashes: one for each block, whatever they are.
            let hash = |at: usize| EngineHash::Int(at as u64);
            let batch = EventBatch {
                timestamp: 1.0,
                events: vec![KvEvent::Stored {
                    block_hashes: (0..blocks).map(hash).collect(),
                    parent: None,
                    token_ids: prompt[..blocks * 16].to_vec(),
                    block_size: 16,
                    medium: None,
                    lora_name: None,
                    extra_keys: ExtraKeys::salt(salt),
                    group_idx: None,
                    group_kind: GroupKind::default(),
                }],
                dp_rank: None,
                boot_id: None,
            };
            index.apply(&node.id, &batch);
            node.set_trust(Trust::Exact);
        }
    }
}
