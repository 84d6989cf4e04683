"""The few likeliest tokens of a row of logits, found without building a candidate for each word of the vocabulary."""

from __future__ import annotations

import ctypes

import llama_cpp as lib
import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]

# Elements per block of which the largest is looked at: one SIMD pass over the row, then a sort of the maxima.
_BLOCK = 64
_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
assert _TOKEN_DATA.itemsize == ctypes.sizeof(lib.llama_token_data)


def largest(row: Logits, count: int) -> npt.NDArray[np.intp] | None:
    """Indices, in ascending order, that include those of the `count` largest elements, and not many more.

    None when finding them would take as long as looking at all: `count` is large, or many elements are equal.
    """
    num_blocks = len(row) // _BLOCK
    if count > num_blocks // 2:
        return None
    maxima = row[: num_blocks * _BLOCK].reshape(_BLOCK, num_blocks).max(axis=0)
    # `count` blocks have an element of at least this size, so that nothing smaller is among the largest.
    maxima.partition(num_blocks - count)
    found: npt.NDArray[np.intp] = (row >= maxima[num_blocks - count]).nonzero()[0]
    return found if len(found) <= num_blocks else None


class Candidates:
    """A llama_token_data_array of tokens chosen beforehand, for a chain of samplers to work on."""

    def __init__(self) -> None:
        self._array = lib.llama_token_data_array()

    def choose(self, chain: object, row: Logits, tokens: npt.NDArray[np.intp]) -> int:
        """Apply `chain` to `tokens` alone; returns the one that it selects."""
        data = np.empty(len(tokens), _TOKEN_DATA)
        data["id"] = tokens
        data["logit"] = row[tokens]
        array = self._array
        array.data = ctypes.cast(data.ctypes.data, lib.llama_token_data_p)
        array.size, array.selected, array.sorted = len(tokens), -1, False
        lib.llama_sampler_apply(chain, ctypes.byref(array))
        assert 0 <= array.selected < array.size, "the samplers chose no token"
        return int(array.data[array.selected].id)
