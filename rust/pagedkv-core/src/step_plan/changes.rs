//! The lists of what changed state, packed behind the arrays so that they travel with them.

use crate::error::{Result, invalid};

/// A sequence that became resident, or ceased to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Its row in the block table.
    pub row: u32,
    /// Its request.
    pub request_id: String,
    /// Which of the request's samples it is.
    pub sample: u32,
}

/// The change lists of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Sequences that have a row from this plan on.
    pub new: Vec<Change>,
    /// Sequences that lost their blocks and will come back.
    pub preempted: Vec<Change>,
    /// Sequences that ended.
    pub finished: Vec<Change>,
}

impl Changes {
    pub(crate) fn is_empty(&self) -> bool {
        self.new.is_empty() && self.preempted.is_empty() && self.finished.is_empty()
    }
}

/// Three counts, then for each change its row, sample and length of the id, and the id.
pub(crate) fn encode(changes: &Changes, out: &mut Vec<u8>) {
    out.clear();
    if changes.is_empty() {
        return;
    }
    let lists = [&changes.new, &changes.preempted, &changes.finished];
    lists.iter().for_each(|list| out.extend_from_slice(&(list.len() as u32).to_le_bytes()));
    for change in lists.into_iter().flatten() {
        for number in [change.row, change.sample, change.request_id.len() as u32] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(change.request_id.as_bytes());
    }
}

pub(super) fn decode(bytes: &[u8]) -> Result<Changes> {
    if bytes.is_empty() {
        return Ok(Changes::default());
    }
    let mut reader = Reader { rest: bytes };
    let counts = [reader.number()?, reader.number()?, reader.number()?];
    let [new, preempted, finished] =
        counts.map(|count| (0..count).map(|_| reader.change()).collect::<Result<Vec<_>>>());
    Ok(Changes { new: new?, preempted: preempted?, finished: finished? })
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.rest.split_at_checked(len) else {
            return invalid("buffer", "whole change lists", format!("{} bytes where {len} follow", self.rest.len()));
        };
        self.rest = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u32> {
        self.take(4).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("four bytes were taken")))
    }

    fn change(&mut self) -> Result<Change> {
        let (row, sample, len) = (self.number()?, self.number()?, self.number()?);
        match std::str::from_utf8(self.take(len as usize)?) {
            Ok(request_id) => Ok(Change { row, request_id: request_id.into(), sample }),
            Err(error) => invalid("buffer", "request ids in UTF-8", error),
        }
    }
}
