"""Embedding models: an encoder with its published weights, not trained further. They find similar images but do not
score findings."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import cbmir
from cbmir.card import INTENDED_USE_WITHOUT_FINDINGS, ModelCard
from cbmir.errors import UserError
from cbmir.input_file import MOST_MODEL, input_digest
from cbmir.labels import LabelSet
from cbmir.preprocessing import PreprocessSpec
from cbmir.training.config import TrainConfig
from cbmir.training.encoders.encoder import build_encoder, grey_range_of, own_input
from cbmir.training.model import NoHead, RetrievalModel
from cbmir.training.run import embedding_fingerprint


def embedding_model(
    encoder: str, weights: str, *, image_size: int | None = None, grey_range: str = "own", intensity: str = "header"
) -> tuple[RetrievalModel, ModelCard]:
    """Return the model, in evaluation mode on the CPU, and its card. It sees the whole image, resized to a square.

    Args:
        encoder: A name that `build_encoder` accepts.
        weights: A file with every tensor of the encoder, or `imagenet`.
        image_size: Side of the square in pixels; None means that of the published weights (`own_input`).
        grey_range: The values for black and white that the weights expect (`grey_range_of`).
        intensity: How stored values become grey values (`PreprocessSpec`).

    Raises:
        UserError: `weights` is `none`.
        EncoderError: As in `build_encoder`.
    """
    if weights == "none":
        raise UserError("expected weights of the encoder, found none: random ones find nothing useful; give a file "
                        "with --weights, or imagenet")  # fmt: skip
    size = image_size or own_input(encoder).image_size
    spec, own = PreprocessSpec(resize=size, crop=size, intensity=intensity), grey_range_of(encoder, grey_range)
    network, dim = build_encoder(encoder, weights, image_size=size, grey_range=own, complete=True)
    model = RetrievalModel(network, NoHead(dim)).eval()
    facts = {"weights": "imagenet", "grey_range": own.to_json()}
    if weights != "imagenet":
        file = Path(weights)
        facts |= {"weights": file.name, "weights_sha256": input_digest(file, MOST_MODEL)}
    card = ModelCard(
        labels=LabelSet(()),
        preprocess=spec,
        encoder=encoder,
        embedding_dim=dim,
        head=model.head.kind,
        sigma=TrainConfig.sigma,  # weights the neighbours in `runtime.results.agreement`
        proxies_per_class=(),
        negative_proxies=False,
        thresholds=(),
        calibration=(),
        fingerprint=embedding_fingerprint(model, spec),
        training=facts,
        versions={"cbmir": cbmir.__version__} | {name: version(name) for name in ("torch", "torchvision", "timm")},
        intended_use=INTENDED_USE_WITHOUT_FINDINGS,
    )
    return model, card
