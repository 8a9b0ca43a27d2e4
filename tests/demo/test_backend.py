"""What the page can ask, without a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo import backend as module
from cbmir.demo.backend import Backend
from cbmir.demo.examples import find_examples
from cbmir.errors import UserError
from cbmir.runtime import Entry, Finder, Gallery
from cbmir.runtime.gallery.database import live_folder
from cbmir.runtime.gallery.projection import GalleryProjection, principal_plane
from cbmir.runtime.neighbours import NOTHING_ALIKE

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def finder(tiny_model: Path, demo_gallery: Path) -> Iterator[Finder]:
    with Finder.open(tiny_model, demo_gallery, threads=1) as finder:
        yield finder


@pytest.fixture
def backend(finder: Finder, tmp_path: Path) -> Backend:
    assert finder.gallery is not None
    chart = GalleryProjection.make(finder.gallery, principal_plane, "principal components")
    return Backend(finder, find_examples(finder), lambda: tmp_path, chart)


@pytest.fixture
def ask(backend: Backend) -> Ask:
    """Ask as a page does: with numbers that grow, and with what it shows; the answer can travel."""
    numbers = iter(range(1, 1000))
    shown: dict[str, int] = {}

    def ask(action: str, **more: Any) -> dict[str, Any]:
        session = more.pop("session", "me")
        answer = backend.answer(session, {"n": next(numbers), "action": action, "about": shown.get(session, 0), **more})
        json.dumps(answer, allow_nan=False)
        if "picture" in answer:
            shown[session] = answer["about"]
        assert "findings" not in answer.get("html", {}) or answer["about"] == shown[session]
        return answer

    return ask


@pytest.fixture
def study(tmp_path: Path, make_xray: Callable[..., NDArray[np.uint8]]) -> list[str]:
    """Two uploads."""
    paths = []
    for number, name in enumerate(("first", "second")):
        paths.append(str(tmp_path / f"{number}~{name}.png"))
        Image.fromarray(make_xray(60 + number, 128)).save(paths[-1])
    return paths


@pytest.fixture
def image(tmp_path: Path, make_xray: Callable[..., NDArray[np.uint8]]) -> str:
    path = tmp_path / "1~chest.png"
    Image.fromarray(make_xray(50, 256)).save(path)
    return str(path)


def ids(answer: dict[str, Any]) -> list[str]:
    return re.findall(r'<li class="card" data-id="(.*?)"', answer["html"]["wall"])


def test_an_upload_is_analysed(ask: Ask, image: str, finder: Finder) -> None:
    expected = finder.analyze(Path(image).read_bytes(), 20)
    answer = ask("open", paths=[image])
    assert ids(answer) == [one.id for one in expected.neighbours]
    assert answer["picture"]["src"].startswith("data:image/png;base64,")
    assert (answer["picture"]["width"], answer["picture"]["caption"]) == (256, "chest.png")
    labels = ", ".join(expected.query_labels) or "no finding"
    assert answer["html"]["search"].endswith(f"this image: {labels} (predicted)")
    for key, evidence in answer["evidence"].items():
        assert np.sum(evidence["cells"]) == pytest.approx(evidence["sum"], abs=1e-3), key
    assert len(answer["evidence"]) == 3
    assert all(0 <= one <= 1 for one in answer["place"])
    assert not Path(image).exists()


def test_controls_search_anew(ask: Ask, image: str) -> None:
    ask("open", paths=[image])
    answer = ask("search", controls={"k": 3, "having": "Mass"})
    assert ids(answer) == [name for name in ids(ask("search", controls={})) if name in ids(answer)]
    assert len(ids(answer)) == 3
    assert "picture" not in answer  # what has not changed is not sent
    assert "passes these filters" in ask("search", controls={"view": "LATERAL"})["html"]["wall"]
    assert ask("search", controls={"k": 99})["action"] == "error"


def test_an_example_leaves_its_own_patient_out(ask: Ask) -> None:
    answer = ask("example", at=0)
    assert not {"image_0", "image_1"} & set(ids(answer))
    assert "this image: Effusion (known)" in answer["html"]["search"]
    assert "image_1" in ids(ask("search", controls={"exclude": False}))
    assert ask("example", at=99)["action"] == ask("example", at="0")["action"] == "error"


def test_more_like_one_of_the_gallery_shows_its_thumbnail(ask: Ask, finder: Finder) -> None:
    answer = ask("like", id="image_4")
    assert not {"image_4", "image_5"} & set(ids(answer))
    assert "(thumbnail)" in answer["picture"]["caption"]
    assert answer["picture"]["width"] == 64
    assert "from its thumbnail" not in answer["html"]["alerts"]
    for name in ("nobody", "../../etc/passwd"):
        error = ask("like", id=name)
        assert error["action"] == "error"
        assert "no such image" in error["html"]["errors"]
        assert "/" not in re.sub("<.*?>", "", error["html"]["errors"])  # no folder of the server's


@pytest.mark.parametrize("how", ["gone", "changed"])
def test_more_like_one_whose_file_is_another_is_said_to_be_approximate(
    how: str, ask: Ask, backend: Backend, monkeypatch: pytest.MonkeyPatch, demo_gallery: Path
) -> None:
    entry = backend.gallery.entry
    image = "/gone.png" if how == "gone" else str(demo_gallery.parent / "image_7.png")
    monkeypatch.setattr(backend.gallery, "entry", lambda name: replace(entry(name), image=image))
    thumbnail = backend.gallery.thumbnail("image_4")
    assert thumbnail is not None
    expected = backend.finder.analyze(thumbnail, 20).embedding
    assert "analysed from its thumbnail" in ask("like", id="image_4")["html"]["alerts"]
    view = backend.sessions.get("me").view
    assert view is not None
    assert view.analysis is not None
    np.testing.assert_allclose(view.analysis.embedding, expected, atol=0.02)  # what is shown is what was analysed


def test_findings_without_an_image(ask: Ask, finder: Finder) -> None:
    answer = ask("findings", labels=["Effusion", "Mass"])
    assert ids(answer) == [one.id for one in finder.search_by_findings(["Effusion", "Mass"], 20)]
    assert answer["picture"] is None
    assert answer["evidence"] == {}
    assert "Effusion + Mass" in answer["html"]["search"]
    compared = ask("compare", id="image_1")["compare"]
    assert compared["here"] is None
    assert "= Mass" in compared["labels"]
    few = ids(ask("search", controls={"k": 2}))
    assert len(few) == 2
    (gone, *_) = set(ids(answer)) - set(few)
    assert ask("compare", id=gone)["action"] == "error"  # it is on the wall no more
    for labels in ([], ["Knee"], "Mass", None):
        assert ask("findings", labels=labels)["action"] == "error"


def test_side_by_side_has_exact_maps_on_both(ask: Ask, backend: Backend, image: str) -> None:
    name = ids(ask("open", paths=[image]))[0]
    compared = ask("compare", id=name)["compare"]
    view = backend.sessions.get("me").view
    assert view is not None
    cosine = view.neighbours[0].cosine
    assert compared["exact"] is True
    assert compared["here"]["sum"] == pytest.approx(cosine)
    assert compared["there"]["sum"] == pytest.approx(cosine, abs=1e-4)
    assert f"cosine {cosine:.3f}" in compared["title"]
    assert ask("compare", id="nobody")["action"] == "error"


def test_side_by_side_says_where_it_is_approximate(
    ask: Ask, backend: Backend, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ids(ask("open", paths=[image]))[0]
    entry = backend.gallery.entry
    monkeypatch.setattr(backend.gallery, "entry", lambda name: replace(entry(name), image="/gone.png"))
    compared = ask("compare", id=name)["compare"]
    assert compared["exact"] is False
    assert compared["there"]["cells"]


def test_a_report(ask: Ask, image: str) -> None:
    assert ask("report")["action"] == "error"
    ask("open", paths=[image])
    download = ask("report")["download"]
    assert download["html"].startswith("<!doctype html>")
    assert "same patient NOT left out, since it is not known" in download["html"]
    assert "chest.png" not in download["html"]


def test_an_image_that_is_refused_empties_the_page(ask: Ask, tmp_path: Path) -> None:
    ask("example", at=0)
    (tmp_path / "2~notes.txt").write_text("No X-ray at all.")
    answer = ask("open", paths=[str(tmp_path / "2~notes.txt")])
    assert "notes.txt: expected PNG, JPEG, TIFF or DICOM, found text" in answer["html"]["errors"]
    assert str(tmp_path) not in answer["html"]["errors"]
    assert answer["picture"] is None
    assert ids(answer) == []
    assert ask("report")["action"] == "error"


REPLACING: dict[str, dict[str, Any]] = {
    "example": {"at": 5}, "member": {"at": 1}, "search": {}, "like": {"id": "image_4"},
    "findings": {"labels": ["Mass"]},
}  # fmt: skip


@pytest.mark.parametrize("action", REPLACING)
@pytest.mark.parametrize("why", ["the question", "the engine"])
def test_what_fails_changes_nothing_on_the_page(
    action: str, why: str, ask: Ask, backend: Backend, study: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for an image that was to be opened: the old one must not be taken for it."""
    before = ask("open", paths=study)
    if why == "the engine":
        monkeypatch.setattr(backend.finder, "analyze", None)
        monkeypatch.setattr(backend.finder, "search_by_findings", None)
        answer = ask(action, **REPLACING[action])
    else:
        answer = ask(action, **REPLACING[action], controls={"patient": "x" * 201})
    monkeypatch.undo()
    assert answer["action"] == "error"
    assert answer["html"]["errors"]
    after = ask("search")
    if action == "example":
        assert answer["picture"] is None
        assert after["action"] == "idle"
    else:
        assert list(answer["html"]) == ["errors"]
        assert after["about"] == answer["about"] == before["about"]
        assert after["evidence"] == before["evidence"]
        assert after["html"]["findings"] == before["html"]["findings"]


