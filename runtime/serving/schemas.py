"""Schemas of requests and answers: they check requests, and document answers in OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from cbmir.card import BALANCED, NOT_A_DEVICE
from cbmir.choices import Rank
from cbmir.manifest import Box
from cbmir.runtime.evidence import Region
from cbmir.runtime.novelty import Novelty
from cbmir.runtime.results import Finding, LabelAgreement
from cbmir.runtime.serving.settings import MOST_NEIGHBOURS

CASE = r"^case-[0-9a-f]{16}$"
_Case = Annotated[str, Field(pattern=CASE)]
_Short = Annotated[str, Field(max_length=2000)]
_View = Annotated[Literal["", "PA", "AP", "LATERAL"], BeforeValidator(lambda view: str(view).upper())]


REGION = Field("", description="A part of the image to search by: x0,y0,x1,y1 in fractions of its width and height, "
               "from its upper left corner.", examples=["0.1,0.5,0.45,0.9"])  # fmt: skip


class Neighbours(BaseModel):
    """Parameters of a search, as in `cbmir query`. An unknown parameter is an error."""

    model_config = ConfigDict(extra="forbid")

    k: int = Field(10, ge=0, le=MOST_NEIGHBOURS, description="How many neighbours.")
    where: _Short = Field("", description="Only neighbours with these findings: names, and, or, not, parentheses; "
                              "quote names with spaces.", examples=["Effusion and not Pneumothorax"])  # fmt: skip
    view: _View = Field("", description="Only neighbours of this view.")
    source: _Short = Field("", description="Only neighbours from this hospital or data set (not case-sensitive).")
    since: _Short = Field("", description="Only neighbours of this day (YYYY-MM-DD) or later.")
    until: _Short = Field("", description="Only neighbours of this day (YYYY-MM-DD) or earlier.")
    exact: bool = Field(False, description="Compare every image of the gallery, instead of using its index.")
    include_same_patient: bool = Field(False, description="Include images of the same patient.")


class AnalyzeOptions(Neighbours):
    """Parameters of /v1/analyze."""

    results: _Short = Field("", description="Objects to make of a DICOM file, separated by commas: sr, sc, kos, fhir.",
                            examples=["sr,fhir"])  # fmt: skip
    rank: Rank = Field("nearness", description="The order of neighbours. nearness: the most similar first. findings: "
                                   "those whose known labels agree most with the image's probabilities first, which "
                                   "compares every image of the gallery.")  # fmt: skip
    region: _Short = REGION


class EmbedOptions(BaseModel):
    """Parameters of /v1/embed."""

    model_config = ConfigDict(extra="forbid")

    region: _Short = REGION


class Search(Neighbours):
    """The body of /v1/search: one of `embedding` and `case`."""

    embedding: Annotated[list[FiniteFloat], Field(max_length=65536, fail_fast=True)] | None = Field(
        None, description="An embedding of this model with unit norm, as /v1/embed returns it."
    )
    case: _Case | None = Field(None, description="A neighbour's id in an earlier answer.")
    patient_id: _Short = Field("", description="The id, as in the gallery, of a patient whose images are left out.")

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.embedding is None) == (self.case is None):
            raise ValueError("expected one of embedding and case")
        return self


class Refine(Search):
    """The body of /v1/refine: as for /v1/search, with similar and dissimilar cases, and findings."""

    alike: list[_Case] = Field([], max_length=100, description="Ids of cases that are similar to what you look for.")
    unlike: list[_Case] = Field([], max_length=100, description="Ids of cases that are not similar to it.")
    findings: dict[_Short, FiniteFloat] = Field(
        {}, max_length=100, description="How far to go towards a finding of the model, from -1 (away from it) to 1."
    )


class Case(BaseModel):
    """A neighbour. `id` identifies an image only to this service. `report` is null if reports are not shared, `boxes`
    if thumbnails are not."""

    id: str
    distance: float = Field(description="Euclidean, between unit vectors: 0 to 2.")
    cosine: float
    labels: list[str] = Field(description="Positive or uncertain.")
    shared: list[str] = Field(description="Those labels that the query has too, or is predicted to have.")
    uncertain: list[str] = Field(description="Those labels that are uncertain.")
    report: str | None = None
    place: Annotated[
        Region | None, Field(description="The place that matches the region, if the gallery keeps cells.")
    ] = None
    boxes: Annotated[list[Box] | None, Field(description="Where people have drawn findings, if known.")] = None


class Model(BaseModel):
    """The model that answered."""

    fingerprint: str = Field(description="Names the embedding space: only vectors of the same space can be compared.")
    weights: str
    encoder: str
    engine: str
    device: str
    precision: str
    version: str = Field(description="The version of cbmir.")


class _Answer(BaseModel):
    model: Model
    notice: str = NOT_A_DEVICE


class AnalyzeAnswer(_Answer):
    """The content of `Analysis.to_json`, without anything that would name another patient."""

    known: list[str] = Field(description="Case ids of the gallery's images that were made from the same file.")
    operating_point: str = Field(description="The operating point whose thresholds were used.")
    findings: list[Finding] = Field(description="Empty, with a warning, if the model scores no findings.")
    rank: Rank = Field(description="The order of the neighbours.")
    region: Region | None = Field(None, description="The region that was searched for; null for the whole image.")
    neighbours: list[Case]
    agreement: list[LabelAgreement]
    novelty: Novelty | None
    warnings: list[str]
    results: dict[str, Any] | None = Field(
        None, description="By kind: a FHIR Bundle as it is, DICOM objects as files in base64."
    )


class SearchAnswer(_Answer):
    """Neighbours, nearest first."""

    neighbours: list[Case]
    warnings: list[str]


class EmbedAnswer(_Answer):
    """An embedding: float32, unit norm."""

    embedding: list[float]


class About(_Answer):
    """The running model and gallery, and the limits of requests."""

    labels: list[str] = Field(description="The model's findings; empty if it scores none.")
    operating_point: str
    thresholds: list[float | None] = Field(description="Those of the operating point.")
    embedding_dim: int
    gallery: dict[str, Any] | None
    shared: list[str] = Field(description="Data of other patients' images that are shown besides labels.")
    most_neighbours: int = MOST_NEIGHBOURS
    max_upload_bytes: int


class Health(BaseModel):
    status: Literal["live", "ready", "not ready"]
    problem: Annotated[str | None, Field(description="Why it is not ready.")] = None


class Reloaded(_Answer):
    """The new model. `generation` counts the models that were opened since the start."""

    generation: int


class ProblemDetails(BaseModel):
    """An error (RFC 9457)."""

    type: str = Field(examples=["urn:cbmir:problem:damaged-image"])
    title: str
    status: int
    detail: str
    instance: str = Field(description="The request's id, which is also in the service's log.")
    errors: list[dict[str, str]] | None = None


_Responses = dict[int | str, dict[str, Any]]
_FILE = {"schema": {"type": "string", "format": "binary"}}

#: The request body of routes that take an image file.
UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The file itself, not a form. Its format is detected from its content.",
        "content": dict.fromkeys(("application/dicom", "image/png", "image/jpeg"), _FILE),
    }
}
SEARCH: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {
            "schema": Search.model_json_schema(),
            "examples": {
                "case": {"value": {"case": "case-1f0c6b9a2d4e8f37", "k": 5, "where": "Effusion"}},
                "embedding": {"value": {"embedding": [0.6, 0.8], "k": 5}},
            },
        }},
    }
}  # fmt: skip
REFINE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {
            "schema": Refine.model_json_schema(),
            "example": {
                "case": "case-1f0c6b9a2d4e8f37", "alike": ["case-0b7e3c5d9a1f2468"], "findings": {"Effusion": 0.5},
            },
        }},
    }
}  # fmt: skip
_EXAMPLE = AnalyzeAnswer(
    model=Model(
        fingerprint="b3c1f0", weights="b3c1f0", encoder="densenet121", engine="onnxruntime", device="cpu",
        precision="float32", version="0.2.0",
    ),
    known=[],
    operating_point=BALANCED,
    findings=[Finding("Effusion", 0.83, 0.61, True, 0.55)],
    rank="nearness",
    region=None,
    neighbours=[
        Case(id="case-1f0c6b9a2d4e8f37", distance=0.31, cosine=0.952, labels=["Effusion", "Atelectasis"],
             shared=["Effusion"], uncertain=["Atelectasis"])
    ],
    agreement=[
        LabelAgreement("Effusion", positive=7, negative=3, uncertain=0, unknown=0, share=0.71, gallery=0.12,
                       above_chance=True),
    ],
    novelty=Novelty(distance=0.28, percentile=41.5, flagged=False),
    warnings=[],
    results=None,
)  # fmt: skip
ANALYZED: _Responses = {200: {"content": {"application/json": {"example": _EXAMPLE.model_dump(mode="json")}}}}
THUMBNAIL: _Responses = {200: {"content": {"image/jpeg": _FILE}}}
METRICS: _Responses = {
    200: {"content": {"text/plain": {"example": 'cbmir_http_requests_total{route="/v1/analyze",status="200"} 12.0\n'}}}
}
NOT_READY: _Responses = {503: {"model": Health, "description": "Not ready."}}

_WORDS = {
    400: "No body, or one that is cut off.",
    401: "No token, or a wrong one.",
    403: "Not shared, or requested by another site's page.",
    404: "No such case, gallery or route.",
    408: "The body came too slowly.",
    409: "Reloading failed; the old model and gallery stay in use.",
    413: "The body is too large.",
    415: "No image file, or one in an encoding that is not supported.",
    421: "Requested under a host name that is not this service's.",
    422: "An image that cannot be analysed, or parameters that are not as expected.",
    429: "All slots are taken: try again after `Retry-After` seconds.",
    501: "Results were requested, but the extra that makes them is not installed.",
    503: "Not ready, the gallery was replaced, or no answer in time: try again after `Retry-After` seconds.",
}
_PROBLEM = {"application/problem+json": {"schema": ProblemDetails.model_json_schema()}}
#: The error responses of all guarded routes.
PROBLEMS: _Responses = {status: {"description": words, "content": _PROBLEM} for status, words in _WORDS.items()}
