//! Transfers between the device and other places: which are under way, and what follows when one ends.

use super::Scheduler;
use super::in_flight::InFlight;
use super::request::Stage;
use crate::error::{Error, Result, invalid};
use crate::host_pool::{HostBlockId, HostPool};
use crate::ids::{BlockId, Handle, PlanId};
use crate::invariants::BrokenLaw;
use crate::kv_cache_manager::{Elsewhere, SwapRecord, SwappedBlock};
use crate::step_plan::{Field, StepPlan};

/// Where a transfer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the device to the host tier.
    Out,
    /// From the host tier to the device.
    In,
    /// From outside to the device.
    Load,
}

/// One block of a transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransferredBlock {
    pub(super) device: BlockId,
    pub(super) elsewhere: Elsewhere,
    /// The cache group that it belongs to.
    pub(super) group: u8,
    /// Its place in the record of its request.
    pub(super) place: u32,
}

impl TransferredBlock {
    fn host(&self) -> Option<HostBlockId> {
        match self.elsewhere {
            Elsewhere::Host(block) => Some(block),
            Elsewhere::Outside { .. } => None,
        }
    }
}

/// All blocks of a request that go one way in one step.
#[derive(Debug)]
pub(super) struct Transfer {
    id: i64,
    slot: u32,
    handle: Handle,
    pub(super) direction: Direction,
    pub(super) blocks: Vec<TransferredBlock>,
    /// Whether the request ended, or gave up what the transfer moves: then the host blocks are the transfer's own.
    is_orphan: bool,
}

/// The transfers that have not ended.
#[derive(Debug)]
pub(super) struct Transfers {
    last_id: i64,
    /// By ascending id.
    outstanding: Vec<Transfer>,
}

impl Transfers {
    pub(super) const fn new() -> Self {
        Self { last_id: 0, outstanding: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.outstanding.is_empty()
    }

    pub(super) fn find(&self, id: i64) -> Option<&Transfer> {
        self.position(id).map(|at| &self.outstanding[at])
    }

    fn position(&self, id: i64) -> Option<usize> {
        self.outstanding.binary_search_by_key(&id, |transfer| transfer.id).ok()
    }
}

/// What a preempted request has in the host tier, or one that is new outside, and how far its samples had parted when it
/// went out.
#[derive(Debug)]
pub(super) struct Swapped {
    pub(super) record: SwapRecord,
    pub(super) stage: Stage,
    /// The newest plan in flight that names what it had.
    pub(super) named_by: Option<PlanId>,
}

impl Swapped {
    /// Gives back the host blocks that the record still has.
    fn release(&mut self, host: &mut HostPool) {
        self.record.blocks.iter_mut().filter_map(SwappedBlock::take_host).for_each(|block| host.release(block));
    }
}

impl Scheduler {
    /// Ends transfers: the loop has seen that what `plan.swap_out`, `plan.swap_in` or `plan.loads` asked for under these ids
    /// is done, or that it failed. What failed on its way out, or in, is computed again.
    ///
    /// # Errors
    /// [`Error::UnknownTransfer`] for an id that is not outstanding: never given out, or ended before;
    /// [`Error::InvalidArgument`] for one that is given twice.
    ///
    /// # Complexity
    /// O(blocks of the transfers + their number x that of all outstanding ones).
    pub fn transfers_done(&mut self, ids: &[i64], ok: bool) -> Result<()> {
        for (at, &id) in ids.iter().enumerate() {
            if self.transfers.position(id).is_none() {
                return Err(Error::UnknownTransfer(id));
            }
            if ids[..at].contains(&id) {
                return invalid("ids", "each transfer once", format!("{id} twice"));
            }
        }
        for &id in ids {
            let at = self.transfers.position(id).expect("the ids were checked");
            let transfer = self.transfers.outstanding.remove(at);
            self.end_transfer(transfer, ok);
        }
        Ok(())
    }