@pytest.mark.parametrize("action", [*REPLACING, "compare", "report"])
def test_a_late_question_changes_nothing(action: str, backend: Backend, study: list[str]) -> None:
    more = REPLACING.get(action, {"id": "image_0"})
    assert backend.answer("me", {"n": 2, "action": "open", "paths": study})["about"] == 2
    newer = backend.answer("me", {"n": 5, "action": "like", "id": "image_2", "about": 2})
    late = backend.answer("me", {"n": 4, "action": action, "about": 2, **more})
    assert late == {"n": 4, "action": "late", "about": 5}
    again = backend.answer("me", {"n": 6, "action": "search", "about": 5})
    assert (again["about"], ids(again)) == (5, ids(newer))


@pytest.mark.parametrize("action", [action for action in REPLACING if action != "search"])
def test_of_two_images_asked_for_the_newer_counts(action: str, backend: Backend, study: list[str]) -> None:
    backend.answer("me", {"n": 1, "action": "open", "paths": study})
    backend.answer("me", {"n": 5, "action": action, "about": 1, **REPLACING[action]})
    assert backend.answer("me", {"n": 4, "action": "like", "id": "image_2", "about": 1})["action"] == "late"


@pytest.mark.parametrize("overtaking", ["search", "compare", "report"])
@pytest.mark.parametrize("action", ["open", *(action for action in REPLACING if action != "search")])
def test_an_image_asked_for_is_shown_though_a_question_about_the_old_one_overtook_it(
    action: str, overtaking: str, backend: Backend, study: list[str], image: str
) -> None:
    first = backend.answer("me", {"n": 1, "action": "open", "paths": study})
    overtook = backend.answer("me", {"n": 5, "action": overtaking, "about": 1, "id": ids(first)[0]})
    assert (overtook["action"], overtook["about"]) == (overtaking, 1)
    answer = backend.answer("me", {"n": 4, "action": action, "about": 1, **REPLACING.get(action, {"paths": [image]})})
    assert (answer["action"], answer["about"]) == (action, 4)
    assert "picture" in answer
    assert backend.answer("me", {"n": 3, "action": "search", "about": 1})["action"] == "late"


