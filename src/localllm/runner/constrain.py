"""What binds the answer to a request: its grammar, or the tools that it must call."""

from __future__ import annotations

from localllm.chat import grammar
from localllm.chat.formats.forced import answer_gate, call_openers, call_prefix
from localllm.errors import InvalidRequest
from localllm.llama.constraint import Constraint, Gate, Grammars
from localllm.llama.model import Model
from localllm.types import ChatRequest


class Constrainer:
    """Used by the reader thread only. `template` is the model's chat template."""

    def __init__(self, model: Model, template: str) -> None:
        self._model = model
        self._template = template
        self._grammars = Grammars(model)

    def check(self, request: ChatRequest) -> str:
        """What the answer is bound to, in the form that `constrain` takes; "" for nothing.

        Raises InvalidRequest that names what cannot be used.
        """
        if request.sampling.ignore_eos and (request.forced_tools or request.grammar is not None):
            raise InvalidRequest('"ignore_eos": an answer that has a form must end with it', field="ignore_eos")
        if request.forced_tools:
            return grammar.forced_call(request.tools, request.forced_tools)
        return grammar.compile_grammar(request.grammar) if request.grammar is not None else ""

    def constrain(self, request: ChatRequest, compiled: str, prompt: str) -> Constraint | None:
        """`prompt` is what was rendered: some end inside a thought."""
        if not compiled:
            return None
        gate = self._gate(request, prompt) if request.messages is not None else None
        if request.forced_tools:
            prefix = self._tokens(call_prefix(self._template))
            return self._grammars.constrain(compiled, gate, prefix)
        openers = [self._tokens(text) for text in call_openers(self._template)] if request.tools else []
        exits = [tokens[0] for tokens in openers if len(tokens) == 1]
        return self._grammars.constrain(compiled, gate, (), exits)

    def _gate(self, request: ChatRequest, prompt: str) -> Gate | None:
        gate = answer_gate(self._template, prompt, request.think)
        if gate is None:
            return None
        return Gate(tuple(self._tokens(gate.opener)), gate.closer, gate.is_inside)

    def _tokens(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False) if text else []
