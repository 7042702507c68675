"""Names of full blocks: a hash over all token ids up to the block's end and over what made them.

The same everywhere and always: no use of Python's salted `hash`.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from sys import byteorder

from engine.errors import EngineError

DIGEST_BYTES = 32
"""Length of a key; long enough that two contents with one key need not be considered."""


class BlockHasher:
    """Makes the keys of blocks: each is a digest of its parent's key and its own token ids.

    The parent of a sequence's first block is a root, a digest of everything else that the values
    in a block depend on. Equal keys therefore mean equal tokens from position 0 on, computed by
    the same model, in the same dtype, under the same salt.

    Args:
        identity: What values depend on beside tokens, in a fixed order: the weights (source and
            revision, or shape and seed), the dtype, whether windows are disabled, the layer group.
        block_size: Tokens in a block, at least 1.

    Raises:
        EngineError: The block size is below 1.
    """

    def __init__(self, identity: Sequence[str], block_size: int) -> None:
        if block_size < 1:
            raise EngineError(f"block hasher: expected block_size of at least 1, got {block_size}.")
        self.block_size = block_size
        self._identity = tuple(identity)

    def root(self, salt: str | None = None) -> bytes:
        """Return the parent of first blocks.

        Args:
            salt: Requests with different salts share nothing; None is a salt of its own.
        """
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        parts = [*self._identity, str(self.block_size)]
        parts += [] if salt is None else [salt]
        digest.update(f"{len(self._identity)},{len(parts)}".encode())
        for part in parts:
            raw = part.encode("utf-8", "surrogatepass")
            # The length first, so that no two lists of parts give one string of bytes.
            digest.update(len(raw).to_bytes(8, "little"))
            digest.update(raw)
        return digest.digest()

    def keys(self, parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """Return the keys of the full blocks that follow `parent`, in order.

        Args:
            parent: The key of the block before, or a root.
            token_ids: What follows that block, 0 to 2^32 - 1; of the last block what is there is
                left out if it is not full.
        """
        values = array("I", token_ids)
        if byteorder == "big":
            values.byteswap()
        raw, size = values.tobytes(), self.block_size * values.itemsize
        keys, digest = [], hashlib.blake2b
        for start in range(0, len(raw) - size + 1, size):
            parent = digest(parent + raw[start : start + size], digest_size=DIGEST_BYTES).digest()
            keys.append(parent)
        return keys


class KeyChain:
    """The keys of one sequence's full blocks in order; grows with the sequence.

    Args:
        hasher: Makes the keys.
        salt: As for `BlockHasher.root`.
    """

    def __init__(self, hasher: BlockHasher, salt: str | None = None) -> None:
        self._hasher = hasher
        self._root = hasher.root(salt)
        self.keys: list[bytes] = []

    def extend(self, tokens: Callable[[int, int], Sequence[int]], num_tokens: int) -> list[bytes]:
        """Add the keys of blocks that became full; return all keys.

        Args:
            tokens: Returns the tokens at positions start to stop - 1; tokens that were named
                before are not asked for again and must not have changed.
            num_tokens: How many tokens the sequence has.
        """
        size = self._hasher.block_size
        start, stop = len(self.keys) * size, num_tokens - num_tokens % size
        if stop > start:
            parent = self.keys[-1] if self.keys else self._root
            self.keys += self._hasher.keys(parent, tokens(start, stop))
        return self.keys