def test_the_picture_goes_along_unless_the_page_has_it(backend: Backend) -> None:
    """So a page that lost an answer shows the picture that the next one is about."""
    backend.answer("me", {"n": 1, "action": "example", "at": 0})
    backend.answer("me", {"n": 2, "action": "example", "at": 5, "about": 1})
    answer = backend.answer("me", {"n": 3, "action": "search", "about": 1})
    assert answer["about"] == 2
    assert answer["picture"]["caption"] == "Example image_5"
    assert "picture" not in backend.answer("me", {"n": 4, "action": "search", "about": 2})
    for action in ("compare", "report"):
        asked = {"n": 5, "action": action, "id": ids(answer)[0]}
        assert backend.answer("me", asked | {"about": 1})["action"] == "error"
        assert backend.answer("me", asked | {"about": 2})["action"] == action


@pytest.mark.parametrize("action", ["search", "member", "compare", "report"])
def test_a_page_that_was_forgotten_is_told_so(action: str, ask: Ask, backend: Backend, image: str) -> None:
    ask("open", paths=[image])
    backend.sessions.end("me")
    answer = ask(action, at=0, id="image_0")
    assert answer["action"] == "gone"
    assert "is forgotten" in answer["html"]["errors"]
    assert (answer["picture"], answer["about"], ids(answer)) == (None, 0, [])
    assert ask("search")["action"] == "idle"
    assert ids(ask("example", at=0))


