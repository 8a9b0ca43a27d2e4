"""Codes of cells: their values, the best-matching window against brute force, and galleries with cells."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.errors import GalleryError, UserError
from cbmir.manifest import Manifest, Row, read_manifest
from cbmir.runtime import Entry, Finder, Gallery, add_to_gallery, build_gallery, open_engine, preprocess, read_image
from cbmir.runtime.gallery.build import merge_galleries
from cbmir.runtime.gallery.cells import CellCodec
from cbmir.runtime.gallery.database import DATABASE, live_folder
from cbmir.runtime.gallery.entry import SearchResult
from cbmir.runtime.gallery.maintenance import export, export_deidentified, verify

Maps = NDArray[np.float32]


@pytest.fixture(scope="module")
def maps() -> Maps:
    """Cells that vary in 6 of 40 directions."""
    rng = np.random.default_rng(0)
    directions, mean = rng.normal(size=(6, 40)), rng.normal(size=40)
    cells = np.einsum("nkhw,kd->ndhw", rng.normal(size=(50, 6, 5, 4)), directions) + mean[:, None, None]
    return cells.astype(np.float32)


def codes_of(gallery: Gallery, ids: Sequence[str]) -> NDArray[np.int8]:
    with gallery.reading() as reader:
        return reader.cells(map(reader.number, ids))


def windows(cells: NDArray[np.float64], rows: int, columns: int) -> NDArray[np.float64]:
    """The means [h', w', D] of all windows of cells [h, w, D], computed one by one."""
    height, width, _ = cells.shape
    return np.array([
        [cells[y : y + rows, x : x + columns].mean(axis=(0, 1)) for x in range(width - columns + 1)]
        for y in range(height - rows + 1)
    ])  # fmt: skip


def test_codes_preserve_the_differences_between_cells(maps: Maps) -> None:
    codec = CellCodec.fitted(maps)
    codes = codec.codes(maps)
    assert (codes.shape, codes.dtype, codec.shape) == ((50, 5, 4, 32), np.int8, (5, 4, 32))
    embeddings = maps.mean(axis=(2, 3))
    norms = np.linalg.norm(embeddings, axis=1)
    decoded = codec.pca.decoded(codes.reshape(-1, 32)).reshape(50, 5, 4, 40)
    cells = np.moveaxis(maps, 1, -1) / norms[:, None, None, None]
    assert np.square(decoded - cells).sum() < 0.01 * np.square(cells - cells.mean(axis=(0, 1, 2))).sum()
    np.testing.assert_allclose(decoded.mean(axis=(1, 2)), embeddings / norms[:, None], atol=0.05)


@pytest.mark.parametrize("window", [(1, 1), (2, 3), (5, 4)])
def test_places_agree_with_brute_force(maps: Maps, window: tuple[int, int]) -> None:
    codec = CellCodec.fitted(maps)
    codes = codec.codes(maps)
    query = maps[7, :, 1:3, 1:4].mean(axis=(1, 2))
    query /= np.linalg.norm(query)
    cosines, corners = codec.places(query, codes, window)
    for codes_of_image, cosine, corner in zip(codes, cosines, corners, strict=True):
        decoded = codec.pca.decoded(codes_of_image.reshape(-1, 32)).astype(np.float64).reshape(5, 4, 40)
        means = windows(decoded, *window)
        every = means @ query / np.linalg.norm(means, axis=-1)
        assert cosine == pytest.approx(every.max(), abs=1e-5)
        assert every[tuple(corner)] == pytest.approx(every.max(), abs=1e-5)


def test_a_codec_as_text_and_codes_of_another_codec(maps: Maps) -> None:
    codec, other = CellCodec.fitted(maps), CellCodec.fitted(maps[:25])
    again = CellCodec.loads(codec.dumps())
    np.testing.assert_array_equal(again.codes(maps), codec.codes(maps))
    assert codec.recoded(codes := codec.codes(maps), again) is codes
    recoded = codec.recoded(other.codes(maps), other).astype(int)
    assert np.abs(recoded - codec.codes(maps)).mean() < 3  # of 127
    for text in ("not json", '{"grid": [5, 4], "pca": "AAAA"}'):
        with pytest.raises(ValueError, match=r"Expecting value|a description of the codes|pickled"):
            CellCodec.loads(text)
    with pytest.raises(GalleryError, match=r"float32 \[N, 40, 5, 4\], found \[50, 40, 5, 3\]"):
        codec.codes(maps[..., :3])


@pytest.fixture(scope="module")
def built(tiny_model: Path, tiny_manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cells") / "gallery"
    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, read_manifest(tiny_manifest), place, workers=0, cells=True)
    return place


def test_a_gallery_keeps_the_cells_of_its_images(built: Path, tiny_model: Path) -> None:
    with Gallery.open(built, read_only=True) as gallery, open_engine(tiny_model, threads=1) as engine:
        codec, ids = gallery.cell_codec, gallery.ids()
        assert codec is not None
        assert gallery.info()["cells"] == [8, 8, 8]  # the tiny model has 8 dimensions
        crops = np.stack([preprocess(read_image(gallery.entry(id).image), engine.card.preprocess) for id in ids])
        outputs = engine.run(crops[:, None], feature_map=True)
        assert outputs.feature_map is not None
        wanted = codec.codes(outputs.feature_map).astype(int)
        assert np.abs(codes_of(gallery, ids).astype(int) - wanted).max() <= 1
        np.testing.assert_array_equal(codes_of(gallery, ids[3:0:-1]), codes_of(gallery, ids)[3:0:-1])
        with pytest.raises(GalleryError, match="found 'nobody'"):
            codes_of(gallery, ["nobody"])
    assert verify(built) == []


def test_a_search_by_region_is_ranked_by_the_places(
    built: Path, tiny_gallery: Path, tiny_model: Path, make_xray: Callable[..., NDArray[np.uint8]]
) -> None:
    region = (0.1, 0.5, 0.5, 0.9)
    with Finder.open(tiny_model, built, threads=1) as finder, Finder.open(tiny_model, tiny_gallery, threads=1) as plain:
        analysis = finder.analyze(make_xray(99), 6, region=region)
        gallery, spec = finder.gallery, finder.card.preprocess
        assert isinstance(gallery, Gallery) and gallery.cell_codec is not None
        codes = codes_of(gallery, gallery.ids())
        every = gallery.cell_codec.pca.decoded(codes.reshape(-1, 8)).astype(np.float64).reshape(-1, 8, 8, 8)
        decoded = dict(zip(gallery.ids(), every, strict=True))
        best, corners = {}, {}
        for id, cells in decoded.items():
            means = windows(cells, 4, 4)  # the region has 3.8 cells of the crop, which is 84% of a side
            every = means @ analysis.query / np.linalg.norm(means, axis=-1)
            best[id], corners[id] = every.max(), np.unravel_index(every.argmax(), every.shape)
        assert [one.id for one in analysis.neighbours] == sorted(best, key=lambda id: -best[id])[:6]
        start = (spec.resize - spec.crop) // 2 / spec.resize
        for one in analysis.neighbours:
            assert one.cosine == pytest.approx(best[one.id], abs=1e-5)
            assert one.distance == pytest.approx(np.sqrt(2 - 2 * one.cosine), abs=1e-6)
            y, x = (start + spec.crop / spec.resize * np.array(corners[one.id]) / 8).tolist()
            side = spec.crop / spec.resize / 2
            assert one.place == pytest.approx((x, y, x + side, y + side))
        refined = finder.refine(analysis, findings={"Mass": 0.5}, k=3)
        assert all(one.place for one in refined.neighbours)
        assert analysis.to_json()["neighbours"][0]["place"] == list(analysis.neighbours[0].place or ())
        # without a region or without cells, nothing is reranked
        for other in (finder.analyze(make_xray(99), 6), plain.analyze(make_xray(99), 6, region=region)):
            assert [one.place for one in other.neighbours] == [None] * 6
        assert finder.analyze(make_xray(99), 0, region=region).neighbours == ()
        whole = finder.analyze(make_xray(99), 6).novelty
        assert analysis.novelty == whole


def test_the_place_of_a_bright_patch(tiny_model: Path, tmp_path: Path) -> None:
    """A patch on the right of the query is at the lower left of the gallery's image."""

    def picture(left: int, top: int) -> NDArray[np.uint8]:
        pixels = np.random.default_rng(1).integers(90, 110, (256, 256)).astype(np.uint8)
        pixels[top : top + 52, left : left + 52] = np.linspace(170, 250, 52).astype(np.uint8)
        return pixels

    rng = np.random.default_rng(2)
    rows = []
    for number in range(12):
        pixels = picture(48, 152) if number == 0 else rng.integers(60, 140, (256, 256)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        rows.append(Row(image=tmp_path / f"{number}.png", patient_id=f"p{number}", labels=(0, 0, 0), split="train"))
    with open_engine(tiny_model, threads=1) as engine:
        manifest = Manifest(engine.card.labels, tuple(rows))
        build_gallery(engine, manifest, tmp_path / "gallery", workers=0, cells=True)
    with Finder.open(tiny_model, tmp_path / "gallery", threads=1) as finder:
        (first,) = finder.analyze(picture(152, 100), 1, region=(0.594, 0.391, 0.797, 0.594)).neighbours
    assert first.id == "0"
    assert first.place is not None
    x0, y0, x1, y1 = first.place
    assert 48 / 256 - 0.11 < x0 < (48 + 26) / 256 < x1 < 0.55
    assert 152 / 256 - 0.11 < y0 < (152 + 26) / 256 < y1 < 0.95


def test_an_image_removed_during_a_search(
    built: Path, tiny_model: Path, tmp_path: Path, make_xray: Callable[..., NDArray[np.uint8]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Hits and the codes that rank them come from one snapshot."""
    shutil.copytree(built, tmp_path / "copy")
    with Finder.open(tiny_model, tmp_path / "copy", threads=1) as finder, Gallery.open(tmp_path / "copy") as writer:
        assert finder.gallery is not None
        search = finder.gallery.search

        def then_remove(*given: Any, **options: Any) -> SearchResult:
            found = search(*given, **options)
            writer.remove(ids=[hit.entry.id for hit in found.hits[:3]])
            return found

        monkeypatch.setattr(finder.gallery, "search", then_remove)
        assert len(finder.analyze(make_xray(99), 6, region=(0.1, 0.5, 0.5, 0.9)).neighbours) == 6


def test_add_update_merge_export_and_shards(
    built: Path, tiny_gallery: Path, tiny_model: Path, tiny_manifest: Path, tmp_path: Path
) -> None:
    manifest = read_manifest(tiny_manifest)
    with Gallery.open(built) as gallery:
        ids, codes = gallery.ids(), codes_of(gallery, gallery.ids())
        export(gallery, tmp_path / "copy")
        assert export_deidentified(gallery, tmp_path / "nameless") == len(ids)
    with Gallery.open(tmp_path / "nameless") as nameless:
        assert nameless.cell_codec is None
    with open_engine(tiny_model, threads=1) as engine:
        added = add_to_gallery(engine, manifest, tmp_path / "copy", splits=("test",), workers=0).images
        for number in (1, 2):
            build_gallery(engine, manifest, tmp_path / f"{number}", shard=(number, 2), workers=0, cells=True)
        with pytest.raises(UserError, match="keeps cells, found a Milvus"):
            build_gallery(engine, manifest, "milvus:./none.db", cells=True)
    assert added > 0
    with Gallery.open(tmp_path / "copy") as copy:
        assert copy.update([copy.entry(ids[0])]) == 0
        np.testing.assert_array_equal(codes_of(copy, ids), codes)
        assert len(codes_of(copy, copy.ids())) == len(ids) + added
        copy.remove(ids=ids[:2])
        assert len(codes_of(copy, copy.ids())) == len(ids) + added - 2
    merge_galleries(tmp_path / "merged", [tmp_path / "1", tmp_path / "2"])
    with Gallery.open(tmp_path / "merged") as merged:
        assert merged.ids() == ids
        assert np.abs(codes_of(merged, ids).astype(int) - codes).max() <= 2
        with pytest.raises(GalleryError, match=r"keeps cells, and .* none: build that one again with --cells"):
            merge_galleries(tmp_path / "merged", [tiny_gallery])
    merge_galleries(tmp_path / "without", [tiny_gallery])
    merge_galleries(tmp_path / "without", [built])  # a gallery without cells leaves them out
    with Gallery.open(tmp_path / "without") as without:
        assert without.cell_codec is None


def test_invalid_cells_and_damaged_codes(built: Path, tiny_gallery: Path, tmp_path: Path) -> None:
    entry, vector = Entry("new", "/new.png", "p"), np.eye(1, 8, dtype=np.float32)
    with Gallery.open(built) as gallery:
        export(gallery, tmp_path / "copy")
    with (
        Gallery.open(tmp_path / "copy") as copy,
        pytest.raises(GalleryError, match=r"cells of 1 images, found .* none"),
    ):
        copy.add([entry], vector)
    with Gallery.open(tiny_gallery) as plain:
        with pytest.raises(GalleryError, match="expected no cells for a gallery that keeps none"):
            plain.add([entry], vector, cells=np.ones((1, 8, 8, 8), np.float32))
        with pytest.raises(GalleryError, match="expected a gallery that keeps cells"):
            codes_of(plain, plain.ids()[:1])
    file = live_folder(tmp_path / "copy") / DATABASE
    with sqlite3.connect(file) as database:
        database.execute("UPDATE cells SET codes = zeroblob(length(codes)) WHERE number = 3")
    database.close()
    with (
        Gallery.open(tmp_path / "copy") as copy,
        pytest.raises(GalleryError, match=r"the cells of .* are damaged"),
    ):
        codes_of(copy, copy.ids())
    (problem,) = verify(tmp_path / "copy")
    assert problem.what == "the cells are missing or damaged"
    assert len(problem.affected) == 1
