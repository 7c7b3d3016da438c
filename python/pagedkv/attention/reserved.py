"""Plans in device memory that stays where it is, with room for any batch of a size: what captured graphs need."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kernels.paged_attention import WorkLists
from pagedkv.kv_cache.device import uploaded

if TYPE_CHECKING:
    import torch

# Words of a list's header, of a work item and of a merge item: `cuda/include/attention.cuh`.
_HEADER, _ITEM, _MERGE = 4, 12, 8


@dataclass(frozen=True)
class Room:
    """The largest lists of batches in which each sequence has one query at most.

    Attributes
    ----------
    few, many, merges : int
        Items of `paged_decode`, of `paged_prefill`, and merges.
    partial_rows : int
        Rows of the workspace.
    num_tokens : int
        Tokens of a run; those that belong to no sequence find nothing.
    """

    few: int
    many: int
    merges: int
    partial_rows: int
    num_tokens: int

    @classmethod
    def of(
        cls, num_seqs: int, num_tokens: int, *, group: int, rows: tuple[int, int], pieces: int, max_pieces: int | None
    ) -> "Room":
        """Return the room that batches of a size take at most.

        Parameters
        ----------
        num_seqs, num_tokens : int
            Sequences, and tokens of a run.
        group : int
            Query heads per KV head.
        rows : tuple of int
            Query rows of an item of `paged_decode` and of `paged_prefill`.
        pieces : int
            Pieces that keep the device busy.
        max_pieces : int or None
            Pieces of the longest sequence, where keys are cut at fixed multiples.

        Notes
        -----
        Keys are cut at the largest multiple that gives `pieces` of them. At the next larger one there are fewer; a
        piece there is at most two here, and a sequence that begins in the middle of one has one more.
        """
        cut = num_seqs * (max_pieces + 1) if max_pieces is not None else 2 * pieces + 2 * num_seqs
        few_rows, many_rows = rows
        padding = -(-num_tokens * group // few_rows)
        is_few = group <= few_rows
        parts = -(-group // (few_rows if is_few else many_rows))
        items = cut * parts
        return cls(
            few=padding + (items if is_few else 0),
            many=0 if is_few else items,
            merges=num_seqs * parts,
            partial_rows=cut * group,
            num_tokens=num_tokens,
        )


class Reserved:
    """Lists of a plan in device memory of a fixed size.

    Parameters
    ----------
    room : Room
        For how much.
    device : torch.device
        Where.
    """

    def __init__(self, room: Room, device: "torch.device") -> None:
        import torch

        self.room = room
        words = [_HEADER + room.few * _ITEM, _HEADER + room.many * _ITEM, _HEADER + room.merges * _MERGE]
        self._starts = np.cumsum([0, *words]).tolist()
        # Lists of nothing, for what runs before the first plan. Models make room in inference mode, plan outside of it.
        with torch.inference_mode(False):
            self._arena = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)

    def fill(self, lists: list[Any], num_partial_rows: int) -> WorkLists:
        """Put a plan in the place of the one before, in the order of the current stream.

        Parameters
        ----------
        lists : list of numpy.ndarray, int32
            Items for few rows and for many, merges, words of the tree mask and depths of trees.
        num_partial_rows : int
            Rows of the workspace that they take.

        Returns
        -------
        WorkLists
            The plan, with thread blocks for all that may come to be.

        Raises
        ------
        InvalidArgumentError
            If there is no room for it; the plan before stays.
        """
        self._check(lists, num_partial_rows)
        arena = np.zeros(self._starts[-1], np.int32)
        for start, words in zip(self._starts, lists[:3], strict=False):
            arena[start : start + len(words)] = words
        self._arena.copy_(uploaded(arena, self._arena.device))
        few, many, merges = (
            self._arena[start:end] for start, end in zip(self._starts[:3], self._starts[1:], strict=True)
        )
        room = self.room
        return WorkLists(few, many, merges, room.few, room.many, room.merges, None, None, room.partial_rows)

    def _check(self, lists: list[Any], num_partial_rows: int) -> None:
        room = self.room
        if len(lists[3]):
            raise InvalidArgumentError("tree_mask: expected none, because room is reserved for single queries")
        found = {"few": int(lists[0][0]), "many": int(lists[1][0]), "merges": int(lists[2][0])}
        found["partial_rows"] = num_partial_rows
        for name, count in found.items():
            if count > (most := getattr(room, name)):
                raise InvalidArgumentError(
                    f"plan: expected at most {most} {name}, for which room is reserved, found {count}"
                )
