"""A manifest's summary, for its sidecar and `cbmir data check`, and the check for problems."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cbmir.errors import ImageError
from cbmir.input_file import existing
from cbmir.manifest import Manifest, Row
from cbmir.runtime.imaging.image_warning import ImageWarning, count_kinds, kinds_text
from cbmir.runtime.imaging.reader import read_image
from cbmir.training.splits import patients_in_two_splits

_NAMED = 5  # examples of each problem in the text; the JSON lists all
#: SHA-256 and warnings of a file, or the error that explains why it cannot be read. The pixels are not kept.
Read = tuple[str, tuple[ImageWarning, ...]] | ImageError
#: The names of a label's values in counts.
VALUE_NAMES: dict[int | None, str] = {1: "positive", 0: "negative", -1: "uncertain", None: "unknown"}


def summarise(manifest: Manifest) -> dict[str, Any]:
    """Count images and patients in total and by split, images by view, and each label's values by split.

    Rows without a split count as `unassigned`, rows without a view as `unknown`.
    """
    splits = [name for name in ("train", "val", "test", "") if any(row.split == name for row in manifest)]
    parts = {name or "unassigned": manifest.split(name) for name in splits}
    values = {name: [Counter(column) for column in zip(*(row.labels for row in part), strict=True)]
              for name, part in parts.items()}  # fmt: skip
    return {
        "images": len(manifest),
        "patients": len({row.patient_id for row in manifest}),
        "splits": {
            name: {"images": len(part), "patients": len({row.patient_id for row in part})}
            for name, part in parts.items()
        },
        "views": dict(sorted(Counter(row.view or "unknown" for row in manifest).items())),
        "labels": {
            label: {
                name: {word: counts[position][value] for value, word in VALUE_NAMES.items()}
                for name, counts in values.items()
            }
            for position, label in enumerate(manifest.labels.names)
        },
    }


@dataclass(frozen=True)
class CheckReport:
    """The result of `check_manifest`.

    `unreadable` and `warnings` map an image to its messages. `duplicates` are groups of images with identical files
    (SHA-256); `leaking_duplicates` are those in more than one split. All four are empty in a `quick` check, which opens
    no image.
    """

    quick: bool
    summary: dict[str, Any]
    missing: tuple[str, ...]
    patients_in_two_splits: dict[str, tuple[str, ...]]
    unreadable: dict[str, str]
    warnings: dict[Path, tuple[ImageWarning, ...]]
    duplicates: tuple[tuple[str, ...], ...]
    leaking_duplicates: tuple[tuple[str, ...], ...]

    @property
    def ok(self) -> bool:
        """Whether the manifest is fit for training: every image can be read, no patient or file is in two splits."""
        return not (self.missing or self.unreadable or self.patients_in_two_splits or self.leaking_duplicates)

    def to_json(self) -> dict[str, Any]:
        warnings = {str(image): list(said) for image, said in self.warnings.items()}
        kinds = count_kinds(map(kinds_text, self.warnings.values()))
        return {"ok": self.ok, **asdict(replace(self, warnings={})), "warnings": warnings, "warning_kinds": kinds}

    def text(self) -> str:
        """Return the report as text."""
        return "\n".join([*_summary_lines(self.summary), "", *self._findings()])

    def _findings(self) -> Iterator[str]:
        splits = self.patients_in_two_splits
        yield from _examples("missing files", self.missing)
        yield from _examples("patients in two splits", [f"{p}: {', '.join(names)}" for p, names in splits.items()])
        if self.quick:
            yield "not checked  unreadable images and duplicates (--quick)"
        else:
            yield from _examples("unreadable images", self.unreadable.values())
            yield from _examples("duplicate images in two splits", map(" = ".join, self.leaking_duplicates))
            leaking = set(self.leaking_duplicates)
            harmless = [group for group in self.duplicates if group not in leaking]
            yield from _examples("duplicate images in one split", map(" = ".join, harmless), note=True)
            yield from _examples("images read with a warning", [""] * len(self.warnings), note=True)
            for kind in count_kinds(map(kinds_text, self.warnings.values())):
                some = (f"{image}: {one}" for image, said in self.warnings.items() for one in said if one.kind == kind)
                yield from _examples(f"  {kind}", some, note=True)
        unassigned = self.summary["splits"].get("unassigned", {"images": 0})["images"]
        yield from _examples(
            "images without a split, which training without folds leaves out", [""] * unassigned, note=True
        )


def check_manifest(manifest: Manifest, *, quick: bool = False, workers: int = 2) -> CheckReport:
    """Check a manifest's splits and files, and read every image with the manifest's intensity policy (default:
    `header`).

    Args:
        quick: Do not read the images.
        workers: Number of reading threads; decoding releases the GIL.
    """
    missing = {row.image for row in manifest if existing(row.image) is None}
    present = [row for row in manifest if row.image not in missing]
    unreadable: dict[str, str] = {}
    warnings: dict[Path, tuple[ImageWarning, ...]] = {}
    same: dict[str, list[Row]] = defaultdict(list)
    if not quick:
        read = partial(_read, manifest.about.get("policies", {}).get("intensity", "header"))
        for row, result in zip(present, _read_all(read, present, workers), strict=True):
            if isinstance(result, ImageError):
                unreadable[str(row.image)] = str(result)
                continue
            sha256, said = result
            same[sha256].append(row)
            if said:
                warnings[row.image] = said
    groups = [rows for rows in same.values() if len(rows) > 1]
    leaking = [rows for rows in groups if len({row.split for row in rows if row.split}) > 1]
    duplicates, across = (tuple(tuple(str(row.image) for row in rows) for rows in some) for some in (groups, leaking))
    return CheckReport(
        quick, summarise(manifest), tuple(sorted(map(str, missing))), patients_in_two_splits(manifest), unreadable,
        warnings, duplicates, across,
    )  # fmt: skip


def _read_all(read: Callable[[Row], Read], rows: list[Row], workers: int) -> Iterator[Read]:
    pool = ThreadPoolExecutor(workers)
    try:
        yield from tqdm(pool.map(read, rows), total=len(rows), unit="image", desc="reading", disable=None)
    finally:
        pool.shutdown(cancel_futures=True)


def _read(intensity: str, row: Row) -> Read:
    try:
        radiograph = read_image(row.image, intensity=intensity, allow_lateral=row.view == "LATERAL")
    except ImageError as error:
        return error
    return radiograph.sha256, radiograph.warnings


def _examples(what: str, examples: Iterable[str], *, note: bool = False) -> Iterator[str]:
    """Yield the number of examples and the first few; nothing for a note without examples."""
    found = list(examples)
    if found or not note:
        yield f"{'note' if note else 'PROBLEM' if found else 'ok':<11}  {what}: {len(found):,}"
    yield from (f"{'':<13}{example}" for example in found[:_NAMED] if example)
    if len(found) > _NAMED and found[0]:
        yield f"{'':<13}… and {len(found) - _NAMED:,} more (--json names all)"


def _summary_lines(summary: dict[str, Any]) -> Iterator[str]:
    yield f"{summary['images']:,} images of {summary['patients']:,} patients"
    for split, counts in summary["splits"].items():
        yield f"  {split:<10} {counts['images']:>9,} images  {counts['patients']:>8,} patients"
    yield "views: " + ", ".join(f"{view} {count:,}" for view, count in summary["views"].items())
    width = max(map(len, summary["labels"]))
    yield ""
    yield f"{'label':<{width}}" + "".join(f"{name:>11}" for name in VALUE_NAMES.values())
    for label, splits in summary["labels"].items():
        totals = (sum(counts[name] for counts in splits.values()) for name in VALUE_NAMES.values())
        yield f"{label:<{width}}" + "".join(f"{total:>11,}" for total in totals)