    /// Ids of the transfers that have not ended, ascending.
    pub fn outstanding_transfers(&self) -> impl Iterator<Item = i64> {
        self.transfers.outstanding.iter().map(|transfer| transfer.id)
    }

    /// Host blocks, and how many of them are free.
    pub fn num_host_blocks(&self) -> (u32, u32) {
        (self.host.num_blocks(), self.host.num_free())
    }

    /// Begins a transfer of a request; the next plan announces it.
    pub(super) fn begin_transfer(&mut self, slot: u32, direction: Direction, blocks: Vec<TransferredBlock>) {
        self.transfers.last_id += 1;
        let id = self.transfers.last_id;
        let request = &mut self.requests[slot];
        request.transfer = Some(id);
        let handle = request.handle;
        self.transfers.outstanding.push(Transfer { id, slot, handle, direction, blocks, is_orphan: false });
        self.announcements.transfers.push(id);
    }

    /// Blocks that a plan's transfers move one way.
    pub(super) fn num_transferred(&self, record: &InFlight, direction: Direction) -> u32 {
        self.announced(record, direction).map(|transfer| transfer.blocks.len() as u32).sum()
    }

    /// Writes what the plan's transfers move, and under which ids.
    pub(super) fn write_transfers(&self, record: &InFlight, plan: &mut StepPlan) {
        for (direction, pairs, ids) in
            [(Direction::Out, Field::SwapOut, Field::SwapOutIds), (Direction::In, Field::SwapIn, Field::SwapInIds)]
        {
            for (at, (id, block)) in self.announced_blocks(record, direction).enumerate() {
                let host = block.host().expect("a swap is with the host tier");
                let (device, host) = (block.device.get() as i32, host.get() as i32);
                let pair = if direction == Direction::Out { [device, host] } else { [host, device] };
                plan.i32s_mut(pairs)[2 * at..][..2].copy_from_slice(&pair);
                plan.i64s_mut(ids)[at] = id;
            }
        }
        for (at, (id, block)) in self.announced_blocks(record, Direction::Load).enumerate() {
            let Elsewhere::Outside { column } = block.elsewhere else { unreachable!("a load comes from outside") };
            let load = [i32::from(block.group), column as i32, block.device.get() as i32];
            plan.i32s_mut(Field::Loads)[3 * at..][..3].copy_from_slice(&load);
            let handle = self.transfers.find(id).expect("it is announced").handle;
            plan.i64s_mut(Field::LoadIds)[at] = id;
            plan.i64s_mut(Field::LoadHandles)[at] = handle.get();
        }
    }

    fn announced_blocks(
        &self,
        record: &InFlight,
        direction: Direction,
    ) -> impl Iterator<Item = (i64, &TransferredBlock)> {
        self.announced(record, direction).flat_map(|transfer| transfer.blocks.iter().map(|block| (transfer.id, block)))
    }

    fn announced(&self, record: &InFlight, direction: Direction) -> impl Iterator<Item = &Transfer> {
        let transfers = record.announced.transfers.iter().filter_map(|&id| self.transfers.find(id));
        transfers.filter(move |transfer| transfer.direction == direction)
    }

    /// Whether there is work, and transfers are outstanding.
    pub(super) fn waits_for_transfers(&self) -> bool {
        !self.transfers.is_empty() && self.has_work()
    }

