"""DICOM: the expected outcome of every real file, and truncated codestreams of real files."""

from __future__ import annotations

import csv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.encaps import encapsulate, generate_frames
from pydicom.pixels import apply_modality_lut, apply_voi_lut
from pydicom.uid import (
    ImplicitVRLittleEndian,
    JPEGBaseline8Bit,
)

from cbmir.errors import (
    DamagedImageError,
    DicomImageError,
    ImageError,
)
from cbmir.runtime.imaging.reader import read_image
from dicom_files import file_bytes

OUTCOMES: dict[str, type[ImageError] | tuple[str, int]] = {  # view and number of warnings, or the error
    "chest_mono1_10bit_no_preamble_no_meta.dcm": ("PA", 0),
    "chest_mono1_10bit_explicit.dcm": ("PA", 0),
    "dx_thorax_mono1_8bit_small.dcm": ("", 3),  # a lateral dog: no ViewPosition, but description and picture
    "rsna_nih_jpegbaseline_mono2.dcm": ("PA", 1),
    "chest_rg1_j2k_lossy_mono1_15bit.dcm": ("PA", 0),
    "chest_canon_j2k_lossless_mono1_12bit_bad.dcm": DamagedImageError,
    "chest_canon_j2k_lossless_mono1_12bit_fixed.dcm": ("PA", 0),
    "cr_chest_tiny_charset_japanese.dcm": DicomImageError,
    "nonchest_testpattern_ot_16bit_signed.dcm": DicomImageError,
    "nonchest_hip_rg2_jpeglossless_sv1_10bit.dcm": DicomImageError,
    "nonchest_hip_rg2_jpegls_lossless_10bit.dcm": DicomImageError,
    "nonchest_hip_rg2_jpegextended_10bit_fixed.dcm": DicomImageError,
    "nonchest_tibia_rg3_jpegls_mono1.dcm": DicomImageError,
    "lut_voi_lut_sequence.dcm": DicomImageError,
    "lut_modality_lut_sequence.dcm": DicomImageError,
    "derived_chest_mono1_10bit_rle.dcm": ("PA", 0),
    "derived_chest_mono1_10bit_j2k_lossless.dcm": ("PA", 0),
    "derived_chest_mono1_10bit_jpegls_lossless.dcm": ("PA", 0),
    "derived_chest_mono1_10bit_deflated.dcm": ("PA", 0),
    "derived_chest_missing_tags.dcm": DicomImageError,
    "derived_chest_multi_window_sigmoid.dcm": ("PA", 0),
    "derived_chest_truncated_pixels.dcm": DamagedImageError,
}


@pytest.mark.parametrize("file", OUTCOMES)
def test_real_files(shared: Path, file: str) -> None:
    path, outcome = shared / "dicom" / file, OUTCOMES[file]
    if not isinstance(outcome, tuple):
        with pytest.raises(outcome, match=file):
            read_image(path)
        return
    radiograph = read_image(path)
    assert (radiograph.view, len(radiograph.warnings)) == outcome
    with (shared / "dicom" / "manifest.csv").open() as stream:
        sizes = {row["file"]: row["rows_x_cols"] for row in csv.DictReader(stream)}
    assert "x".join(map(str, radiograph.pixels.shape)) == sizes[file]
    if file.startswith(("derived", "chest_mono1")) and "sigmoid" not in file:
        original = read_image(shared / "dicom" / "chest_mono1_10bit_explicit.dcm").pixels
        assert np.array_equal(radiograph.pixels, original)


def test_every_real_file_has_an_outcome(shared: Path) -> None:
    assert {path.name for path in (shared / "dicom").glob("*.dcm")} == set(OUTCOMES)


@pytest.mark.parametrize("file", [file for file, outcome in OUTCOMES.items() if isinstance(outcome, tuple)])
def test_grey_values_of_real_files_by_pydicom(shared: Path, file: str) -> None:
    """Compare with pydicom's modality LUT and VOI LUT, pixel by pixel; its range is that of the stored bits."""
    dataset = dcmread(shared / "dicom" / file, force=True)
    if dataset.get("VOILUTFunction") == "SIGMOID":
        dataset.WindowCenter, dataset.WindowWidth = 512, 1024  # the first of two; pydicom fails on the second
    if "TransferSyntaxUID" not in dataset.file_meta:
        dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    if dataset.file_meta.TransferSyntaxUID == JPEGBaseline8Bit:
        dataset.pixel_array_options(decoding_plugin="pillow")  # another plugin rounds differently
    values = apply_modality_lut(dataset.pixel_array, dataset)
    if "WindowWidth" in dataset:
        grey = apply_voi_lut(values, dataset) / (2**dataset.BitsStored - 1)
    else:
        grey = (values - values.min()) / np.ptp(values)
    expected = 255 * (1 - grey if dataset.PhotometricInterpretation == "MONOCHROME1" else grey)
    pixels = read_image(shared / "dicom" / file).pixels
    assert np.abs(pixels - expected).max() <= 0.5 + 1e-6


