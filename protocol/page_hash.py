"""Names for the content of KV pages: chained 128-bit hashes of the tokens that led to it.

This file owns the one rule by which two parts of the system agree that two pages hold the same
KV: the hash of a page covers its own tokens, all tokens before it (through the hash of the page
before), and a root that stands for the model, the dtype, the page size and the tenant. It must
never hash a partly filled page, and it knows nothing of where pages lie or who uses them.

Life of a chain: a root -> the first page's hash -> the next one's, over full pages only, as far
as the tokens go; a sequence that grows goes on from its last hash.

The idea is vLLM's automatic prefix caching (hash chains over blocks). blake2b is the standard
library's and is fast for short input; 128 bits make a chance collision impossible in practice.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import pack
from sys import byteorder

HASH_BYTES = 16


def root(fingerprint: str, dtype: str, page_size: int, salt: str = "") -> bytes:
    """Where every chain of one model, one KV dtype, one page size and one tenant starts."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"tandem kv root")
    for field in (fingerprint, dtype, str(page_size)):
        text = field.encode()
        digest.update(pack("<I", len(text)) + text)
    return salted(digest.digest(), salt)


def salted(model_root: bytes, salt: str) -> bytes:
    """The root of one tenant's chains; without a salt the model's own."""
    if not salt:
        return model_root
    return blake2b(
        model_root + salt.encode(), digest_size=HASH_BYTES, person=b"tandem salt"
    ).digest()


def page_hashes(tokens: Sequence[int], page_size: int, chain_root: bytes) -> list[bytes]:
    """The hashes of all full pages of ``tokens``, in order."""
    chain = PageChain(page_size, chain_root)
    return list(chain.reach(tokens, len(tokens) // page_size))


def matchable_pages(n_tokens: int, page_size: int) -> int:
    """Leading pages of a prompt that may be found instead of computed.

    Never the page of the last token: its logits give the first token, so it must be computed.
    """
    return max(0, n_tokens - 1) // page_size


class PageChain:
    """The hashes of one growing sequence, each computed once.

    The tokens are handed in anew with every call; those of pages that have a hash already must
    not have changed.
    """

    def __init__(self, page_size: int, chain_root: bytes) -> None:
        self._page_size = page_size
        self._root = chain_root
        self._hashes: list[bytes] = []

    def reach(self, tokens: Sequence[int], n_pages: int, first: int = 0) -> Sequence[bytes]:
        """The hashes of the pages from ``first`` up to ``n_pages``.

        ``ValueError`` if ``tokens`` do not fill those that are computed now.
        """
        self._grow(tokens, n_pages)
        return self._hashes[first:n_pages]

    def walk(self, tokens: Sequence[int], n_pages: int) -> Iterator[bytes]:
        """The hashes of the first ``n_pages`` one by one. Not many more are computed than are
        asked for, so that a long prompt of which nothing is known costs little."""
        for page in range(n_pages):
            if page == len(self._hashes):
                self._grow(tokens, min(n_pages, 2 * page + 1))
            yield self._hashes[page]

    def fork(self) -> PageChain:
        """A chain of its own that begins with the same hashes: for a further answer."""
        chain = PageChain(self._page_size, self._root)
        chain._hashes = list(self._hashes)
        return chain

    def _grow(self, tokens: Sequence[int], n_pages: int) -> None:
        hashes, size = self._hashes, self._page_size
        if len(hashes) >= n_pages:
            return
        if n_pages * size > len(tokens):
            raise ValueError(f"{len(tokens)} tokens do not fill {n_pages} pages of {size}")
        content = array("I", tokens[len(hashes) * size : n_pages * size])
        if byteorder == "big":
            content.byteswap()
        data, width = content.tobytes(), size * content.itemsize
        last = hashes[-1] if hashes else self._root
        for start in range(0, len(data), width):
            page = last + data[start : start + width]
            last = blake2b(page, digest_size=HASH_BYTES).digest()
            hashes.append(last)
