//! Blocks and the prefixes that they hold: onto a node, public, hit, off it again, and what is told of that.

use super::BlockPool;
use crate::chain_hash::LoraName;
use crate::config::Retention;
use crate::error::{Error, Result, invalid};
use crate::events::{KVCacheSnapshot, KVEventBatch};
use crate::identity::RootKey;
use crate::ids::{BlockId, NO_NODE, NULL_BLOCK, NodeId};

impl BlockPool {
    pub(crate) fn hold_root(&mut self, key: &RootKey) -> NodeId {
        self.prefixes.hold_root(key)
    }

    pub(crate) fn attach(&mut self, block: BlockId, node: NodeId) {
        self.stamp += 1;
        self.prefixes.attach(&mut self.blocks, block, node);
        let twin = self.blocks[block.index()].twin_next;
        if let Some(retention) = self.cached.retention(&self.blocks, twin) {
            self.retain(block, retention);
        }
    }

    /// Makes the block public: the tokens of its node were computed. A block that left its node meanwhile stays private.
    pub(crate) fn publish(&mut self, block: BlockId) {
        let record = &mut self.blocks[block.index()];
        record.committed = record.node != NO_NODE;
        if record.committed {
            self.prefixes.published(block, record.node);
            if let Some(events) = &mut self.events {
                events.published(&self.prefixes, &self.blocks, block);
            }
        }
    }

    /// Takes the block off its node if the tokens on their way to it were never computed.
    pub(crate) fn withdraw(&mut self, block: BlockId) {
        let record = &self.blocks[block.index()];
        if record.node != NO_NODE && !record.committed {
            self.forget(block);
        }
    }

    /// Takes the block off its node, if it has one.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let node = self.blocks[block.index()].node;
        if node == NO_NODE {
            return;
        }
        self.stamp += 1;
        if let Some(events) = &mut self.events
            && self.blocks[block.index()].committed
        {
            events.withdrawn(&self.prefixes, &self.blocks, block);
        }
        self.cached.reset(&mut self.blocks, block);
        let parent = self.prefixes.node(node).parent;
        self.prefixes.detach(&mut self.blocks, block);
        if !self.cached.is_in_order() {
            self.let_stand_alone(parent);
        }
    }

    /// Takes one more hold on each block that a lookup found, and keeps them as the sequence that takes them asks.
    pub(crate) fn hold_hits(&mut self, blocks: &[BlockId], retention: Option<Retention>) {
        for &block in blocks.iter().filter(|&&block| block != NULL_BLOCK) {
            self.hold(block);
            self.blocks[block.index()].was_hit = true;
            if let Some(retention) = retention {
                self.retain(block, retention);
            }
        }
    }

    /// Forgets every prefix: evictable blocks become free now, held and fenced ones when they are released.
    pub(crate) fn reset_prefixes(&mut self) {
        self.stamp += 1;
        self.prefixes.reset();
        while let Some(block) = self.cached.first() {
            self.cached.remove(&mut self.blocks, block);
            self.forget(block);
            self.free.push(&mut self.blocks, block);
        }
        if let Some(events) = &mut self.events {
            events.cleared();
        }
    }

    /// Forgets the prefixes of an adapter: their evictable blocks become free now, held and fenced ones when they are
    /// released.
    pub(crate) fn invalidate_lora(&mut self, lora_id: i64) {
        self.stamp += 1;
        if let Some(events) = &mut self.events {
            events.adapter_forgotten(&self.prefixes, &self.blocks, lora_id);
        }
        self.prefixes.invalidate_lora(lora_id);
        let is_stale = |&block: &BlockId| !self.prefixes.is_current(self.blocks[block.index()].node);
        let stale: Vec<_> = self.cached.iter(&self.blocks).filter(is_stale).collect();
        for block in stale {
            self.cached.remove(&mut self.blocks, block);
            self.forget(block);
            self.free.push(&mut self.blocks, block);
        }
    }

    pub(crate) fn take_events(&mut self) -> Result<KVEventBatch> {
        let events = self.events.as_mut().ok_or_else(no_events)?;
        Ok(events.take(&self.prefixes, &self.blocks))
    }

    pub(crate) fn event_snapshot(&mut self) -> Result<KVCacheSnapshot> {
        let events = self.events.as_mut().ok_or_else(no_events)?;
        Ok(events.snapshot(&self.prefixes, &self.blocks))
    }

    pub(crate) fn name_lora(&mut self, lora_id: i64, name: LoraName) -> Result<()> {
        let events = self.events.as_mut().ok_or_else(no_events)?;
        if self.prefixes.knows_lora(lora_id) {
            return invalid("lora_id", "an adapter of which nothing is cached or in use", lora_id);
        }
        events.name_lora(lora_id, name);
        Ok(())
    }
}

fn no_events() -> Error {
    Error::Unsupported("events: the cache was configured without them".into())
}