@pytest.mark.parametrize("file", ["rsna_nih_jpegbaseline_mono2.dcm"])
def test_lungs_are_darker_than_the_middle_of_a_real_chest(shared: Path, file: str) -> None:
    """These were checked once by eye: upright, with bright bone."""
    pixels = read_image(shared / "dicom" / file).pixels
    height, width = pixels.shape
    band = pixels[int(0.35 * height) : int(0.55 * height)].mean(axis=0)
    right, middle, left = (band[int(a * width) : int((a + 0.1) * width)].mean() for a in (0.22, 0.45, 0.68))
    assert max(right, left) < middle - 20


def test_air_is_dark_in_a_real_monochrome1_file(shared: Path) -> None:
    """Stored 0 is white. The window 550 / 1024 is applied to the stored values by hand, then inverted."""
    path = shared / "dicom" / "chest_mono1_10bit_explicit.dcm"
    expected = 255 - 255 * np.clip((dcmread(path).pixel_array - 549.5) / 1023 + 0.5, 0, 1)
    assert np.abs(read_image(path).pixels - expected).max() <= 0.5


COMPRESSED = [
    "rsna_nih_jpegbaseline_mono2.dcm",
    "nonchest_hip_rg2_jpegextended_10bit_fixed.dcm",
    "nonchest_hip_rg2_jpeglossless_sv1_10bit.dcm",
    "nonchest_tibia_rg3_jpegls_mono1.dcm",
    "derived_chest_mono1_10bit_jpegls_lossless.dcm",
    "derived_chest_mono1_10bit_j2k_lossless.dcm",
    "chest_rg1_j2k_lossy_mono1_15bit.dcm",
    "derived_chest_mono1_10bit_rle.dcm",
]


@pytest.mark.parametrize("part", [0.5, 0.95])
@pytest.mark.parametrize("file", COMPRESSED)
def test_a_truncated_codestream_is_damaged(shared: Path, file: str, part: float) -> None:
    """Several decoders would silently fill in the missing part."""
    dataset = dcmread(shared / "dicom" / file)
    dataset.BodyPartExamined = "CHEST"
    (frame,) = generate_frames(dataset.PixelData, number_of_frames=1)
    dataset.PixelData = encapsulate([frame[: int(part * len(frame))]])
    with pytest.raises(DamagedImageError, match=r"PixelData \(7FE0,0010\)"):
        read_image(file_bytes(dataset, enforce=False))


@pytest.mark.parametrize("file", COMPRESSED[:4])
def test_a_complete_codestream_is_read(shared: Path, file: str) -> None:
    """Some end in a padding byte FF or 00 for an even length."""
    dataset = dcmread(shared / "dicom" / file)
    dataset.BodyPartExamined = "CHEST"
    assert read_image(file_bytes(dataset, enforce=False)).pixels.shape == (dataset.Rows, dataset.Columns)


def test_two_frames_in_the_pixel_data_of_one(shared: Path) -> None:
    dataset = dcmread(shared / "dicom" / "derived_chest_mono1_10bit_jpegls_lossless.dcm")
    (frame,) = generate_frames(dataset.PixelData, number_of_frames=1)
    dataset.PixelData = encapsulate([frame, frame])
    with pytest.raises(DamagedImageError, match=r"PixelData \(7FE0,0010\)"):
        read_image(file_bytes(dataset, enforce=False))


def test_eight_threads_read_files_as_one_does(shared: Path) -> None:
    files = [shared / "dicom" / file for file, outcome in OUTCOMES.items() if isinstance(outcome, tuple)]
    files = [file for file in files if file.stat().st_size < 400_000]
    assert len(files) >= 8
    alone = [read_image(file) for file in files]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(read_image, files * 4))
    for one, other in zip(alone * 4, together, strict=True):
        assert np.array_equal(one.pixels, other.pixels)
        assert (one.name, one.sha256, one.patient_id, one.study_id, one.view, one.warnings) == (
            other.name, other.sha256, other.patient_id, other.study_id, other.view, other.warnings,
        )  # fmt: skip
