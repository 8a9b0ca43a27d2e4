"""Tables about how a benchmark was made: its selections, options, machine and run times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.report.tables import NOTHING, Column, Table, TableCell, number, row_title
from cbmir.training.comparison.results import Results, ordered
from cbmir.training.config import TrainConfig

#: Fields of TrainConfig that a method or a part determines.
_OWN = ("manifest", "manifest_fingerprint", "labels", "loss", "negative_proxies", "linear_fit", "seed", "fold")


def selections_table(results: Results) -> Table:
    """Return the numbers of images and patients of each part."""
    splits = {"train": "training", "val": "validation", "test": "queries"}
    counts = [Column(f"{title}, {what}", ("",)) for title in splits.values() for what in ("images", "patients")]
    rows = tuple(
        (
            TableCell(part["part"]),
            *(number(part[what][split]) for split in splits for what in ("images", "patients")),
            TableCell(part["file"]),
        )
        for part in results["selections"]
    )
    return Table("selections", "Selections", (Column("part"), *counts, Column("file")), rows)


def options_table(results: Results) -> Table:
    """Return the options shared by all methods that train a network, including defaults, and those tuned for one."""
    plan, defaults = results["plan"], {field.name: field.default for field in fields(TrainConfig)}
    options = {name: value for name, value in (defaults | plan["training"]).items() if name not in _OWN}
    if options["class_weights"] is None:
        options["class_weights"] = "the loss's own"
    for method, own in plan["tuned"].items():
        if method in results["methods"] and METHODS[method].answer is None:  # the others train no network
            options |= {f"{name}, {METHODS[method].title}": own[name] for name in own if name in options}
    rows = tuple((TableCell(name.replace("_", "-")), TableCell(str(value))) for name, value in options.items())
    note = "The method determines the loss, linear fit, negative proxies and, in a sweep, the proxies per class."
    return Table("options", "Training options", (Column("option"), Column("value")), rows, (note,))


def machine_table(results: Results) -> Table:
    """Return the machine and the versions that made the report."""
    hardware = results["hardware"]
    facts = {"processor": hardware["processor"], "cores": str(hardware["processors"])}
    facts |= {"memory": f"{hardware['memory_gib'] or 'unknown'} GiB"}
    facts |= {"GPUs": ", ".join(hardware["gpus"]) or "none"} | results["versions"]
    rows = tuple((TableCell(name), TableCell(value)) for name, value in facts.items())
    note = "This machine made the report; cells may have run on others."
    return Table("machine", "Machine and versions", (Column("name"), Column("value")), rows, (note,))


def times_table(results: Results) -> Table:
    """Return the parts of every row and their run time."""
    names = ("training images", "proxies per class", "parts finished", "parts", "run time")
    rows = tuple(
        (
            TableCell(row_title(results, row)),
            number(row["training_images"]) if row["finished"] else NOTHING,
            _per_class(row["proxies_per_class"]) if row["finished"] else NOTHING,
            number(row["finished"]),
            number(row["cells"]),
            TableCell(duration(row["seconds"]), numbers=(row["seconds"],)) if row["finished"] else NOTHING,
        )
        for row in ordered(results)
    )
    columns = (Column("method"), *(Column(name, ("",) if name != "run time" else (" (s)",)) for name in names))
    note = "Summed over the finished parts. For a network, the time of its epochs and of the evaluation."
    return Table("run-times", "Run times", columns, rows, (note,))


def duration(seconds: float) -> str:
    """Format as `1 h 02 min`, `3 min 20 s` or `12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60:,} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _per_class(counts: Sequence[int]) -> TableCell:
    """Return a number such as `2` if it is the same for every class, else a range such as `1 to 8`."""
    least, most = min(counts, default=None), max(counts, default=None)
    return number(least) if least == most else TableCell(f"{least} to {most}")
