"""`cbmir pacs node`: receive radiographs from a PACS, and send results back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.cli.options import PATH, command, listen_options, option
from cbmir.cli.pacs.service import SignalsHeldCommand, pacs_service, service_options
from cbmir.errors import UserError, require

if TYPE_CHECKING:
    from cbmir.runtime.pacs.destinations import Destination


@command(
    "cbmir pacs node --model model.onnx --gallery gallery --store-to ORTHANC@127.0.0.1:4242",
    "cbmir pacs node --model model.onnx --host 0.0.0.0 --allow-calling ORTHANC --tls node.pem node.key ca.pem",
    cls=SignalsHeldCommand,
)
@option("--aet", default="CBMIR", help="The node's AE title: senders must use it.")
@listen_options(11112)
@option("--allow-calling", multiple=True, metavar="AET", help="An AE title that may send; may be repeated.")
@option("--allow-any-calling", is_flag=True, help="Accept images from any AE title.")
@option("--tls", nargs=3, type=PATH, metavar="CERT KEY CA",
        help="Mutual TLS with these PEM files: the node's certificate, its key, and the trusted authorities. Senders "
        "without a certificate from these authorities are refused.")  # fmt: skip
@option("--store-to", metavar="AET@HOST:PORT", help="Send results there.  [default: files in DIR/results]")
@option("--max-associations", type=click.IntRange(1), default=16, help="Maximum number of senders at once.")
@service_options
def node(
    aet: str, host: str, port: int, allow_calling: tuple[str, ...], allow_any_calling: bool,
    tls: tuple[Path, Path, Path] | None, store_to: str | None, max_associations: int, **common: Any,
) -> None:  # fmt: skip
    """Run a DICOM node: C-ECHO, C-STORE of radiographs, and results sent by C-STORE (docs/pacs.md).

    A sender gets its answer once the image is on disk; from then on it is not lost if this process dies. A report is
    sent at least once, always under the same UID. SIGTERM finishes the work in progress, a second one stops at once;
    SIGHUP reloads model and gallery.

    Research use only. Not a medical device, not for diagnosis.
    """
    require("pynetdicom", "dicom")
    from cbmir.runtime.pacs.destinations import Address, Folder, StoreScu, Tls
    from cbmir.runtime.pacs.storage_scp import StorageScp
    from cbmir.runtime.sockets import is_loopback

    if not (allow_calling or allow_any_calling or tls or is_loopback(host)):
        raise UserError(f"expected --allow-calling or --tls, since other machines can reach {host}, found neither; "
                        f"--allow-any-calling lets everyone in")  # fmt: skip
    files = Tls(*tls) if tls else None
    to = None if store_to is None else Address.parse(store_to)

    def open_destination() -> Destination:
        if to is None:
            return Folder(common["state"] / "results")
        return StoreScu(to, calling=aet, tls=files.client() if files else None)

    with pacs_service(open_destination, **common) as (intake, start):
        pacs_node = StorageScp(
            intake, ae_title=aet, host=host, port=port, allow_calling=allow_calling,
            tls=files.server() if files else None, max_associations=max_associations,
        )  # fmt: skip
        start(pacs_node, lambda: f"{aet}@{host}:{pacs_node.port}")