def test_sessions_know_nothing_of_each_other(ask: Ask, image: str) -> None:
    ask("open", paths=[image], session="one")
    assert ask("search", session="two")["action"] == "idle"
    assert ask("report", session="two")["action"] == "error"


@pytest.mark.parametrize("action", ["search", "example"])
def test_an_internal_error_is_answered_and_quotes_nothing(
    action: str,
    ask: Ask,
    backend: Backend,
    image: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ask("open", paths=[image])

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DOE^JOHN")

    monkeypatch.setattr(backend.finder, "analyze", fail)
    answer = ask(action, at=0)
    assert answer["action"] == "error"
    assert "internal error" in answer["html"]["errors"]
    assert ("picture" in answer) == (action == "example")
    assert "RuntimeError" in caplog.text
    assert "DOE" not in caplog.text + str(answer)


def test_an_example_that_has_gone_names_no_folder(ask: Ask, backend: Backend, demo_gallery: Path) -> None:
    backend._examples = [replace(one, path=demo_gallery / "gone.png") for one in backend._examples]
    answer = ask("example", at=0)
    assert "found it gone or changed" in answer["html"]["errors"]
    assert str(demo_gallery) not in answer["html"]["errors"]


def test_a_study_of_several_files(ask: Ask, study: list[str], tmp_path: Path) -> None:
    (tmp_path / "3~notes.txt").write_text("No X-ray at all.")
    answer = ask("open", paths=[*study, str(tmp_path / "3~notes.txt")], more=4)
    assert "2 images in this study" in answer["html"]["members"]
    assert "notes.txt: expected PNG, JPEG, TIFF or DICOM, found text" in answer["html"]["members"]
    assert "4 more files were not sent" in answer["html"]["members"]
    second = ask("member", at=1)
    assert second["picture"]["caption"] == "second.png"
    assert 'data-at="1" aria-pressed="true"' in second["html"]["members"]
    assert "notes.txt" in second["html"]["members"]
    for at in (2, -1, True, None, "1"):
        assert ask("member", at=at)["action"] == "error"
    assert ask("search")["about"] == second["about"]
    assert ask("member", at=0)["picture"]["caption"] == "first.png"


def test_a_dicom_file(ask: Ask, tmp_path: Path) -> None:
    """Its patient is known to the search, and named nowhere."""
    from dicom_files import PATIENT, make_dicom

    (tmp_path / "1~chest.dcm").write_bytes(make_dicom(PatientID="patient_2"))
    answer = ask("open", paths=[str(tmp_path / "1~chest.dcm")])
    assert answer["picture"]["caption"] == "chest.dcm"
    assert set(ids(answer)) == {"image_0", "image_1", "image_2", "image_3", "image_6", "image_7"}
    assert "same patient left out" in answer["html"]["search"]
    assert PATIENT not in str(answer)


def test_the_place_on_the_map_is_the_same_whatever_is_asked_for(ask: Ask, image: str) -> None:
    place = ask("open", paths=[image])["place"]
    for controls in ({"k": 1}, {"having": "Mass"}, {"view": "LATERAL"}):
        assert ask("search", controls=controls)["place"] == place


def test_the_flag_is_above_the_findings_and_there_is_no_place_on_the_map(
    tiny_model: Path, tmp_path: Path, make_xray: Callable[..., NDArray[np.uint8]]
) -> None:
    """A gallery of 120 images that lie together, and one that lies elsewhere."""
    with Finder.open(tiny_model) as plain, Gallery.create(tmp_path / "gallery", plain.card) as gallery:
        far = plain.analyze(make_xray(50)).embedding
        vectors = np.random.default_rng(0).normal(-far, 0.05, (120, len(far))).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        gallery.add([Entry(str(number), "/gone.png", f"p{number}") for number in range(120)], vectors)
        chart = GalleryProjection.make(gallery, principal_plane, "principal components")
        backend = Backend(Finder(plain.engine, gallery), [], lambda: tmp_path, chart)
        Image.fromarray(make_xray(50)).save(tmp_path / "1~far.png")
        answer = backend.answer("me", {"n": 1, "action": "open", "paths": [str(tmp_path / "1~far.png")]})
    assert NOTHING_ALIKE in answer["html"]["alerts"]
    assert "farther from the gallery than 100.0%" in answer["html"]["novelty"]
    assert answer["place"] is None
    assert "no place on the map: nothing in the gallery is like it" in answer["html"]["map-note"]
    assert len(ids(answer)) == 20


def test_a_map_of_a_few_of_a_large_gallery_has_a_place_for_an_image(
    finder: Finder, tmp_path: Path, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those 5 of 600 images are on the map which are the 301st nearest and on."""
    vectors = np.random.default_rng(0).normal(size=(600, finder.card.embedding_dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with Gallery.create(tmp_path / "gallery", finder.card) as gallery:
        gallery.add([Entry(str(number), "/gone.png", f"p{number}") for number in range(600)], vectors)
        nearest = gallery.search(finder.analyze(image).embedding, 600).hits
        on_map = tuple(hit.entry.id for hit in nearest[300:305])
        chart = GalleryProjection(on_map, np.full((5, 2), 0.5, np.float32), "by hand", finder.card.fingerprint)
        backend = Backend(Finder(finder.engine, gallery), [], lambda: tmp_path, chart)
        asked = {"n": 1, "action": "like", "id": nearest[0].entry.id}
        monkeypatch.setattr(
            backend, "_of_gallery", lambda entry: (finder.read(image), np.zeros((8, 8), np.uint8), True)
        )
        answer = backend.answer("me", asked)
        assert answer["place"] == pytest.approx((0.5, 0.5))
        assert "is put amid the 5" in answer["html"]["map-note"]
        monkeypatch.setattr(module, "_MOST_AROUND", 100)
        for other in (asked | {"n": 2}, {"n": 3, "action": "findings", "labels": ["Mass"]}):
            answer = backend.answer("me", other)
            assert answer["place"] is None
            assert "no place on the map: none of its nearest look-alikes is on it" in answer["html"]["map-note"]


def test_what_the_gallery_is_not_sure_of_is_said(ask: Ask, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = backend.gallery.entry
    monkeypatch.setattr(backend.gallery, "entry", lambda name: replace(entry(name), labels={"Effusion": -1}))
    answer = ask("example", at=0)
    assert "this image: Effusion (uncertain) (known)" in answer["html"]["search"]
    assert "= Effusion (uncertain)" in answer["html"]["wall"]


@pytest.mark.parametrize(
    "question",
    [None, [], {}, {"n": 1}, {"n": "1", "action": "search"}, {"n": 1, "action": "_search"}, {"n": 1, "action": []}],
)
def test_what_the_page_cannot_ask(backend: Backend, question: Any) -> None:
    assert backend.answer("me", question)["action"] == "error"


def test_paths_that_are_no_uploads(ask: Ask, demo_gallery: Path) -> None:
    for paths in (["/etc/passwd"], [str(live_folder(demo_gallery) / "gallery.sqlite")], [3], "x", None):
        assert ask("open", paths=paths).get("picture") is None
    assert (live_folder(demo_gallery) / "gallery.sqlite").exists()


def test_a_finder_without_gallery_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with Finder.open(tiny_model) as finder, pytest.raises(UserError, match="gallery"):
        Backend(finder, [], lambda: tmp_path)
