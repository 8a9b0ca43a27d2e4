"""Measure galleries of growing size: all measured figures of docs/gallery.md, in one command.

    python benchmarks/gallery_growth.py --sizes 1000,10000,100000 -o docs/gallery --write-docs docs/gallery.md

For each size, a gallery is made from vectors that resemble embeddings (`Mixture`); cbmir's ways to search it, faiss and
hnswlib take turns in one run. FOLDER gets size-N.json, which later calls reuse, and growth.csv, .png and .svg. The docs
also get load.json of gallery_load.py, if it exists. `--write-docs` puts each section between its marks,
<!-- gallery:NAME --> and <!-- /gallery:NAME -->. A million vectors need 10 GB in the scratch folder and 17 GB of
memory. Run nothing else meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from figures import any_card, filled, ratio_text, reached, table
from gallery_contenders import THREADS, TimedContender, names
from numpy.typing import NDArray

from cbmir.export.perf.bench import ratio
from cbmir.export.perf.process import RemoteObject
from cbmir.files import write_json, write_text
from cbmir.machine import describe_machine, in_words
from cbmir.runtime import Entry, Gallery

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

K = 10
BLOCK = 4096
QUERIES = 200
ROUNDS, SINGLES = 7, 25
BATCH = 256
RATES = (1, 10, 100, 500)  # per mille of the rows that pass a filter
BASELINE = ("faiss HNSW", 64)
CSV = ("name", "setting", "recall", "ms", "p99_ms", "qps", "build_s", "index_mb", "own_mb", "mapped_mb")
AIMED = 100_000  # the size that the aims are for


class Mixture:
    """Reproducible blocks of vectors float32 [n, 1024] like the embeddings of a DenseNet121 trained with proxies.

    Such embeddings are non-negative means over a feature map, and vary in few directions: for 1,776 chest radiographs
    of NIH, the mean cosine of two is 0.77 (standard deviation 0.16), that of the tenth neighbour 0.98, and 6 directions
    explain 90% of the variance. Here the figures for 1,776 vectors are 0.78 (0.14), 0.96 and 9.
    """

    dim, rank, groups = 1024, 64, 1000

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        mean = np.exp(0.4 * rng.normal(size=self.dim))
        variances = np.arange(1.0, self.rank + 1) ** -2
        variances *= 0.4 / variances.sum()
        directions = np.linalg.qr(rng.normal(size=(self.dim, self.rank)))[0].T
        self.mean = mean / np.linalg.norm(mean)
        self.basis = directions * np.sqrt(variances)[:, None] * self.mean * np.sqrt(self.dim)
        self.centres = rng.normal(size=(self.groups, self.rank)) * np.sqrt(0.7)
        self.seed = seed

    def block(self, number: int, count: int = BLOCK) -> Floats:
        """Return the first `count` vectors of block `number`, with unit norm."""
        rng = np.random.default_rng((self.seed, number))
        groups = self.centres[rng.integers(self.groups, size=count)]
        latent = groups + np.sqrt(0.3) * rng.normal(size=(count, self.rank))
        noise = 0.05 / np.sqrt(self.dim) * rng.normal(size=(count, self.dim))
        vectors = np.maximum(self.mean + latent @ self.basis + noise, 0)
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def passes(rate: int, rows: Rows) -> NDArray[np.bool_]:
    """Return a mask of the rows that have the label `Rate<rate>`."""
    return rows % (1000 // rate) == 1000 // rate - 1


def entries(start: int, count: int) -> list[Entry]:
    """Make entries for `count` rows from `start`: the id is the row; 2.5 images per patient; no thumbnail or report."""
    rows = np.arange(start, start + count)
    digests = [hashlib.sha256(str(row).encode()).hexdigest() for row in rows]
    labels = np.stack([passes(rate, rows) for rate in RATES], axis=1).astype(int).tolist()
    return [
        Entry(
            id=f"{row:08}", image=f"/images/{row:08}.png", patient_id=f"p{2 * row // 5}", study_id=f"s{row}",
            view="PA" if row % 3 else "AP", date=f"20{row % 20:02}-01-{1 + row % 28:02}",
            labels=dict(zip((f"Rate{rate}" for rate in RATES), values, strict=True)), sha256=digest,
        )
        for row, values, digest in zip(rows.tolist(), labels, digests, strict=True)
    ]  # fmt: skip


@click.command()
@click.option("--sizes", default="1000,10000,100000", show_default=True, help="Numbers of vectors.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--scratch", type=click.Path(path_type=Path, file_okay=False), help="Where galleries are made.")
@click.option("--write-docs", "docs", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE.md")
def main(sizes: str, output: Path, scratch: Path | None, docs: Path | None) -> None:
    """Measure galleries of growing sizes, and write tables and a chart for docs/gallery.md."""
    output.mkdir(parents=True, exist_ok=True)
    for count in sorted(int(size) for size in sizes.split(",")):
        file = output / f"size-{count}.json"
        if not file.exists():
            with tempfile.TemporaryDirectory(dir=scratch, prefix="growth-") as folder:
                write_json(file, measure(count, Path(folder)))
        click.echo(file)
    found = (json.loads(file.read_text("utf-8")) for file in output.glob("size-*.json"))
    reports = sorted(found, key=lambda report: report["count"])
    draw(reports, output)
    if docs is not None:
        own = sections(reports) | {"load": load_text(output / "load.json")}
        write_text(docs, filled(docs.read_text("utf-8"), "gallery", own))


# -- measuring


def measure(count: int, scratch: Path) -> dict[str, Any]:
    """Measure one size, and return all figures as JSON types."""
    mixture = Mixture()
    queries = mixture.block(10**9, BATCH)
    gallery = make_gallery(mixture, count, scratch / "gallery")
    truth, filtered = exact_neighbours(mixture, count, queries[:QUERIES])
    found: dict[tuple[str, int], float] = {}
    with ExitStack() as stack:
        built, runners = {}, []
        for name in names(count):
            one = stack.enter_context(RemoteObject(name, partial(TimedContender, name, scratch / "gallery")))
            click.echo(f"{count}: {name}")
            built[name] = one.call("build")
            # A runner is a contender with one setting (`way`); filters are settings of the gallery.
            runners += [(one, way, number == 0) for number, way in enumerate(one.call("settings"))]
        for one, way, _ in runners:
            expected = filtered[way] if is_filter(one.name, way) else truth
            found[one.name, way] = recall(one.call("search", queries[:QUERIES], K, way), expected)
        times: dict[tuple[str, int], list[list[float]]] = {(one.name, way): [] for one, way, _ in runners}
        batches: dict[tuple[str, int], list[float]] = {(one.name, way): [] for one, way, _ in runners}
        for turn in range(ROUNDS):
            own = queries[(turn * SINGLES + np.arange(SINGLES)) % QUERIES]
            first = turn % len(runners)  # each round starts with a different runner
            for one, way, is_shown in runners[first:] + runners[:first]:
                times[one.name, way].append(one.call("singles", own, K, way))
                if is_shown and turn < 3:
                    batches[one.name, way].append(one.call("batch", queries, K, way))
        mapped = {one.name: one.call("mapped_mb") for one, _, is_shown in runners if is_shown}
    rounds = {key: [float(np.median(seconds)) for seconds in turns] for key, turns in times.items()}
    rows = [
        {
            "name": name, "setting": way, "recall": found[name, way], "ms": 1000 * float(np.median(rounds[name, way])),
            "p99_ms": 1000 * float(np.quantile(turns, 0.99)), "rounds": rounds[name, way],
            "ratio": times_as_long(
                rounds[name, way], rounds[("cbmir gallery", 1000) if is_filter(name, way) else BASELINE]
            ),
            "qps": BATCH / min(batches[name, way]) if batches[name, way] else None, **built[name],
            "mapped_mb": mapped[name],
        }
        for (name, way), turns in times.items()
    ]  # fmt: skip
    return {"count": count, "dim": Mixture.dim, "threads": THREADS, "machine": describe_machine(), "gallery": gallery,
            "rows": rows}  # fmt: skip


def is_filter(name: str, way: int) -> bool:
    """Return whether this is `Gallery.search` with a filter that `way` per mille pass."""
    return name == "cbmir gallery" and way != 1000


def times_as_long(own: Sequence[float], against: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of times per round: median, 10th and 90th percentile."""
    return astuple(ratio(against, own))


