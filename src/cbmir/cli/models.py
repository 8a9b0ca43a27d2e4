"""`cbmir models`: list the models that come with cbmir."""

from __future__ import annotations

import shutil
from textwrap import fill

from cbmir.card import ModelCard
from cbmir.cli.options import command, json_option, print_answer
from cbmir.labels import spelled


@command(
    "cbmir models",
    "cbmir models --json > cards.json                        # the full model cards",
    "cbmir index build starter my.csv -o gallery             # a name works wherever MODEL is expected",
)
@json_option
def models(as_json: bool) -> None:
    """Show the models that come with cbmir: how each was made, how well it works, and what it must not be used for."""
    from cbmir.runtime import open_engine
    from cbmir.runtime.models.catalog import MODELS, model_file

    wide = min(shutil.get_terminal_size().columns, 100)
    found, lines = {}, []
    for name in MODELS:
        file = model_file(name)
        with open_engine(file) as opened:
            card = opened.card
        found[name] = {"file": file, "bytes": file.stat().st_size, "card": card.to_json()}
        lines += [name]
        lines += [fill(line, wide, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
                  for line in _words(card)]  # fmt: skip
        lines += [f"  {file} ({file.stat().st_size / 1e6:.1f} MB)", ""]
        lines += [f"  cbmir index build {name} manifest.csv -o gallery", f"  cbmir query {name} gallery chest.png", ""]
    print_answer(as_json, found, "\n".join(lines[:-1]))


def _words(card: ModelCard) -> list[str]:
    images = card.training.get("images", {}).get("train", 0)
    spec = f"{card.encoder}, {card.preprocess.crop} pixels, {card.embedding_dim} dimensions, {card.precision}"
    lines = [
        f"Findings: {', '.join(map(spelled, card.labels.names))}",
        f"Model: {spec}; fingerprint {card.fingerprint[:12]}",
        f"Trained on {images:,} images of {card.training.get('patients', 0):,} patients "
        f"({card.training.get('source', 'not stated')})",
    ]
    for name, figure in card.metrics.items():
        values = {"AUC": figure} if "value" in figure else {
            "nDCG@10 corrected for chance": figure["corrected_ndcg"],
            "the same with Jaccard gain": figure["corrected_jaccard_ndcg"],
        }  # fmt: skip
        shown = (f"{title} {_interval(one)}" for title, one in values.items())
        lines.append(f"{name.removesuffix(' auc').capitalize()}: {'; '.join(shown)}")
    return [*card.notes, *lines, f"Licence: {card.licence}", card.intended_use]


def _interval(figure: dict[str, float]) -> str:
    return f"{figure['value']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"
