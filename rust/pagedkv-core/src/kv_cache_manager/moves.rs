//! Accepted guesses of a draft tree: they lie scattered among the rejected ones, and the next plan moves their keys and
//! values to where they belong.
//!
//! Until that plan is made, a sequence *awaits* its moves: it is computed up to the first moved position, and holds the
//! blocks up to the last one. The blocks that the moves only read are given back at once: whoever gets them writes into
//! them in the plan that moves, or in later ones, and a plan's moves come before all else that it writes. In the plan, the
//! moves are a growth like any other, from the first moved position to the last: a commit publishes the blocks that they
//! fill, a rollback takes the sequence back. Whatever takes the blocks of a sequence that awaits moves drops the moves.

use super::KVCacheManager;

/// What a sequence awaits.
#[derive(Clone, Debug)]
pub(crate) struct Moves {
    /// The first position that the moves fill.
    pub(super) from: u32,
    /// Group, source slot, destination slot.
    slots: Vec<[i64; 3]>,
}

impl KVCacheManager {
    /// Of the last `num_nodes` computed tokens of a sequence, which were guesses, keeps the first `num_accepted`, or those
    /// that `path` names by their ascending numbers. Nobody else knows of them.
    pub(crate) fn accept(&mut self, index: usize, num_nodes: u32, num_accepted: u32, path: Option<&[i32]>) {
        let first = self.sequences[index].num_computed - num_nodes;
        let path = path.map_or(&[][..], |path| &path[..num_accepted as usize]);
        let in_place = path.iter().zip(0..).take_while(|&(&node, place)| node == place).count();
        let mut slots = Vec::new();
        for group in 0..self.groups.len() {
            let slot = |position: u32| self.slot(index, group, position);
            let moves = path.iter().zip(first..).skip(in_place);
            slots.extend(moves.map(|(&node, to)| [group as i64, slot(first + node as u32), slot(to)]));
        }
        let end = first + num_accepted;
        self.sequences[index].num_computed = end;
        self.shrink(index, end);
        if !slots.is_empty() {
            let from = first + in_place as u32;
            self.sequences[index].num_computed = from;
            self.sequences[index].moves = Some(Box::new(Moves { from, slots }));
            self.awaiting.push(index as u32);
        }
    }

    /// Whether some sequence may await moves.
    pub(crate) fn has_moves(&self) -> bool {
        !self.awaiting.is_empty()
    }

    /// Puts the moves that a sequence awaits into the newest plan.
    pub(crate) fn place_moves(&mut self, index: usize) {
        let Some(moves) = self.sequences[index].moves.take() else { return };
        let record = self.plans.back_mut().expect("a plan is open");
        record.moves.extend_from_slice(&moves.slots);
        self.grow_by_moves(index, moves.from);
        self.register_filled(index);
    }

    /// Puts all moves that sequences await into the newest plan.
    pub(crate) fn place_all_moves(&mut self) {
        while let Some(index) = self.awaiting.pop() {
            self.place_moves(index as usize);
        }
    }

    /// The moves of the newest plan: group, source slot, destination slot.
    pub(crate) fn moves(&self) -> &[[i64; 3]] {
        &self.plans.back().expect("a plan is open").moves
    }
}
