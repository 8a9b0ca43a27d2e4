"""The parts of the body that BodyPartExamined names, in several languages and with damaged letters."""

from __future__ import annotations

import pytest

from cbmir.errors import DicomImageError
from cbmir.runtime.imaging.body_part import named_parts
from cbmir.runtime.imaging.reader import read_image
from dicom_files import make_dicom

CHEST = (
    "CHEST", "Thorax", "LUNGS", "PECHO", "TÓRAX", "torax", "BRUST", "BRUSTKORB", "POITRINE", "TORACE", "PEITO",
    "PULMÃO",
    "T?RAX", "T\ufffdRAX", "T??RAX", "TÀRAX", "BR?ST", "T\xa2RAX", "TO\u0301RAX", "KLATKA PIERSIOWA", "PŁUCA", "胸部",
    "CHEST_PA", "PORTABLE CHEST", "PORTCHEST", "CHESTPA", "CHEST2", "LTHORAX", "RX TORAX", "Tórax PA/Lat", "LUNG LEFT",
    "TH0RAX", "T#RAX", "T*RAX", "TH_RAX", "PORT TH0RAX_2", "CHEST PE", "CHEST COU",
)  # fmt: skip
OTHER = (
    "HIP", "SKULL", "ABDOMEN", "HAND", "HIPS", "LHIP", "HAND LT", "RTHAND", "HANDS", "ABDOMENKUB", "CSPINE",
    "CADERA", "CRÁNEO", "CRANEO", "MANO", "MANOS",
    "QUADRIL", "CRÂNIO", "ABDOME", "MÃO",
    "HÜFTE", "HUEFTE", "SCHÄDEL", "SCHAEDEL", "BAUCH", "Hände",
    "HANCHE", "CRÂNE", "VENTRE", "MAIN",
    "ANCA", "CRANIO", "ADDOME",
    "HEUP", "SCHEDEL", "BUIK",
    "CR?NEO", "SCH\ufffdDEL", "CHESTABDOMEN", "NECKCHESTABDPELV", "BRUSTWIRBELSÄULE", "BRUSTBEIN", "THORACIC SPINE",
    "COLUMNA DORSAL", "MU?ECA", "PIE IZQ", "FUß", "AVANT-BRAS", "OPG", "UP_EXM", "AC JOINT", "PÉ", "FEMORE",
    "KNEE LEFT", "BREAST", "EXTREMITY", "WHOLEBODY",
    "SKU1L", "P#LVIS", "ABD0MEN", "腹部", "骨盤", "PÉS", "PE\u0301",
)  # fmt: skip
UNKNOWN = (
    "UNKNOWN", "", "?", "???", "M?O", "XXX", "NONE", "PA", "L", "BEHANDLUNG", "THORAKS1Q", "RIB", "HEART", "*", "0",
    "SECRET^NAME", "X" * 1000,
    "PE", "pe", "PES", "COU", "H1P", "H_P", "SERIES_12", "1234", "A_1_B",
)  # fmt: skip


@pytest.mark.parametrize("text", CHEST)
def test_names_of_the_chest(text: str) -> None:
    assert named_parts(text) == {"chest"}
    assert named_parts(text.encode().decode("latin-1")) == {"chest"}  # UTF-8 instead of the standard's Latin-1


@pytest.mark.parametrize("text", OTHER)
def test_names_of_other_parts(text: str) -> None:
    assert named_parts(text) == {"other"}
    assert named_parts(text.encode().decode("latin-1")) == {"other"}


@pytest.mark.parametrize("text", UNKNOWN)
def test_texts_without_a_part(text: str) -> None:
    assert named_parts(text) == frozenset()


def test_chest_and_another_part() -> None:
    assert named_parts("CHEST AND ABDOMEN") == named_parts("TH0RAX ABD") == {"chest", "other"}


@pytest.mark.parametrize("text", ["PECHO", "TÓRAX", "BRUST", "T?RAX", "CHESTPA"])
@pytest.mark.parametrize("charset", ["latin-1", "utf-8"])
def test_chests_in_other_languages_are_read(text: str, charset: str) -> None:
    assert read_image(with_part(text.encode(charset))).warnings == ()


@pytest.mark.parametrize("text", ["HIP", "SKULL", "ABDOMEN", "HAND", "CADERA", "SCHÄDEL", "MÃO", "HANCHE"])
@pytest.mark.parametrize("charset", ["latin-1", "utf-8"])
def test_other_parts_are_refused(text: str, charset: str) -> None:
    with pytest.raises(DicomImageError, match=r"BodyPartExamined \(0018,0015\): expected CHEST") as caught:
        read_image(with_part(text.encode(charset)))
    assert caught.value.reason == "BodyPartExamined"


@pytest.mark.parametrize("text", ["UNKNOWN", "XXX", "M?O", "HEART"])
def test_unknown_parts_are_a_warning(text: str) -> None:
    (warning,) = read_image(with_part(text.encode())).warnings
    assert warning == ("BodyPartExamined (0018,0015) names no known body part: not known to be a chest radiograph")
    assert warning.kind == "body part unknown"


def test_a_part_besides_the_chest_is_a_warning() -> None:
    (warning,) = read_image(make_dicom(BodyPartExamined="CHEST ABDOMEN")).warnings
    assert "names another part besides the chest" in warning


def with_part(value: bytes) -> bytes:
    """A file with these bytes as BodyPartExamined."""
    value += b" " * (len(value) % 2)
    return make_dicom(BodyPartExamined="X" * len(value)).replace(b"X" * len(value), value)
