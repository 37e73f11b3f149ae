"""Names of tile contents: what a tile holds depends on its own tokens and on all before them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

ROOT = b"sits-prefix-1"


def chain_names(token_ids: Sequence[int], tile_tokens: int, parent: bytes = ROOT) -> list[bytes]:
    """Return one name for each full tile of `token_ids`, which follow the tile named `parent`.

    The name of tile i is a 128-bit BLAKE2b digest over the name of tile i-1 and its own tokens, so equal names mean
    equal tokens from the first on. A keyless cryptographic digest: no prompt can be made to collide with another.
    """
    words = np.asarray(token_ids, dtype="<i4")
    names = []
    for start in range(0, len(words) - tile_tokens + 1, tile_tokens):
        parent = blake2b(parent + words[start : start + tile_tokens].tobytes(), digest_size=16).digest()
        names.append(parent)
    return names
