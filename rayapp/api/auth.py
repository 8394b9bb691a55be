"""Who may call: API keys, and how many requests each may have at a time.

`KeyGate` stands in front of the endpoints, made by `build_api`. Keys are compared as digests, in constant time, and
are never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from rayapp.api.errors import ApiError
from rayapp.api.settings import ApiConfig, RequestSettings

OPEN_PATHS = ("/health", "/ping")  # probes have no key


class Keys:
    """The keys that are good now.

    Raises:
        ValueError: no key is found where the configuration says.
    """

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._of_env = _digests(self._env())
        self._of_file: list[bytes] = []
        self._file_version: tuple[int, int] | None = None
        if config.keys_file is not None:
            self._read_file(config.keys_file)
        if self.needed and not self._of_env + self._of_file:
            places = [f"${config.keys_env}"] if config.keys_env else []
            places += [str(config.keys_file)] if config.keys_file else []
            raise ValueError(f"no API key in {' or '.join(places)}: put one there, or take the setting out of `api:`")

    @property
    def needed(self) -> bool:
        return self._config.keys_env is not None or self._config.keys_file is not None

    def find(self, key: str) -> bytes | None:
        """Its digest if the key is good. Takes as long whichever it is."""
        if self._config.keys_file is not None:
            self._read_file(self._config.keys_file)
        found = None
        asked = _digest(key)
        for digest in self._of_env + self._of_file:
            if hmac.compare_digest(digest, asked):
                found = digest
        return found

    def _env(self) -> str:
        return os.environ.get(self._config.keys_env, "") if self._config.keys_env else ""

    def _read_file(self, file: Path) -> None:
        """Take its keys if it has changed. One that cannot be read has none: it may have been taken away on purpose."""
        try:
            status = file.stat()
            version = (status.st_mtime_ns, status.st_ino)
            if version != self._file_version:
                lines = (line.partition("#")[0] for line in file.read_text().splitlines())
                self._of_file, self._file_version = _digests(" ".join(lines)), version
        except OSError:
            self._of_file, self._file_version = [], None


class KeyGate:
    """Lets requests through that bring a good key, as `Authorization: Bearer KEY`, and counts them.

    Args:
        settings: what counts at the moment.
    """

    def __init__(self, app: ASGIApp, keys: Keys, settings: Callable[[], RequestSettings]) -> None:
        self.app = app
        self._keys = keys
        self._settings = settings
        self._running: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        try:
            key = self._admit(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self._running[key] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    def _admit(self, scope: Scope) -> bytes:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
        scheme, _, key = header.partition(" ")
        digest = self._keys.find(key.strip()) if scheme.lower() == "bearer" else None
        if digest is None:
            asked = "this key is not known" if key else "an API key is needed"
            raise ApiError(
                401,
                f"{asked}: send `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        limit = self._settings().max_requests_per_key
        if limit is not None and self._running[digest] >= limit:
            raise ApiError(
                429,
                f"this key has {self._running[digest]} requests running and may have {limit} (max_requests_per_key): "
                "wait for one to end",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        return digest


def _path(scope: Scope) -> str:
    """Below the route prefix."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _digests(keys: str) -> list[bytes]:
    return [_digest(key) for key in keys.replace(",", " ").split()]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
