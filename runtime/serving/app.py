"""The application: routes, and what stands around them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from cbmir import __version__
from cbmir.card import INTENDED_USE
from cbmir.errors import CbmirError
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.serving import schemas
from cbmir.runtime.serving.limits import RequestLimiter, read_body, read_upload
from cbmir.runtime.serving.problems import MOST_ERRORS, Problem, answer_problem, problem_of
from cbmir.runtime.serving.schemas import (
    CASE,
    About,
    AnalyzeAnswer,
    AnalyzeOptions,
    EmbedAnswer,
    Health,
    Reloaded,
    Search,
    SearchAnswer,
)
from cbmir.runtime.serving.security import Guard
from cbmir.runtime.serving.service import Answers, Facts
from cbmir.runtime.serving.settings import Settings
from cbmir.runtime.serving.telemetry import Audit, Metrics, Observer

_T = TypeVar("_T")
_MOST_JSON = 2**20  # bytes
_CHECK_S = 5.0  # that health checks, metrics and the like may take
_PATIENT = (
    "The patient of the image, as the gallery names patients, whose images are left out. In a header, since URLs end "
    "in logs."
)


def create_app(live: ReloadableFinder, settings: Settings) -> FastAPI:
    """The service as an ASGI application, for `serve` or any other server. It closes `live` when it ends.

    Raises UserError where the audit trail cannot be written. `app.state.answers.reload()` reloads.
    """
    gate = RequestLimiter(settings.concurrency, settings.queue, settings.timeout_s)
    checks = RequestLimiter(
        2, 32, _CHECK_S
    )  # so that neither waits for the other, nor a reload for a gallery that hangs
    answers = Answers(live, settings)
    metrics = Metrics(live, gate)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        gate.close()
        checks.close()
        live.close()

    app = FastAPI(
        title="cbmir",
        version=__version__,
        description=INTENDED_USE,
        lifespan=lifespan,
        docs_url=None,  # pages that load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        # Of FastAPI's newer versions: spans of OpenTelemetry have the query, logs the messages of exceptions.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.answers, app.state.gates = answers, (gate, checks)
    routes = _Routes(answers, gate, checks, metrics, settings)
    app.include_router(routes.open())
    app.include_router(routes.guarded())
    for kind in (CbmirError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer_problem)
    app.add_middleware(Guard, settings=settings)
    app.add_middleware(Observer, metrics=metrics, audit=None if settings.audit is None else Audit(settings.audit))
    return app


class _Routes:
    """What each route does with the parts of the service."""

    def __init__(
        self, answers: Answers, gate: RequestLimiter, checks: RequestLimiter, metrics: Metrics, settings: Settings
    ) -> None:
        self._answers, self._gate, self._checks = answers, gate, checks
        self._metrics, self._settings = metrics, settings

    def open(self) -> APIRouter:
        """Those that want no token."""
        router = APIRouter(tags=["health"])
        for method in ("GET", "HEAD"):  # as some proxies ask
            router.add_api_route(
                "/health/live", self.live, summary="Whether the process answers", response_model=Health,
                response_model_exclude_none=True, methods=[method], include_in_schema=method == "GET",
            )  # fmt: skip
            for path in ("/health", "/health/ready"):
                router.add_api_route(
                    path, self.ready, summary="Whether it can analyse", response_model=Health,
                    response_model_exclude_none=True, responses=schemas.NOT_READY, methods=[method],
                    include_in_schema=method == "GET",
                )  # fmt: skip
        return router

    def guarded(self) -> APIRouter:
        """Those that want the token. It is `Guard` that looks at it: `HTTPBearer` only documents it."""
        bearer = Depends(HTTPBearer(auto_error=False, description="The token of the service's token file."))
        router = APIRouter(tags=["v1"], dependencies=[bearer], responses=schemas.PROBLEMS)
        router.add_api_route(
            "/v1/analyze", self.analyze, summary="Findings, and the nearest images of the gallery",
            response_model=AnalyzeAnswer, openapi_extra=schemas.UPLOAD,
            responses=schemas.ANALYZED, methods=["POST"],
        )  # fmt: skip
        router.add_api_route(
            "/v1/embed", self.embed, summary="An image's embedding", response_model=EmbedAnswer,
            openapi_extra=schemas.UPLOAD, methods=["POST"],
        )  # fmt: skip
        router.add_api_route(
            "/v1/search", self.search, summary="The nearest images of an embedding or a case",
            response_model=SearchAnswer, openapi_extra=schemas.SEARCH, methods=["POST"],
        )  # fmt: skip
        router.add_api_route(
            "/v1/cases/{case}/thumbnail", self.thumbnail, summary="A small picture of a case",
            response_class=Response, responses=schemas.THUMBNAIL,
        )  # fmt: skip
        router.add_api_route("/v1/about", self.about, summary="What runs", response_model=About)
        router.add_api_route(
            "/v1/reload", self.reload, summary="Open model and gallery anew", response_model=Reloaded, methods=["POST"]
        )
        router.add_api_route(
            "/metrics", self.metrics, summary="For Prometheus", response_class=Response, tags=["health"],
            responses=schemas.METRICS,
        )  # fmt: skip
        return router

    async def analyze(
        self, request: Request, options: Annotated[AnalyzeOptions, Query()],
        patient_id: Annotated[str, Header(alias="Patient-ID", max_length=256, description=_PATIENT)] = "",
    ) -> AnalyzeAnswer:  # fmt: skip
        """The body is the image file itself: DICOM (one frontal chest radiograph), PNG or JPEG. Other patients' images
        appear as opaque case ids. For research, not for diagnosis."""
        _check_given_once(request)
        patient = _utf8(patient_id)
        return await self._upload(request, lambda data, facts: self._answers.analyze(data, patient, options, facts))

    async def embed(self, request: Request) -> EmbedAnswer:
        """The body is as that of /v1/analyze."""
        return await self._upload(request, self._answers.embed)

    async def search(self, request: Request) -> SearchAnswer:
        """Of a case: without itself and, unless asked for, without its patient's other images."""
        if request.query_params:
            raise Problem(422, "parameters", "Expected all parameters in the body, found some in the URL.")
        with self._gate.place() as place:
            body = await read_body(request, _MOST_JSON, self._settings.timeout_s)
            return await place.run(lambda: self._answers.search(_parsed(body), request.scope["cbmir"].facts))

    async def thumbnail(self, request: Request, case: Annotated[str, Path(pattern=CASE)]) -> Response:
        """JPEG of about 256 pixels, where the gallery's owner shares them."""
        with self._gate.place() as place:
            image = await place.run(lambda: self._answers.thumbnail(case, request.scope["cbmir"].facts))
        return Response(image, media_type="image/jpeg")

    async def about(self) -> About:
        """Model, engine, labels, gallery."""
        return await self._check(self._answers.about)

    async def reload(self) -> Reloaded:
        """Requests under way end with what they began with; until the new model is warm, the old one answers."""
        return await asyncio.to_thread(self._answers.reload)

    async def metrics(self) -> Response:
        """Prometheus' text format."""
        return Response(await self._check(self._metrics.text), media_type=CONTENT_TYPE_LATEST)

    async def live(self) -> Health:
        """Always 200."""
        return Health(status="live")

    async def ready(self, response: Response) -> Health:
        """200 once the model has run and the gallery is read; 503 before, and where the gallery was replaced."""
        try:
            await self._check(self._answers.check_ready)
        except (CbmirError, Problem) as error:
            response.status_code = 503
            return Health(status="not ready", problem=problem_of(error).kind)
        return Health(status="ready")

    async def _check(self, work: Callable[[], _T]) -> _T:
        with self._checks.place() as place:
            return await place.run(work)

    async def _upload(self, request: Request, work: Callable[[bytes, Facts], _T]) -> _T:
        trace = request.scope["cbmir"]
        with self._gate.place() as place:
            data = await read_upload(request, self._settings.max_upload_bytes, self._settings.timeout_s)
            trace.uploaded = len(data)

            def answer() -> _T:
                trace.facts["sha256"] = hashlib.sha256(data).hexdigest()
                return work(data, trace.facts)

            return await place.run(answer)


def _check_given_once(request: Request) -> None:
    """Raise Problem for a parameter that is there twice, of which one would be left out in silence."""
    given = [name for name, _ in request.query_params.multi_items()]
    if len(given) > len(set(given)):
        raise Problem(422, "parameters", "Expected each parameter once, found one more than once.")


def _utf8(header: str) -> str:
    """A header's text, which Starlette takes for Latin-1. Raises Problem for what is no UTF-8: it would be another
    patient's id."""
    try:
        return header.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        raise Problem(422, "parameters", "Expected the header Patient-ID in UTF-8, found other bytes.") from None


def _parsed(body: bytes) -> Search:
    try:
        return Search.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MOST_ERRORS:  # of which a list takes long
            raise Problem(422, "parameters", f"{error.error_count():,} things are not as expected.") from None
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in errors]) from None
