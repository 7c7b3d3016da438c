"""Share of the slots of held blocks that hold no token, on ShareGPT lengths in a saturated pool.

The paper's Figure 2 for vLLM, without a clock: the first 2,000 requests of the trace with prompt + output <= 2,048, all
waiting from the start, a pool of 984 blocks of 16 (the one of OPT-13B on a 40 GB A100), and the scheduler that serves.
The mean is over steps behind the first 10 %. The peer is the paper's own figure: 96.3 % of the pool holds tokens.
"""

import os
from pathlib import Path

import numpy as np

import lines
import pagedkv
from pagedkv.simulate import read_lengths, replay_saturated

TRACES = Path(os.environ.get("PAGEDKV_TRACES", Path(__file__).resolve().parents[2] / "shared" / "traces"))
NUM_REQUESTS = 2000
MAX_LEN = 2048
NUM_BLOCKS = 984
PAPER_WASTE_PERCENT = 3.7  # Kwon et al., SOSP 2023, Figure 2: 96.3 % of the pool's slots hold tokens
MOST_WASTE_PERCENT = 4.0


def main() -> None:
    arguments = lines.parser(__doc__).parse_args()
    prompts, outputs = read_lengths(TRACES / "sharegpt_lengths.csv")
    chosen = np.flatnonzero(prompts + outputs <= MAX_LEN)[:NUM_REQUESTS]
    cache_config = pagedkv.CacheConfig(NUM_BLOCKS)
    scheduler_config = pagedkv.SchedulerConfig(max_num_batched_tokens=2560, max_model_len=MAX_LEN)
    replay = replay_saturated(prompts[chosen], outputs[chosen], cache_config, scheduler_config)
    report = lines.Report("waste", arguments.json)
    report.add(
        "waste_sharegpt",
        "percent",
        100 * replay.mean_waste(),
        better="lower",
        peer=PAPER_WASTE_PERCENT,
        peer_name="paper, Fig. 2 (share of the pool)",
        limit=MOST_WASTE_PERCENT,
        limit_name="paper: under 4 %",
        num_requests=len(chosen),
        num_blocks=NUM_BLOCKS,
        block_size=cache_config.block_size,
        num_steps=len(replay.num_tokens),
        mean_running=float(replay.num_running[len(replay.num_running) // 10 :].mean()),
        num_preemptions=replay.num_preemptions,
    )
    report.show()


if __name__ == "__main__":
    main()
