"""The plain data that all layers share.

Units: durations are integer nanoseconds (`*_ns`), sizes are bytes (`*_bytes` or `size`), counts start with `num_`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "cancelled"]
ThinkLevel = Literal["low", "medium", "high", "max"]
KVCacheType = Literal["f16", "q8_0", "q4_0"]
FlashAttention = Literal["auto", "on", "off"]
Pooling = Literal["mean", "cls", "last"]


class ToolCall(msgspec.Struct, frozen=True):
    """`arguments` is always an object; clients that want JSON text encode it at their own edge."""

    id: str
    name: str
    arguments: dict[str, Any]


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Role
    content: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_name: str = ""
    tool_call_id: str = ""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer must look like: a JSON schema, a regular expression, or a grammar in Lark's or GBNF's form.

    `field` is what the client calls it: errors name it.
    """

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    source: str
    field: str = "format"


class PromptTemplate(msgspec.Struct, frozen=True):
    """How a conversation becomes a prompt: Jinja as in model files, or Go's text/template as in Ollama's layers."""

    language: Literal["jinja", "go"]
    source: str


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen and when to stop. Defaults are Ollama's, and llama.cpp's where Ollama has none.

    `num_predict` None means "until the window is full". `seed` None means a fresh random seed. A `temperature` of 0 is
    greedy. `num_keep` tokens of the prompt (all, if negative) stay when a full window is shifted. `repeat_last_n` and
    `dry_penalty_last_n` -1 mean the whole window. `logit_bias` maps tokens to what is added to their logits. `mirostat`
    1 or 2 replaces everything that narrows down; a `dry_multiplier` of 0, an `xtc_probability` of 0 and a negative
    `top_n_sigma` switch those off.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    num_predict: int | None = None
    num_keep: int = 4
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    mirostat: Literal[0, 1, 2] = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    top_n_sigma: float = -1.0


