"""The namespace of cached prefixes: what must be equal, besides the keys, before two requests may share pages."""

from __future__ import annotations

import hashlib


def namespace(weights_version: str, adapter: str | None, adapter_load: int, salt: str | None) -> bytes:
    """A 16-byte name. `adapter_load` counts loads, so an adapter that comes back under its old name starts empty.

    Every field goes in behind its length, and an absent one differs from an empty one: no value of one field can
    look like another's.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"cache namespace")
    for field in (weights_version, adapter, str(adapter_load), salt):
        if field is None:
            digest.update(b"\0")
        else:
            # A salt comes from JSON, which can spell half of a surrogate pair.
            data = field.encode("utf-8", "surrogatepass")
            digest.update(b"\1" + len(data).to_bytes(8, "big") + data)
    return digest.digest()
