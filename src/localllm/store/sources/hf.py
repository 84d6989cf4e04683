"""Hugging Face: which file of which repository, asked through huggingface_hub; the bytes go through store.transfer."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from localllm.errors import Forbidden, LocalLLMError, NotFoundAtSource, SourceUnavailable, Unauthorized, Unsupported
from localllm.store.catalog import HuggingFaceSource as HuggingFaceSpec
from localllm.store.manifests import MODEL_LAYER, PROJECTOR_LAYER
from localllm.store.sources import Plan, PlannedFile
from localllm.store.transfer import CONNECT_SECONDS, Remote

# Without a wish: formats whose CPU kernels gain from batches first, then by common sense.
PREFERRED_QUANTS = ("Q4_K_M", "Q4_0", "Q8_0", "IQ4_NL", "MXFP4", "Q4_K_S", "Q5_K_M", "Q6_K", "Q4_1", "F16", "BF16")

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_QUANT = re.compile(r"(?:^|[-_./])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|B?F16|F32|MXFP4\w*|NVFP4))(?=[-.]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class RepoFile:
    name: str
    size: int | None
    sha256: str


class HuggingFaceSource:
    def __init__(self, spec: HuggingFaceSpec) -> None:
        self.label = f"Hugging Face ({spec.repo})"
        self._spec = spec

    async def resolve(self, client: httpx.AsyncClient) -> Plan:
        revision, files = await asyncio.to_thread(self._list_files)
        spec = self._spec
        model = choose_file(files, file=spec.file, quant=spec.quant, repo=spec.repo)
        planned = [PlannedFile(MODEL_LAYER, self._remote(model, revision))]
        if spec.mmproj:
            projector = choose_file(files, file=spec.mmproj, quant="", repo=spec.repo)
            planned.append(PlannedFile(PROJECTOR_LAYER, self._remote(projector, revision)))
        return Plan(tuple(planned))

    def _list_files(self) -> tuple[str, list[RepoFile]]:
        """The commit that the revision means now, and its files with sizes and sha256. Blocking."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        spec = self._spec
        try:
            info = HfApi(endpoint=_endpoint()).model_info(
                spec.repo, revision=spec.revision, files_metadata=True, timeout=CONNECT_SECONDS
            )
        except GatedRepoError:
            raise self._gated() from None
        except RepositoryNotFoundError as error:
            raise self._no_repository(error) from None
        except RevisionNotFoundError:
            raise NotFoundAtSource(f"{spec.repo} has no revision {spec.revision}") from None
        except HfHubHTTPError as error:
            raise SourceUnavailable(f"{self.label}: {_first_line(error)}") from None
        except (
            Exception
        ) as error:  # what carries the hub's client differs between its versions: requests, httpx, httpx2
            raise SourceUnavailable(f"{self.label} cannot be reached: {_first_line(error)}") from None
        return info.sha or spec.revision, [_repo_file(sibling) for sibling in info.siblings or ()]

    def _gated(self) -> LocalLLMError:
        url = f"{_endpoint()}/{self._spec.repo}"
        if _has_token():
            return Forbidden(f"{self._spec.repo} is gated", hint=f"Accept its licence at {url}, then try again.")
        return Unauthorized(
            f"{self._spec.repo} is gated and there is no token",
            hint=f"Accept its licence at {url}, then run `hf auth login` or set HF_TOKEN.",
        )

    def _no_repository(self, error: Any) -> LocalLLMError:
        """The hub answers 401 for what does not exist as for what is private, so the two cannot be told apart."""
        if _has_token():
            return NotFoundAtSource(f"Hugging Face has no repository {self._spec.repo} that your token may see")
        return NotFoundAtSource(
            f"Hugging Face has no public repository {self._spec.repo}",
            hint="If it is private, run `hf auth login` or set HF_TOKEN.",
        )

    def _remote(self, file: RepoFile, revision: str) -> Remote:
        from huggingface_hub import get_token, hf_hub_url

        url = hf_hub_url(self._spec.repo, file.name, revision=revision, endpoint=_endpoint())
        token = get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return Remote(url, headers, file.sha256, file.size)


def _endpoint() -> str:
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


def _has_token() -> bool:
    from huggingface_hub import get_token

    return bool(get_token())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _repo_file(sibling: Any) -> RepoFile:
    return RepoFile(sibling.rfilename, sibling.size, sibling.lfs.sha256 if sibling.lfs else "")


def choose_file(files: Iterable[RepoFile], *, file: str, quant: str, repo: str) -> RepoFile:
    """The one file that is meant by an exact name, or by a quantisation, or by neither.

    Raises NotFoundAtSource that lists what there is, Unsupported for a model in several parts.
    """
    models = [f for f in files if f.name.lower().endswith(".gguf")]
    if file:
        match = next((f for f in models if f.name == file), None)
        if match is None and not quant:
            raise _no_such_file(repo, file, models)
        if match is not None:
            return _whole(match, repo)
    weights = [f for f in models if "mmproj" not in f.name.lower()]
    if not weights:
        raise NotFoundAtSource(f"{repo} has no GGUF files", hint="Look for a repository whose name ends in -GGUF.")
    if quant:
        return _whole(_with_quant(weights, quant, repo), repo)
    for preferred in PREFERRED_QUANTS:
        for candidate in weights:
            if quant_of(candidate.name) == preferred:
                return _whole(candidate, repo)
    return _whole(weights[0], repo)


def _with_quant(weights: list[RepoFile], quant: str, repo: str) -> RepoFile:
    wanted = quant.lower().removesuffix(".gguf")
    for candidate in weights:
        stem = candidate.name.lower().removesuffix(".gguf")
        if wanted in (quant_of(candidate.name).lower(), stem, stem.rpartition("/")[2]):
            return candidate
    raise _no_such_file(repo, quant, weights)


def _no_such_file(repo: str, wanted: str, models: list[RepoFile]) -> NotFoundAtSource:
    quants = sorted({quant_of(f.name) for f in models} - {""})
    found = (
        f"It has {', '.join(quants)}." if quants else f"It has {', '.join(f.name for f in models[:8]) or 'no GGUF'}."
    )
    return NotFoundAtSource(f"{repo} has no {wanted}", hint=found)


def _whole(file: RepoFile, repo: str) -> RepoFile:
    if _SPLIT.search(file.name):
        raise Unsupported(
            f"{file.name} of {repo} is one part of a model in several files, which cannot be pulled yet",
            hint="Choose a smaller quantisation that is a single file.",
        )
    return file


def quant_of(name: str) -> str:
    """The quantisation that a file's name ends with, upper-case; "" when it names none."""
    matches = _QUANT.findall(_SPLIT.sub(".gguf", name))
    return matches[-1].upper() if matches else ""
