"""The plan of a benchmark: REPORT/benchmark.json, the selections beside it, and the cells to run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypedDict

from cbmir.errors import RunError
from cbmir.fields import Within, from_json
from cbmir.files import is_empty, write_json
from cbmir.input_file import read_json
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, read_manifest, write_manifest
from cbmir.training.comparison.methods.registry import METHODS, SWEPT, methods_of
from cbmir.training.comparison.protocols import PROTOCOLS, Protocol, keep_training, select, sweep_sizes
from cbmir.training.config import BALANCEABLE, TrainConfig
from cbmir.training.splits import patients_in_two_splits

#: Options that --resume may change: they add cells, or the images have moved.
RESUMABLE_CHANGES = ("manifest", "methods", "seeds", "sizes", "proxies", "pairs", "command")
#: Proxies per class in a sweep (1 to 32 in the paper's figure).
SWEPT_PROXIES = ("1", "2", "4", "8", "16", "32")
PLAN = "benchmark.json"
#: Options that `--tuned` may set for a method.
TUNED = ("lr", "epochs", "head_rate", "seeds")
SWEEPS = ("proxies-per-class", "train-size", "negative-proxies", "none")


class _Tuned(TypedDict, total=False):
    lr: float
    epochs: Annotated[int, Within(1)]
    head_rate: float
    seeds: Annotated[int, Within(1)]


@dataclass(frozen=True)
class Part:
    """One selection of images, drawn with `seed`. `fold` is one of the plan's folds (0 without folds), `size` the
    number of training images (0 for all)."""

    seed: int
    fold: int
    size: int

    @property
    def name(self) -> str:
        fold = f"-fold{self.fold}" if self.fold else ""
        return f"seed{self.seed}{fold}" + (f"-{self.size}" if self.size else "")


@dataclass(frozen=True)
class Cell:
    """One method on one part. `proxies` is their number per class, or empty for a method without that choice."""

    part: Part
    method: str
    proxies: str = ""

    @property
    def name(self) -> str:
        """The cell's folder below REPORT/cells."""
        return f"{self.part.name}/{self.method}" + (f"-m{self.proxies}" if self.proxies else "")


