"""`cbmir pacs retry`: put dead letters of a node or follower back into its queue."""

from __future__ import annotations

import sys
from pathlib import Path

from cbmir.cli.options import command, json_option, print_answer
from cbmir.cli.pacs.service import log_safely, state_option
from cbmir.errors import UserError, require


@command("cbmir pacs retry --state cbmir-pacs")
@state_option
@json_option
def retry(state: Path, as_json: bool) -> None:
    """Put dead letters back into the queue, once the cause of their failure is fixed (docs/pacs.md).

    Stop the node or follower first: only one process can open the queue. Its next start processes them.
    """
    require("pydicom", "dicom")
    from cbmir.runtime.pacs.intake import retry as put_back
    from cbmir.runtime.pacs.jobs import DATABASE
    from cbmir.runtime.pacs.queue import DurableQueue

    if not (state / DATABASE).exists():
        raise UserError(f"expected the folder of a queue, found none at {state}; name it with --state")
    log_safely()
    with DurableQueue(state, sys.maxsize) as queue:
        back, left = put_back(queue)
    text = f"{back} dead letters are back in the queue, {left} stay"
    print_answer(as_json, {"back": back, "left": left}, text)
