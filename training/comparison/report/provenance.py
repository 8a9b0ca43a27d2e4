"""How a report was made: command, protocol, selections, options, versions, machine, run times, rules and sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from cbmir.training.comparison.protocols import PROTOCOLS, VALIDATION, Protocol
from cbmir.training.comparison.report.blocks import Block, Cell, Code, Column, Heading, Items, Table, Text
from cbmir.training.comparison.report.tables import NOTHING, Results, ordered, row_title
from cbmir.training.comparison.statistics import LEAST, RESAMPLES
from cbmir.training.config import TrainConfig

#: Of TrainConfig, what a method or a part settles.
_OWN = ("manifest", "manifest_fingerprint", "labels", "loss", "negative_proxies", "seed", "fold")


def how_it_was_made(results: Results) -> Iterator[Block]:
    """The last section of the report."""
    yield Heading("How it was made")
    yield Text(f"On {results['made']} (UTC) by this command:")
    yield Code(results["command"])
    yield Items(tuple(_rules(PROTOCOLS[results["protocol"]["name"]], results)))
    yield Heading("How to read the figures")
    yield Items(READING)
    yield Heading("Selections, options and machine")
    yield _selections(results)
    yield _options(results)
    yield _machine(results)
    yield _times(results)
    yield Heading("Sources of the methods")
    yield Items(
        tuple(
            f"{method['title']}: {method['source']}. {method['chosen']}".strip()
            for method in results["methods"].values()
        )
    )


READING = (
    "nDCG has the gain 2^r \N{MINUS SIGN} 1, where r is the number of labels that a training image shares with the "
    "query, and is divided by that of the best order of all training images. ACG is the mean of r over the query's "
    "number of labels; precision the share with r above 0. All are per query, then the mean.",
    "An uncertain label counts as positive in retrieval and does not count in AUC; an unknown one counts in neither.",
    "Images of the query's own patient are left out of what it retrieves and of the best order.",
    "Tied images have the expectation over their orders (F. McSherry, M. Najork, Computing Information Retrieval "
    "Performance Measures Efficiently in the Presence of Tied Scores, ECIR 2008): binary codes tie often. The random "
    "ranking is the expectation over all orders.",
    "AUC is the mean over findings of which the queries hold both values; ties count half. With several parts it is "
    "the mean of theirs, since scores of different models are not ranked together. A method without a classifier has "
    "none; the community graph searches the BCE network's features and has its scores.",
    f"Intervals are 95% bootstrap intervals over patients ({RESAMPLES:,} resamples): all queries of a patient are "
    "drawn together, those of several seeds and folds too. They hold for these training runs.",
    "The standard deviation over seeds is another thing: how far the mean of one run lies from that of the next.",
    "p is of the paired difference from BCE, query by query, two-sided, by flipping the signs of whole patients at "
    "random (10,000 times), for AUC from the bootstrap; corrected by Holm (1979) for all rows of the same training-set "
    "size.",
    f"A view or source with queries of fewer than {LEAST} patients is not shown.",
)


def _rules(protocol: Protocol, results: Results) -> Iterator[str]:
    plan = results["plan"]
    yield f"Protocol: {protocol.title}; k = {protocol.k}. Findings: {', '.join(results['protocol']['labels'])}."
    if protocol.labels:
        taken = "all images" if protocol.negatives else "images with a finding"
        yield (
            f"{protocol.queries:,} queries, {VALIDATION:,} images for validation and those to train on are drawn from "
            f"{taken}, patient by patient, anew for each seed; no patient is in two splits."
        )
    elif plan["folds"]:
        yield f"The table is cut into {plan['folds']} folds by patient, the same for every seed; each fold asks once."
    else:
        yield "The table's own splits: test asks, val chooses the epoch, train is learnt from and searched."
    yield f"Table: {plan['manifest']}, SHA-256 of its content {plan['manifest_fingerprint']}."
    yield "Training images are also the gallery; all methods have the same images, image size and augmentation."
    yield (
        "The epoch is that of the best validation nDCG@10; training ends early after as many epochs without a better "
        "one as the option patience says, where the paper always trains 50."
    )


def _selections(results: Results) -> Table:
    splits = {"train": "training", "val": "validation", "test": "queries"}
    counts = [Column(f"{title}, {what}", ("",)) for title in splits.values() for what in ("images", "patients")]
    rows = tuple(
        (
            Cell(part["part"]),
            *(_count(part[what][split]) for split in splits for what in ("images", "patients")),
            Cell(part["file"]),
        )
        for part in results["selections"]
    )
    return Table("selections", "Selections", (Column("part"), *counts, Column("file")), rows)


def _options(results: Results) -> Table:
    """Of all methods that train a network; what was not given has the default."""
    defaults = {field.name: field.default for field in fields(TrainConfig) if field.name not in _OWN}
    options = defaults | results["plan"]["training"]
    rows = tuple((Cell(name.replace("_", "-")), Cell(_option(name, value))) for name, value in options.items())
    note = "Loss, negative proxies and, in a sweep, proxies per class are the method's."
    return Table("options", "Training options", (Column("option"), Column("value")), rows, (note,))


def _option(name: str, value: Any) -> str:
    return "as the loss has it" if name == "class_weights" and value is None else str(value)


def _machine(results: Results) -> Table:
    hardware = results["hardware"]
    memory = "unknown" if hardware["memory_gib"] is None else f"{hardware['memory_gib']} GiB"
    facts = {
        "processor": hardware["processor"],
        "cores": str(hardware["cores"]),
        "memory": memory,
        "GPUs": ", ".join(hardware["gpus"]) or "none",
    } | results["versions"]
    rows = tuple((Cell(name), Cell(value)) for name, value in facts.items())
    note = "Of the machine that made the report; cells may have run on others."
    return Table("machine", "Machine and versions", (Column("what"), Column("is")), rows, (note,))


def _times(results: Results) -> Table:
    """Of every row: its parts and their run time."""
    names = ("training images", "proxies per class", "parts finished", "parts", "run time")
    rows = tuple(
        (
            Cell(row_title(results, row)),
            _count(row["training_images"]) if row["finished"] else NOTHING,
            _per_class(row["proxies_per_class"]) if row["finished"] else NOTHING,
            _count(row["finished"]),
            _count(row["cells"]),
            Cell(duration(row["seconds"]), numbers=(row["seconds"],)) if row["finished"] else NOTHING,
        )
        for row in ordered(results)
    )
    columns = (Column("method"), *(Column(name, ("",) if name != "run time" else (" (s)",)) for name in names))
    note = "Run times are summed over the finished parts, loading and evaluation included."
    return Table("run-times", "Run times", columns, rows, (note,))


def duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 20 s` or `12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60:,} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _per_class(counts: Sequence[int]) -> Cell:
    """`2` where every class has as many, else `1 to 8`."""
    if not counts:
        return NOTHING
    least, most = min(counts), max(counts)
    return _count(least) if least == most else Cell(f"{least} to {most}")


def _count(number: int) -> Cell:
    return Cell(f"{number:,}", numbers=(number,))
