"""Case ids of a gallery that changes and does not say when."""

from __future__ import annotations

from typing import Any

import pytest

from cbmir.runtime.dicom_output.identifiers import case_id
from cbmir.runtime.serving import service
from cbmir.runtime.serving.service import CaseIndex


class Uncounted:
    """As one in Milvus: it has no generations."""

    uuid = "0123456789abcdef0123456789abcdef"

    def __init__(self, *ids: str) -> None:
        self.of, self.reads = list(ids), 0

    def __len__(self) -> int:
        return len(self.of)

    def ids(self) -> list[str]:
        self.reads += 1
        return list(self.of)


def test_one_case_for_another_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there are as many as before; who asks for what there is not does not have it read each time."""
    now = 0.0
    monkeypatch.setattr(service, "monotonic", lambda: now)
    gallery: Any = Uncounted("a", "b")
    index, of = CaseIndex(), {one: case_id(gallery, one) for one in "abc"}
    assert index.id_of(gallery, of["b"]) == "b"
    gallery.of = ["a", "c"]
    now = 60.0
    assert index.id_of(gallery, of["c"]) == "c"
    for _ in range(10):
        assert index.id_of(gallery, of["b"]) is None
    assert gallery.reads == 2
    gallery.of.append("b")  # which its number tells
    assert index.id_of(gallery, of["b"]) == "b"
