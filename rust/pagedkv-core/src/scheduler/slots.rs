//! The requests of a scheduler, each in a slot of its own from when it is taken up until it is gone.

use std::ops::{Index, IndexMut};

use super::request::Request;
use crate::ids::Handle;

/// Requests by slot. Whoever uses a slot knows that a request is in it; a slot that is left is given out again.
#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Option<Request>>,
    vacant: Vec<u32>,
}

impl Requests {
    pub(super) fn insert(&mut self, request: Request) -> u32 {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.put_back(slot, request);
        slot
    }

    pub(super) fn remove(&mut self, slot: u32) -> Request {
        self.vacant.push(slot);
        self.take(slot)
    }

    /// Takes a request out of its slot, which stays its own: it is to be put back.
    pub(super) fn take(&mut self, slot: u32) -> Request {
        self.slots[slot as usize].take().expect("a slot in use has a request")
    }

    pub(super) fn put_back(&mut self, slot: u32, request: Request) {
        self.slots[slot as usize] = Some(request);
    }

    /// The request with this handle, if it is in the slot still.
    pub(super) fn find(&self, slot: u32, handle: Handle) -> Option<&Request> {
        self.slots[slot as usize].as_ref().filter(|request| request.handle == handle)
    }

    /// [`Self::find`], to change it.
    pub(super) fn find_mut(&mut self, slot: u32, handle: Handle) -> Option<&mut Request> {
        self.slots[slot as usize].as_mut().filter(|request| request.handle == handle)
    }

    /// Slots, in use or not.
    pub(super) fn num_slots(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Request)> {
        (0..).zip(&self.slots).filter_map(|(slot, request)| Some((slot, request.as_ref()?)))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Request> {
        self.slots.iter_mut().flatten()
    }
}

impl Index<u32> for Requests {
    type Output = Request;

    fn index(&self, slot: u32) -> &Request {
        self.slots[slot as usize].as_ref().expect("a slot in use has a request")
    }
}

impl IndexMut<u32> for Requests {
    fn index_mut(&mut self, slot: u32) -> &mut Request {
        self.slots[slot as usize].as_mut().expect("a slot in use has a request")
    }
}
