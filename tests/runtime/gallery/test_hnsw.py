"""The approximate index: its candidates against brute force; saved, mapped and extended."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.runtime.gallery.hnsw import Codes, HnswIndex

DIM, COUNT = 32, 1500
BOTH: tuple[Codes, ...] = ("bf16", "int8")


def unit(count: int, seed: int = 0) -> NDArray[np.float32]:
    values = np.abs(np.random.default_rng(seed).normal(size=(count, DIM)))  # non-negative, as embeddings are
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


def nearest(vectors: NDArray[np.float32], queries: NDArray[np.float32], k: int) -> list[set[int]]:
    return [set(row.tolist()) for row in np.argsort(-(queries @ vectors.T), axis=1)[:, :k]]


@pytest.mark.slow
@pytest.mark.parametrize("codes", BOTH)
def test_every_vector_is_found_after_parallel_insertion(codes: Codes) -> None:
    """Otherwise an image is never found again; this happened to at least one in nearly every build of this size."""
    vectors = unit(COUNT)
    vectors = vectors[np.argsort(-np.abs(vectors).max(axis=1))]  # largest value first, so that later ones fit its codes
    for _ in range(4):
        built = HnswIndex.build(codes, vectors, threads=2)
        grown = HnswIndex.build(codes, vectors[:900], threads=2).extended(vectors, threads=2)
        assert grown is not None
        for index in (built, grown):
            found = index.search(vectors, 256)
            assert [row for row, near in enumerate(found) if row not in near] == []
            assert sorted(np.asarray(index._index.keys).tolist()) == list(range(COUNT))  # each row once


@pytest.mark.parametrize("codes", BOTH)
def test_the_nearest_are_among_the_candidates(codes: Codes) -> None:
    vectors, queries = unit(COUNT), unit(50, seed=1)
    index = HnswIndex.build(codes, vectors)
    found = index.search(queries, 64)
    kept = [len(own & set(rows.tolist())) for own, rows in zip(nearest(vectors, queries, 10), found, strict=True)]
    assert sum(kept) >= 0.98 * 500
    assert all(len(set(rows.tolist())) == 64 for rows in found)


@pytest.mark.parametrize("codes", BOTH)
def test_a_saved_index_is_mapped(codes: Codes, tmp_path: Path) -> None:
    vectors, queries = unit(COUNT), unit(20, seed=1)
    index = HnswIndex.build(codes, vectors, threads=1)
    index.save(tmp_path / "index")
    viewed = HnswIndex.view(tmp_path / "index", index.codec)
    assert len(viewed) == COUNT
    for mine, theirs in zip(index.search(queries, 30), viewed.search(queries, 30), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("codes", BOTH)
def test_a_mapped_index_is_extended_in_memory(codes: Codes, tmp_path: Path) -> None:
    vectors = unit(COUNT)
    index = HnswIndex.build(codes, vectors[:1000])
    index.save(tmp_path / "index")
    before = hashlib.sha256((tmp_path / "index").read_bytes()).digest()
    grown = HnswIndex.view(tmp_path / "index", index.codec).extended(vectors)
    if grown is None:  # the largest value came later
        assert codes == "int8" and np.abs(vectors[1000:]).max() > np.abs(vectors[:1000]).max()
        vectors[1000:] = vectors[200:700]
        grown = HnswIndex.view(tmp_path / "index", index.codec).extended(vectors)
    assert grown is not None and len(grown) == COUNT
    assert hashlib.sha256((tmp_path / "index").read_bytes()).digest() == before
    queries = unit(50, seed=1)
    found = grown.search(queries, 64)
    kept = [len(own & set(rows.tolist())) for own, rows in zip(nearest(vectors, queries, 10), found, strict=True)]
    assert sum(kept) >= 0.97 * 500


def test_unreachable_vectors_are_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    index = HnswIndex.build("int8", unit(100))
    monkeypatch.setattr(HnswIndex, "_lost", lambda self, vectors: np.arange(min(2, len(vectors))))
    with caplog.at_level("WARNING"):
        assert index.extended(unit(100)) is not None and not caplog.text
        HnswIndex.build("int8", unit(100))
    assert "the index cannot reach 2 of 100 vectors" in caplog.text


def test_an_int8_index_is_not_extended_beyond_its_range() -> None:
    vectors = unit(200)
    index = HnswIndex.build("int8", vectors[:100])
    vectors[150] = np.eye(DIM)[0]
    assert index.extended(vectors) is None
    assert HnswIndex.build("bf16", vectors[:100]).extended(vectors) is not None


@pytest.mark.parametrize("codes", BOTH)
def test_fewer_vectors_than_requested(codes: Codes, tmp_path: Path) -> None:
    queries = unit(3, seed=1)
    empty = HnswIndex.build(codes, unit(0))
    assert [rows.tolist() for rows in empty.search(queries, 5)] == [[], [], []]
    few = HnswIndex.build(codes, unit(4))
    assert [sorted(rows.tolist()) for rows in few.search(queries, 50)] == [[0, 1, 2, 3]] * 3
    assert sorted(few.search(queries[:1], 50)[0].tolist()) == [0, 1, 2, 3]
    assert few.search(queries[:0], 5) == []
    empty.save(tmp_path / "empty")
    assert len(HnswIndex.view(tmp_path / "empty", None)) == 0


def test_many_threads_search_one_index() -> None:
    vectors, queries = unit(COUNT), unit(64, seed=1)
    index = HnswIndex.build("int8", vectors)
    expected = [index.search(query[None], 20)[0].tolist() for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: index.search(query[None], 20)[0].tolist(), queries)) == expected
    assert [rows.tolist() for rows in index.search(queries, 20)] == expected


def test_invalid_indexes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "garbage").write_bytes(b"usearch of the future" * 100)
    with pytest.raises(GalleryError, match="this version of usearch"):
        HnswIndex.view(tmp_path / "garbage", None)


def test_a_partly_written_index_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = HnswIndex.build("bf16", unit(100))
    inner = index._index

    class Full:
        serialized_length = inner.serialized_length

        def save(self, path: Path) -> Any:
            inner.save(path)
            path.write_bytes(path.read_bytes()[:1000])

    monkeypatch.setattr(index, "_index", Full())
    with pytest.raises(OSError, match="found 1000: the disk may be full"):
        index.save(tmp_path / "index")
    monkeypatch.undo()
    with pytest.raises(OSError, match="cannot write the index"):
        index.save(tmp_path / "missing" / "index")


def test_an_engine_may_be_opened_after_a_search() -> None:
    """usearch imported before ONNX Runtime crashes the process."""
    pytest.importorskip("onnxruntime")
    code = (
        "import numpy as np; from cbmir.runtime.gallery.hnsw import HnswIndex\n"
        "HnswIndex.build('int8', np.eye(8, dtype=np.float32)).search(np.eye(8, dtype=np.float32), 3)\n"
        "import onnxruntime"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
