//! When have all heard of a turn, and do they hold the same?

use std::time::Duration;

use serde_json::Value;

use super::super::account::Account;
use super::super::patience::Patience;
use super::super::servers::is_ready;
use super::{Check, POLL, Turn, number};
use crate::error::LoadError;

/// Events are there within milliseconds of an answer; the index or the account is wrong if nothing
/// more has come for so long.
const SETTLE_STANDSTILL: Duration = Duration::from_secs(30);
/// So often the index and the account may differ before the check ends: they do not come together
/// again by themselves, and each time is waited for.
const DIFFERENCES_MAX: usize = 3;

impl Check {
    /// Waits until the account holds all blocks of this turn, and the index as many as the account.
    pub(super) async fn settle(&mut self, turn: Option<&Turn>) -> Result<(), LoadError> {
        self.done.index_compared += 1;
        let mut patience = Patience::new(SETTLE_STANDSTILL, (0, Value::Null));
        loop {
            let history = self.listener.history();
            let account = history.account();
            let has_heard = turn.is_none_or(|turn| self.has_heard(&account, turn));
            let node = self.gateway.node().await?;
            let held = account.blocks() as u64;
            let index = number(&node, "/index_blocks");
            if has_heard && index == held && is_ready(&node) {
                self.done.index_equal += 1;
                return Ok(());
            }
            if patience.is_over((history.batches(), node["index_blocks"].clone())) {
                let after = turn.map_or("turns at once", |turn| &turn.request_id);
                self.fault(format!(
                    "after {after}: all blocks were told of: {has_heard}; the index holds {index}, \
                     the events say {held}; the node is {}, trust {}",
                    node["state"], node["trust"]
                ));
                return self.another_difference();
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Ends the check when there were too many.
    fn another_difference(&self) -> Result<(), LoadError> {
        match self.done.index_compared - self.done.index_equal {
            DIFFERENCES_MAX => Err(LoadError::program(
                "the check",
                format!("index and account differed {DIFFERENCES_MAX} times"),
            )),
            _ => Ok(()),
        }
    }

    fn has_heard(&mut self, account: &Account, turn: &Turn) -> bool {
        if self.salts.len() == turn.tenant as usize {
            self.salts
                .extend(account.salt_of(&turn.prompt, &self.salts));
        }
        // The last token of an answer is sampled, and not computed.
        let mut tokens = turn.prompt.clone();
        tokens.extend(
            turn.output
                .split_last()
                .map_or(&[][..], |(_, others)| others),
        );
        let full = tokens.len() / account.block_tokens() * account.block_tokens();
        account.leading(Some(self.salt(turn.tenant)), &tokens) == full
    }
}
