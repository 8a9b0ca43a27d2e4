"""Shared by several commands: options, examples in the help, and output."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.card import BALANCED, NOT_A_DEVICE
from cbmir.choices import ENGINES, OPERATING_POINTS, RECIPES
from cbmir.preprocessing import INTENSITIES

if TYPE_CHECKING:
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms

log = logging.getLogger("cbmir")

PATH = click.Path(path_type=Path)


class HelpFormatter(click.HelpFormatter):
    """A formatter that breaks lines only between words, never at the hyphen of an option or file name."""

    _UNBROKEN = "\N{NON-BREAKING HYPHEN}"

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", self._UNBROKEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: int, **options: int) -> None:
        super().write_dl([(name, text.replace("-", self._UNBROKEN)) for name, text in rows], *args, **options)

    def getvalue(self) -> str:
        return super().getvalue().replace(self._UNBROKEN, "-")


class Context(click.Context):
    """A context that formats help with `HelpFormatter`."""

    formatter_class = HelpFormatter


class Command(click.Command):
    """A command with cbmir's help format."""

    context_class = Context


def examples(*lines: str) -> str:
    """Format examples for the end of a command's help: lines to paste, with notes after `#`."""
    return "\n  ".join(("\b\nExamples:" if len(lines) > 1 else "\b\nExample:", *lines))


