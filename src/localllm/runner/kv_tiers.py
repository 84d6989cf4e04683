"""The bytes behind the prefix cache: snapshots in main memory and files on disk. Belongs to the engine's thread."""

from __future__ import annotations

import logging

from localllm.llama.context import Context
from localllm.runner.kv_files import Fetched, KVFiles
from localllm.runner.prefix_cache import MIN_FILE_TOKENS, Placement, PrefixCache, Save
from localllm.runner.sequence import Sequence

_log = logging.getLogger(__name__)

# How long the engine must have been idle before what slots hold is written to disk.
IDLE_SECONDS = 2.0


class KVTiers:
    def __init__(self, context: Context, cache: PrefixCache, files: KVFiles | None, max_tokens: int) -> None:
        """`files` None: nothing outlives the process. Files of more than `max_tokens` do not fit the window."""
        self._context = context
        self._cache = cache
        self._files = files
        self._snapshots: dict[int, memoryview] = {}
        self.num_evictions = 0
        self._waiting: dict[int, tuple[list[int], list[Sequence]]] = {}
        if files is not None:
            for id, tokens in files.start(max_tokens).items():
                cache.add_file(id, tokens)

    @property
    def num_ram_bytes(self) -> int:
        return sum(map(len, self._snapshots.values()))

    def fill(self, placement: Placement) -> bool:
        """Carry out a placement; False, and the slot is empty, when its memory cannot be what was planned."""
        # Taken before anything is saved: that may make the ledger drop it.
        snapshot = None if placement.snapshot is None else self._snapshots.get(placement.snapshot)
        if placement.save is not None:
            self.save(placement.slot, placement.save)
        if placement.source is not None:
            self._context.copy(placement.source, placement.slot)
        if snapshot is not None and not self._context.restore(placement.slot, snapshot):
            _log.warning("llama.cpp refused a snapshot of its own")
        was_cut = self._context.cut(placement.slot, placement.num_cached_tokens)
        if was_cut and self._context.holds(placement.slot, placement.num_cached_tokens):
            return True
        self._context.cut(placement.slot, 0)
        return False

    def evict(self, slot: int, save: Save | None) -> None:
        """Empty a slot, and first keep what is worth it."""
        if save is not None:
            self.save(slot, save)
        self._context.cut(slot, 0)
        self.num_evictions += 1

    def save(self, slot: int, save: Save) -> None:
        """Keep what `slot` holds, in memory and, if it is worth that, on disk."""
        data = self._context.save(slot)
        if self._files is not None and self._cache.is_worth_a_file(save.tokens):
            self._write(save.tokens, data)
        self._store(save, data)

    def fetch(self, sequence: Sequence) -> None:
        """Let a new sequence wait for a file if that spares it enough; `take_in` ends the wait."""
        id = None if self._files is None else self._cache.file_for(sequence.tokens)
        if id is None:
            return
        assert self._files is not None
        sequence.is_fetching = True
        if id not in self._waiting:
            self._waiting[id] = (self._cache.file_tokens(id), [])
            self._files.read(id)
        self._waiting[id][1].append(sequence)

    def take_in(self, fetched: Fetched) -> None:
        """A file has arrived, or has turned out to be unusable."""
        assert self._files is not None
        tokens, sequences = self._waiting.pop(fetched.id, ([], []))
        for sequence in sequences:
            sequence.is_fetching = False
        if fetched.data is None:
            self._files.forget(fetched.id)
            self._cache.remove_file(fetched.id)
        elif any(sequence.is_alive for sequence in sequences):
            self._store(self._cache.new_save(tokens, sequences[0].client), memoryview(fetched.data))

    def write_idle(self, *, is_last_chance: bool = False) -> bool:
        """Write one idle slot's memory to disk if that is worth it; True when there may be more to do."""
        if self._files is None:
            return False
        for slot, tokens in self._cache.idle_slots():
            is_long = len(tokens) >= MIN_FILE_TOKENS
            if is_long and self._cache.is_worth_a_file(tokens, is_last_chance=is_last_chance):
                return self._write(tokens, self._context.save(slot))
        return False

    def flush(self, seconds: float) -> None:
        """Before the process ends: write all that is worth it, for at most about `seconds`."""
        if self._files is not None:
            while self.write_idle(is_last_chance=True):
                pass
            self._files.flush(seconds)

    def _store(self, save: Save, data: memoryview) -> None:
        self._snapshots[save.id] = data
        for id in self._cache.store(save, len(data)):
            del self._snapshots[id]
            self.num_evictions += 1

    def _write(self, tokens: list[int], data: memoryview) -> bool:
        assert self._files is not None
        id = self._files.write(tokens, data)
        if id is None:
            return False
        for redundant in self._cache.add_file(id, tokens):
            self._files.delete(redundant)
        return True
