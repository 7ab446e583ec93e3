"""Who may ask: keys, and the tenants they stand for."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from hashlib import sha256

from ..shared.errors import InvalidApiKey

OPEN_PATHS = frozenset({"/health"})
ADMIN_PATHS = frozenset(
    {
        *("/server_info", "/model_info", "/flush_cache", "/abort_request"),
        *("/pause_generation", "/continue_generation", "/update_weights_from_disk"),
        *("/load_lora_adapter", "/unload_lora_adapter", "/start_profile", "/stop_profile"),
    }
)
DEFAULT_TENANT = "default"

_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64}):(.+)", re.DOTALL)


class Keys:
    """The keys of a deployment, held as digests and compared in constant time.

    Args:
        api_keys: `KEY`, whose tenant is named after its digest, or `TENANT:KEY`; none lets everybody in.
        admin_key: opens the control routes; without one, any api key does.
    """

    def __init__(self, api_keys: Sequence[str], admin_key: str = "") -> None:
        self._tenants = dict(map(_entry, api_keys))
        self._admin = _digest(admin_key) if admin_key else None

    def tenant(self, authorization: str | None, path: str) -> str:
        """The tenant that an `Authorization` header speaks for.

        Raises:
            InvalidApiKey: no key, an unknown one, or one that does not open this path.
        """
        if path in OPEN_PATHS:
            return DEFAULT_TENANT
        if not self._tenants and (self._admin is None or path not in ADMIN_PATHS):
            return DEFAULT_TENANT
        digest = _digest(_bearer(authorization))
        admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        found = None
        for known, tenant in self._tenants.items():  # all of them, so that the time does not tell which one fits
            if hmac.compare_digest(digest, known):
                found = tenant
        if path in ADMIN_PATHS and self._admin is not None and not admin:
            raise InvalidApiKey("This route needs the admin key.")
        if found is None and not admin:
            raise InvalidApiKey("Incorrect API key provided.")
        return found or DEFAULT_TENANT


def _entry(text: str) -> tuple[bytes, str]:
    named = _NAMED.fullmatch(text)
    if named:
        return _digest(named[2]), named[1]
    digest = _digest(text)
    return digest, f"key-{digest.hex()[:12]}"


def _digest(key: str | bytes) -> bytes:
    return sha256(key if isinstance(key, bytes) else key.encode(errors="surrogateescape")).digest()


def _bearer(authorization: str | None) -> bytes:
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise InvalidApiKey("No API key provided: send it as 'Authorization: Bearer KEY'.")
    return key.strip().encode("latin-1")  # how ASGI's headers were decoded: the bytes as the client sent them