def command(*lines: str, **attributes: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a `click.command` with examples at the end of its help."""
    return click.command(**{"cls": Command} | attributes, epilog=examples(*lines))


def option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """Make a `click.option`, with its default in the help unless it is empty."""
    return click.option(*names, **{"show_default": attributes.get("default") not in (None, "")} | attributes)


def together(*options: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Combine options into one decorator; the help lists them in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


#: Passes `as_json` to the command.
json_option = option("--json", "as_json", is_flag=True, help="Print JSON, for a program to read.")


def print_json(value: Any) -> None:
    """Print one JSON value on stdout, indented, with paths as text. Raises TypeError for other types."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=os.fspath))


def print_answer(as_json: bool, value: Any, text: str) -> None:
    """Print a command's answer: `value` as JSON if `as_json`, else `text`."""
    if as_json:
        print_json(value)
    else:
        click.echo(text)


def tell_warnings(images: int, kinds: Mapping[str, int], listed: Path | str) -> None:
    """Log how many images were read with a warning, of which kinds, and where they are listed."""
    if images:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        log.warning("%s images were read with a warning (%s): see %s", f"{images:,}", counts, listed)


def announce(url: str, notes: Iterable[str]) -> None:
    """Print the address of a listening service, and the notes of its model card."""
    click.echo("\n".join((f"{url}  (Ctrl-C to stop)", *notes, NOT_A_DEVICE)))


engine_option = option("--engine", type=click.Choice(ENGINES), default="auto",
                       help="The engine that runs the model. auto runs a file on CUDA or the CPU, and picks the "
                       "fastest file of a folder. Any other engine must be installed.")  # fmt: skip
allow_lateral_option = option("--allow-lateral", is_flag=True, help="Accept lateral views too, with a warning. They "
                              "are refused by default: the findings are those of frontal radiographs.")  # fmt: skip
operating_point_option = option("--operating-point", type=click.Choice(OPERATING_POINTS), default=BALANCED,
                                help="Which of the model's thresholds to use: balanced, or those with a "
                                "sensitivity or a specificity of at least 0.90 on its validation "
                                "images.")  # fmt: skip
threads_option = option("--threads", type=click.IntRange(1), help="Threads per answer.  [default: the processors, "
                        "divided by the number of parallel answers]")  # fmt: skip


def _is_gallery(place: str) -> bool:
    from cbmir.runtime.gallery.database import DATABASE, live_folder
    from cbmir.runtime.gallery.protocol import is_milvus

    return is_milvus(place) or (live_folder(Path(place)) / DATABASE).is_file()


def _is_model(place: str) -> bool:
    from cbmir.runtime.engines.registry import ENDINGS, model_files
    from cbmir.runtime.models.catalog import find_model

    path = find_model(place)
    return bool(model_files(path)) if path.is_dir() else path.is_file() and path.name.endswith(ENDINGS)


def _swapped(ctx: click.Context, found: str) -> click.BadParameter:
    both = {"model", "gallery"} <= {one.name for one in ctx.command.params}
    return click.BadParameter(f"{found}.{' Are MODEL and GALLERY swapped?' if both else ''}")


def _refuse_gallery(ctx: click.Context, option: click.Parameter, model: Path) -> Path:
    if not model.is_file() and _is_gallery(str(model)):
        raise _swapped(ctx, f"{str(model)!r} is a gallery, not a model")
    return model


def _refuse_model(ctx: click.Context, option: click.Parameter, gallery: str | None) -> str | None:
    if gallery is not None and not _is_gallery(gallery) and _is_model(gallery):
        raise _swapped(ctx, f"{gallery!r} is a model, not a gallery")
    return gallery


model_argument = click.argument("model", type=PATH, callback=_refuse_gallery)
gallery_argument = click.argument("gallery", type=click.Path(), callback=_refuse_model)


def gallery_option(default: str) -> Callable[[Any], Any]:
    """Make the option `--gallery`; its help says what happens without it."""
    return option("--gallery", callback=_refuse_model, help="A gallery's folder, or a milvus: address.  "
                  f"[default: {default}]")  # fmt: skip


def _load_key(ctx: click.Context, option: click.Parameter, place: str | None) -> Pseudonyms | None:
    if place is None:
        return None
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms

    return Pseudonyms.load(place)


PATIENT_DATA = (
    "A gallery is patient data: its images, reports and embeddings identify patients. Protect it like the images."
)
STAYS_CLEAR = (
    "Only the ids of patients and studies are pseudonyms. Ids and paths of images, reports, SOP instance UIDs, "
    "dates and sources stay in plain text, and may name patients."
)
#: Passes `pseudonyms` to the command, a `Pseudonyms` or None.
pseudonyms_option = option("--pseudonyms", callback=_load_key, metavar="FILE|env:NAME",
                           help="The key of a gallery that keeps patients' and studies' ids as pseudonyms "
                           "(HMAC-SHA256): a file that only you can read, or an environment variable. Ids and paths "
                           "of images, reports, SOP instance UIDs, dates and sources stay in plain text.")  # fmt: skip
#: The arguments of `Finder.open` besides model and gallery.
finder_options = together(operating_point_option, allow_lateral_option, pseudonyms_option, engine_option)

model_option = option("--model", required=True, type=PATH, callback=_refuse_gallery, help="A model file, a folder of "
                      "them, or the name of a model that comes with cbmir ('cbmir models').")  # fmt: skip


def listen_options(port: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the options `--host`, and `--port` with this default."""
    return together(
        option("--host", default="127.0.0.1", help="The address to listen on."),
        option("--port", type=click.IntRange(0, 65535), default=port, help="The port; 0 takes any free one."),
    )


#: How to read images; shared by `build`, `add` and `embed`.
reading_options = together(
    option("--workers", type=click.IntRange(0), help="Processes that decode images.  [default: one per processor]"),
    option("--reduced-jpeg2000", is_flag=True, help="Decode large JPEG 2000 images at a lower resolution: faster, "
           "and within one grey level for all but a few pixels."),
)  # fmt: skip
tolerance_option = option("--tolerance", "tolerances", multiple=True, metavar="NAME=NUMBER",
                          help="Change a limit: overlap or cross (minimum share of the top 10 neighbours kept), ndcg, "
                          "auc or score (maximum difference), cosine (minimum). May be repeated.")  # fmt: skip


@contextmanager
def resumable(kept: str = "Finished work is kept") -> Iterator[None]:
    """Log, after Ctrl-C within the block, that finished work is kept."""
    try:
        yield
    except KeyboardInterrupt:
        log.warning("%s: run the same command again to continue.", kept)
        raise


def _take_recipe(ctx: click.Context, option: click.Parameter, name: str) -> None:
    """Use the recipe's values as defaults of its options."""
    ctx.default_map = {**(ctx.default_map or {}), **RECIPES[name]}


def recipe_option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """Make an option whose default depends on the recipe; the help shows that of the first recipe."""
    recipe = next(iter(RECIPES.values()))
    return option(*names, default=recipe[names[0].split("/")[0].removeprefix("--").replace("-", "_")], **attributes)


#: Options that `cbmir train` and `cbmir benchmark` share: encoder, schedule, proxies, precision, devices.
training_options = together(
    option("--recipe", type=click.Choice(list(RECIPES)), default=next(iter(RECIPES)), is_eager=True,
           expose_value=False, callback=_take_recipe, help="Default values of the other options. fitted: a "
           "classifier with augmentation and averaged weights, followed by a linear fit. paper: the paper's loss and "
           "settings; '--recipe paper --help' shows its values."),
    option("--encoder", default="densenet121",
           help="A torchvision classification model (densenet121, resnet18 …), timm:NAME, xrv:densenet121 "
           "(torchxrayvision), or rad-dino. Vision transformers, such as rad-dino, need --recipe paper."),
    option("--weights", default="none", help="Initial weights of the encoder: none (random), imagenet (downloaded by "
           "torchvision or timm), or a file: a state dict, safetensors, or a model of torchxrayvision."),
    recipe_option("--epochs", help="Maximum number of epochs; the best one by AUC and corrected nDCG is kept."),
    recipe_option("--patience", help="Stop after this many epochs without improvement."),
    recipe_option("--batch-size", help="Images per step, on all devices together."),
    recipe_option("--lr", help="Learning rate of AdamW; with --schedule cosine, the highest one."),
    recipe_option("--head-rate", help="Learning rate of the head, as a multiple of --lr."),
    recipe_option("--weight-decay", help="Weight decay of AdamW."),
    recipe_option("--schedule", type=click.Choice(["constant", "cosine"]),
                  help="Learning rate: constant, or a warm-up and then a cosine decay."),
    recipe_option("--average", type=click.FloatRange(0, 1, max_open=True),
                  help="Keep a moving average of the weights with this decay; 0 keeps the weights themselves."),
    recipe_option("--augment", type=click.Choice(["crop", "full"]),
                  help="Random crops, or also rotation, scale and exposure."),
    option("--sigma", default=0.7, help="Width of the Gaussian similarity to proxies."),
    option("--proxies-per-class", default="2",
           help="Proxies of each finding: a number, or auto: more for common findings, fewer for rare ones."),
    option("--class-weights/--no-class-weights", default=None,
           help="Whether rare findings count as much as common ones.  [default: with the loss proxy, as in the paper]"),
    option("--image-size", default=224, help="Side of the crop in pixels; images are first resized to 270/224 of it."),
    option("--intensity", type=click.Choice(INTENSITIES), default="header",
           help="How stored values become grey: by the window or table of the DICOM header, from the lowest to the "
           "highest value, or from the 1st to the 99th percentile. Every later step reads it from the card."),
    option("--precision", type=click.Choice(["auto", "32", "bf16-mixed", "16-mixed"]), default="auto",
           help="auto: bf16 or fp16 on CUDA, 32 on a CPU."),
    option("--devices", default="auto",
           help="Number of GPUs, or of CPU processes. In a benchmark auto is 1 per cell."),
)  # fmt: skip
