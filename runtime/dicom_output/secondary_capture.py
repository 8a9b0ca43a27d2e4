"""The page for a radiologist: image, evidence, findings and similar images, drawn with Pillow and stored as a Secondary
Capture image (PS3.3 A.8) in the study of the image that it shows.

The page is light on black, like X-rays. No information depends on colour alone, and the page names no patient.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache

import numpy as np
from highdicom.sc import SCImage
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps
from pydicom import Dataset
from pydicom.uid import ExplicitVRLittleEndian

from cbmir.labels import spelled
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.dicom_output import identifiers as own
from cbmir.runtime.dicom_output.content import ALGORITHM, Content
from cbmir.runtime.dicom_output.objects import complete, identity, item
from cbmir.runtime.evidence import MORE, overlay
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.runtime.results import Analysis, Finding

WIDTH, HEIGHT = 1600, 1200  # pixels of the page
NOTICE = "FOR RESEARCH, NOT FOR DIAGNOSIS"

_MARGIN, _GAP = 32, 24
_PICTURE = 468  # side of the square that each picture is fitted into
_TOP, _BOTTOM = 104, 1116  # edges of the content, between header and footer
_TABLE = _MARGIN + 2 * (_PICTURE + _GAP)  # left edge of the findings
_BAR_WIDTH = 76
_INK, _PALE, _LINE, _BAR, _AMBER = (236, 236, 236), (160, 160, 160), (72, 72, 72), (104, 136, 168), (255, 176, 0)

Colour = tuple[int, int, int]


def _draw_page(content: Content, analysis: Analysis, image: Radiograph, spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Draw the page, uint8 [HEIGHT, WIDTH, 3], RGB."""
    sheet = _Sheet()
    sheet.text(_MARGIN, 26, "cbmir", 36)
    sheet.text(_MARGIN + 124, 38, "chest X-ray: findings and similar images", 22, _PALE)
    sheet.notice(34)
    small = np.array(ImageOps.contain(Image.fromarray(image.pixels), (_PICTURE, _PICTURE), Image.Resampling.LANCZOS))
    sheet.picture(_MARGIN, "The image", small)
    below = _TOP + 40 + _PICTURE + 16
    if (explained := _explained(content, analysis)) is not None:
        title, legend, evidence = explained
        sheet.picture(_MARGIN + _PICTURE + _GAP, title, overlay(small, evidence, spec, opacity=0.6))
        sheet.lines(_MARGIN + _PICTURE + _GAP, below, legend, 18, _PICTURE, at_most=2)
    _draw_findings(sheet, content.findings, content.operating_point)
    end = _draw_similar_images(sheet, content, below + 64)
    if content.priors:
        days = ", ".join(f"{one.source.day or 'unknown day'} ({one.distance:.3f})" for one in content.priors)
        text = f"Similar earlier images of this patient: {days}"
        end = sheet.lines(_MARGIN, end + 12, text, 18, 2 * _PICTURE + _GAP, at_most=2, colour=_INK)
    _draw_warnings(sheet, content.warnings, end + 16)
    _draw_footer(sheet, content)
    return np.array(sheet.image)


def _explained(content: Content, analysis: Analysis) -> tuple[str, str, NDArray[np.float32]] | None:
    """Return title, legend and map of the evidence for the top finding, predicted if possible, or the nearest image."""
    if content.findings:
        top = next((one for one in content.findings if one.predicted), content.findings[0])
        legend = "Orange, +: areas that support it more than average. Blue, -: less. Line: the part that it sees."
        return f"Evidence for {spelled(top.label)}", legend, analysis.evidence_for_finding(top.label)
    if analysis.neighbours:
        legend = "Orange, +: areas that make the two similar. Blue, -: less. Line: the part that it sees."
        nearest = analysis.evidence_for_neighbour(analysis.neighbours[0].id)
        return "Evidence for the most similar image", legend, nearest
    return None


