"""The application: its routes and middleware."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from cbmir import __version__
from cbmir.card import INTENDED_USE, NOT_A_DEVICE
from cbmir.errors import CbmirError
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.serving import schemas
from cbmir.runtime.serving.limits import RequestLimiter, body_size, read_body, read_upload
from cbmir.runtime.serving.problems import MOST_ERRORS, Problem, Trace, answer_problem, problem_of
from cbmir.runtime.serving.security import Credential, Guard, SecurityHeaders
from cbmir.runtime.serving.service import Facts, FinderService
from cbmir.runtime.serving.settings import Settings
from cbmir.runtime.serving.telemetry import Audit, Metrics, Observer

_T = TypeVar("_T")
_CHECK_S = 5.0  # seconds for health checks, metrics and the like
_PATIENT = "The id of the image's patient in the gallery, to leave out their images. A header, since URLs are logged."

#: Open without a token, because monitors and browsers have none. The answers only say whether the service is up.
_OPEN = ("/", "/health", "/health/live", "/health/ready")
#: For people who open the address in a browser. It loads nothing, and the security policy allows no styles.
_PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>cbmir</title></head><body>
<h1>cbmir {__version__} over HTTP</h1>
<p><strong>{NOT_A_DEVICE}</strong></p>
<p>This service is for programs. For people there is the command <code>cbmir demo</code>.</p>
<ul>
<li><a href="openapi.json">openapi.json</a>: every route, with examples</li>
<li><a href="v1/about">v1/about</a>: the model, the gallery and the limits</li>
<li><a href="health">health</a>: whether the service can analyse</li>
<li><a href="metrics">metrics</a>: for Prometheus</li>
</ul>
<p>Send an image:
<code>curl --data-binary @chest.dcm -H 'Content-Type: application/dicom' 'http://ADDRESS/v1/analyze?k=5'</code></p>
<p>If the service has a token, everything except this page and health needs the header
<code>Authorization: Bearer TOKEN</code>.</p>
</body></html>
"""
health = APIRouter(tags=["health"])
_READY: dict[str, Any] = {
    "summary": "Whether it can analyse", "response_model_exclude_none": True, "responses": schemas.NOT_READY,
}  # fmt: skip
#: `Guard` checks the token; `HTTPBearer` documents it.
guarded = APIRouter(
    tags=["v1"], responses=schemas.PROBLEMS,
    dependencies=[Depends(HTTPBearer(auto_error=False, description="The token of the service's token file."))],
)  # fmt: skip


def create_app(live: ReloadableFinder, settings: Settings) -> FastAPI:
    """Make the ASGI application, which closes `live` at its end. Raises UserError if it cannot write `audit`."""
    limiter = RequestLimiter(settings.concurrency, settings.queue, settings.timeout_s)
    checks = RequestLimiter(2, 32, _CHECK_S)  # separate, so that hanging checks do not block requests, or the reverse
    metrics = Metrics(live, limiter)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        limiter.close()
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
        # For newer versions of FastAPI, whose OpenTelemetry spans contain queries, and logs the messages of exceptions.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.service, app.state.settings, app.state.metrics = FinderService(live, settings), settings, metrics
    app.state.limiter, app.state.checks = limiter, checks
    app.include_router(health)
    app.include_router(guarded)
    for kind in (CbmirError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer_problem)
    if settings.token is None:
        app.add_middleware(Guard, hosts=settings.hosts)
    else:
        wanted = "the service's token as 'Authorization: Bearer TOKEN'"
        app.add_middleware(
            Guard, credential=Credential("Bearer", settings.token.encode("ascii"), wanted), open_paths=_OPEN
        )
    app.add_middleware(Observer, metrics=metrics, audit=None if settings.audit is None else Audit(settings.audit))
    app.add_middleware(SecurityHeaders, policy="default-src 'none'; frame-ancestors 'none'")
    return app


@health.get("/", include_in_schema=False, response_class=HTMLResponse)
async def front_page() -> str:
    """Show what this is, with links to the API."""
    return _PAGE


@health.head("/health/live", include_in_schema=False)  # as some proxies ask
@health.get("/health/live", summary="Whether the process answers", response_model_exclude_none=True)
async def live() -> schemas.Health:
    """Always answer 200."""
    return schemas.Health(status="live")


@health.head("/health/ready", include_in_schema=False)
@health.get("/health/ready", **_READY)
@health.head("/health", include_in_schema=False)
@health.get("/health", **_READY)
async def ready(request: Request, response: Response) -> schemas.Health:
    """Answer 200 once the model has run and the gallery was read; 503 before, and if the gallery was replaced."""
    try:
        await _check(request, request.app.state.service.check_ready)
    except (CbmirError, Problem) as error:
        response.status_code = 503
        return schemas.Health(status="not ready", problem=problem_of(error).kind)
    return schemas.Health(status="ready")