@dataclass(frozen=True)
class Plan:
    """The methods and images that a benchmark compares.

    Attributes:
        training: Options of `cbmir train` that all methods share. `tuned` has the options (`TUNED`) of single methods.
        sizes: Training-set sizes; 0 means all images.
        proxies: Numbers of proxies per class.
        pairs: Pairs of labels for the t-SNE maps.
        command: The commands that were run, one per line.
    """

    protocol: str
    manifest: str
    manifest_fingerprint: str
    methods: tuple[str, ...]
    seeds: int = 3
    folds: int = 0
    sizes: tuple[int, ...] = (0,)
    proxies: tuple[str, ...] = ("2",)
    pairs: tuple[str, ...] = ()
    training: dict[str, Any] = field(default_factory=dict)
    tuned: dict[str, dict[str, Any]] = field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise RunError(f"expected a protocol of {', '.join(PROTOCOLS)}, found {self.protocol!r}")
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise RunError(f"expected methods among {', '.join(METHODS)}; found {', '.join(unknown)}")
        if self.seeds < 1 or self.folds == 1 or self.folds < 0:
            raise RunError(f"expected 1 seed or more and no folds or 2 or more, found {self.seeds} and {self.folds}")

    def cells(self) -> Iterator[Cell]:
        """Yield every cell, part by part. A cell that others need comes first, even if it was not requested."""
        resting = [name for name in self.methods if METHODS[name].needs_bce]
        methods = [m for m in METHODS if m in self.methods or (m == "bce" and resting)]
        seeds = {name: int(self.tuned.get(name, {}).get("seeds", self.seeds)) for name in methods}
        if resting:
            seeds["bce"] = max(seeds[name] for name in ("bce", *resting))
        methods.sort(key=lambda name: METHODS[name].needs_bce)
        for part in self.parts():
            for method in methods:
                if part.seed >= seeds[method]:
                    continue
                many = METHODS[method].many_proxies
                yield from (Cell(part, method, proxies) for proxies in (self.proxies if many else ("",)))

    def parts(self) -> list[Part]:
        """Return every selection of images."""
        folds = range(1, self.folds + 1) if self.folds else (0,)
        return [Part(seed, fold, size) for size in self.sizes for seed in range(self.seeds) for fold in folds]

    @property
    def shown_size(self) -> int:
        """Training-set size in tables and figures that compare methods: the protocol's, else all, else the largest."""
        size = PROTOCOLS[self.protocol].size
        return size if size in self.sizes else 0 if 0 in self.sizes else max(self.sizes)

    @property
    def shown_proxies(self) -> str:
        """Number of proxies per class in the same tables and figures: the paper's 2, or the first."""
        return "2" if "2" in self.proxies else self.proxies[0]

    def cell(self, name: str) -> Cell:
        """Return the cell with this name. Raises RunError for an unknown name."""
        found = next((cell for cell in self.cells() if cell.name == name), None)
        if found is None:
            raise RunError(f"expected a cell of this benchmark, found {name!r}")
        return found

    def config(self, cell: Cell, selection: Manifest, path: Path) -> TrainConfig:
        """Return the training options of a cell; for a method without its own network, those of the BCE network."""
        method = METHODS[cell.method]
        options: dict[str, Any] = {"loss": "bce", "negative_proxies": PROTOCOLS[self.protocol].negatives}
        options |= self.training | ({"proxies_per_class": cell.proxies} if cell.proxies else {})
        options |= {"linear_fit": False, **method.training}
        options |= self._tuned("bce" if method.needs_bce else cell.method)
        if options["loss"] not in BALANCEABLE:
            options["class_weights"] = None
        return TrainConfig(
            str(path.resolve()), selection.fingerprint, selection.labels.names, seed=cell.part.seed, **options
        )

    def _tuned(self, method: str) -> dict[str, Any]:
        return {name: value for name, value in self.tuned.get(method, {}).items() if name != "seeds"}

    def differences(self, other: Plan) -> list[str]:
        """Return the options that keep `other` from continuing this benchmark, as "name: value here -> value there".

        In `tuned`, only methods of this plan count, and BCE if one of them needs it.
        """
        methods = dict.fromkeys(cell.method for cell in self.cells())
        own, others = (
            {**asdict(plan), **plan.training, "training": "", "devices": "",
             "tuned": {method: plan._tuned(method) for method in methods if plan._tuned(method)}}
            for plan in (self, other)
        )  # fmt: skip
        return [
            f"{name}: {own.get(name)} -> {others.get(name)}"
            for name in own | others
            if name not in RESUMABLE_CHANGES and own.get(name) != others.get(name)
        ]

    def extended(self, other: Plan) -> Plan:
        """Return this plan with the requests of `other` added."""

        def both(name: str) -> Any:
            return tuple(dict.fromkeys((*getattr(self, name), *getattr(other, name))))

        sizes = sorted(both("sizes"), key=lambda size: size or sys.maxsize)
        commands = dict.fromkeys((*self.command.splitlines(), *other.command.splitlines()))
        tuned = self.tuned | other.tuned
        for name, own in self.tuned.items():  # no finished seed is dropped
            if "seeds" in tuned[name]:
                tuned[name] = tuned[name] | {"seeds": max(tuned[name]["seeds"], own.get("seeds", self.seeds))}
        return replace(
            other, methods=both("methods"), sizes=tuple(sizes), seeds=max(self.seeds, other.seeds),
            proxies=both("proxies"), pairs=both("pairs"), tuned=tuned, command="\n".join(commands),
        )  # fmt: skip

    @classmethod
    def read(cls, report: Path) -> Plan:
        """Read a report's plan. Raises RunError if the folder is not a benchmark."""
        try:
            return from_json(cls, read_json(report / PLAN))
        except (OSError, ValueError) as error:
            raise RunError(f"{report}: expected a folder made by 'cbmir benchmark', found {error}") from error


def make_plan(
    protocol: Protocol, manifest: Manifest, path: Path, *, methods: tuple[str, ...], sweeps: tuple[str, ...],
    seeds: int, folds: int, pairs: tuple[str, ...], training: dict[str, Any], command: str,
    tuned: dict[str, dict[str, Any]] = {},  # noqa: B006  it is never modified
) -> Plan:  # fmt: skip
    """Make the plan for these options.

    By default it compares all methods of the protocol, or in a sweep those of the paper's figures. Several sweeps are
    crossed. Raises SplitError, ManifestError or RunError if the manifest does not fit the options.
    """
    if folds and protocol.labels:
        raise RunError(f"expected no folds with protocol {protocol.name}, which draws its own images by seed")
    if "negative-proxies" in sweeps and not protocol.negatives:
        raise RunError(f"expected no sweep of negative proxies with protocol {protocol.name}, whose images all have a "
                       "finding: there is nothing that they could learn")  # fmt: skip
    if over := [name for name, own in tuned.items() if own.get("seeds", 0) > seeds]:
        raise RunError(f"expected at most {seeds} seeds in --tuned, as in --seeds, found more for {', '.join(over)}")
    known = methods_of(protocol.negatives)
    if not methods:
        methods = tuple(name for name in SWEPT if name in known) if sweeps else known
    elif "negative-proxies" in sweeps:
        methods = tuple(dict.fromkeys((*methods, "proxy", "proxy-negative")))
    for pair in pairs:
        first, slash, second = pair.partition("/")
        if not slash:
            raise RunError(f"expected a pair of labels such as Edema/Cardiomegaly, found {pair!r}")
        for name in (first, second):
            (LabelSet(protocol.labels) if protocol.labels else manifest.labels).index(name.strip())
    proxies = SWEPT_PROXIES if "proxies-per-class" in sweeps else (training["proxies_per_class"],)
    plan = Plan(
        protocol.name, str(path.resolve()), manifest.fingerprint, methods, seeds, folds, (0,), proxies, pairs,
        training, tuned, command,
    )  # fmt: skip
    if "train-size" not in sweeps:
        return replace(plan, sizes=(protocol.size,))
    selections = [] if protocol.sizes else list(select_parts(plan, manifest).values())
    return replace(plan, sizes=sweep_sizes(protocol, selections))


