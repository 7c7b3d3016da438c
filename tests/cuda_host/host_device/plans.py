"""Work lists of attention: what the planner hands to a kernel, cut wherever a test wants."""

import itertools
from dataclasses import dataclass

import numpy as np

HEADER_WORDS, ITEM_WORDS, MERGE_WORDS = 4, 12, 8
POISON = -(2**31)  # what stands behind a list, and would be met by a block that did not look at the list's length


@dataclass(frozen=True)
class WorkList:
    """What the planner hands to the kernels: a header with the number of items, and the items."""

    work: np.ndarray
    num_items: int
    merges: np.ndarray
    num_merges: int
    num_partial_rows: int


def make_work(batch_arrays, *, group, max_rows, piece=None, trees=None, window=None, spare_items=1):
    """Cut a batch into items of at most `max_rows` query rows, and of keys up to multiples of `piece`.

    Behind the items lie `spare_items` of poison, as in lists with room for a larger batch.
    """
    seq_lens, query_start_loc, rows = (array.tolist() for array in batch_arrays)
    items, merges, partial_row = [], [], 0
    for s, (length, row) in enumerate(zip(seq_lens, rows, strict=True)):
        first_token = query_start_loc[s]
        num_queries = query_start_loc[s + 1] - first_token
        context_len = length - num_queries
        tree = trees.of_sequence(s) if trees else None
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
    return WorkList(
        _list(items, ITEM_WORDS, spare_items),
        len(items),
        _list(merges, MERGE_WORDS, spare_items),
        len(merges),
        partial_row,
    )


def _list(items, item_words, spare_items):
    words = np.full(HEADER_WORDS + (len(items) + spare_items) * item_words, POISON, np.int32)
    words[:HEADER_WORDS] = len(items), 0, 0, 0
    words[HEADER_WORDS : HEADER_WORDS + len(items) * item_words] = np.array(items, np.int32).reshape(-1)
    return words


@dataclass
class Trees:
    """Masks of draft trees as the kernels take them: 32-bit words, and how deep each query stands."""

    words: np.ndarray
    depths: np.ndarray
    rows: list  # per sequence: first word, words per row, first depth; or None

    def of_sequence(self, s):
        """Return where a sequence's mask is, or None where it has none."""
        return self.rows[s]


def make_trees(tree_mask, tree_mask_start_loc, query_start_loc):
    """Return the masks of a batch, from the bytes that the operation takes."""
    starts, queries = tree_mask_start_loc.tolist(), query_start_loc.tolist()
    depths, rows = [], []
    for s in range(len(starts) - 1):
        num_queries = queries[s + 1] - queries[s]
        if starts[s] == starts[s + 1]:
            rows.append(None)
            continue
        seen = np.asarray(tree_mask[starts[s] : starts[s + 1]], np.uint8).reshape(num_queries, -1)
        bits = np.unpackbits(seen, axis=1, bitorder="little")[:, :num_queries]
        rows.append((starts[s] // 4, seen.shape[1] // 4, len(depths)))
        depths += (bits.sum(axis=1, dtype=int) - 1).tolist()
    words = np.asarray(tree_mask, np.uint8).view(np.uint32)
    return Trees(words, np.array(depths, np.int32), rows)
