//! Guesses for the next tokens of running sequences, in a chain or as a tree, for a plan to check.

use super::Scheduler;
use super::in_flight::{Entry, InFlight};
use super::pass::Pass;
use super::request::Stage;
use crate::error::{Error, Result, invalid};
use crate::step_plan::{Field, StepPlan};

/// Guesses for the next tokens of one sample.
#[derive(Clone, Debug, Default)]
pub(super) struct Drafts {
    ids: Vec<i32>,
    /// The guess that each continues, -1 for the last known token; empty for a chain.
    parents: Vec<i32>,
    /// Tokens from the last known one to each; empty for a chain.
    depths: Vec<u32>,
}

/// A guess in a plan, and the one that it continues; -1 for the last known token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) token: i32,
    pub(super) parent: i32,
}

impl Drafts {
    pub(super) fn clear(&mut self) {
        self.ids.clear();
        self.parents.clear();
        self.depths.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    fn set(&mut self, ids: &[i32], parents: Option<&[i32]>) {
        self.clear();
        self.ids.extend_from_slice(ids);
        let Some(parents) = parents.filter(|parents| !parents.iter().copied().eq(-1..parents.len() as i32 - 1)) else {
            return;
        };
        self.parents.extend_from_slice(parents);
        for &parent in parents {
            let above = usize::try_from(parent).map_or(0, |parent| self.depths[parent]);
            self.depths.push(above + 1);
        }
    }

    /// Leading guesses of which all can be accepted where `most` tokens can.
    pub(super) fn num_within(&self, most: u32) -> u32 {
        if self.parents.is_empty() {
            return most.min(self.ids.len() as u32);
        }
        self.depths.iter().take_while(|&&depth| depth <= most).count() as u32
    }

    /// The first `num` guesses.
    pub(super) fn nodes(&self, num: u32) -> impl Iterator<Item = Node> {
        let parent = |i: usize| self.parents.get(i).copied().unwrap_or(i as i32 - 1);
        self.ids[..num as usize].iter().enumerate().map(move |(i, &token)| Node { token, parent: parent(i) })
    }
}

/// Whether each guess continues the one before it.
pub(super) fn is_chain(nodes: &[Node]) -> bool {
    nodes.iter().map(|node| node.parent).eq(-1..nodes.len() as i32 - 1)
}

impl Scheduler {
    /// Gives running sequences, by their rows, guesses for their next tokens: those of the i-th row are
    /// `ids[start_loc[i]..start_loc[i + 1]]`. They replace earlier ones. The next plan that has the tokens and the blocks
    /// for them runs them behind the last known token and draws a sample after each; its commit says how many were
    /// accepted. A preemption drops them. What does not fit is left out from the end.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a row without a sequence that decodes, a row twice, more guesses than `lookahead`,
    /// or bounds or tokens out of range; [`Error::SequenceInFlight`].
    ///
    /// # Complexity
    /// O(rows + guesses).
    pub fn set_draft_tokens(&mut self, rows: &[i32], start_loc: &[i32], ids: &[i32]) -> Result<()> {
        self.set_drafts(rows, start_loc, ids, None)
    }

    /// As [`Self::set_draft_tokens`], for trees: `parents[k]` is the number of the guess of the same row that guess `k`
    /// continues, or -1 for the last known token. Guesses that do not fit, or are too deep to be accepted, are left out
    /// with all behind them, so trees are best given level by level.
    ///
    /// # Errors
    /// As [`Self::set_draft_tokens`]; [`Error::InvalidArgument`] also for a parent that is no earlier guess of its row.
    pub fn set_draft_trees(&mut self, rows: &[i32], start_loc: &[i32], ids: &[i32], parents: &[i32]) -> Result<()> {
        self.set_drafts(rows, start_loc, ids, Some(parents))
    }

    fn set_drafts(&mut self, rows: &[i32], start_loc: &[i32], ids: &[i32], parents: Option<&[i32]>) -> Result<()> {
        self.drain_inbox();
        let spans = spans(rows.len(), start_loc, ids.len())?;
        if let Some(negative) = ids.iter().find(|&&token| token < 0) {
            return invalid("ids", "token ids of at least 0", negative);
        }
        if let Some(parents) = parents {
            check_parents(parents, &spans, ids.len())?;
        }
        let mut places = Vec::with_capacity(rows.len());
        for (&row, span) in rows.iter().zip(&spans) {
            if span.len() > self.limits.lookahead as usize {
                let expected = format!("at most {} tokens per row (lookahead)", self.limits.lookahead);
                return invalid("start_loc", expected, format!("{} for row {row}", span.len()));
            }
            let place = self.decoding_at(row)?;
            if places.contains(&place) {
                return invalid("rows", "each row once", format!("row {row} twice"));
            }
            places.push(place);
        }
        for ((slot, sample), span) in places.into_iter().zip(spans) {
            let drafts = &mut self.request_mut(slot).samples[sample].drafts;
            drafts.set(&ids[span.clone()], parents.map(|parents| &parents[span]));
        }
        Ok(())
    }

