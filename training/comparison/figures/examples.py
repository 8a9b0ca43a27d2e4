"""A page of example retrievals, as in the paper: queries chosen by rule, and their nearest images with their findings.

The paper does not say how its examples were chosen. Here they are the queries at six quantiles of nDCG under the shown
method, so that good and bad ones are seen; the same queries are shown once more for BCE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cbmir.manifest import Manifest, Row, read_manifest
from cbmir.training.comparison.cells import Answers, cell_folder, read_answers
from cbmir.training.comparison.figures.drawing import Picture, save, shown_cells
from cbmir.training.comparison.figures.tiles import FRAMES, Tile, page
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Plan, selection_path
from cbmir.training.comparison.protocols import PROTOCOLS
from cbmir.training.metrics import Floats

QUANTILES = (95, 80, 60, 40, 20, 5)
SHOWN = 5
#: `query` is the position among the part's test images; findings are separated by semicolons.
HEADER = ("query", "quantile", "ndcg", "rank", "shared", "missing", "more")


@dataclass(frozen=True)
class Agreement:
    """Findings that query and neighbour share, that only the query has, and that only the neighbour has."""

    shared: tuple[str, ...]
    missing: tuple[str, ...]
    more: tuple[str, ...]

    @property
    def kind(self) -> str:
        """`all` of the query's findings are shared, `some` or `none`."""
        return "none" if not self.shared else "some" if self.missing else "all"

    @property
    def findings(self) -> list[tuple[str, str]]:
        """As they stand below the neighbour."""
        return [(kind, name) for kind in ("shared", "more", "missing") for name in getattr(self, kind)]


@dataclass(frozen=True)
class Example:
    """A query, at which quantile of nDCG it was chosen, its nDCG here, and its nearest images."""

    position: int
    quantile: int
    ndcg: float
    query: Row
    findings: Sequence[str]
    neighbours: Sequence[tuple[Row, Agreement]]


def draw_examples(report: Path, plan: Plan, folder: Path) -> list[Picture]:
    """The page of the paper's method, or of the first finished one, and that of BCE for the same queries.

    None where no cell is finished or no query has a finding. Raises ImageError when an image cannot be read.
    """
    cells = shown_cells(report, plan, dict.fromkeys(("proxy-negative", "proxy", *METHODS)))
    if not cells:
        return []
    shown = next(iter(cells.values()))
    selection = read_manifest(selection_path(report, shown.part))
    answers = {cell.method: read_answers(cell_folder(report, cell)) for cell in (shown, cells.get("bce", shown))}
    queries = choose_queries(answers[shown.method].retrieval["positive queries"].ndcg)
    if not queries:
        return []
    k = PROTOCOLS[plan.protocol].k
    rule = (
        f"Queries were chosen by rule: of those with a finding, the ones at the quantiles "
        f"{', '.join(map(str, queries.values()))}% of nDCG@{k} under “{METHODS[shown.method].title}”, best first."
    )
    return [_page(name, examples(own, queries, selection), k, rule, folder) for name, own in answers.items()]


def choose_queries(ndcg: Floats) -> dict[int, int]:
    """Position of a query -> quantile (%) at which its nDCG lies, best first; [Q], NaN is left out.

    Of n queries in rising order (equal ones as they stand) it is the one nearest to place (n - 1) q / 100. Where there
    are too few for all quantiles, each is named once.
    """
    known = np.flatnonzero(~np.isnan(ndcg))
    order = known[np.argsort(ndcg[known], kind="stable")]
    chosen: dict[int, int] = {}
    for quantile in QUANTILES if len(order) else ():
        chosen.setdefault(int(order[round((len(order) - 1) * quantile / 100)]), quantile)
    return chosen


def agreement(query: Row, neighbour: Row, names: Sequence[str]) -> Agreement:
    """By finding; uncertain (-1) counts as positive, unknown does not, as in the metrics."""
    own, theirs = ({n for n, v in zip(names, row.labels, strict=True) if v in (1, -1)} for row in (query, neighbour))
    return Agreement(*(tuple(n for n in names if n in group) for group in (own & theirs, own - theirs, theirs - own)))


def examples(answers: Answers, queries: dict[int, int], selection: Manifest) -> list[Example]:
    """The chosen queries (position -> quantile) with the images that a method found for them."""
    asking, gallery, names = selection.split("test").rows, selection.split("train").rows, selection.labels.names
    ndcg = answers.retrieval["positive queries"].ndcg
    return [
        Example(
            position, quantile, float(ndcg[position]), asking[position],
            agreement(asking[position], asking[position], names).shared,
            [(gallery[i], agreement(asking[position], gallery[i], names))
             for i in answers.neighbours[position, :SHOWN] if i >= 0],
        )
        for position, quantile in queries.items()
    ]  # fmt: skip


def _page(method: str, shown: Sequence[Example], k: int, rule: str, folder: Path) -> Picture:
    title = METHODS[method].title
    kinds = [found.kind for example in shown for _, found in example.neighbours]
    picture = Picture(
        f"examples-{method}",
        f"Example retrievals: {title}",
        f"{len(shown)} queries and their {SHOWN} nearest gallery images of other patients ({title}). {rule} Below an "
        "image, ✓ marks a finding shared with the query, + one that only the neighbour has, \N{MINUS SIGN} one that "
        "only the query has. Frames: solid where all of the query's findings are shared, dashed where some are, dotted "
        f"where none is. Of the {len(kinds)} neighbours "
        + ", ".join(f"{kinds.count(kind)} share {kind}" for kind in FRAMES)
        + " of them.",
    )
    with page([(f"nDCG@{k}\n{example.ndcg:.2f}", _tiles(example)) for example in shown]) as figure:
        table = [
            (example.position, example.quantile, example.ndcg, rank,
             *("; ".join(group) for group in (found.shared, found.missing, found.more)))
            for example in shown
            for rank, (_, found) in enumerate(example.neighbours, start=1)
        ]  # fmt: skip
        return save(figure, picture, folder, HEADER, table)


def _tiles(example: Example) -> list[Tile]:
    own = [("own", name) for name in example.findings]
    return [
        Tile(example.query.image, own),
        *(Tile(row.image, found.findings, found.kind) for row, found in example.neighbours),
    ]
