"""`cbmir serve`: the HTTP service."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import click

from cbmir.cli import options
from cbmir.cli.options import PATH, command, option
from cbmir.errors import UserError, require
from cbmir.process import threads_each

_DECODING = 2 / 3  # share of a request's timeout; the rest is for the steps after decoding


@command(
    "cbmir serve --model model.onnx --gallery gallery",
    "curl --data-binary @chest.dcm -H 'Content-Type: application/dicom' 'http://127.0.0.1:8000/v1/analyze?k=5'",
    "cbmir serve --model model.onnx --gallery gallery --host 0.0.0.0 --token-file token --audit audit.jsonl",
)
@options.model_option
@options.gallery_option("findings and embeddings only")
@options.listen_options(8000)
@option("--token-file", type=PATH,
        help="A file that only its owner may read, with the token that every request must carry.")  # fmt: skip
@option("--no-token", is_flag=True, help="Serve other machines without a token.")
@option("--share", multiple=True, type=click.Choice(["reports", "thumbnails"]), help="Also return "
        "other patients' reports (which may name patients), or thumbnails with boxes.")  # fmt: skip
@option("--audit", type=PATH, help="Append a line of JSON to this file for each request.")
@option("--concurrency", type=click.IntRange(1), default=2, help="Requests to answer at once.")
@option("--queue", default=32, help="Requests that may wait; further ones get status 429.")
@option("--max-upload", default=64, metavar="MIB", help="The largest image file.")
@option("--timeout", default=30.0, metavar="SECONDS", help="Time limit of an upload, and of its answer.")
@options.finder_options
@options.threads_option
def serve(
    model: Path, gallery: str | None, host: str, port: int, token_file: Path | None, no_token: bool,
    share: tuple[str, ...], audit: Path | None, concurrency: int, queue: int, max_upload: int, timeout: float,
    threads: int | None, **opening: Any,
) -> None:  # fmt: skip
    """Answer over HTTP: /v1/analyze, /v1/search, /v1/embed, /health, /metrics, /openapi.json (docs/http.md).

    SIGHUP or POST /v1/reload reloads model and gallery without interruption; SIGTERM finishes the requests in progress.

    Research use only. Not a medical device, not for diagnosis.
    """
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        require(module, "serve")
    from cbmir.runtime.finder import Finder
    from cbmir.runtime.hot_reload import ReloadableFinder
    from cbmir.runtime.imaging.decoder_process import DecoderPool
    from cbmir.runtime.logs import log_as_json
    from cbmir.runtime.serving.server import serve as serve_app
    from cbmir.runtime.serving.settings import Settings, load_token
    from cbmir.runtime.sockets import allowed_hosts, is_loopback

    if token_file is None and not no_token and not is_loopback(host):
        raise UserError(f"expected --token-file, since other machines can reach {host}, found none; --no-token lets "
                        f"everyone in")  # fmt: skip
    settings = Settings(
        token=None if token_file is None else load_token(token_file),
        hosts=allowed_hosts(host),
        max_upload_bytes=max_upload * 2**20, concurrency=concurrency, queue=queue, timeout_s=timeout, audit=audit,
        share=frozenset(share),
    )  # fmt: skip
    log_as_json()
    each = threads_each(threads, concurrency)
    with ExitStack() as stack:
        decoders = cache(lambda: stack.enter_context(DecoderPool(concurrency, timeout * _DECODING)))
        live = ReloadableFinder(
            lambda: Finder.open(model, gallery, threads=each, read=decoders().read, **opening), at_once=False
        )

        def ready(url: str) -> None:
            with live.use() as finder:
                options.announce(url, finder.card.notes)

        serve_app(live, settings, host=host, port=port, ready=ready)