def read_tuned(path: Path) -> dict[str, dict[str, Any]]:
    """Read the options of single methods (`--tuned`) from a file. Raises RunError for an unknown method or option."""
    try:
        tuned = from_json(dict[str, _Tuned], read_json(path))
        wrong = [name for name, options in tuned.items() if name not in METHODS or not options.keys() <= set(TUNED)]
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: expected a JSON object of methods, found {error}") from error
    if wrong:
        raise RunError(f"{path}: expected {', '.join(TUNED)} of methods of the benchmark, found {', '.join(wrong)}")
    return {name: dict(options) for name, options in tuned.items()}


def select_parts(plan: Plan, manifest: Manifest) -> dict[Part, Manifest]:
    """Select the images of each part of the plan. Raises SplitError or ManifestError if that is impossible."""

    @cache
    def largest(seed: int, fold: int) -> Manifest:
        return select(PROTOCOLS[plan.protocol], manifest, seed, fold, plan.folds, max(plan.sizes))

    every = {part: largest(part.seed, part.fold) for part in plan.parts()}
    return {p: keep_training(rows, p.size, seed=p.seed) if p.size else rows for p, rows in every.items()}


def prepare(report: Path, plan: Plan, manifest: Manifest, *, resume: bool) -> Plan:
    """Write the selections and the plan; return the plan, extended by earlier requests for this report.

    With `resume` the folder may also contain only `cells` from another machine. Raises RunError for a folder with other
    contents or a selection that has changed, and the errors of `select_parts`.
    """
    if not (report / PLAN).exists():
        brought = resume and report.is_dir() and {path.name for path in report.iterdir()} == {"cells"}
        if not is_empty(report) and not brought:
            raise RunError(f"{report}: expected a new or empty folder for the report, found files; choose another -o")
    elif not resume:
        raise RunError(
            f"{report}: this folder already holds a benchmark; continue it with --resume, or choose another -o"
        )
    else:
        before = Plan.read(report)
        changed = before.differences(plan)
        if changed:
            raise RunError(
                f"{report}: --resume needs the options that the benchmark began with; different: {'; '.join(changed)}"
            )
        plan = before.extended(plan)
    selections = {selection_path(report, part): one for part, one in select_parts(plan, manifest).items()}
    for path, selection in selections.items():
        if path.exists() and read_manifest(path).fingerprint != selection.fingerprint:
            raise RunError(f"{path}: this selection was made by another version of cbmir; start another report")
    report.mkdir(parents=True, exist_ok=True)
    write_json(report / PLAN, asdict(plan))  # first, so that --resume continues after an interruption
    for path, selection in selections.items():
        write_manifest(selection, path)  # even if it exists, since the images may have moved
    return plan


def selection_path(report: Path, part: Part) -> Path:
    """Return the path of a part's manifest: its images, patients, splits and labels, as `cbmir train` reads them."""
    return report / "selections" / f"{part.name}.csv"


def preview(plan: Plan, selections: dict[Part, Manifest]) -> str:
    """Return the selections, methods and number of cells as text, which `cbmir benchmark --dry-run` prints."""
    protocol = PROTOCOLS[plan.protocol]
    lines = [f"{protocol.title}; nDCG@{protocol.k}", ""]
    rows = [("selection", "training", "validation", "queries", "patients", "in two splits", "fingerprint")]
    for part, selection in selections.items():
        count = Counter(row.split for row in selection)
        patients = {row.patient_id for row in selection if row.split}
        shared = patients_in_two_splits(selection)
        train, val, test = (f"{count[split]:,}" for split in ("train", "val", "test"))
        rows.append((part.name, train, val, test, f"{len(patients):,}", f"{len(shared)}", selection.fingerprint[:12]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    cells = Counter(cell.method for cell in plan.cells())
    lines += ["", f"{sum(cells.values())} cells:"]
    lines += [f"  {count:>3}  {name:<15} {METHODS[name].title}" for name, count in cells.items()]
    return "\n".join(lines)