    fn end_transfer(&mut self, transfer: Transfer, ok: bool) {
        let Transfer { id, slot, handle, direction, blocks, is_orphan } = transfer;
        // The last one first, as a sequence releases its blocks.
        blocks.iter().rev().for_each(|block| self.manager.pool.end_transfer(block.device));
        let found = self.requests.find_mut(slot, handle).filter(|request| request.transfer == Some(id));
        if is_orphan {
            blocks.iter().filter_map(TransferredBlock::host).for_each(|block| self.host.release(block));
            found.into_iter().for_each(|request| request.transfer = None);
            return;
        }
        let request = found.expect("a transfer whose request ended is an orphan");
        request.transfer = None;
        let is_back = !request.is_waiting();
        match direction {
            Direction::Out if ok => {}
            Direction::Out => {
                let swapped = request.swapped.as_mut().expect("a request that goes out has a record");
                for block in blocks {
                    let host = swapped.record.blocks[block.place as usize].take_host();
                    self.host.release(host.expect("what goes out has a place"));
                }
            }
            Direction::In | Direction::Load if is_back => {
                let arrivals = std::mem::take(&mut request.arrivals);
                // What samples share is computed once only if one of them does so for all.
                let starts_over = !ok && request.stage == Stage::Apart && request.num_live > 1;
                self.forget_swapped(slot);
                if starts_over {
                    return self.start_over(slot);
                }
                for arrival in arrivals {
                    if ok && direction == Direction::Load {
                        let len = self.manager.sequence(arrival.sequence as usize).num_scheduled;
                        self.recorder.loaded(&mut self.requests[slot], len - arrival.num_there);
                    }
                    self.manager.arrive(arrival, ok);
                }
            }
            // It lost its blocks again meanwhile. What is elsewhere of it is as good as before, unless that failed.
            Direction::In | Direction::Load if ok => {}
            Direction::In | Direction::Load => self.forget_swapped(slot),
        }
    }

    /// Gives up what a request has elsewhere. A transfer that is under way keeps its host blocks until it ends.
    pub(super) fn forget_swapped(&mut self, slot: u32) {
        let request = &mut self.requests[slot];
        request.arrivals.clear();
        let Some(mut swapped) = request.swapped.take() else { return };
        if let Some(at) = request.transfer.and_then(|id| self.transfers.position(id)) {
            let transfer = &mut self.transfers.outstanding[at];
            transfer.is_orphan = true;
            for block in &transfer.blocks {
                swapped.record.blocks[block.place as usize].elsewhere = None;
            }
        }
        swapped.release(&mut self.host);
    }

    /// Law 1 for the host tier and for transfers: a host block is free or has one owner, a block counts its transfers.
    pub(super) fn check_transfers(&self) -> std::result::Result<(), BrokenLaw> {
        let broken = |what: String| Err(BrokenLaw { law: 1, what });
        let mut owners = vec![0; self.host.num_blocks() as usize];
        self.host.free().for_each(|block| owners[block.get() as usize] += 1);
        for (_, request) in self.requests.iter() {
            for block in request.swapped.iter().flat_map(|swapped| &swapped.record.blocks) {
                if let Some(Elsewhere::Host(block)) = block.elsewhere {
                    owners[block.get() as usize] += 1;
                }
            }
            if request.is_keeper && request.swapped.is_some() {
                return broken(format!("request {} waits with blocks, and has some elsewhere", request.id));
            }
            let is_under_way = request.transfer.is_none_or(|id| self.transfers.find(id).is_some());
            let arrives = request.transfer.is_some() && matches!(request.stage, Stage::Prompt | Stage::Apart);
            if !is_under_way || request.arrivals.is_empty() == arrives {
                return broken(format!("request {} waits for a transfer that ended, or for none", request.id));
            }
        }
        let mut counts = vec![0; self.manager.pool.num_blocks() as usize];
        for transfer in &self.transfers.outstanding {
            for block in &transfer.blocks {
                counts[block.device.index()] += 1;
                if let Some(host) = block.host().filter(|_| transfer.is_orphan) {
                    owners[host.get() as usize] += 1;
                }
            }
        }
        if let Some(block) = owners.iter().position(|&owners| owners != 1) {
            return broken(format!("host block {block} has {} owners", owners[block]));
        }
        let wrong =
            self.manager.pool.blocks.iter().zip(&counts).position(|(block, &count)| block.num_transfers != count);
        wrong.map_or(Ok(()), |block| broken(format!("block {block} is in {} transfers", counts[block])))
    }
}