def _draw_findings(sheet: _Sheet, findings: Sequence[Finding], operating_point: str) -> None:
    """Draw one row per finding, most probable first: label, probability with a bar, score, threshold, prediction."""
    left, right = _TABLE, WIDTH - _MARGIN
    sheet.text(left, _TOP, "Findings", 24)
    if not findings:
        sheet.lines(left, _TOP + 42, "This model scores no findings.", 20, right - left, at_most=2)
        return
    head = _TOP + 42
    bar, percent, score, threshold = left + 186, left + 316, left + 372, left + 452  # all but the bar: right edges
    sheet.text(left, head, "finding", 17, _PALE)
    for x, word in ((percent, "probability"), (score, "score"), (threshold, "threshold")):
        sheet.text(x, head, word, 17, _PALE, anchor="ra")
    room = _BOTTOM - head - 130
    step = max(26, min(52, room // len(findings)))
    shown = findings[: room // step]
    for row, one in enumerate(shown):
        y = head + 32 + row * step
        sheet.line(left, y, right)
        middle = y + step // 2
        size = 20 if step >= 32 else 17
        colour = _INK if one.predicted else _PALE
        label, width = spelled(one.label), bar - left - 8
        small = sheet.largest(label, size, width)
        sheet.text(left, middle, sheet.cut(label, small, width), small, colour, anchor="lm")
        if one.probability is not None:
            sheet.bar(bar, middle, one.probability, one.predicted)
            probability = "<1%" if one.probability < 0.005 else f"{100 * one.probability:.0f}%"
            sheet.text(percent, middle, probability, size, colour, anchor="rm")
        sheet.text(score, middle, f"{one.score:.2f}", size, colour, anchor="rm")
        if one.threshold is not None:
            sheet.text(threshold, middle, f"{one.threshold:.2f}", size, colour, anchor="rm")
        if one.predicted:
            sheet.text(right, middle, "predicted", size, _AMBER, anchor="rm")
    y = head + 32 + len(shown) * step
    sheet.line(left, y, right)
    if len(shown) < len(findings):
        sheet.text(left, y + 8, f"and {len(findings) - len(shown)} more", 18, _PALE)
        y += 26
    note = (
        "Probability: for findings with enough validation data to calibrate it. Predicted: the "
        f"score exceeds the model's {operating_point} threshold. A low score does not exclude a finding."
    )
    sheet.lines(left, y + 10, note, 17, right - left, at_most=4)


def _draw_similar_images(sheet: _Sheet, content: Content, y: int) -> int:
    """Draw the cases in up to two columns. Returns where they end."""
    left, width = _MARGIN, 2 * _PICTURE + _GAP
    sheet.text(left, y, "Similar images", 24)
    of = "" if content.collection is None else f"nearest of {content.collection:,} images in the gallery"
    sheet.text(left + 176, y + 5, of or "no gallery was searched", 18, _PALE)
    if content.similar_images:
        sheet.text(left, y + 38, "case, distance, labels", 17, _PALE)
    y += 66
    cases = content.similar_images[:10]
    rows = (len(cases) + 1) // 2 if len(cases) > 5 else len(cases)
    column = width if rows == len(cases) else width // 2
    for number, one in enumerate(cases):
        x, at = left + number // max(1, rows) * column, y + number % max(1, rows) * 30
        sheet.text(x, at, one.case, 17)
        sheet.text(x + 258, at, f"{one.distance:.3f}", 17, anchor="ra")
        sheet.text(x + 276, at, sheet.cut(one.words, 17, column - 296), 17, _PALE)
    return y + rows * 30


def _draw_warnings(sheet: _Sheet, warnings: Sequence[str], y: int) -> None:
    if warnings:
        sheet.text(_MARGIN, y, "Please note", 20, _AMBER)
    y += 30
    for warning in warnings:
        room = (_BOTTOM - 8 - y) // 24
        if room < 1:
            return
        y = sheet.lines(_MARGIN, y, f"- {warning}", 18, 2 * _PICTURE + _GAP, at_most=room, colour=_INK)


def _draw_footer(sheet: _Sheet, content: Content) -> None:
    sheet.line(_MARGIN, _BOTTOM, WIDTH - _MARGIN)
    local = content.source.local(content.moment)
    made = f"{ALGORITHM} {content.version}, {local:%Y-%m-%d %H:%M %z}"
    sheet.text(_MARGIN, _BOTTOM + 14, made, 17, _PALE)
    about = "Decision support for research; not a medical device. Cases are opaque ids of the gallery."
    sheet.text(_MARGIN, _BOTTOM + 42, about, 17, _PALE)
    sheet.notice(_BOTTOM + 24)


@cache
def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """Return Pillow's built-in font."""
    return ImageFont.load_default(size)


class _Sheet:
    """A black page to draw on. Positions are in pixels from the left and the top; text is in `_font`."""

    def __init__(self) -> None:
        self.image = Image.new("RGB", (WIDTH, HEIGHT))
        self._draw = ImageDraw.Draw(self.image)

    def text(self, x: int, y: int, text: str, size: int, colour: Colour = _INK, anchor: str = "la") -> None:
        self._draw.text((x, y), text, fill=colour, font=_font(size), anchor=anchor)

    def notice(self, y: int) -> None:
        """Draw the notice in a frame, at the right edge."""
        font = _font(22)
        width = int(self._draw.textlength(NOTICE, font=font))
        left, right = WIDTH - _MARGIN - width - 24, WIDTH - _MARGIN
        self._draw.rectangle((left, y - 8, right, y + 34), outline=_AMBER, width=2)
        self._draw.text((left + 12, y), NOTICE, fill=_AMBER, font=font)

    def cut(self, text: str, size: int, width: int) -> str:
        """Return as much of a text as fits into `width` pixels, with dots at the end if it was cut."""
        font = _font(size)
        if self._draw.textlength(text, font=font) <= width:
            return text
        while text and self._draw.textlength(f"{text}...", font=font) > width:
            text = text[:-1]
        return f"{text.rstrip(' ,')}..."

    def largest(self, text: str, size: int, width: int) -> int:
        """Return the largest size from 16 to `size` in which a text fits into `width` pixels, or 16."""
        sizes = range(size, 16, -1)
        return next((s for s in sizes if self._draw.textlength(text, font=_font(s)) <= width), 16)

    def lines(self, x: int, y: int, text: str, size: int, width: int, *, at_most: int, colour: Colour = _PALE) -> int:
        """Draw a text in lines of `width` pixels. Returns where the next one begins."""
        letters = max(8, int(width / self._draw.textlength("abcdefghij ", font=_font(size)) * 11))
        wrapped = textwrap.wrap(text, letters, max_lines=at_most, placeholder=" ...")
        for line in wrapped:
            self.text(x, y, self.cut(line, size, width), size, colour)
            y += size + 6
        return y

    def line(self, left: int, y: int, right: int) -> None:
        self._draw.line((left, y, right, y), fill=_LINE)

    def bar(self, x: int, middle: int, share: float, strong: bool | None) -> None:
        """Draw a share in [0, 1] as a bar."""
        self._draw.rectangle((x, middle - 6, x + _BAR_WIDTH, middle + 6), outline=_LINE)
        if length := round(_BAR_WIDTH * share):
            self._draw.rectangle((x, middle - 6, x + length, middle + 6), fill=MORE if strong else _BAR)

    def picture(self, x: int, title: str, pixels: NDArray[np.uint8]) -> None:
        """Draw a picture uint8 [h, w] or [h, w, 3] in the middle of its square, under its title."""
        self.text(x, _TOP, self.cut(title, 24, _PICTURE), 24)
        top = _TOP + 40
        left, above = x + (_PICTURE - pixels.shape[1]) // 2, top + (_PICTURE - pixels.shape[0]) // 2
        self.image.paste(Image.fromarray(pixels).convert("RGB"), (left, above))
        self._draw.rectangle((x - 1, top - 1, x + _PICTURE, top + _PICTURE), outline=_LINE)


def page(content: Content, analysis: Analysis, image: Radiograph, spec: PreprocessSpec) -> Dataset:
    """Make the page of an analysis of `image`, ready to be stored. Its pixels only name the patient if `image` does."""
    source = content.source
    made = SCImage(
        pixel_array=_draw_page(content, analysis, image, spec),
        photometric_interpretation="RGB",
        bits_allocated=8,
        coordinate_system="PATIENT",
        patient_orientation=("L", "F"),
        transfer_syntax_uid=ExplicitVRLittleEndian,
        **identity(content, "sc", source),
    )
    made["PatientOrientation"].value = ""  # type 2C: a page has none, but highdicom requires one
    made.Laterality = ""  # type 2C
    made.ConversionType = "WSD"
    made.DateOfSecondaryCapture, made.TimeOfSecondaryCapture = made.ContentDate, made.ContentTime
    made.BurnedInAnnotation = source.burned_in or "YES"  # if not stated, the image on the page may name the patient
    made.ImageComments = own.DISCLAIMER
    made.DerivationDescription = "Page of findings, evidence and similar images"
    reference = item(ReferencedSOPClassUID=source.sop_class, ReferencedSOPInstanceUID=source.uid)
    reference.PurposeOfReferenceCodeSequence = [own.concept(own.SOURCE_IMAGE)]
    made.SourceImageSequence = [reference]
    complete(made, source)
    return made
