"""The KV memory of a model and the one batch that is decoded with it. Belongs to the engine's thread alone."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence

import llama_cpp as lib
import numpy as np
import numpy.typing as npt

from localllm.errors import LoadOutOfMemory
from localllm.llama import library
from localllm.llama.model import Model
from localllm.types import LoadOptions

_LIBC = ctypes.CDLL(None)
# Rows of logits for drafted tokens, beyond the one that each slot has in a step.
MAX_DRAFT_ROWS = 16

# A stream that holds this part of its cells is copied as it is.
_MOSTLY_FULL = 0.8

_KV_TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0, "q4_0": lib.GGML_TYPE_Q4_0}
FLASH = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


class DecodeResult(enum.Enum):
    """What llama_decode said. A negative code is a bug or fatal and is raised, not returned."""

    OK = 0
    NO_ROOM = 1
    ABORTED = 2


class DecodeError(RuntimeError):
    """llama_decode failed in a way that the engine cannot recover from; the runner must end."""


class Batch:
    """A llama_batch whose arrays are numpy's: filled by slices, never token by token.

    Token `i` of the batch belongs to exactly one slot. Rows of one slot must be consecutive and slots ascending: split
    KV streams only share a micro-batch when their ids follow each other.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_tokens = 0
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._slot = np.zeros(capacity, np.int32)
        self._output = np.zeros(capacity, np.int8)
        self._num_slots = np.ones(capacity, np.int32)
        self._slot_pointers = self._slot.ctypes.data + np.arange(capacity, dtype=np.uintp) * self._slot.itemsize
        self.native = lib.llama_batch(
            0,
            _pointer(self._token, ctypes.c_int32),
            None,
            _pointer(self._pos, ctypes.c_int32),
            _pointer(self._num_slots, ctypes.c_int32),
            _pointer(self._slot_pointers, ctypes.POINTER(ctypes.c_int32)),
            _pointer(self._output, ctypes.c_int8),
        )

    def clear(self) -> None:
        self.num_tokens = 0

    def add(self, slot: int, tokens: Sequence[int], position: int, *, num_outputs: int) -> range:
        """Append `tokens` of `slot`, the first at `position`; returns the batch indices of those with logits.

        Only the last `num_outputs` get any: each output row costs a product with the whole vocabulary.
        """
        start, end = self.num_tokens, self.num_tokens + len(tokens)
        assert tokens and end <= self.capacity, "the scheduler planned more tokens than a batch holds"
        assert num_outputs <= len(tokens)
        self._token[start:end] = tokens
        self._pos[start:end] = np.arange(position, position + len(tokens))
        self._slot[start:end] = slot
        self._output[start:end] = 0
        self._output[end - num_outputs : end] = 1
        self.num_tokens = end
        return range(end - num_outputs, end)


def _pointer(array: npt.NDArray[np.generic], kind: type) -> object:
    return array.ctypes.data_as(ctypes.POINTER(kind))


