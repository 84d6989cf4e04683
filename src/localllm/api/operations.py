"""What each route is for, what it takes and what it answers: the source of /openapi.json and of /docs.

The shapes are the Structs that the routes themselves decode and encode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from localllm.api import progress, tokens
from localllm.api import wire_anthropic as anthropic
from localllm.api import wire_embedding as embedding
from localllm.api import wire_native as native
from localllm.api import wire_openai as openai
from localllm.api import wire_responses as responses
from localllm.api.wire import ModelBody
from localllm.store.fetch import PullEvent

Tag = Literal["Ollama", "OpenAI", "Anthropic", "localllm"]
TAGS: dict[Tag, str] = {
    "Ollama": "The native API: what Ollama's clients speak.",
    "OpenAI": "What OpenAI's clients speak, and Cohere's and Jina's way of reranking.",
    "Anthropic": "What Anthropic's clients speak.",
    "localllm": "What the others do not have.",
}
Stream = Literal["application/x-ndjson", "text/event-stream"]
NDJSON: Stream = "application/x-ndjson"
SSE: Stream = "text/event-stream"
TEXT = "text/plain"

# What fields of bodies mean, whatever the route, and what their Structs do not say of their types.
FIELDS: dict[str, dict[str, Any]] = {
    "model": {"description": "The name of a model in the store, or a second name of one"},
    "options": {"description": "Options of sampling and loading, as Ollama names them: see docs/api.md"},
    "keep_alive": {
        "description": "How long the model stays in memory afterwards: seconds, or a duration; negative is for ever",
        "type": ["string", "number"],
        "examples": ["5m", 300, -1, 0],
    },
    "priority": {"description": "From -10 to 10; lower is sooner"},
    "pin": {"description": "Keep what the prompt begins with in the prefix cache"},
    "grammar": {"description": "What the answer must look like, in GBNF or Lark's form"},
    "regex": {"description": "What the answer must look like"},
    "stream": {"description": "Send the answer as it comes"},
    "format": {"description": 'What the answer must look like: "json", or a JSON schema', "type": ["string", "object"]},
    "think": {
        "description": "Whether to think first, or how hard: low, medium, high or max",
        "type": ["boolean", "string"],
    },
    "truncate": {"description": "Leave something out when not all fits the window, rather than refuse"},
    "shift": {"description": "Go on when the window is full, and forget its oldest tokens"},
    "logprobs": {"description": "Tell how likely each token was"},
    "top_logprobs": {"description": "For each token, the likeliest in its place, up to 20"},
    "_debug_render_only": {"description": "Answer with the prompt instead"},
    "raw": {"description": "Send the prompt as it is, with no chat around it"},
    "suffix": {"description": "What comes after the answer"},
    "context": {"description": "Tokens of an earlier exchange to go on from"},
    "tools": {"description": "Functions that may be called", "items": {"type": "object"}},
    "tool_choice": {"description": "auto, none, required, or a function by its name"},
    "response_format": {"description": "text, json_object, or json_schema with a schema"},
    "stop": {"description": "Texts that end the answer where they appear"},
    "n": {"description": "How many answers"},
    "num_ctx": {"description": "The window in tokens"},
    "max_tokens": {"description": "How long the answer may be"},
    "max_completion_tokens": {"description": "How long the answer may be"},
    "max_output_tokens": {"description": "How long the answer may be"},
    "reasoning_effort": {"description": "none, minimal, low, medium, high, xhigh or max"},
    "prediction": {"description": "Taken, and makes no difference"},
    "previous_response_id": {"description": "The answer that this goes on from; the last ones are kept in memory"},
    "input": {"description": "A text, or a list"},
    "prompt": {"description": "A text; on /v1/completions also token ids, or a list of either"},
    "dimensions": {"description": "How many numbers to keep of each vector"},
    "pooling": {"description": "How a model that was made to generate text sums up its input"},
    "verbose": {"description": "Long arrays too"},
    "insecure": {"description": "Let a registry be asked without TLS"},
    "add_special": {"description": "With what the model wants first"},
}


@dataclass(frozen=True)
class Operation:
    """One verb on one path.

    `reply` is a Struct, an example of an object, a media type of text, or None for no content. With `stream`, the
    reply may be many objects of `event`, if the request asks for it. `statuses` are those of success.
    """

    tag: Tag
    summary: str
    body: type | None = None
    reply: type | dict[str, Any] | str | None = None
    stream: Stream | None = None
    event: Any = None
    statuses: tuple[int, ...] = (200,)
    raw_body: bool = False

    @property
    def does_work(self) -> bool:
        """Whether it waits for a model, and may be told how urgent that is."""
        return self.body is not None and issubclass(self.body, ModelBody)


_STATUS = {"status": "success"}

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/"): Operation("Ollama", "A sign of life, in Ollama's words", reply=TEXT),
    ("GET", "/api/version"): Operation(
        "Ollama", "The Ollama whose contract this is, and localllm's own version", reply={"version": "", "localllm": ""}
    ),
    ("POST", "/api/generate"): Operation(
        "Ollama",
        "Text from a prompt; without one, load or unload the model",
        native.GenerateBody,
        native.InferenceReply,
        NDJSON,
        native.InferenceReply,
    ),
    ("POST", "/api/chat"): Operation(
        "Ollama",
        "Text from messages; without any, load or unload the model",
        native.ChatBody,
        native.InferenceReply,
        NDJSON,
        native.InferenceReply,
    ),
    ("POST", "/api/embed"): Operation("Ollama", "Vectors of texts", embedding.EmbedBody, embedding.EmbedReply),
    ("POST", "/api/embeddings"): Operation(
        "Ollama", "The vector of one text (older)", embedding.EmbeddingsBody, embedding.EmbeddingsReply
    ),
    ("GET", "/api/tags"): Operation("Ollama", "The models in the store", reply=native.ListedModels),
    ("GET", "/api/ps"): Operation("Ollama", "The models in memory", reply=native.RunningModels),
    ("POST", "/api/show"): Operation("Ollama", "One model in detail", native.ShowBody, native.ShowReply),
    ("POST", "/api/pull"): Operation(
        "Ollama", "Fetch a model", native.PullBody, _STATUS, stream=NDJSON, event=PullEvent
    ),
    ("POST", "/api/push"): Operation(
        "Ollama", "Send a model to a registry", native.PullBody, _STATUS, stream=NDJSON, event=PullEvent
    ),
    ("POST", "/api/create"): Operation(
        "Ollama", "Make a model from another, or from files", native.NameBody, _STATUS, NDJSON, PullEvent
    ),
    ("DELETE", "/api/delete"): Operation("Ollama", "Forget a model", native.NameBody),
    ("POST", "/api/copy"): Operation("Ollama", "Give a model another name", native.CopyBody),
    ("HEAD", "/api/blobs/{digest}"): Operation("Ollama", "Is this file there?"),
    ("POST", "/api/blobs/{digest}"): Operation(
        "Ollama", "Send a file that a model will be created from", raw_body=True, statuses=(200, 201)
    ),
    ("GET", "/api/status"): Operation("Ollama", "As of an Ollama whose cloud is switched off", reply={"cloud": {}}),
    ("POST", "/api/me"): Operation("Ollama", "Nobody is signed in", statuses=()),
    ("POST", "/api/signout"): Operation("Ollama", "Nobody is signed in", statuses=()),
    ("DELETE", "/api/user/keys/{key}"): Operation("Ollama", "Nobody is signed in", statuses=()),
    ("POST", "/api/experimental/web_search"): Operation("Ollama", "There is no cloud to search with", statuses=()),
    ("POST", "/api/experimental/web_fetch"): Operation("Ollama", "There is no cloud to fetch with", statuses=()),
    ("GET", "/api/experimental/model-recommendations"): Operation(
        "Ollama", "None: there is no cloud to ask", reply={"recommendations": []}
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "OpenAI", "Text from messages", openai.ChatCompletionBody, openai.Completion, SSE, openai.Completion
    ),
    ("POST", "/v1/completions"): Operation(
        "OpenAI", "Text that goes on", openai.CompletionBody, openai.TextCompletion, SSE, openai.TextCompletion
    ),
    ("POST", "/v1/responses"): Operation(
        "OpenAI", "An answer in a conversation", responses.ResponsesBody, responses.Response, SSE, responses.Event
    ),
    ("POST", "/v1/embeddings"): Operation(
        "OpenAI", "Vectors of texts", embedding.OpenAIEmbeddingsBody, embedding.OpenAIEmbeddings
    ),
    ("POST", "/v1/rerank"): Operation(
        "OpenAI", "How well documents answer a query", embedding.RerankBody, embedding.RerankReply
    ),
    ("GET", "/v1/models"): Operation("OpenAI", "The models in the store", reply=openai.ModelCards),
    ("GET", "/v1/models/{id}"): Operation("OpenAI", "One model; ids may have slashes", reply=openai.ModelCard),
    ("POST", "/v1/messages"): Operation(
        "Anthropic", "An answer to messages", anthropic.MessagesBody, anthropic.MessageReply, SSE, anthropic.Event
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Anthropic", "How long a prompt is", anthropic.CountTokensBody, anthropic.TokenCount
    ),
    ("GET", "/health"): Operation(
        "localllm", "Whether the daemon lives", reply={"status": "ok", "server": "localllm", "version": "", "pid": 1}
    ),
    ("GET", "/ready"): Operation("localllm", "Whether it takes new work", reply={"status": "ready"}),
    ("GET", "/metrics"): Operation("localllm", "Numbers in Prometheus' format", reply=TEXT),
    ("GET", "/api/queue"): Operation("localllm", "Who works, and who waits for what", reply=progress.Queue),
    ("POST", "/api/tokenize"): Operation("localllm", "The tokens of a text", tokens.TokenizeBody, tokens.Tokens),
    ("POST", "/api/detokenize"): Operation("localllm", "The text of tokens", tokens.DetokenizeBody, tokens.Text),
    ("POST", "/api/render"): Operation(
        "localllm", "The exact prompt that a chat would send", native.ChatBody, native.RenderReply
    ),
    ("GET", "/openapi.json"): Operation("localllm", "This description", reply={"openapi": "3.1.0"}),
    ("GET", "/docs"): Operation("localllm", "This description, to be read", reply="text/html"),
}
