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
    /// The order in which each cell holds the element that is listed for it.
    pub(super) fn of(elements: &[usize]) -> Self {
        let cells = match elements.iter().position(|element| *element == 1) {
            None | Some(1) => Self::Natural,
            Some(half) => Self::EvensFirst(half),
        };
        debug_assert!(
            elements.iter().enumerate().all(|(cell, element)| cells.element(cell) == *element),
            "broken law: {cells:?} is not {elements:?}"
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