class LoadWishes(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client or a Modelfile asks of a load; None means "you choose". The daemon turns this into LoadOptions."""

    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    use_mmap: bool | None = None
    kv_cache_type: KVCacheType | None = None


class LoadOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a runner needs to know to load a model: every field is decided before it gets here.

    `num_ctx` is the window of *each* slot in tokens; `num_parallel` the number of slots; `num_gpu_layers` -1 means all.
    `has_fixed_threads`: the numbers of threads were asked for, and do not follow the cores that are there.
    `kv_unified`: the slots share one pool of `num_ctx` KV cells instead of having so many each.
    `speculate` allows drafts by prompt lookup. `kv_ram_bytes` and `kv_disk_bytes` bound what the prefix cache keeps
    outside the slots, the latter in `kv_folder`, which all runners share.
    """

    num_ctx: int
    num_parallel: int
    num_threads: int
    num_threads_batch: int
    has_fixed_threads: bool = False
    num_batch: int = 2048
    num_ubatch: int = 512
    num_gpu_layers: int = -1
    main_gpu: int = 0
    use_mmap: bool = True
    kv_cache_type: KVCacheType = "f16"
    flash_attention: FlashAttention = "auto"
    kv_unified: bool = False
    target_itl_ms: float = 100.0
    speculate: bool = True
    kv_ram_bytes: int = 0
    kv_disk_bytes: int = 0
    kv_folder: str = ""


class ChatRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request for text, as the runner gets it.

    Either `messages` (rendered with the model's chat template) or `prompt` (sent as it is) is set.
    `context_tokens` are token ids of an earlier exchange, put before the rendered prompt.
    `truncate` lets the oldest messages be dropped when the prompt is longer than the window (the system message and the
    last message stay); without it such a prompt is a ContextExceeded error. `shift` lets an answer go on when the
    window is full, and a prompt be longer than it if `truncate` does not help: tokens after the first few are dropped.
    `num_top_logprobs` asks for each token's log-probability and for so many of the likeliest; None for neither.
    `pin` keeps the prompt's prefix in the cache. `priority` lower is sooner; `client` groups requests for fairness.
    With a `suffix`, the answer is what belongs between `prompt` and it. `grammar` binds the answer, not the thinking.
    `forced_tools` are names of tools, one of which must be called; the answer ends after `max_tool_calls`, if not 0.
    `template` is used instead of the one in the model file; one in Go also takes a `prompt` and its `suffix`.
    `inspect` asks for no answer, only for what would be computed: Finished then has the prompt and its tokens,
    without what the model wants at the beginning (BOS, say) if not `add_special`.
    """

    id: str
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    context_tokens: tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    think: bool | ThinkLevel | None = None
    sampling: SamplingParams = SamplingParams()
    num_top_logprobs: int | None = None
    truncate: bool = False
    shift: bool = False
    return_tokens: bool = False
    speculate: bool = True
    pin: bool = False
    priority: int = 0
    client: str = ""
    suffix: str = ""
    template: PromptTemplate | None = None
    grammar: Grammar | None = None
    forced_tools: tuple[str, ...] = ()
    max_tool_calls: int = 0
    inspect: bool = False
    add_special: bool = True


class EmbedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request for vectors; or, with a `query`, for scores of how well each input answers it.

    An input is text, or token ids as they are. `truncate` lets inputs over the window lose their end; without it they
    are a ContextExceeded error. `dimensions` keeps so many numbers of each vector. `pooling` is how a model that was
    made to generate text is to sum up its input: it has no way of its own.
    """

    id: str
    inputs: tuple[str | tuple[int, ...], ...]
    query: str | None = None
    truncate: bool = True
    dimensions: int | None = None
    pooling: Pooling | None = None
    priority: int = 0
    client: str = ""


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """How likely the model held a token, before any sampling option; `top` are the likeliest in its place.

    `piece` is the token's bytes, which need not be whole characters.
    """

    piece: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of the answer. `num_tokens` is how many tokens were generated since the last delta.

    `logprobs`, when they were asked for, has one entry for each of these tokens, shown or held back.
    """

    content: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    num_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """`num_prompt_tokens` includes the `num_cached_tokens` of them that needed no computing.

    `num_dropped_messages` and `num_dropped_tokens` were left out because the window had no room for them.
    `num_accepted_tokens` of the `num_draft_tokens` that were guessed ahead turned out right.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_dropped_messages: int = 0
    num_dropped_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a request's time went, as seen by the runner; the daemon adds its own share."""

    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0


class Finished(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one good ending of a request. `tokens` is prompt plus answer when `return_tokens` was asked for.

    `prompt` is the text of the prompt, for a request that was to be inspected. `stopped_by` is the stop string that was
    found, if one was.
    """

    finish_reason: FinishReason
    usage: Usage = Usage()
    timings: Timings = Timings()
    tokens: tuple[int, ...] = ()
    prompt: str = ""
    stopped_by: str = ""


class Embeddings(msgspec.Struct, frozen=True, omit_defaults=True):
    """The good ending of an EmbedRequest. `vectors` are little-endian 32-bit floats, one vector or score per input."""

    vectors: tuple[bytes, ...]
    usage: Usage = Usage()
    timings: Timings = Timings()


# Upper bounds of what EngineStats counts: seconds of a step, and sequences that a step worked for.
STEP_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
BATCH_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class HistogramCounts(msgspec.Struct, frozen=True):
    """`counts` has one entry for each bound, of the values up to it and above the one before, and one for the rest."""

    counts: tuple[int, ...]
    sum: float


class EngineStats(msgspec.Struct, frozen=True):
    """What a runner's engine has done since it began, and how it stands.

    `num_evictions` counts prefixes that were dropped for want of room.
    """

    steps: HistogramCounts
    batches: HistogramCounts
    num_preemptions: int
    num_evictions: int
    num_running: int
    num_waiting: int
    kv_ram_bytes: int


class RunnerInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a runner knows once its model is loaded: effective values, not wishes."""

    num_slots: int
    num_ctx: int
    num_ctx_train: int
    num_threads: int
    num_threads_batch: int
    num_gpu_layers: int = 0
    num_layers: int = 0
    size_bytes: int = 0
    size_vram_bytes: int = 0
    system_info: str = ""
