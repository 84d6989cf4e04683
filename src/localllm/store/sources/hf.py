"""Hugging Face: which file of which repository, asked through huggingface_hub; the bytes go through store.transfer."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from localllm.errors import DigestMismatch, Forbidden, LocalLLMError, NotFoundAtSource, SourceUnavailable, Unauthorized
from localllm.store.catalog import HuggingFaceSource as HuggingFaceSpec
from localllm.store.manifests import MODEL_LAYER, PROJECTOR_LAYER
from localllm.store.sources import Plan, PlannedFile, call_blocking, is_split, refuse_split, without_split
from localllm.store.web import (
    CONNECT_SECONDS,
    Remote,
    Retry,
    is_passing,
    reason_of,
    retry_after,
    retrying,
    unreachable,
)

# Without a wish: formats whose CPU kernels gain from batches first, then by common sense.
PREFERRED_QUANTS = ("Q4_0", "Q4_K_M", "Q8_0", "IQ4_NL", "MXFP4", "Q4_K_S", "Q5_K_M", "Q6_K", "Q4_1", "F16", "BF16")

_HOME = "https://huggingface.co"
# Until a hub that gives no sign is given up and the next source is tried.
_TOTAL_SECONDS = 9.5
_QUANT = re.compile(r"(?:^|[-_./])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|B?F16|F32|MXFP4\w*|NVFP4))(?=[-.]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class RepoFile:
    name: str
    size: int | None
    sha256: str


class HuggingFaceSource:
    def __init__(self, spec: HuggingFaceSpec) -> None:
        self.place = _place()
        self.label = f"{self.place} ({spec.repo})"
        self._spec = spec

    async def resolve(self, client: httpx.AsyncClient) -> Plan:
        spec = self._spec
        revision, files = await retrying(self._ask, self.place)
        model = choose_file(files, file=spec.file, quant=spec.quant, repo=spec.repo)
        if model.name == spec.file:
            model = self._pinned(model)
        planned = [PlannedFile(MODEL_LAYER, self._remote(model, revision))]
        if spec.mmproj:
            projector = choose_file(files, file=spec.mmproj, quant="", repo=spec.repo)
            planned.append(PlannedFile(PROJECTOR_LAYER, self._remote(projector, revision)))
        return Plan(tuple(planned))

    def _pinned(self, file: RepoFile) -> RepoFile:
        """The file with what the catalogue says of it. Raises DigestMismatch when the hub has another one."""
        wanted = self._spec.sha256
        if wanted and file.sha256 and wanted != file.sha256:
            raise DigestMismatch(
                f"{file.name} of {self._spec.repo} is not the file that the catalogue means: "
                f"want sha256:{wanted}, got sha256:{file.sha256}"
            )
        return RepoFile(file.name, self._spec.size if file.size is None else file.size, file.sha256 or wanted)

    async def _ask(self) -> tuple[str, list[RepoFile]]:
        try:
            return await call_blocking(self._list_files, _TOTAL_SECONDS)
        except TimeoutError as error:
            raise unreachable(self.place, error) from None

    def _list_files(self) -> tuple[str, list[RepoFile]]:
        """The commit that the revision means now, and its files with sizes and sha256. Blocking."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        spec = self._spec
        try:
            info = HfApi(endpoint=_endpoint()).model_info(
                spec.repo, revision=spec.revision, files_metadata=True, timeout=CONNECT_SECONDS
            )
        except HfHubHTTPError as error:
            raise self._refusal(error) from None
        # The errors of the hub's HTTP client, which is another one in each of its major versions.
        except Exception as error:
            raise unreachable(self.place, error) from None
        return info.sha or spec.revision, [_repo_file(sibling) for sibling in info.siblings or ()]

    def _refusal(self, error: Any) -> LocalLLMError | Retry:
        """What an answer other than 200 means."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        spec, response = self._spec, error.response
        code = response.status_code if response is not None else 0
        if isinstance(error, GatedRepoError):
            return self._gated()
        if isinstance(error, RevisionNotFoundError):
            return NotFoundAtSource(f"{spec.repo} has no revision {spec.revision}")
        if code == 401 and _has_token() and "invalid" in str(error).lower():
            return Unauthorized(
                f"{self.place} does not accept your token", hint="Run `hf auth login` or set HF_TOKEN anew."
            )
        if isinstance(error, RepositoryNotFoundError) or code in (401, 404):
            return self._no_repository()
        if code == 403:
            return Forbidden(f"{self.place} refuses access to {spec.repo}", hint=f"See {_endpoint()}/{spec.repo}.")
        if is_passing(code):
            return Retry(f"{self.place} answered {code} for {spec.repo}", retry_after(response.headers))
        return SourceUnavailable(f"{self.label}: {reason_of(error)}")

    def _gated(self) -> LocalLLMError:
        url = f"{_endpoint()}/{self._spec.repo}"
        if _has_token():
            return Forbidden(
                f"{self._spec.repo} is gated and its licence is not accepted",
                hint=f"Accept its licence at {url}, then try again.",
            )
        return Unauthorized(
            f"{self._spec.repo} is gated and there is no token",
            hint=f"Accept its licence at {url}, then run `hf auth login` or set HF_TOKEN.",
        )

    def _no_repository(self) -> LocalLLMError:
        """The hub answers 401 for what does not exist as for what is private, so the two cannot be told apart."""
        if _has_token():
            return NotFoundAtSource(f"{self.place} has no repository {self._spec.repo} that your token may see")
        return NotFoundAtSource(
            f"{self.place} has no public repository {self._spec.repo}",
            hint="If it is private, run `hf auth login` or set HF_TOKEN.",
        )

    def _remote(self, file: RepoFile, revision: str) -> Remote:
        from huggingface_hub import get_token, hf_hub_url

        url = hf_hub_url(self._spec.repo, file.name, revision=revision, endpoint=_endpoint())
        token = get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return Remote(url, headers, file.sha256, file.size)


def hub_file(url: httpx.URL) -> HuggingFaceSpec | None:
    """The repository's file that an address of a hub's site means; None for other addresses.

    Through the hub's API it comes with a digest, and with the login that a gated repository wants.
    """
    parts = url.path.strip("/").split("/")
    is_hub = url.host in ("huggingface.co", "hf.co") or url.host == httpx.URL(_endpoint()).host
    if not is_hub or len(parts) < 5 or parts[2] not in ("resolve", "blob"):
        return None
    return HuggingFaceSpec("/".join(parts[:2]), file="/".join(parts[4:]), revision=parts[3])


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or _HOME).rstrip("/")


def _place() -> str:
    """The hub by its name, a mirror of it by its address."""
    return "Hugging Face" if _endpoint() == _HOME else f"the hub {httpx.URL(_endpoint()).host}"


def _has_token() -> bool:
    from huggingface_hub import get_token

    return bool(get_token())


def _repo_file(sibling: Any) -> RepoFile:
    return RepoFile(sibling.rfilename, sibling.size, sibling.lfs.sha256 if sibling.lfs else "")


def choose_file(files: Iterable[RepoFile], *, file: str, quant: str, repo: str) -> RepoFile:
    """The one file that is meant by an exact name, or by a quantisation, or by neither.

    Raises NotFoundAtSource that lists what there is, Unsupported for a model in several parts.
    """
    models = [f for f in files if f.name.lower().endswith(".gguf")]
    if file:
        match = next((f for f in models if f.name == file), None)
        if match is not None:
            return _whole(match)
        if not quant:
            raise _no_such_file(repo, file, models)
    weights = [f for f in models if not _is_helper(f.name)]
    if not weights:
        raise NotFoundAtSource(f"{repo} has no GGUF files", hint="Look for a repository whose name ends in -GGUF.")
    if quant:
        return _whole(_with_quant(weights, quant, repo))
    return _whole(min(weights, key=_rank))


def _is_helper(name: str) -> bool:
    """Projectors and importance matrices are GGUF files too, but no models."""
    return any(word in name.lower() for word in ("mmproj", "imatrix"))


def _rank(file: RepoFile) -> tuple[bool, int]:
    quant = quant_of(file.name)
    rank = PREFERRED_QUANTS.index(quant) if quant in PREFERRED_QUANTS else len(PREFERRED_QUANTS)
    return is_split(file.name), rank


def _with_quant(weights: list[RepoFile], quant: str, repo: str) -> RepoFile:
    wanted = quant.lower().removesuffix(".gguf")
    for candidate in weights:
        stem = candidate.name.lower().removesuffix(".gguf")
        if wanted in (quant_of(candidate.name).lower(), stem, stem.rpartition("/")[2]):
            return candidate
    raise _no_such_file(repo, quant, weights)


def _no_such_file(repo: str, wanted: str, models: list[RepoFile]) -> NotFoundAtSource:
    quants = sorted({quant_of(f.name) for f in models} - {""})
    found = ", ".join(quants or [f.name for f in models[:8]]) or "no GGUF files"
    return NotFoundAtSource(f"{repo} has no {wanted}", hint=f"It has {found}.")


def _whole(file: RepoFile) -> RepoFile:
    refuse_split(file.name)
    return file


@functools.lru_cache(maxsize=4096)
def quant_of(name: str) -> str:
    """The quantisation that a file's name ends with, upper-case; "" when it names none."""
    matches = _QUANT.findall(without_split(name))
    return matches[-1].upper() if matches else ""
