"""Measurements of a collection, made when it is built or extended, because Milvus cannot compute them quickly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbmir.labels import LabelSet
from cbmir.runtime import novelty
from cbmir.runtime.gallery.milvus import records as rows
from cbmir.runtime.gallery.milvus.client import HEAVY, Collection, parts


def label_shares(collection: Collection, labels: LabelSet) -> dict[str, float | None]:
    """Compute `SearchableGallery.label_shares`."""
    shares = dict[str, float | None]()
    for at, name in enumerate(labels.names):
        present, absent = (collection.count(f"array_contains({kind}, {at})") for kind in ("positive", "negative"))
        shares[name] = present / (present + absent) if present + absent else None
    return shares


def reference_distances(collection: Collection, *, sample: int, seed: int) -> NDArray[np.float32]:
    """Compute `cbmir.runtime.novelty.reference_distances` with one pass over the ids and a search per sampled image."""
    rng = np.random.default_rng(seed)
    chosen: list[str] = []
    for number, row in enumerate(collection.scan("", "id")):  # reservoir sampling
        if number < sample:
            chosen.append(row["id"])
        elif (at := int(rng.integers(0, number + 1))) < sample:
            chosen[at] = row["id"]
    found = list(collection.by("id", sorted(chosen), "id", "patient", "vector"))
    distances = []
    for some in parts(found, HEAVY):
        queries = np.array([row["vector"] for row in some], np.float32)
        near = collection.candidates(queries, "", novelty.NEAREST + 8, "patient")
        for row, query, hits in zip(some, queries, near, strict=True):
            own = row["patient"]
            others = [hit for hit in hits if hit["id"] != row["id"] and (not own or hit["patient"] != own)]
            if len(others) < novelty.NEAREST and own:  # the patient has many images
                others = collection.candidates(query[None], f"patient != {rows.text(own)}", novelty.NEAREST)[0]
            if len(others) >= novelty.NEAREST:
                nearest = np.array([hit["vector"] for hit in others[: novelty.NEAREST]], np.float32)
                distances.append(novelty.mixture_distance(query, nearest))
    return novelty.as_reference(distances)
