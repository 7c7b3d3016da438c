"""What a measurement gives to a line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measured:
    """Samples, of which the median counts; samples of what the machine allows; and numbers that belong beside them."""

    samples: Sequence[float]
    limit: Sequence[float] = ()
    sizes: Mapping[str, float] = field(default_factory=dict)
