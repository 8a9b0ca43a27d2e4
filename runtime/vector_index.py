"""The approximate index of a large gallery: usearch HNSW in two files, derived from the embeddings and replaceable.

`index.usearch` is written under a temporary name, synced, then renamed; `index.json` holds its SHA-256. The digest is
verified before usearch sees the bytes: a flipped bit would crash the process, not raise.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.files import replacing

INDEX_FILE, ABOUT_FILE = "index.usearch", "index.json"


class VectorIndex:
    """Approximate nearest neighbours by cosine, in bfloat16. Keys are uint64. Searching is safe from many threads."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self._lock = threading.Lock()  # usearch hands out its thread contexts by number: two callers would share one

    def __len__(self) -> int:
        return len(self._index)

    @classmethod
    def build(cls, keys: NDArray[np.uint64], vectors: NDArray[np.float32]) -> VectorIndex:
        """Index unit vectors float32 [N, D] under keys uint64 [N]; with one thread, so that builds repeat exactly."""
        from usearch.index import Index

        index = Index(ndim=vectors.shape[1], metric="cos", dtype="bf16")
        if len(keys):
            index.add(keys, vectors, threads=1)
        return cls(index)

    @classmethod
    def load(cls, folder: Path, stamp: dict[str, Any]) -> VectorIndex | str:
        """The index saved under this stamp, which names a gallery's state; or the reason why there is none to trust."""
        from usearch.index import Index

        try:
            about = json.loads((folder / ABOUT_FILE).read_text("utf-8"))
            data = (folder / INDEX_FILE).read_bytes()
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError) as error:
            return f"cannot be read ({error})"
        if about != stamp | {"sha256": hashlib.sha256(data).hexdigest()}:
            return "is stale or damaged"
        try:
            return cls(Index.restore(data))
        except (ValueError, RuntimeError) as error:  # written by a version of usearch that this one cannot read
            return f"cannot be loaded ({error})"

    def save(self, folder: Path, stamp: dict[str, Any]) -> None:
        """Write the two files; a reader sees the old pair, the new pair, or a mismatch that `load` refuses."""
        data = bytes(self._index.save())
        about = stamp | {"sha256": hashlib.sha256(data).hexdigest()}
        _replace(folder / INDEX_FILE, data)
        _replace(folder / ABOUT_FILE, json.dumps(about).encode())

    def search(self, query: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        """Keys of about the `count` nearest, fewer where the index is smaller."""
        with self._lock:
            matches = self._index.search(query, min(count, len(self)), threads=1)
        keys: NDArray[np.int64] = np.asarray(matches.keys, dtype=np.int64)
        return keys


def _replace(path: Path, data: bytes) -> None:
    with replacing(path) as temporary, temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
