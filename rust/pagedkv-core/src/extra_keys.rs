//! Extra keys of single blocks, such as the images that they hold, by small numbers.

use std::collections::HashMap;

/// Interned extra keys of blocks, counted by the nodes that carry them. Key 0 is the empty one.
#[derive(Debug, Default)]
pub(crate) struct ExtraKeys {
    ids: HashMap<Box<[u8]>, u32>,
    keys: HashMap<u32, (Box<[u8]>, u32)>,
    next: u32,
}

impl ExtraKeys {
    pub(crate) fn find(&self, key: &[u8]) -> Option<u32> {
        if key.is_empty() { Some(0) } else { self.ids.get(key).copied() }
    }

    pub(crate) fn key(&self, id: u32) -> &[u8] {
        self.keys.get(&id).map_or(&[], |(key, _)| key)
    }

    pub(crate) fn intern(&mut self, key: &[u8]) -> u32 {
        if key.is_empty() {
            return 0;
        }
        let id = self.find(key).unwrap_or_else(|| {
            self.next += 1;
            self.ids.insert(key.into(), self.next);
            self.keys.insert(self.next, (key.into(), 0));
            self.next
        });
        self.keys.get_mut(&id).expect("an interned key has an entry").1 += 1;
        id
    }

    pub(crate) fn release(&mut self, id: u32) {
        let Some((key, count)) = self.keys.get_mut(&id) else {
            return;
        };
        *count -= 1;
        if *count == 0 {
            self.ids.remove(key);
            self.keys.remove(&id);
        }
    }
}
