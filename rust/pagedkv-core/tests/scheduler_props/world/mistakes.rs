//! Calls that must be refused, each with its error.

use pagedkv_core::{Error, Handle, NewRequest};

use super::World;
use crate::model::scheduler::Outcome;

impl World {
    pub(super) fn mistake(&mut self, which: u8, target: u8) {
        let plans = self.model.in_flight();
        let never = Handle::new(self.num_added as i64 + i64::from(target));
        match which % 7 {
            0 => self.refused(|scheduler| scheduler.abort(never, None), |error| *error == Error::UnknownHandle(never)),
            1 => self.add_twice(target),
            2 if plans.len() > 1 => {
                let error = Error::PlanOutOfOrder { found: plans[1], oldest: plans[0] };
                self.refused(|scheduler| scheduler.commit(plans[1], &[]), |refused| *refused == error);
            }
            3 if !plans.is_empty() => {
                let mut outcome = self.model.outcome(u64::from(target));
                match &mut outcome {
                    Outcome::Tokens(tokens) | Outcome::Beams { tokens, .. } => tokens.push(0),
                    Outcome::Rows { rows, width, .. } => rows.extend(vec![0; *width]),
                }
                let is_expected = |error: &Error| matches!(error, Error::InvalidArgument { argument: "tokens", .. });
                self.refused(|scheduler| Self::end(scheduler, plans[0], &outcome), is_expected);
            }
            4 => self.end_wrong_transfers(i64::from(target)),
            _ if !self.ended_plans.is_empty() => {
                let ended = self.ended_plans[usize::from(target) % self.ended_plans.len()];
                let is_expected = |error: &Error| *error == Error::PlanNotInFlight(ended);
                self.refused(|scheduler| scheduler.commit(ended, &[]), is_expected);
                self.refused(|scheduler| scheduler.rollback(ended), is_expected);
            }
            _ => self.schedule(target),
        }
    }

    /// A transfer that was never begun, one that ended before, and one that is told to have ended twice at once.
    fn end_wrong_transfers(&mut self, number: i64) {
        let started = self.model.started_transfers();
        let ended = self.ended_transfers.get(number as usize % self.ended_transfers.len().max(1)).copied();
        let unknown = ended.unwrap_or(number + 1_000_000);
        let ids: Vec<i64> = started.iter().copied().chain([unknown]).collect();
        let is_unknown = |error: &Error| *error == Error::UnknownTransfer(unknown);
        self.refused(|scheduler| scheduler.transfers_done(&ids, true), is_unknown);
        if let Some(&first) = started.first() {
            let is_expected = |error: &Error| matches!(error, Error::InvalidArgument { argument: "ids", .. });
            self.refused(|scheduler| scheduler.transfers_done(&[first, first], true), is_expected);
        }
    }

    fn add_twice(&mut self, number: u8) {
        let Some(handle) = self.handle(number) else {
            return self.schedule(number);
        };
        let request = self.model.requests.iter().find(|request| request.handle == handle).expect("it is live");
        let twice = NewRequest::new(request.request_id(), vec![0], 1);
        if self.model.is_id_free(&twice.request_id) {
            // Its abort was left, and waits to take effect.
            return self.submit(twice);
        }
        let error = Error::DuplicateRequest(twice.request_id.clone());
        self.refused(|scheduler| scheduler.add_request(twice), |refused| *refused == error);
    }
}
