//! The order in which kernels keep the elements of a row: as they come, or by units, those at even places first.

/// An order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cells {
    /// As elements come.
    Natural,
    /// In each unit of twice so many, those at even places and then those at odd ones.
    EvensFirst(usize),
}

impl Cells {
    /// The order in which each cell of a unit holds the element that `element` names.
    pub(super) fn of(unit: usize, element: impl Fn(usize) -> usize) -> Self {
        let cells = match (0..unit).find(|cell| element(*cell) == 1) {
            None | Some(1) => Self::Natural,
            Some(half) => Self::EvensFirst(half),
        };
        debug_assert!(
            (0..unit).all(|cell| cells.element(cell) == element(cell)),
            "broken law: {cells:?} is not the order of a unit of {unit}"
        );
        cells
    }

    /// Which element a cell holds.
    pub(super) fn element(self, cell: usize) -> usize {
        match self {
            Self::Natural => cell,
            Self::EvensFirst(half) => {
                let place = cell % (2 * half);
                cell - place + 2 * (place % half) + place / half
            }
        }
    }
}