    /// Takes guesses that need a block out of the plan again, those of one sequence: they give way to tokens that must
    /// run. Answers whether there were any.
    pub(super) fn revoke_drafts(&mut self, pass: &mut Pass) -> bool {
        let block_size = self.manager.block_size;
        let takes_blocks =
            |entry: &Entry| entry.end.div_ceil(block_size) > (entry.end - entry.num_drafts).div_ceil(block_size);
        self.revoke_last_drafts(pass, takes_blocks)
    }

    /// Takes guesses out of the plan again until so many tokens are left of the budget, if all of them are enough.
    pub(super) fn revoke_drafts_for(&mut self, pass: &mut Pass, num_tokens: u32) -> bool {
        let num_drafts: u32 = pass.record.entries.iter().map(|entry| entry.num_drafts).sum();
        if pass.budget + num_drafts < num_tokens {
            return false;
        }
        while pass.budget < num_tokens {
            self.revoke_last_drafts(pass, |entry| entry.num_drafts > 0);
        }
        true
    }

    fn revoke_last_drafts(&mut self, pass: &mut Pass, is_meant: impl Fn(&Entry) -> bool) -> bool {
        let Some(entry) = pass.record.entries.iter_mut().rfind(|entry| is_meant(entry)) else {
            return false;
        };
        self.manager.shorten(entry.sequence as usize, entry.num_drafts);
        pass.budget += entry.num_drafts;
        entry.end -= entry.num_drafts;
        (entry.num_drafts, entry.num_samples) = (0, 1);
        true
    }

    /// The request and the sample on a row, if it decodes and is in no plan in flight.
    fn decoding_at(&self, row: i32) -> Result<(u32, usize)> {
        let Some(sequence) = u32::try_from(row).ok().and_then(|row| self.seats.sequence_at(row)) else {
            return invalid("rows", "rows on which a sequence sits", row);
        };
        let seat = self.seats.seat(sequence);
        let request = self.request(seat.slot);
        if request.num_in_flight > 0 {
            return Err(Error::SequenceInFlight(u64::from(row.unsigned_abs())));
        }
        let found = self.manager.sequence(sequence);
        if request.stage != Stage::Apart || found.num_scheduled + 1 != found.tokens.len() {
            return invalid("rows", "rows of sequences that decode", format!("row {row}, which computes its prompt"));
        }
        Ok((seat.slot, seat.sample as usize))
    }

    /// Checks the rows with which a plan is committed, and the paths that they take through draft trees.
    pub(super) fn check_rows(record: &InFlight, rows: &[i32], width: usize, accepted: Option<&[i32]>) -> Result<()> {
        let num_rows: usize = record.entries.iter().map(Entry::num_rows).sum();
        if rows.len() != num_rows * width || width == 0 {
            let expected = format!("{num_rows} rows, one per sequence that samples, of at least one token");
            return invalid("tokens", expected, format!("{} tokens in rows of {width}", rows.len()));
        }
        if let Some(accepted) = accepted.filter(|accepted| accepted.len() != rows.len()) {
            let expected = format!("{num_rows} rows of {width}, the shape of tokens");
            return invalid("accepted", expected, format!("{} entries", accepted.len()));
        }
        let mut at = 0;
        for entry in &record.entries {
            let nodes = record.nodes_of(entry);
            for _ in 0..entry.num_rows() {
                let path = accepted.map(|accepted| &accepted[at..at + width]);
                check_row(nodes, &rows[at..at + width], path)?;
                at += width;
            }
        }
        Ok(())
    }
}

impl InFlight {
    /// The guesses that an entry runs.
    pub(super) fn nodes_of(&self, entry: &Entry) -> &[Node] {
        &self.nodes[entry.first_node as usize..][..entry.num_drafts as usize]
    }