def make_gallery(mixture: Mixture, count: int, path: Path) -> dict[str, float]:
    """Make a gallery, with int8 codes from 10,000 vectors on. Returns seconds of each step and sizes in MB."""
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    making = 0.0
    card = any_card([f"Rate{rate}" for rate in RATES], Mixture.dim, fingerprint="growth")
    with Gallery.create(path, card, index="int8" if count >= 10_000 else "exact") as gallery:
        for at in range(0, count, BLOCK):
            pause = time.perf_counter()
            vectors, own = mixture.block(at // BLOCK, min(BLOCK, count - at)), entries(at, min(BLOCK, count - at))
            making += time.perf_counter() - pause
            with gallery.writing() as writer:
                writer.add(own, vectors)
        seconds["add_s"] = time.perf_counter() - start - making
        start = time.perf_counter()
        gallery.write_index()
        seconds["write_index_s"] = time.perf_counter() - start
    start = time.perf_counter()
    with Gallery.open(path) as gallery:
        gallery.search(mixture.block(10**9, 1)[0], K)
        seconds["open_and_answer_s"] = time.perf_counter() - start
        start = time.perf_counter()
        one = mixture.block(10**9 + 1, 1)
        with gallery.writing() as writer:
            writer.add(entries(count, 1), one)
        gallery.search(one[0], K)
        seconds["add_one_and_find_it_s"] = time.perf_counter() - start
        with gallery.writing() as writer:
            writer.remove(ids=[f"{count:08}"])
    megabytes = {
        "sqlite_mb": sum(file.stat().st_size for file in path.glob("gallery.sqlite*")) / 1e6,
        "derived_mb": sum(file.stat().st_size for file in path.glob("derived-*/*")) / 1e6,
    }
    return seconds | megabytes


def exact_neighbours(mixture: Mixture, count: int, queries: Floats) -> tuple[list[set[int]], dict[int, list[set[int]]]]:
    """Find the K nearest rows of each query by brute force in float32: among all rows, and among those that pass each
    filter."""
    filters: dict[int, Any] = {1000: None} | {rate: rate for rate in RATES}
    best = {rate: [np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)] for rate in filters}
    for at in range(0, count, BLOCK):
        rows = np.arange(at, min(at + BLOCK, count))
        cosines = queries @ mixture.block(at // BLOCK, len(rows)).T
        for rate in filters:
            own = np.arange(len(rows)) if rate == 1000 else np.flatnonzero(passes(rate, rows))
            values = np.concatenate([best[rate][0], cosines[:, own]], axis=1)
            numbers = np.concatenate([best[rate][1], np.tile(rows[own], (len(queries), 1))], axis=1)
            order = np.argsort(-values, axis=1)[:, :K]
            best[rate] = [np.take_along_axis(values, order, 1), np.take_along_axis(numbers, order, 1)]
    sets = {rate: [set(row.tolist()) for row in numbers] for rate, (_, numbers) in best.items()}
    return sets.pop(1000), sets


def recall(found: Rows, expected: Sequence[set[int]]) -> float:
    """Return the share of the nearest rows that were found, over all queries."""
    hits = sum(len(set(rows.tolist()) & own) for rows, own in zip(found, expected, strict=True))
    there = sum(len(own) for own in expected)
    return hits / there if there else 1.0


# -- writing


def sections(reports: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the Markdown sections by the names of their marks."""
    return {
        "machine": f"```\n{in_words(reports[-1]['machine'])}\n```\n{reports[-1]['threads']} threads; "
                   f"{QUERIES} queries for recall, {ROUNDS} rounds of {SINGLES} for latency.",
        "aims": aims_table(reports),
        "search": "\n\n".join(f"**{report['count']:,} vectors**\n\n{search_table(report)}" for report in reports),
        "filters": filter_table(reports),
        "gallery": gallery_table(reports),
    }  # fmt: skip


def load_text(path: Path) -> str:
    """Return the figures of gallery_load.py as text; "" without them."""
    if not path.exists():
        return ""
    one = json.loads(path.read_text("utf-8"))
    return (
        f"{one['readers']} readers and 1 writer for {one['seconds']:.0f} s: {one['generations']:,} writes and "
        f"{one['answers']:,} answers ({one['exact']:,} exact, {one['filtered']:,} with a filter), of which "
        f"**{one['wrong']} were wrong**; recall@10 by the index {one['recall_by_index']:.4f}; "
        f"{one['ms_an_answer']:.1f} ms per answer on average, all on {one['machine']['usable']} processors."
    )


def search_table(report: dict[str, Any]) -> str:
    """Return a table of all ways to search at one size, without filters."""
    rows = [
        (
            _label(row), f"{row['recall']:.4f}", f"{row['ms']:.2f}", f"{row['p99_ms']:.2f}", ratio_text(*row["ratio"]),
            "" if row["qps"] is None else f"{row['qps']:,.0f}", f"{row['build_s']:.1f}", f"{row['index_mb']:,.0f}",
            f"{row['own_mb']:,.0f}",
        )
        for row in report["rows"]
        if not is_filter(row["name"], row["setting"])
    ]  # fmt: skip
    header = ("", "recall@10", "ms", "p99", f"times `{BASELINE[0]} {BASELINE[1]}` [10-90%]", "queries/s", "build s",
              "index MB", "memory MB")  # fmt: skip
    return table(header, rows)


def filter_table(reports: Sequence[dict[str, Any]]) -> str:
    """Return a table of `Gallery.search` with filters that fewer and fewer rows pass."""
    rows = [
        (f"{report['count']:,}", f"{row['setting'] / 10:g}%", f"{row['recall']:.4f}", f"{row['ms']:.2f}",
         "1" if row["setting"] == 1000 else ratio_text(*row["ratio"]))
        for report in reports
        for row in report["rows"]
        if row["name"] == "cbmir gallery"
    ]  # fmt: skip
    return table(("vectors", "pass", "recall@10", "ms", "times as long as unfiltered [10-90%]"), rows)


def gallery_table(reports: Sequence[dict[str, Any]]) -> str:
    """Return a table of times and sizes of making and opening a gallery."""
    rows = []
    for report in reports:
        one = report["gallery"]
        rows.append((
            f"{report['count']:,}", f"{one['add_s']:.1f}", f"{one['write_index_s']:.1f}",
            f"{1000 * one['open_and_answer_s']:.0f}", f"{1000 * one['add_one_and_find_it_s']:.0f}",
            f"{one['sqlite_mb']:,.0f}", f"{one['derived_mb']:,.0f}",
        ))  # fmt: skip
    header = ("vectors", "add s", "derive s", "open and answer ms", "add one and find it ms", "SQLite MB", "derived MB")
    return table(header, rows)


def aims_table(reports: Sequence[dict[str, Any]]) -> str:
    """Return a table of the aims at 100,000 vectors, and whether they are reached."""
    report = next((one for one in reports if one["count"] == AIMED), None)
    if report is None:
        return ""
    rows = {(row["name"], row["setting"]): row for row in report["rows"]}
    int8, rare = rows["cbmir int8", 0], rows["cbmir gallery", 1]
    share = int8["index_mb"] * 1e6 / (4 * report["dim"] * report["count"])
    lines = []
    for own in (rows["cbmir bf16", 0], int8):
        # the settings of faiss with the same recall, within the precision that 2,000 neighbours allow
        equal = [
            row for (name, _), row in rows.items() if name == BASELINE[0] and row["recall"] >= own["recall"] - 0.002
        ]
        base = min(equal or [rows[BASELINE]], key=lambda row: row["ms"])
        times = times_as_long(own["rounds"], base["rounds"])
        words = f"recall@10 of {own['name']}, in times of the latency of {_label(base)} (recall {base['recall']:.4f})"
        is_reached = own["recall"] >= 0.99 and times[0] <= 1
        lines.append((words, f"{own['recall']:.4f} in {ratio_text(*times)}", "0.99 in 1", reached(is_reached)))
    lines.append(("recall@10 of int8 with rerank, in a share of float32's memory",
                  f"{int8['recall']:.4f} in {share:.2f}", "0.995 in 0.33",
                  reached(int8["recall"] >= 0.995 and share <= 1 / 3)))  # fmt: skip
    lines.append(("filter that leaves 0.1%: recall@10 in times of the unfiltered latency",
                  f"{rare['recall']:.4f} in {ratio_text(*rare['ratio'])}", "1 in 3",
                  reached(rare["recall"] == 1 and rare["ratio"][0] <= 3)))  # fmt: skip
    return table(("at 100,000 vectors", "measured", "aim", ""), lines)


def draw(reports: Sequence[dict[str, Any]], folder: Path) -> None:
    """Plot recall, latency, memory and build time against size, with one line per contender's first setting."""
    from cbmir.training.comparison.figures.charts import numbered_style
    from cbmir.training.comparison.figures.sheet import ReportFigure, save, sheet

    panels = (("recall", "recall@10"), ("ms", "ms a query"), ("index_mb", "index MB"), ("build_s", "build s"))
    lines = names(AIMED)
    with sheet(7.0, 5.0) as figure:
        axes = figure.subplots(2, 2).flat
        for axis, (value, title) in zip(axes, panels, strict=True):
            for number, name in enumerate(lines):
                points = [(report["count"], row[value]) for report in reports for row in report["rows"]
                          if row["name"] == name and row["setting"] in (0, 64, 1000) and row[value]]  # fmt: skip
                if points and (name != "cbmir gallery" or value in ("recall", "ms")):  # it only opens a finished index
                    axis.plot(*zip(*points, strict=True), label=name, markersize=4, **numbered_style(number))
            axis.set_title(title)
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:,.0f}")
            if value != "recall":
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
            axis.set_xlabel("vectors")
            axis.grid()
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        rows = [[report["count"], *(row[name] for name in CSV)] for report in reports for row in report["rows"]]
        caption = "Growth of a gallery: each contender at its first setting, efSearch, ef and nprobe being 64."
        picture = ReportFigure("growth", "How a gallery grows", caption)
        save(figure, picture, folder, ("count", *CSV), rows)


def _label(row: dict[str, Any]) -> str:
    setting = "" if row["setting"] in (0, 1000) else f" {row['setting']}"
    return f"`{row['name']}{setting}`"


if __name__ == "__main__":
    main()