class Context:
    """`num_slots` KV streams of `num_ctx` cells each; or one pool of `num_ctx` for all, if the options say so."""

    def __init__(self, model: Model, options: LoadOptions) -> None:
        """Allocate the KV memory and compute buffers. Raises LoadOutOfMemory when they do not fit."""
        params = lib.llama_context_default_params()
        params.n_ctx = options.num_ctx * (1 if options.kv_unified else options.num_parallel)
        params.n_seq_max = options.num_parallel
        params.n_batch = options.num_batch
        params.n_ubatch = min(options.num_ubatch, options.num_batch)
        # Reserving the default (a row per token of a batch) would waste n_batch × vocabulary floats.
        params.n_outputs_max = options.num_parallel + MAX_DRAFT_ROWS
        params.n_threads = options.num_threads
        params.n_threads_batch = options.num_threads_batch
        params.flash_attn_type = FLASH[options.flash_attention]
        params.type_k = params.type_v = _KV_TYPES[options.kv_cache_type]
        params.kv_unified = options.kv_unified
        params.no_perf = True
        # A C function that says whether a string is not empty: asked thousands of times a step, it must not be Python.
        self._abort_flag = ctypes.create_string_buffer(2)
        params.abort_callback = ctypes.cast(_LIBC.strlen, lib.ggml_abort_callback)
        params.abort_callback_data = ctypes.cast(self._abort_flag, ctypes.c_void_p)
        self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise LoadOutOfMemory(
                f"llama.cpp could not allocate a context of {params.n_ctx} tokens for {options.num_parallel} slots: "
                f"{library.last_errors() or 'no reason given'}",
                hint="Lower num_ctx (LOCALLLM_CONTEXT_LENGTH) or the number of slots (LOCALLLM_NUM_PARALLEL).",
            )
        self._row_type = ctypes.c_float * model.num_vocab
        self.num_slots = options.num_parallel
        self.is_in_main_memory = options.num_gpu_layers == 0 or not library.supports_gpu()
        self.is_unified = options.kv_unified
        self.num_ctx = int(lib.llama_n_ctx_seq(self.handle))
        # llama.cpp takes no more tokens at once than all slots together have cells.
        self.batch = Batch(int(lib.llama_n_batch(self.handle)))
        self._memory = lib.llama_get_memory(self.handle)
        # Layers that see only so many of the last tokens; what `save` writes of them is no more than that.
        self.num_window = int(lib.llama_model_n_swa(model.handle))
        self.can_cut = self._probe_cut(model)
        self.can_shift = self.can_cut and bool(lib.llama_memory_can_shift(self._memory))

    def decode(self) -> DecodeResult:
        """Compute the batch. Raises DecodeError on a code that means a bug or a fatal condition.

        After NO_ROOM the memory is as before; after ABORTED some positions may be filled: see `next_position`.
        """
        self.batch.native.n_tokens = self.batch.num_tokens
        self._abort_flag[0] = b"\0"
        code = lib.llama_decode(self.handle, self.batch.native)
        if code < 0:
            raise DecodeError(f"llama_decode returned {code}: {library.last_errors()}")
        return DecodeResult(code)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of batch row `row`, in the context's own memory: to read or to change until the next decode."""
        pointer = lib.llama_get_logits_ith(self.handle, row)
        assert pointer, "this row of the batch has no logits"
        return np.frombuffer(memoryview(self._row_type.from_address(ctypes.addressof(pointer.contents))), np.float32)

    def next_position(self, slot: int) -> int:
        """How many positions of `slot` are filled."""
        return int(lib.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def holds(self, slot: int, num_tokens: int) -> bool:
        """Whether `slot` has exactly `num_tokens` positions, with all that the next one will look at."""
        if self.next_position(slot) != num_tokens:
            return False
        first = int(lib.llama_memory_seq_pos_min(self._memory, slot))
        return not self.num_window or first <= max(0, num_tokens - self.num_window)

    def cut(self, slot: int, position: int) -> bool:
        """Forget everything of `slot` from `position` on. False, and nothing changed, when the memory cannot be cut."""
        return bool(lib.llama_memory_seq_rm(self._memory, slot, position, -1))

    def copy(self, source: int, destination: int) -> None:
        """Replace all of `destination` by all of `source`; a part of a stream cannot be copied.

        In a pool, the two then share their cells. Elsewhere llama.cpp copies a stream with all its cells, used or not;
        in main memory it is quicker to write out those that are used and read them in again (1 ms for 200 tokens of
        SmolLM2, where a stream of 5,120 cells takes 27 ms).
        """
        is_quick = self.is_unified or not self.is_in_main_memory
        if not is_quick and not self.num_window and self.next_position(source) < _MOSTLY_FULL * self.num_ctx:
            restored = self.restore(destination, self.save(source))
            assert restored, "llama.cpp refused what it had just written"
            return
        lib.llama_memory_seq_rm(self._memory, destination, -1, -1)
        lib.llama_memory_seq_cp(self._memory, source, destination, -1, -1)

    def shift(self, slot: int, num_kept: int, num_dropped: int) -> None:
        """Forget `num_dropped` positions of `slot` after `num_kept`; those behind move up. See `can_shift`."""
        assert self.can_shift
        end = num_kept + num_dropped
        lib.llama_memory_seq_rm(self._memory, slot, num_kept, end)
        lib.llama_memory_seq_add(self._memory, slot, end, -1, -num_dropped)

    def set_threads(self, num_threads: int, num_threads_batch: int) -> None:
        """Compute with so many threads from the next step on: for single tokens and for more of them."""
        lib.llama_set_n_threads(self.handle, num_threads, num_threads_batch)

    def save(self, slot: int) -> memoryview:
        """All that `slot` holds, as bytes that `restore` understands in any context of the same kind.

        Of a sliding window, that is what the next token looks at, so that a restored slot had better not be cut.
        """
        size = int(lib.llama_state_seq_get_size(self.handle, slot))
        data = np.empty(size, np.uint8)
        written = int(lib.llama_state_seq_get_data(self.handle, _pointer(data, ctypes.c_uint8), size, slot))
        assert written == size, "llama.cpp wrote less of a slot than it had announced"
        return data.data

    def restore(self, slot: int, data: memoryview) -> bool:
        """Replace all of `slot` by what `save` gave; False, and the slot is empty, when llama.cpp refuses the data."""
        lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        array = np.frombuffer(data, np.uint8)
        if lib.llama_state_seq_set_data(self.handle, _pointer(array, ctypes.c_uint8), len(data), slot):
            return True
        lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        return False

    def abort(self) -> None:
        """Make the decode in progress, if any, end soon with ABORTED. May be called from another thread.

        Only back ends on the CPU look for it, between two operations of the graph.
        """
        self._abort_flag[0] = b"x"

    @property
    def can_swap(self) -> bool:
        """Whether slots may change places at little cost, and whether it matters where they are."""
        return self.is_in_main_memory and not self.is_unified and not self.num_window

    def swap(self, left: int, right: int) -> None:
        """Let two slots change places, through main memory."""
        saved = [self.save(slot) if self.next_position(slot) else None for slot in (left, right)]
        for slot, data in zip((right, left), saved, strict=True):
            restored = self.cut(slot, 0) if data is None else self.restore(slot, data)
            assert restored, "llama.cpp refused what it had just written"

    def _probe_cut(self, model: Model) -> bool:
        """Recurrent and hybrid memories refuse to drop a tail; the only reliable test is to try (two tokens)."""
        token = max(0, int(lib.llama_vocab_bos(model.vocab)))
        self.batch.clear()
        self.batch.add(0, [token, token], 0, num_outputs=1)
        self.decode()
        can_cut = self.cut(0, 1)
        self.cut(0, 0)
        return can_cut
