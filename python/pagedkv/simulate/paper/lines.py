"""What a figure of the paper is compared by."""

from dataclasses import dataclass, field
from typing import Any, Literal

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Line:
    """One figure: ours, the paper's, and how far they may lie apart.

    Parameters
    ----------
    what, unit : str
        Name of the figure, and unit of both values.
    ours : float
        What the simulation gives.
    paper : float, optional
        What the paper gives, where it gives one value.
    tolerance : float, optional
        How far `ours` may lie from `paper`, in the unit of both.
    between : tuple of float, optional
        The least and the most that it may be, by the paper's range or by what is asked for.
    better : str
        Whether a higher or a lower value is better.
    must_reach : str
        What is asked of the figure, for people.
    note : str
        What else is to be known.
    details : dict
        Sizes and further figures.
    """

    what: str
    unit: str
    ours: float
    paper: float | None = None
    tolerance: float | None = None
    between: tuple[float, float] | None = None
    better: Better = "higher"
    must_reach: str = ""
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.paper is None else self.ours - self.paper

    @property
    def holds(self) -> bool | None:
        """Whether the figure is what it must be; None where nothing is asked of it."""
        asked = []
        if self.between is not None:
            asked.append(self.between[0] <= self.ours <= self.between[1])
        if self.paper is not None and self.tolerance is not None:
            asked.append(abs(self.ours - self.paper) <= self.tolerance)
        return all(asked) if asked else None
