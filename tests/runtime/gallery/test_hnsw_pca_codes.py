"""int8 codes: short if vectors vary in few directions, otherwise of full length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.runtime import Entry, Gallery
from cbmir.runtime.gallery.hnsw import HnswIndex, PcaInt8Codec

DIM, RANK, COUNT = 256, 20, 1500
Vectors = NDArray[np.float32]


def unit(values: NDArray[np.float64]) -> Vectors:
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


def alike(count: int, seed: int = 0, plane: int = 0) -> Vectors:
    """Unit vectors around a mean that vary in `RANK` directions, with a little noise; `plane` sets the directions."""
    directions = np.random.default_rng((9, plane)).normal(size=(RANK, DIM)) / np.sqrt(DIM)
    mean = np.abs(np.random.default_rng(8).normal(size=DIM)) / np.sqrt(DIM)
    rng = np.random.default_rng(seed)
    return unit(mean + 0.3 * rng.normal(size=(count, RANK)) @ directions + 0.001 * rng.normal(size=(count, DIM)))


def noise(count: int, seed: int = 0) -> Vectors:
    return unit(np.random.default_rng(seed).normal(size=(count, DIM)))


def of(vectors: Vectors) -> PcaInt8Codec:
    return PcaInt8Codec.fitted(vectors, 400)


def test_codes_are_of_the_principal_components() -> None:
    """Distances of codes equal those of the vectors' projections by an SVD, and nearly equal those of the vectors."""
    vectors = alike(COUNT)
    codec = of(vectors)
    codes = codec.codes(vectors)
    assert codes.shape == (COUNT, codec.dim) == (COUNT, 64) and codes.dtype == np.int8
    assert np.abs(codes.astype(int)).max() == 127

    exact = vectors.astype(np.float64)
    centred = exact - exact.mean(axis=0)
    components = centred @ np.linalg.svd(centred, full_matrices=False)[2][:64].T
    expected = np.linalg.norm(components[:1] - components[1:], axis=1)
    found = np.linalg.norm(codes[:1].astype(float) - codes[1:], axis=1) / codec.scale
    np.testing.assert_allclose(found, expected, atol=np.sqrt(64) / codec.scale)
    np.testing.assert_allclose(expected, np.linalg.norm(exact[:1] - exact[1:], axis=1), rtol=0.01)


def test_by_hand() -> None:
    """Vectors vary in two of 128 directions, so codes have 64 components; 1 and -1 become the ends of the range."""
    vectors = np.zeros((4, 128), np.float32)
    vectors[:, 5] = (1, -1, 0, 0)
    vectors[:, 9] = (0, 0, 0.5, -0.5)
    codec = PcaInt8Codec.fitted(vectors, 3)
    codes = codec.codes(vectors).astype(int)
    assert codec.dim == 64 and codec.scale == pytest.approx(127)
    assert np.abs(codes[:2, 0]).tolist() == [127, 127] and codes[0, 0] == -codes[1, 0]
    assert np.abs(codes[2:, 1]).tolist() == [64, 64] and not codes[:, 2:].any()
    assert np.abs(codec.codes(3 * vectors)).max() == 127  # a query beyond the range is clipped


def test_vectors_that_vary_in_every_direction_keep_all_directions() -> None:
    vectors = noise(COUNT)
    codec = of(vectors)
    assert codec.directions is None and codec.dim == DIM
    centred = vectors - vectors.mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(codec.codes(vectors) / codec.scale, centred, atol=0.5 / codec.scale * 1.001)
    assert codec.scale == pytest.approx(127 / np.abs(centred).max(), rel=1e-5)


@pytest.mark.parametrize(("make", "candidates"), [(alike, 44), (noise, 200)])
def test_the_nearest_are_among_the_candidates(make: Callable[..., Vectors], candidates: int) -> None:
    vectors, queries = make(COUNT), make(50, seed=1)
    index = HnswIndex.build("int8", vectors)
    found = index.search(queries, candidates)
    nearest = [set(row.tolist()) for row in np.argsort(-(queries @ vectors.T), axis=1)[:, :10]]
    assert sum(len(own & set(rows.tolist())) for own, rows in zip(nearest, found, strict=True)) >= 0.95 * 500


def test_a_single_vector_is_coded_like_a_batch() -> None:
    vectors = alike(300)
    codec = of(vectors)
    many = codec.codes(vectors[:20]).astype(int)
    for row, expected in zip(vectors[:20], many, strict=True):
        assert np.abs(codec.codes(row[None])[0] - expected).max() <= 1  # a sum in another order may round differently