@guarded.post(
    "/v1/analyze", summary="Findings, and the nearest images of the gallery", openapi_extra=schemas.UPLOAD,
    responses=schemas.ANALYZED,
)  # fmt: skip
async def analyze(
    request: Request, options: Annotated[schemas.AnalyzeOptions, Query()],
    patient_id: Annotated[str, Header(alias="Patient-ID", max_length=256, description=_PATIENT)] = "",
) -> schemas.AnalyzeAnswer:  # fmt: skip
    """The body is the image file itself: DICOM (one frontal chest radiograph), PNG or JPEG. Other patients' images
    appear as opaque case ids. For research, not for diagnosis."""
    _check_each_once(request)
    patient, service = _utf8(patient_id), request.app.state.service
    return await _upload(request, lambda data, facts: service.analyze(data, patient, options, facts))


@guarded.post("/v1/embed", summary="An image's embedding, or a region's", openapi_extra=schemas.UPLOAD)
async def embed(request: Request, options: Annotated[schemas.EmbedOptions, Query()]) -> schemas.EmbedAnswer:
    """The body is the image file, as for /v1/analyze."""
    _check_each_once(request)
    service = request.app.state.service
    return await _upload(request, lambda data, facts: service.embed(data, options, facts))


@guarded.post("/v1/search", summary="The nearest images of an embedding or a case", openapi_extra=schemas.SEARCH)
async def search(request: Request) -> schemas.SearchAnswer:
    """For a case, leave out itself and, unless requested, other images of its patient."""
    return await _search(request, schemas.Search)


@guarded.post("/v1/refine", summary="The same, refined by alike and unlike cases", openapi_extra=schemas.REFINE)
async def refine(request: Request) -> schemas.SearchAnswer:
    """Search for unit(query + 0.75 mean(alike) - 0.15 mean(unlike) + sum of weight * unit(direction of a finding))."""
    return await _search(request, schemas.Refine)


@guarded.get(
    "/v1/cases/{case}/thumbnail", summary="A small picture of a case", response_class=Response,
    responses=schemas.THUMBNAIL,
)  # fmt: skip
async def thumbnail(request: Request, case: Annotated[str, Path(pattern=schemas.CASE)]) -> Response:
    """Return a JPEG of about 256 pixels, if the gallery's owner shares thumbnails."""
    state, facts = request.app.state, Trace.of(request.scope).facts
    image = await state.limiter.run(lambda _: state.service.thumbnail(case, facts))
    return Response(image, media_type="image/jpeg")


@guarded.get("/v1/about", summary="What runs")
async def about(request: Request) -> schemas.About:
    """Describe the model, engine, labels and gallery."""
    return await _check(request, request.app.state.service.about)


@guarded.post("/v1/reload", summary="Reload model and gallery")
async def reload(request: Request) -> schemas.Reloaded:
    """Running requests keep the model and gallery that they began with. The old model answers until the new is warm."""
    return await asyncio.to_thread(request.app.state.service.reload)


@guarded.get("/metrics", summary="For Prometheus", response_class=Response, tags=["health"], responses=schemas.METRICS)
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus' text format."""
    return Response(await _check(request, request.app.state.metrics.text), media_type=CONTENT_TYPE_LATEST)


async def _check(request: Request, work: Callable[[], _T]) -> _T:
    checks: RequestLimiter = request.app.state.checks
    return await checks.run(lambda _: work())


async def _search(request: Request, shape: type[schemas.Search]) -> schemas.SearchAnswer:
    if request.query_params:
        raise Problem(422, "parameters", "Expected all parameters in the body, found some in the URL.")
    state, facts = request.app.state, Trace.of(request.scope).facts
    answer: schemas.SearchAnswer = await state.limiter.run(
        lambda body: state.service.search(_parsed(body, shape), facts),
        lambda: read_body(request, 2**20, state.settings.timeout_s),
    )
    return answer


def _check_each_once(request: Request) -> None:
    given = [name for name, _ in request.query_params.multi_items()]
    if len(given) > len(set(given)):  # one of them would be silently ignored
        raise Problem(422, "parameters", "Expected each parameter once, found one more than once.")


async def _upload(request: Request, work: Callable[[bytes, Facts], _T]) -> _T:
    limiter: RequestLimiter = request.app.state.limiter
    settings: Settings = request.app.state.settings
    facts = Trace.of(request.scope).facts

    def answer(data: bytes) -> _T:
        try:
            return work(data, facts)
        finally:
            if "sha256" not in facts:  # the image could not be read
                facts["sha256"] = hashlib.sha256(data).hexdigest()

    most = settings.max_upload_bytes
    return await limiter.run(answer, lambda: read_upload(request, most, settings.timeout_s), body_size(request, most))


def _utf8(header: str) -> str:
    """Decode a header as UTF-8; Starlette decodes it as Latin-1. Invalid UTF-8 might give another patient's id."""
    try:
        return header.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        raise Problem(422, "parameters", "Expected the header Patient-ID in UTF-8, found other bytes.") from None


def _parsed(body: bytes, shape: type[schemas.Search]) -> schemas.Search:
    try:
        return shape.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MOST_ERRORS:  # a list of them takes long
            raise Problem(422, "parameters", f"{error.error_count():,} values are not as expected.") from None
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in errors]) from None
