"""All kinds of results: valid by dciodvfy for every readable file, also when read back, and without others' data."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import Dataset, dcmread
from pydicom.uid import ExplicitVRLittleEndian

from cbmir.card import ModelCard
from cbmir.errors import DicomImageError, MissingDependencyError, NotAnImageError, UserError
from cbmir.labels import CHEXPERT_9, NIH_14, LabelSet
from cbmir.runtime import Finder
from cbmir.runtime.dicom_output import KINDS, Results, is_own_result, make_results, warm_up
from cbmir.runtime.imaging.dicom_header import pydicom_unlogged
from dicom_files import file_bytes

pytest.importorskip("highdicom")
Make = Callable[..., bytes]
Check = Callable[[Dataset, Path], list[str]]

#: Files of ../shared/dicom, as in the table in test_dicom_real_files.py.
READABLE = (
    "chest_canon_j2k_lossless_mono1_12bit_fixed.dcm", "chest_mono1_10bit_explicit.dcm",
    "chest_mono1_10bit_no_preamble_no_meta.dcm", "chest_rg1_j2k_lossy_mono1_15bit.dcm",
    "derived_chest_mono1_10bit_deflated.dcm", "derived_chest_mono1_10bit_j2k_lossless.dcm",
    "derived_chest_mono1_10bit_jpegls_lossless.dcm", "derived_chest_mono1_10bit_rle.dcm",
    "derived_chest_multi_window_sigmoid.dcm", "dx_thorax_mono1_8bit_small.dcm", "rsna_nih_jpegbaseline_mono2.dcm",
)  # fmt: skip
REFUSED = (
    "chest_canon_j2k_lossless_mono1_12bit_bad.dcm", "cr_chest_tiny_charset_japanese.dcm",
    "derived_chest_missing_tags.dcm", "derived_chest_truncated_pixels.dcm", "lut_modality_lut_sequence.dcm",
    "lut_voi_lut_sequence.dcm", "nonchest_hip_rg2_jpegextended_10bit_fixed.dcm",
    "nonchest_hip_rg2_jpeglossless_sv1_10bit.dcm", "nonchest_hip_rg2_jpegls_lossless_10bit.dcm",
    "nonchest_testpattern_ot_16bit_signed.dcm", "nonchest_tibia_rg3_jpegls_mono1.dcm",
)  # fmt: skip


def test_all_files_are_listed(shared: Path) -> None:
    names = {path.name for path in (shared / "dicom").glob("*.dcm")}
    assert names == {*READABLE, *REFUSED}


@pytest.mark.parametrize("name", READABLE)
def test_every_readable_file_gives_valid_objects(
    name: str, shared: Path, clinic: Any, errors_of: Check, tmp_path: Path
) -> None:
    data = (shared / "dicom" / name).read_bytes()
    results = clinic.results(data, kinds=KINDS)
    source = dcmread(io.BytesIO(data), force=True)
    for kind, dataset in (("sr", results.sr), ("sc", results.sc)):
        assert errors_of(dataset, tmp_path / kind) == []
        again = dcmread(tmp_path / kind)
        assert again.file_meta.TransferSyntaxUID == ExplicitVRLittleEndian
        assert again.StudyInstanceUID == source.StudyInstanceUID
        assert again.get("PatientID", "") == source.get("PatientID", "")
        assert again.get("PatientName", "") == source.get("PatientName", "")
        assert is_own_result(again)


@pytest.mark.parametrize(
    "tags",
    [
        {},
        {"SpecificCharacterSet": "ISO_IR 192", "PatientName": "山田^太郎=やまだ^たろう", "StudyDescription": "胸部"},
        {"SpecificCharacterSet": ["", "ISO 2022 IR 87"], "PatientName": "Yamada^Tarou=山田^太郎=やまだ^たろう"},
        dict.fromkeys(
            ("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID",
             "AccessionNumber", "ReferringPhysicianName", "InstanceNumber", "Modality", "SeriesNumber")
        ),
        {"PatientBirthDate": "", "StudyDate": "", "AccessionNumber": "", "StudyID": ""},
        {"AccessionNumber": "x" * 30, "PatientSex": "unknown", "StudyTime": "later"},
        {"InstanceNumber": "0", "TimezoneOffsetFromUTC": "+0530", "IssuerOfPatientID": "HOSPITAL"},
        {"SOPClassUID": "1.2.840.113619.4.26"},
        {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.7"},
    ],
    ids=["plain", "utf-8", "japanese", "missing", "empty", "not allowed", "numbers", "private class", "capture"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")  # from pydicom, about values written on purpose
def test_unusual_sources_give_valid_objects(
    tags: dict[str, Any], clinic: Any, make_radiograph: Make, errors_of: Check, tmp_path: Path
) -> None:
    results = clinic.results(make_radiograph(**tags), kinds=KINDS)
    for number, dataset in enumerate(results.datasets()):
        assert errors_of(dataset, tmp_path / str(number)) == []
        if tags.get("PatientName"):
            assert dcmread(tmp_path / str(number)).PatientName == tags["PatientName"] or number > 1
    assert results.fhir is not None


def test_selections_and_new_versions_are_valid(clinic: Any, errors_of: Check, tmp_path: Path) -> None:
    results = clinic.results(kinds=KINDS, predecessor="1.2.3")
    assert [name for name, _ in results.named()] == ["sr", "sc", "kos", "kos-2", "kos-3", "kos-4", "kos-5"]
    assert [dataset for _, dataset in results.named()] == results.datasets()
    for number, dataset in enumerate(results.datasets()):
        assert errors_of(dataset, tmp_path / str(number)) == []


@pytest.mark.parametrize(
    "labels", [NIH_14, CHEXPERT_9, ("A label of its own, and a very long one: " + "x" * 80, "b\\c")]
)
def test_every_set_of_labels_gives_valid_objects(
    labels: tuple[str, ...], clinic: Any, tiny_card: ModelCard, make_tiny_model: Callable[..., Path], errors_of: Check,
    tmp_path: Path,
) -> None:  # fmt: skip
    count = len(labels)
    model = make_tiny_model(
        tmp_path / "model.onnx", labels=LabelSet(labels), thresholds=(0.5,) * count, calibration=(None,) * count,
        proxies_per_class=(2,) * (count + 1),
    )  # fmt: skip
    with Finder.open(model, threads=1) as finder:
        results = make_results(clinic.image, finder.analyze(clinic.image), finder, kinds=KINDS)
    for number, dataset in enumerate(results.datasets()):
        assert errors_of(dataset, tmp_path / str(number)) == []


def everything(results: Results) -> bytes:
    """All bytes of the results."""
    return b"".join(map(file_bytes, results.datasets())) + json.dumps(results.fhir).encode()


def test_results_contain_no_data_of_other_patients(clinic: Any) -> None:
    results = clinic.results(kinds=KINDS, k=17)
    found = everything(results)
    assert len(clinic.finder.analyze(clinic.image, 17).neighbours) == 12  # all other patients' images
    assert b"CLINIC-0001" in found and b"case-" in found
    for secret in clinic.secrets:
        for text in (secret, secret.lower(), secret.title()):
            assert text.encode() not in found, text
    for entry in clinic.finder.gallery.every_entry():
        if entry.patient_id != "CLINIC-0001":
            for told in (entry.id, entry.image, entry.study_id, entry.sop_instance_uid, entry.sha256):
                assert told.encode() not in found


def test_an_image_of_the_gallery_is_reported_without_its_id(clinic: Any) -> None:
    results = clinic.results((clinic.folder / "OTHERFOLDER" / "ROEBUCK_3.dcm").read_bytes(), kinds=["sr", "fhir"])
    assert "This image is in the gallery." in results.warnings
    assert b"ROEBUCK_3" not in everything(results)


def test_own_results_are_recognised(clinic: Any, make_radiograph: Make) -> None:
    for dataset in clinic.results(kinds=KINDS).datasets():
        assert is_own_result(dcmread(io.BytesIO(file_bytes(dataset)), stop_before_pixels=True))
    assert not is_own_result(dcmread(io.BytesIO(clinic.image)))
    assert not is_own_result(dcmread(io.BytesIO(make_radiograph(Manufacturer="cbmir", ManufacturerModelName="cbmir"))))
    other = clinic.results().sr
    other.Manufacturer = "Another"
    assert not is_own_result(other)
    assert not is_own_result(Dataset())


def test_many_threads(clinic: Any) -> None:
    alone = clinic.results(kinds=["sc"]).sc.pixel_array
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: clinic.results(kinds=KINDS), range(4)))
    for results in together:
        np.testing.assert_array_equal(results.sc.pixel_array[:1100], alone[:1100])  # the time is printed below
        assert len(results.sr.ContentSequence) == len(together[0].sr.ContentSequence)


def test_only_requested_results_are_made(clinic: Any) -> None:
    results = clinic.results()
    assert results.datasets() == [results.sr]
    assert (results.sc, results.kos, results.fhir) == (None, None, None)
    assert clinic.results(kinds=[]).datasets() == []


@pytest.mark.parametrize(("kinds", "found"), [(["sr", "pdf"], "found pdf"), ("sr", "expected kinds")])
def test_unknown_kinds_are_refused(clinic: Any, kinds: Any, found: str) -> None:
    with pytest.raises(UserError, match=found):
        clinic.results(kinds=kinds)


def test_data_without_uids_is_refused(clinic: Any, make_radiograph: Make) -> None:
    analysis = clinic.finder.analyze(clinic.image)
    with pytest.raises(DicomImageError, match="SeriesInstanceUID"):
        make_results(make_radiograph(SeriesInstanceUID=None), analysis, clinic.finder)
    with pytest.raises(NotAnImageError):
        make_results(b"no DICOM" * 40, analysis, clinic.finder)
    with pytest.raises(UserError, match="predecessor"):
        make_results(clinic.image, analysis, clinic.finder, predecessor="the last one")
    finder = clinic.finder
    for other in (
        finder.analyze(clinic.image, rank="findings"),
        finder.analyze(clinic.image, region=(0.1, 0.1, 0.6, 0.6)),
    ):
        with pytest.raises(UserError, match="whole image ranked by nearness"):
            make_results(clinic.image, other, finder)


def test_warm_up_covers_every_kind() -> None:
    warm_up()


@pytest.mark.release
def test_after_warm_up_nothing_more_is_imported(clinic: Any, tiny_model: Path, tmp_path: Path) -> None:
    """Run in a new process, which has imported nothing yet."""
    (tmp_path / "chest.dcm").write_bytes(clinic.image)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from cbmir.runtime import Finder\nfrom cbmir.runtime.dicom_output import KINDS, make_results, warm_up\n"
        "data = Path(sys.argv[3]).read_bytes()\nwith Finder.open(*sys.argv[1:3]) as finder:\n"
        "    analysis = finder.analyze(data)\n    warm_up()\n    before = set(sys.modules)\n"
        "    make_results(data, analysis, finder, kinds=KINDS)\n"
        "    print(*(set(sys.modules) - before))\n"
    )
    arguments = (tiny_model, clinic.folder / "gallery", tmp_path / "chest.dcm")
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.parametrize("missing", ["pydicom", "highdicom"])
def test_a_missing_library_is_named(clinic: Any, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    analysis = clinic.finder.analyze(clinic.image)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependencyError, match='extra "dicom"'):
        make_results(clinic.image, analysis, clinic.finder)
    with pytest.raises(MissingDependencyError):
        warm_up()


def test_logging_is_silenced_until_the_outermost_block_ends(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("highdicom.base")
    with pydicom_unlogged():
        with pydicom_unlogged():
            log.warning("inner")
        log.warning("outer")
    log.warning("after")
    assert [record.message for record in caplog.records] == ["after"]


def test_logs_contain_no_patient_data(clinic: Any, make_radiograph: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("highdicom.base").setLevel(logging.DEBUG)
        clinic.results(make_radiograph(PatientName="PLANTED", PatientSex="X"), kinds=KINDS)
    for planted in ("PLANTED", "CLINIC-0001", "1.2.826.0.1.1"):
        assert planted not in caplog.text
