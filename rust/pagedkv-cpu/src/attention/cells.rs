//! The order in which kernels keep the elements of a row: as they come, or by units, those at even places first.

/// Elements of the longest unit, and those that are moved at a time where there are none.
pub(super) const MAX_UNIT: usize = 64;

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

    fn element(self, cell: usize) -> usize {
        match self {
            Self::Natural => cell,
            Self::EvensFirst(half) => {
                let place = cell % (2 * half);
                cell - place + 2 * (place % half) + place / half
            }
        }
    }

    /// Elements that change places with one another only.
    pub(super) fn unit(self) -> usize {
        match self {
            Self::Natural => MAX_UNIT,
            Self::EvensFirst(half) => 2 * half,
        }
    }

    /// Puts the elements of a unit into its cells; as many as there are cells.
    pub(super) fn lay_out(self, natural: &[f32; MAX_UNIT], cells: &mut [f32]) {
        let Self::EvensFirst(half) = self else {
            cells.copy_from_slice(&natural[..cells.len()]);
            return;
        };
        match half {
            8 => split::<8>(natural, cells),
            16 => split::<16>(natural, cells),
            32 => split::<32>(natural, cells),
            other => panic!("broken law: units of twice {other} elements"),
        }
    }

    /// Takes the elements of a unit out of its cells.
    pub(super) fn gather(self, cells: &[f32], natural: &mut [f32; MAX_UNIT]) {
        let Self::EvensFirst(half) = self else {
            natural[..cells.len()].copy_from_slice(cells);
            return;
        };
        match half {
            8 => join::<8>(cells, natural),
            16 => join::<16>(cells, natural),
            32 => join::<32>(cells, natural),
            other => panic!("broken law: units of twice {other} elements"),
        }
    }
}

// Loops of a known length, which become shuffles of whole vectors.
fn split<const HALF: usize>(natural: &[f32; MAX_UNIT], cells: &mut [f32]) {
    let (evens, odds) = cells[..2 * HALF].split_at_mut(HALF);
    for i in 0..HALF {
        evens[i] = natural[2 * i];
        odds[i] = natural[2 * i + 1];
    }
}

fn join<const HALF: usize>(cells: &[f32], natural: &mut [f32; MAX_UNIT]) {
    let (evens, odds) = cells[..2 * HALF].split_at(HALF);
    for i in 0..HALF {
        natural[2 * i] = evens[i];
        natural[2 * i + 1] = odds[i];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_come_back_from_their_cells() {
        let natural: [f32; MAX_UNIT] = std::array::from_fn(|i| i as f32);
        for cells in [Cells::Natural, Cells::EvensFirst(8), Cells::EvensFirst(16), Cells::EvensFirst(32)] {
            let (mut laid_out, mut back) = (vec![-1.0; cells.unit()], [-1.0; MAX_UNIT]);
            cells.lay_out(&natural, &mut laid_out);
            let wanted: Vec<f32> = (0..cells.unit()).map(|cell| cells.element(cell) as f32).collect();
            assert_eq!(laid_out, wanted, "{cells:?}");
            cells.gather(&laid_out, &mut back);
            assert_eq!(back[..cells.unit()], natural[..cells.unit()], "{cells:?}");
        }
    }
}
