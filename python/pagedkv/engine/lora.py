"""Which adapter a request runs with, and the adapters that an engine has loaded."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING

from pagedkv.engine.checks import Check, check_fields, integer, mistake
from pagedkv.exceptions import InvalidArgumentError
from pagedkv.models.adapters import Adapters
from pagedkv.models.lora_files import read_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from pagedkv.scheduling import Scheduler


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter to run a request with, by vLLM's names.

    Parameters
    ----------
    lora_name : str
        Its name, for people.
    lora_int_id : int
        Its number, from 1; one number is one adapter for as long as it is loaded.
    lora_path : str or path
        The folder that PEFT saved it in; it is read when the adapter is first used.

    Raises
    ------
    InvalidArgumentError
        If a value is out of its range; it names the field.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | PathLike[str]

    def __post_init__(self) -> None:
        check_fields(self, _CHECKS)


_CHECKS: dict[str, Check] = {
    "lora_name": ("a text that is not empty", lambda found: isinstance(found, str) and found != ""),
    "lora_int_id": integer(1, most=2**63 - 1),
    "lora_path": ("a folder", lambda found: isinstance(found, str | PathLike) and fspath(found) != ""),
}


class LoadedAdapters:
    """The adapters of an engine.

    Parameters
    ----------
    model : transformers.PreTrainedModel or None
        The base model; None where adapters are not enabled.
    scheduler : Scheduler
        Whose prefix cache is kept apart by adapter.
    """

    def __init__(self, model: PreTrainedModel | None, scheduler: Scheduler) -> None:
        self.layers = None if model is None else Adapters(model)
        self._scheduler = scheduler
        self._loaded: dict[int, LoRARequest] = {}

    def load(self, request: LoRARequest) -> int:
        """Load an adapter unless it is; return its number."""
        if not isinstance(request, LoRARequest):
            raise mistake("lora_request", "a LoRARequest", request)
        if self.layers is None:
            raise mistake("lora_request", "none, because enable_lora is false", request.lora_name)
        number = request.lora_int_id
        known = self._loaded.get(number)
        if known is None:
            self.layers.add(number, read_adapter(request.lora_path))
            self._loaded[number] = request
        elif known != request:
            raise InvalidArgumentError(
                f"lora_request: expected {known}, which is loaded by that number, found {request}"
            )
        return number

    @contextmanager
    def loaded(self, request: LoRARequest | None) -> Iterator[int | None]:
        """Load what a request needs, for as long as it is there: an error within takes what was loaded away again."""
        if request is None:
            yield None
            return
        before = self.numbers()
        number = self.load(request)
        try:
            yield number
        except BaseException:
            if number not in before:
                self.remove(number)
            raise

    def remove(self, number: int) -> bool:
        """Drop an adapter that no request runs with, and its cached prefixes; return whether there was one."""
        if self._loaded.pop(number, None) is None or self.layers is None:
            return False
        self.layers.remove(number)
        self._scheduler.invalidate_lora(number)
        return True

    def numbers(self) -> set[int]:
        """Return the numbers of those that are loaded."""
        return set(self._loaded)

    def close(self) -> None:
        """Leave the model as it was given."""
        self._loaded.clear()
        if self.layers is not None:
            self.layers.close()
