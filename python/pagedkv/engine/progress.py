"""The progress bar of a batch of prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm  # type: ignore[import-untyped]

from pagedkv.engine.outputs import RequestOutput


class Progress:
    """Counts prompts that ended and estimates speeds; a context manager.

    Parameters
    ----------
    use_tqdm : bool or callable
        Whether to show a bar, or what makes one in the place of `tqdm.tqdm`.
    total : int
        Prompts in the batch.
    """

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int) -> None:
        make = use_tqdm if callable(use_tqdm) else tqdm
        self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True) if use_tqdm else None
        self._start = time.perf_counter()
        self._num_input_tokens = 0
        self._num_output_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        """Count a prompt that ended.

        Parameters
        ----------
        output : RequestOutput
            Its output.
        """
        if self._bar is None:
            return
        self._num_input_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = time.perf_counter() - self._start
        speeds = self._num_input_tokens / seconds, self._num_output_tokens / seconds
        self._bar.set_postfix_str(
            "est. speed input: {:.1f} toks/s, output: {:.1f} toks/s".format(*speeds), refresh=False
        )
        self._bar.update()
