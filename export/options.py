"""The options of an export, and whether it is possible on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cbmir.errors import EngineError, UserError
from cbmir.export import openvino, tensorrt
from cbmir.export.calibration import check_percentile
from cbmir.export.parity import LIMITS
from cbmir.runtime.engines.openvino import import_openvino, why_no_bfloat16


@dataclass(frozen=True)
class ExportOptions:
    """The files to write beside the float32 file, and how. See `cbmir export --help`.

    Args:
        openvino: bf16, int8 or both.
        targets: TensorRT targets (sm86 …, or current).
        images: A manifest of images for the comparison, instead of the run's images; required for an encoder or file.
        calibrate: A manifest to calibrate int8 on, instead of the run's images or `images`.
        percentile: Limits the ranges of activations in calibration; in (50, 100].
        tolerances: NAME=NUMBER for `ParityLimits.changed`.
        accept_parity_loss: Also write files that miss their limits.
    """

    fp16: bool = False
    int8: bool = False
    openvino: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    max_batch: int = 32
    images: Path | None = None
    calibrate: Path | None = None
    calibration_images: int = 96
    percentile: float | None = None
    tolerances: tuple[str, ...] = ()
    accept_parity_loss: bool = False

    @property
    def quantises(self) -> bool:
        """Whether any file is int8."""
        return self.int8 or "int8" in self.openvino

    def __post_init__(self) -> None:
        check_percentile(self.percentile)
        unknown = sorted(set(self.openvino) - {"bf16", "int8"})
        if unknown:
            raise UserError(f"expected bf16 or int8 for OpenVINO, found {', '.join(unknown)}")


def check_possible(options: ExportOptions) -> None:
    """Check tolerances, packages, the processor and GPUs before the long work begins."""
    LIMITS["float32"].changed(*options.tolerances)
    if options.openvino:
        import_openvino()
    if "bf16" in options.openvino and (why := why_no_bfloat16()):
        raise EngineError(why)
    if "int8" in options.openvino:
        openvino.import_nncf()
    for target in options.targets:
        tensorrt.resolve_target(target)