def test_vectors_of_another_kind_are_detected() -> None:
    codec = of(alike(COUNT))
    assert codec.fits([alike(500, seed=1)]) and codec.fits([])
    assert not codec.fits([alike(500, plane=1)])
    assert not codec.fits([alike(500, seed=1), alike(500, plane=1)])
    assert not codec.fits([3 * alike(500, seed=1)])  # much is clipped
    assert codec.fits([1.01 * alike(500, seed=1)])  # hardly anything is clipped
    assert codec.fits([alike(5000, seed=1), alike(20, plane=1)])  # a few may differ
    assert not codec.fits([alike(5000, seed=1), alike(60, plane=1)])  # although little of the total variance is lost


def test_the_sample_covers_alternating_kinds() -> None:
    """A sample with a fixed step would only see one of the kinds."""
    vectors = np.empty((40_000, DIM), np.float32)
    vectors[::2], vectors[1::2] = alike(20_000), alike(20_000, seed=1, plane=1)
    assert of(vectors).fits([alike(500, seed=2), alike(500, seed=2, plane=1)])


def test_kinds_outside_the_sample_keep_all_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbmir.runtime.gallery.hnsw._SAMPLE", 3)
    codec = of(np.concatenate([alike(100), noise(100)]))
    assert codec.directions is None and codec.fits([alike(100), noise(100)])


def test_an_index_is_rebuilt_for_vectors_of_another_kind() -> None:
    index = HnswIndex.build("int8", alike(300))
    assert index.extended(np.concatenate([alike(300), alike(300, plane=1)])) is None


def test_round_trip_of_a_codec(tmp_path: Path) -> None:
    for vectors in (alike(200), noise(200)):
        codec = of(vectors)
        codec.save(tmp_path / "codec")
        again = PcaInt8Codec.load(tmp_path / "codec")
        np.testing.assert_array_equal(again.codes(vectors), codec.codes(vectors))
        assert (again.dim, again.scale) == (codec.dim, codec.scale)
    for damage in (b"", (tmp_path / "codec").read_bytes()[:500]):
        (tmp_path / "damaged").write_bytes(damage)
        with pytest.raises((ValueError, EOFError)):
            PcaInt8Codec.load(tmp_path / "damaged")


def test_a_gallery_of_short_codes(tmp_path: Path, tiny_card: ModelCard) -> None:
    """It is written, mapped and extended, and removed vectors disappear from every file."""
    vectors, queries = alike(900), alike(20, seed=3)
    card = replace(tiny_card, embedding_dim=DIM)
    entries = [Entry(f"e{n:03}", f"/{n}.png", f"p{n}", sha256=f"{n:064x}") for n in range(900)]
    with Gallery.create(tmp_path / "g", card, index="int8") as gallery:
        gallery.add(entries[:600], vectors[:600])
        gallery.write_index()
    with Gallery.open(tmp_path / "g") as gallery:
        gallery.add(entries[600:], vectors[600:])
        gallery.write_index()
        (place,) = (tmp_path / "g").glob("derived-*")
        codec = PcaInt8Codec.load(place / "codec.npz")
        assert codec.dim == 64
        nearest = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
        found = [gallery.search(query, 10) for query in queries]
        assert {one.method for one in found} == {"hnsw int8"}
        kept = [len({f"e{n:03}" for n in own} & {hit.entry.id for hit in one.hits})
                for own, one in zip(nearest.tolist(), found, strict=True)]  # fmt: skip
        assert sum(kept) >= 190
        code = codec.codes(vectors[77][None]).tobytes()
        assert code in (place / "index.usearch").read_bytes()
        gallery.remove(ids=["e077"])
        left = b"".join(file.read_bytes() for file in (tmp_path / "g").rglob("*") if file.is_file())
        (place,) = (tmp_path / "g").glob("derived-*")
        assert (
            code not in left and PcaInt8Codec.load(place / "codec.npz").codes(vectors[77][None]).tobytes() not in left
        )


@pytest.mark.parametrize("vectors", [noise(0), noise(1), noise(1).repeat(50, axis=0)], ids=["none", "one", "the same"])
def test_few_vectors(vectors: Vectors) -> None:
    codec = of(vectors)
    assert not codec.codes(vectors).any() and not codec.fits([noise(50, seed=2)])
