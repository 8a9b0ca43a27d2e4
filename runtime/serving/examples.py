"""Examples, and bodies that FastAPI does not read by itself, for OpenAPI."""

from __future__ import annotations

from typing import Any

from cbmir.runtime.serving.schemas import Health, ProblemDetails, Search

_FILE = {"schema": {"type": "string", "format": "binary"}}

#: The request body of routes that take an image file.
UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The file itself, not a form. What it is, its content says.",
        "content": dict.fromkeys(("application/dicom", "image/png", "image/jpeg"), _FILE),
    }
}
SEARCH: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": Search.model_json_schema(),
                "examples": {
                    "case": {"value": {"case": "case-1f0c6b9a2d4e8f37", "k": 5, "where": "Effusion"}},
                    "embedding": {"value": {"embedding": [0.6, 0.8], "k": 5}},
                },
            }
        },
    }
}
_MODEL = {
    "model": {
        "fingerprint": "b3c1f0", "weights": "b3c1f0", "encoder": "densenet121", "engine": "onnxruntime",
        "device": "cpu", "precision": "float32", "version": "0.1.0",
    },
    "notice": "Research use only. Not a medical device, not for diagnosis.",
}  # fmt: skip
ANALYZED: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "application/json": {
                "example": {
                    **_MODEL,
                    "known": [],
                    "findings": [
                        {"label": "Effusion", "score": 0.83, "probability": 0.61, "predicted": True, "threshold": 0.55}
                    ],
                    "neighbours": [
                        {"id": "case-1f0c6b9a2d4e8f37", "distance": 0.31, "cosine": 0.952,
                         "labels": ["Effusion", "Atelectasis"], "shared": ["Effusion"], "uncertain": ["Atelectasis"],
                         "report": None}
                    ],
                    "agreement": [
                        {"label": "Effusion", "positive": 7, "negative": 3, "uncertain": 0, "unknown": 0, "share": 0.71}
                    ],
                    "novelty": {"distance": 0.28, "percentile": 41.5, "flagged": False},
                    "warnings": [],
                    "results": None,
                }
            }
        }
    }
}  # fmt: skip
THUMBNAIL: dict[int | str, dict[str, Any]] = {200: {"content": {"image/jpeg": _FILE}}}
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"example": 'cbmir_http_requests_total{route="/v1/analyze",status="200"} 12.0\n'}}}
}
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not ready."}}

_WORDS = {
    400: "No body, or one that is cut off.",
    401: "No token, or another.",
    403: "Not shared, or asked for by another site's page.",
    404: "No such case, gallery or route.",
    408: "The body came too slowly.",
    409: "Reloading failed; what was there goes on.",
    413: "The body is too large.",
    415: "No image file, or one in an encoding that is not read here.",
    421: "Asked for by a name that is not this service's.",
    422: "An image that cannot be analysed, or parameters that are not as expected.",
    429: "All places are taken: try again after `Retry-After` seconds.",
    501: "Results were asked for, and the extra that makes them is not installed.",
    503: "Not ready, the gallery was replaced, or no answer in time: try again after `Retry-After` seconds.",
}
#: Of every guarded route.
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": words,
        "content": {"application/problem+json": {"schema": ProblemDetails.model_json_schema()}},
    }
    for status, words in _WORDS.items()
}
