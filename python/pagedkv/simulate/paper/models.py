"""Figure 12 for the larger models of the paper: their pools are known, their times are a roofline's."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.simulate.experiment import Load, Run
from pagedkv.simulate.machine import BLOCK_SIZE, HOST_BYTES, Machine
from pagedkv.simulate.paper.lines import Line
from pagedkv.simulate.paper.memory import SHORT, Sources
from pagedkv.simulate.paper.throughput import SECONDS
from pagedkv.simulate.sustained import Search

SYSTEMS = ("vllm", "orca_oracle", "orca_max")


@dataclass(frozen=True)
class LargeModel:
    """A model on its GPUs: the blocks of its pool (the paper's Table 1) and its shape.

    Parameters
    ----------
    num_blocks : int
        Blocks of 16 tokens.
    num_layers, hidden_size : int
        Shape, from which the bytes of a token follow.
    parameters : float
        Parameters, two bytes each.
    num_gpus, bandwidth : int, float
        A100 cards, and bytes a second between one of them and its memory.
    rates : dict of str to tuple of float
        Rates of ShareGPT that the authors ran, least and most, which lie around the knee of each system.
    """

    num_blocks: int
    num_layers: int
    hidden_size: int
    parameters: float
    num_gpus: int
    bandwidth: float
    rates: dict[str, tuple[float, float]]

    def run(self, load: Load, system: str) -> Run:
        """Return the run of a system, its GPUs as one of their summed speeds: what they tell one another is free."""
        token_bytes = 2 * 2 * self.num_layers * self.hidden_size
        machine = Machine(self.num_blocks * BLOCK_SIZE, token_bytes=token_bytes, host_bytes=self.num_gpus * HOST_BYTES)
        cost = {
            "bandwidth": self.num_gpus * self.bandwidth,
            "flops": self.num_gpus * 312e12,
            "active_parameters": self.parameters,
            "weight_bytes": 2 * self.parameters,
            "kv_token_bytes": float(token_bytes),
            "attention_width": float(self.num_layers * self.hidden_size),
        }
        return Run(load, system, machine, ("roofline", cost))


# A100 with 40 GB: 1,555 GB/s; with 80 GB: 2,039 GB/s. Rates: `experiments/fig12-*.sh` of the artifact.
MODELS = {
    "66b": LargeModel(
        603, 64, 9216, 66e9, 4, 1.555e12, {"vllm": (0.4, 1.0), "orca_oracle": (0.2, 0.5), "orca_max": (0.1, 0.3)}
    ),
    "175b": LargeModel(
        3754, 96, 12_288, 173e9, 8, 2.039e12, {"vllm": (1.5, 3.0), "orca_oracle": (0.8, 1.8), "orca_max": (0.25, 1.25)}
    ),
}


def searches(sources: Sources) -> dict[tuple[str, str], Search]:
    """Return the searches for ShareGPT on both models."""
    load = Load(sources.sharegpt, seconds=SECONDS)
    return {
        (name, system): Search(model.run(load, system), model.rates[system][1])
        for name, model in MODELS.items()
        for system in SYSTEMS
    }


def ratios(found: dict[tuple[str, str], float]) -> list[Line]:
    """Return how many times the rate of Orca vLLM's scheduler sustains."""
    lines = []
    for name, model in MODELS.items():
        rate = found[name, "vllm"]
        for system, paper in (("orca_oracle", "1.7 to 2.7"), ("orca_max", "2.7 to 8")):
            other = found[name, system]
            note = f"the paper gives {paper} over three models; times are a roofline's"
            details = {
                "rate": rate,
                "other_rate": other,
                "authors_rates": model.rates["vllm"],
                "authors_other_rates": model.rates[system],
            }
            what = f"fig12_{name}_{SHORT[system]}"
            lines.append(Line(what, "times the rate", rate / other, note=note, details=details))
    return lines
