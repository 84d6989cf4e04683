"""PURE: how much memory a model takes, and with which options to load it on a given machine.

The estimate is weights + KV memory of all slots + compute buffers + the process itself. It errs on the large side: a
sliding window counts as a full one, for example.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from localllm.config import Config, kv_folder
from localllm.daemon.decisions import LoadPlan, gpu_layers
from localllm.daemon.machine import Machine
from localllm.store.gguf import GGUFHeader
from localllm.types import FlashAttention, KVCacheType, LoadOptions, LoadWishes

DEFAULT_NUM_CTX = 4096
MIN_NUM_CTX = 4
MAX_AUTO_SLOTS = 16
# Interpreter, libraries, tokeniser tables without a model.
PROCESS_BYTES = 96 << 20
# llama.cpp rounds the cells of a stream up to this (llama_context: n_ctx_seq is padded).
_CELL_PADDING = 256
# Bytes per element: f16, and blocks of 32 elements with their scale in 34 or 18 bytes.
_KV_BYTES: dict[str, float] = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
_FLOAT_BYTES = 4


def plan_load(header: GGUFHeader, wishes: Sequence[LoadWishes], config: Config, machine: Machine) -> LoadPlan:
    """One load that serves all `wishes`: the widest window, and of the rest the first word counts."""
    options = choose_load_options(header, _merge(wishes, default_num_ctx(header, config)), config, machine)
    longest = header.context_length or options.num_ctx
    return LoadPlan(options, estimate_bytes(header, options), longest, header.num_layers)


def choose_load_options(header: GGUFHeader, wishes: LoadWishes, config: Config, machine: Machine) -> LoadOptions:
    """Decide what the wishes and the settings leave open. `machine.available_bytes` is what this model may take."""
    num_ctx = _clip_num_ctx(header, wishes.num_ctx or default_num_ctx(header, config))
    asked = wishes.num_thread or config.num_threads
    threads = asked or automatic_threads(machine.num_cores, config)
    is_embedding = header.pooling_type is not None
    num_batch = wishes.num_batch or (num_ctx if is_embedding else 2048)
    options = LoadOptions(
        num_ctx=num_ctx,
        num_parallel=1,
        num_threads=threads,
        num_threads_batch=threads,
        has_fixed_threads=bool(asked),
        num_batch=num_batch,
        # An embedding looks at its whole input at once, so that has to be one micro-batch.
        num_ubatch=num_batch if is_embedding else min(512, num_batch),
        num_gpu_layers=gpu_layers(config.gpu_layers if wishes.num_gpu is None else wishes.num_gpu, header.num_layers),
        main_gpu=wishes.main_gpu or 0,
        use_mmap=wishes.use_mmap is not False,
        kv_cache_type=wishes.kv_cache_type or cast(KVCacheType, config.kv_cache_type),
        flash_attention=cast(FlashAttention, config.flash_attention),
        kv_unified=config.kv_unified,
        target_itl_ms=(config.target_itl or 0.0) * 1000,
        speculate=config.speculate,
        kv_ram_bytes=config.kv_ram,
        kv_disk_bytes=config.kv_disk if config.kv_ram else 0,
        kv_folder=str(kv_folder()),
    )
    if is_embedding:
        return options
    return _with_slots(options, config.num_parallel or _auto_slots(header, options, machine))


def smaller_load(header: GGUFHeader, plan: LoadPlan) -> LoadPlan | None:
    """A quarter of the slots, or half of the window when there is only one or they share it; None if that is tiny."""
    options = plan.options
    if options.num_parallel > 1 and not options.kv_unified:
        options = msgspec.structs.replace(options, num_parallel=max(1, options.num_parallel // 4))
    elif options.num_ctx >= 2 * _CELL_PADDING:
        options = msgspec.structs.replace(options, num_ctx=options.num_ctx // 2)
    else:
        return None
    return replace(plan, options=options, size_bytes=estimate_bytes(header, options))


def automatic_threads(num_cores: int, config: Config) -> int:
    """Threads of a runner for which nobody has asked for a number."""
    return max(1, num_cores - config.leave_cores)


def default_num_ctx(header: GGUFHeader, config: Config) -> int:
    """The window of whoever does not ask for one."""
    if header.pooling_type is not None and header.context_length and not config.context_length:
        return header.context_length
    return config.context_length or min(DEFAULT_NUM_CTX, header.context_length or DEFAULT_NUM_CTX)


def estimate_bytes(header: GGUFHeader, options: LoadOptions) -> int:
    """All memory of a runner that has loaded the model with these options."""
    kv = (1 if options.kv_unified else options.num_parallel) * kv_bytes_per_slot(header, options)
    return PROCESS_BYTES + header.tensor_bytes + kv + compute_bytes(header, options)


def kv_bytes_per_slot(header: GGUFHeader, options: LoadOptions) -> int:
    """Keys and values of every layer for each cell of one slot's window, and a recurrent model's state."""
    if header.of_arch("attention.causal") is False:
        return 0
    cells = -(-options.num_ctx // _CELL_PADDING) * _CELL_PADDING
    elements = sum(_kv_heads(header)) * (header.key_length + header.value_length)
    state = header.num_layers * _number(header, "ssm.inner_size") * _number(header, "ssm.state_size") * _FLOAT_BYTES
    return int(cells * elements * _KV_BYTES[options.kv_cache_type]) + state


def compute_bytes(header: GGUFHeader, options: LoadOptions) -> int:
    """Activations of one micro-batch, its attention mask or scores, and a row of logits per slot."""
    rows = min(options.num_ubatch, options.num_batch)
    cells = options.num_ctx
    width = 6 * header.embedding_length + 3 * _number(header, "feed_forward_length")
    attention = cells * (header.num_heads if options.flash_attention == "off" else 1)
    return _FLOAT_BYTES * rows * (width + attention) + options.num_parallel * _logits_bytes(header)


def _auto_slots(header: GGUFHeader, options: LoadOptions, machine: Machine) -> int:
    """As many slots as the cores can use and as fit into a quarter of the memory, and into what the weights leave."""
    wanted = min(MAX_AUTO_SLOTS, max(4, 4 * machine.num_cores))
    kv = 0 if options.kv_unified else kv_bytes_per_slot(header, options)
    per_slot = max(1, kv + _logits_bytes(header))
    left_by_rest = machine.available_bytes - estimate_bytes(header, options) + per_slot
    return max(1, min(wanted, machine.available_bytes // 4 // per_slot, left_by_rest // per_slot))


def _with_slots(options: LoadOptions, count: int) -> LoadOptions:
    """A batch must have room for a token of every slot."""
    return msgspec.structs.replace(options, num_parallel=count, num_batch=max(options.num_batch, count))


def _merge(wishes: Sequence[LoadWishes], default: int) -> LoadWishes:
    return LoadWishes(
        num_ctx=max(wish.num_ctx or default for wish in wishes),
        num_batch=_first(wish.num_batch for wish in wishes),
        num_gpu=_first(wish.num_gpu for wish in wishes),
        main_gpu=_first(wish.main_gpu for wish in wishes),
        num_thread=_first(wish.num_thread or None for wish in wishes),
        use_mmap=_first(wish.use_mmap for wish in wishes),
        kv_cache_type=_first(wish.kv_cache_type for wish in wishes),
    )


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _clip_num_ctx(header: GGUFHeader, num_ctx: int) -> int:
    return max(MIN_NUM_CTX, min(num_ctx, header.context_length or num_ctx))


def _kv_heads(header: GGUFHeader) -> list[int]:
    """Key-value heads of each layer. A file may list them: hybrid models have layers without any."""
    listed = header.of_arch("attention.head_count_kv")
    if isinstance(listed, list) and len(listed) == header.num_layers:
        return [count for count in listed if isinstance(count, int) and count > 0]
    return [header.num_kv_heads] * header.num_layers


def _number(header: GGUFHeader, key: str) -> int:
    """An integer of the architecture; the largest of a list of them; 0 when there is none."""
    value = header.of_arch(key, 0)
    numbers = value if isinstance(value, list) else [value]
    return max((n for n in numbers if isinstance(n, int) and n > 0), default=0)


def _logits_bytes(header: GGUFHeader) -> int:
    """A slot's row of logits, once in the graph and once in the output buffer."""
    embeddings = next((tensor for tensor in header.tensors if tensor.name == "token_embd.weight"), None)
    return 2 * _FLOAT_BYTES * embeddings.shape[-1] if embeddings is not None and embeddings.shape else 0
