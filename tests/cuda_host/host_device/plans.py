"""Work lists of attention for one kernel, cut wherever a test wants."""

import itertools
from dataclasses import dataclass

import numpy as np

HEADER_WORDS, ITEM_WORDS, MERGE_WORDS = 4, 12, 8
POISON = -(2**31)  # what stands behind a list, and would be met by a block that did not look at the list's length


@dataclass(frozen=True)
class Plan:
    """What the planner hands to the kernels: lists, each a header with the number of items, and the items."""

    lists: dict  # by kernel of attention
    merges: np.ndarray
    tree_mask: np.ndarray  # 32-bit words
    tree_depths: np.ndarray
    num_partial_rows: int


def plan_for_kernel(kernel, batch_arrays, trees, *, group, max_rows, piece=None, window=None, spare_items=1):
    """Cut a batch for one kernel into items of at most `max_rows` query rows, and of keys up to multiples of `piece`.

    This cuts where the package never would, and owes nothing to its planner.
    """
    seq_lens, query_start_loc, rows = (array.tolist() for array in batch_arrays)
    mask_words, depths, masks = _trees(*trees, query_start_loc)
    items, merges, partial_row = [], [], 0
    for s, (length, row) in enumerate(zip(seq_lens, rows, strict=True)):
        first_token = query_start_loc[s]
        num_queries = query_start_loc[s + 1] - first_token
        context_len = length - num_queries
        tree = masks[s]
        for first_row in range(0, num_queries * group, max_rows):
            num_rows = min(max_rows, num_queries * group - first_row)
            first_query, last_query = first_row // group, (first_row + num_rows - 1) // group
            end = length if tree else max(0, context_len + last_query + 1)
            start = max(0, context_len + (0 if tree else first_query) + 1 - window) if window else 0
            start = min(start, end)
            inner = range((start // piece + 1) * piece, end, piece) if piece else ()
            borders = [start, *inner, end]
            pieces = list(itertools.pairwise(borders))
            if len(pieces) > 1:
                merges.append((first_token, first_row, num_rows, partial_row, len(pieces), num_rows, 0, 0))
            for first_key, end_key in pieces:
                at = -1 if len(pieces) == 1 else partial_row
                partial_row += num_rows if len(pieces) > 1 else 0
                mask = tree if tree else (-1, 0, 0)
                items.append(
                    (row, first_token, first_row, num_rows, first_key, end_key, context_len, at, *mask, num_queries)
                )
    lists = {kernel: with_room(_list(items, ITEM_WORDS), ITEM_WORDS, spare_items)}
    merges = with_room(_list(merges, MERGE_WORDS), MERGE_WORDS, spare_items)
    return Plan(lists, merges, mask_words, depths, partial_row)


def _list(items, item_words):
    words = np.zeros(HEADER_WORDS + len(items) * item_words, np.int32)
    words[0] = len(items)
    words[HEADER_WORDS:] = np.array(items, np.int32).reshape(-1)
    return words


def with_room(words, item_words, spare_items):
    """Return a list behind whose items lie `spare_items` of poison, as in one with room for a larger batch."""
    return np.append(words, np.full(spare_items * item_words, POISON, np.int32))


def _trees(tree_mask, tree_mask_start_loc, query_start_loc):
    """Return masks as words, how deep each query of a tree stands, and where each sequence's are, or None."""
    if tree_mask is None:
        return np.zeros(0, np.int32), np.zeros(0, np.int32), [None] * (len(query_start_loc) - 1)
    starts, depths, rows = tree_mask_start_loc.tolist(), [], []
    for s in range(len(starts) - 1):
        num_queries = query_start_loc[s + 1] - query_start_loc[s]
        if starts[s] == starts[s + 1]:
            rows.append(None)
            continue
        seen = np.asarray(tree_mask[starts[s] : starts[s + 1]], np.uint8).reshape(num_queries, -1)
        bits = np.unpackbits(seen, axis=1, bitorder="little")[:, :num_queries]
        rows.append((starts[s] // 4, seen.shape[1] // 4, len(depths)))  # first word, words per row, first depth
        depths += (bits.sum(axis=1, dtype=int) - 1).tolist()
    return np.asarray(tree_mask, np.uint8).view(np.int32), np.array(depths, np.int32), rows