    /// Writes which of its step's tokens each token of a draft tree sees: a row of bits per token, in whole words.
    pub(super) fn write_tree_mask(&self, plan: &mut StepPlan) {
        let mut start = 0;
        for (s, entry) in self.entries.iter().enumerate() {
            if entry.is_tree {
                let row_len = StepPlan::tree_mask_row_bytes(entry.num_drafts as usize + 1);
                let mask = &mut plan.bytes_of_mut(Field::TreeMask)[start..];
                mask[0] = 1;
                for (row, node) in (1..).zip(self.nodes_of(entry)) {
                    let above = (node.parent + 1) as usize * row_len;
                    mask.copy_within(above..above + row_len, row * row_len);
                    mask[row * row_len + row / 8] |= 1 << (row % 8);
                }
                start += entry.tree_mask_bytes();
            }
            plan.i32s_mut(Field::TreeMaskStartLoc)[s + 1] = start as i32;
        }
    }
}

impl Entry {
    /// Rows of tokens that the commit has for the entry.
    pub(super) fn num_rows(&self) -> usize {
        if self.num_drafts > 0 { 1 } else { self.num_samples as usize }
    }

    /// Bytes of the tree mask that are about the entry.
    pub(super) fn tree_mask_bytes(&self) -> usize {
        let rows = self.num_drafts as usize + 1;
        if self.is_tree { rows * StepPlan::tree_mask_row_bytes(rows) } else { 0 }
    }
}

/// A row without its padding.
pub(super) fn tokens_of(row: &[i32]) -> &[i32] {
    &row[..row.iter().position(|&token| token < 0).unwrap_or(row.len())]
}

fn check_row(nodes: &[Node], row: &[i32], path: Option<&[i32]>) -> Result<()> {
    let tokens = tokens_of(row);
    if tokens.is_empty() || row[tokens.len()..].iter().any(|&padding| padding != -1) {
        return invalid("tokens", "at least one token per row, then -1", format!("{row:?}"));
    }
    let accepted = &tokens[..tokens.len() - 1];
    if let Some(path) = path {
        check_path(nodes, &path[..accepted.len()])?;
        if path[accepted.len()..].iter().any(|&padding| padding != -1) {
            let expected = format!("{} guesses, one per token but the last, then -1", accepted.len());
            return invalid("accepted", expected, format!("{path:?}"));
        }
    } else if !is_chain(nodes) {
        return invalid("accepted", "the path through each draft tree of the plan", "none");
    }
    let guess = |place: usize| path.map_or(place, |path| path[place] as usize);
    let is_guess = |(place, &token): (usize, &i32)| nodes.get(guess(place)).is_some_and(|node| node.token == token);
    if !accepted.iter().enumerate().all(is_guess) {
        let drafts: Vec<i32> = nodes.iter().map(|node| node.token).collect();
        return invalid("tokens", format!("tokens of the draft {drafts:?} and one more"), format!("{tokens:?}"));
    }
    Ok(())
}

fn check_path(nodes: &[Node], path: &[i32]) -> Result<()> {
    let mut above = -1;
    for &guess in path {
        let node = usize::try_from(guess).ok().and_then(|guess| nodes.get(guess));
        if node.is_none_or(|node| node.parent != above) {
            let parents: Vec<i32> = nodes.iter().map(|node| node.parent).collect();
            let expected = format!("a path from the root of the tree with parents {parents:?}");
            return invalid("accepted", expected, format!("{path:?}"));
        }
        above = guess;
    }
    Ok(())
}

fn check_parents(parents: &[i32], spans: &[std::ops::Range<usize>], len: usize) -> Result<()> {
    if parents.len() != len {
        return invalid("parents", format!("{len}, one per id"), parents.len());
    }
    for span in spans {
        for (number, &parent) in (0..).zip(&parents[span.clone()]) {
            if !(-1..number).contains(&parent) {
                let expected = format!("-1 or an earlier guess of the row, below {number}");
                return invalid("parents", expected, parent);
            }
        }
    }
    Ok(())
}

/// The spans that the bounds cut from `len` ids, one per row.
fn spans(num_rows: usize, start_loc: &[i32], len: usize) -> Result<Vec<std::ops::Range<usize>>> {
    let is_whole = start_loc.len() == num_rows + 1
        && start_loc.first() == Some(&0)
        && start_loc.is_sorted()
        && usize::try_from(start_loc[num_rows]) == Ok(len);
    if !is_whole {
        let expected = format!("{} ascending bounds from 0 to {len}", num_rows + 1);
        return invalid("start_loc", expected, format!("{start_loc:?}"));
    }
    Ok(start_loc.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect())
}
