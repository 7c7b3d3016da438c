//! Guesses for the next tokens of running sequences, for a plan to check.

use super::Scheduler;
use super::pass::{Entry, Pass};
use super::request::Stage;
use crate::error::{Error, Result, invalid};

impl Scheduler {
    /// Gives running sequences, by their rows, guesses for their next tokens: those of the i-th row are
    /// `ids[start_loc[i]..start_loc[i + 1]]`. They replace earlier ones. The next plan that has the tokens and the blocks
    /// for them runs them behind the last known token and draws a sample after each; its commit says how many were
    /// accepted. A preemption drops them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a row without a sequence that decodes, a row twice, more guesses than `lookahead`,
    /// or bounds or tokens out of range; [`Error::SequenceInFlight`].
    pub fn set_draft_tokens(&mut self, rows: &[i32], start_loc: &[i32], ids: &[i32]) -> Result<()> {
        self.drain_inbox();
        let spans = spans(rows.len(), start_loc, ids.len())?;
        if let Some(negative) = ids.iter().find(|&&token| token < 0) {
            return invalid("ids", "token ids of at least 0", negative);
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
            drafts.clear();
            drafts.extend_from_slice(&ids[span]);
        }
        Ok(())
    }

    /// Takes guesses that need a block out of the plan again, those of one sequence: they give way to tokens that must
    /// run. Answers whether there were any.
    pub(super) fn revoke_drafts(&mut self, pass: &mut Pass) -> bool {
        let block_size = self.manager.block_size;
        let takes_blocks =
            |entry: &Entry| entry.end.div_ceil(block_size) > (entry.end - entry.num_drafts).div_ceil(block_size);
        let Some(entry) = pass.record.entries.iter_mut().rfind(|entry| takes_blocks(entry)) else {
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
