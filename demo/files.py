"""What the server gives beside the page: its scripts, the gallery's thumbnails by id, and the map. No path is taken."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Response
from starlette.staticfiles import StaticFiles

from cbmir.demo.page import STATIC
from cbmir.errors import GalleryError
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.projection import GalleryProjection
from cbmir.runtime.gallery.protocol import SearchableGallery

_SIGNS = {1: "1", 0: "0", -1: "u", None: "?"}


def add_files(app: FastAPI, gallery: SearchableGallery, chart: GalleryProjection | None) -> None:
    """Add the routes `room/…`, `thumbnail?id=…` and `map.json`."""
    app.mount("/room", StaticFiles(directory=STATIC))

    def thumbnail(id: str) -> Response:
        try:
            jpeg = gallery.thumbnail(id)
        except GalleryError:
            jpeg = None
        if jpeg is None:
            return Response(status_code=404)
        return Response(jpeg, media_type="image/jpeg")

    def map_json() -> Response:
        if chart is None:
            return Response(status_code=404)
        return Response(json.dumps(_map(gallery, chart)), media_type="application/json")

    app.get("/thumbnail")(thumbnail)
    app.get("/map.json")(map_json)


def _map(gallery: SearchableGallery, chart: GalleryProjection) -> dict[str, Any]:
    """Points with ids and labels, as the gallery has them now: of each of its labels a string, a sign a point: 1, 0,
    u (uncertain) or ? (not known)."""
    labels = {name: dict(entry.labels or {}) for name in chart.ids if (entry := _entry(gallery, name)) is not None}
    kept = [at for at, name in enumerate(chart.ids) if name in labels]
    names = [chart.ids[at] for at in kept]
    return {
        "method": chart.method,
        "ids": names,
        "points": chart.points[kept].round(4).tolist(),
        "labels": {label: "".join(_SIGNS[labels[name].get(label)] for name in names) for label in gallery.labels.names},
    }


def _entry(gallery: SearchableGallery, name: str) -> Entry | None:
    """None for one that has gone since the map was made."""
    try:
        return gallery.entry(name)
    except GalleryError:
        return None
