"""A TensorRT plan and its sidecar. A plan has no room for a model card, so `model.sm86.plan.json` stands beside it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.card import CARD_KEY, HEAD_KEY, ModelCard
from cbmir.errors import CardError, CbmirError, ModelError
from cbmir.runtime.engines.base import decode_head, encode_head
from cbmir.runtime.engines.nvidia import current_gpu, find_tensorrt

_FACTS = {"target": str, "max_batch": int, "flavour": str, "version": str, "sha256": str, "source_sha256": str}


@dataclass(frozen=True, eq=False)
class PlanInfo:
    """A plan's sidecar: card and head (float32 [P, D]) of its model, the GPU it was built for (sm86), its largest
    batch, flavour and version of the TensorRT that built it, and SHA-256 of the plan and of the ONNX file."""

    card: ModelCard
    head: NDArray[np.float32]
    target: str
    max_batch: int
    flavour: str
    version: str
    sha256: str
    source_sha256: str

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in _FACTS}
        return {CARD_KEY: self.card.to_json(), HEAD_KEY: encode_head(self.head), **facts}

    def why_not(self) -> str:
        """Why this plan cannot run here, in a sentence; "" where its GPU and its TensorRT are here."""
        try:
            gpu = current_gpu()
            if gpu.target != self.target:
                return (f"the plan was built for a GPU of compute capability {self.target}, and this {gpu.name} is "
                        f"{gpu.target}; export again with --target {gpu.target}")  # fmt: skip
            trt, _ = find_tensorrt(self.flavour)
        except CbmirError as error:
            return str(error)
        if trt.__version__ != self.version:
            return (f"the plan was built by {self.flavour} {self.version}, and {trt.__version__} is installed; export "
                    f"it again, or install that version")  # fmt: skip
        return ""


def sidecar_of(plan: Path) -> Path:
    return plan.with_name(plan.name + ".json")


def read_plan_info(plan: Path) -> PlanInfo:
    """Read a plan's sidecar. Raises CardError where it is missing or damaged."""
    path = sidecar_of(plan)
    try:
        data = json.loads(path.read_text("utf-8"))
        facts = {name: data[name] for name in _FACTS}
        card, head = json.dumps(data[CARD_KEY]), data[HEAD_KEY]
    except FileNotFoundError as error:
        raise CardError(f"{plan}: expected its card in {path.name} beside it, found none; the two files that "
                        f"'cbmir export' writes belong together") from error  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CardError(f"{path}: expected the card of a plan in JSON, found {type(error).__name__}: {error}; export "
                        f"the model again") from error  # fmt: skip
    wrong = [name for name, kind in _FACTS.items() if not isinstance(facts[name], kind)]
    if wrong or not isinstance(head, str):
        raise CardError(f"{path}: expected text and numbers of a plan, found others in "
                        f"{', '.join(wrong or [HEAD_KEY])}; export the model again")  # fmt: skip
    model = ModelCard.loads(card, source=str(path))
    return PlanInfo(model, decode_head(head, model, path), **facts)


def read_plan(plan: Path, info: PlanInfo) -> bytes:
    """The bytes of a plan. Raises ModelError where they are not those that its sidecar was written for."""
    try:
        data = plan.read_bytes()
    except OSError as error:
        raise ModelError(f"{plan}: cannot read the plan ({error.strerror})") from error
    found = hashlib.sha256(data).hexdigest()
    if found != info.sha256:
        raise ModelError(f"{plan}: expected SHA-256 {info.sha256} by {sidecar_of(plan).name}, found {found}: the plan "
                         f"is damaged or of another export; export the model again")  # fmt: skip
    return data
