"""Run the attacks of docs/security.md, each against its promise: `make attack`, by hand; it takes minutes.

    python tests/attack/attack.py [--seconds 600] [--only NAME] [--scale 0.1] [--write docs/security.md]

If a promise is not kept, the exit code is 1, and the table has the first reason.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(place) for place in (HERE, HERE.parent / "helpers", HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import files  # noqa: E402, F401 - imports add attacks to the list
import galleries  # noqa: E402, F401
import node  # noqa: E402, F401
import peers  # noqa: E402, F401
import service  # noqa: E402, F401
import web  # noqa: E402, F401
from lab import ATTACKS, Attack, Lab  # noqa: E402

from cbmir.files import write_json, write_text  # noqa: E402
from cbmir.machine import describe_machine  # noqa: E402

_BEGIN, _END = "<!-- attacks -->\n", "<!-- /attacks -->\n"


@dataclass
class Result:
    """How often a promise was tested and kept, and the first reason why it was not."""

    attack: str
    promise: str
    tried: int = 0
    kept: int = 0
    reason: str = ""
    seconds: float = 0.0

    @property
    def is_kept(self) -> bool:
        return self.kept == self.tried > 0


def attempt(attack: Attack, lab: Lab, scale: float, seconds: float) -> Result:
    """Run an attack for at most `seconds`, but at least once. An error in the attack itself counts as a failure."""
    result, start = Result(attack.name, attack.promise), time.monotonic()
    count = max(1, round(attack.count * scale))
    try:
        with closing(attack.run(lab, count)) as attempts:
            for reason in attempts:
                result.tried += 1
                result.kept += not reason
                result.reason = result.reason or reason
                if time.monotonic() - start > seconds and not attack.whole:
                    break
    except Exception as error:  # noqa: BLE001 - shown in the table
        result.tried += 1
        result.reason = result.reason or f"{type(error).__name__}: {error}"
    result.seconds = round(time.monotonic() - start, 1)
    return result


def table(results: list[Result]) -> str:
    """The results as a Markdown table."""
    lines = ["| attack | count | promise | kept |", "|---|---|---|---|"]
    for one in results:
        reason = one.reason.replace("|", "/").replace("\n", " ")[:160]
        kept = f"{one.kept} of {one.tried}" + ("" if one.is_kept else f": **not kept**, {reason}")
        lines.append(f"| {one.attack} | {one.tried} | {one.promise} | {kept} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="for all together")
    parser.add_argument("--scale", type=float, default=1, help="of the counts")
    parser.add_argument("--only", choices=[one.name for one in ATTACKS], action="append")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    parser.add_argument("-o", "--output", type=Path, help="write the counts as JSON")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are ended
    logging.disable()
    warnings.simplefilter("ignore")
    chosen = [one for one in ATTACKS if not given.only or one.name in given.only]
    results: list[Result] = []
    until = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        lab = Lab.made_in(Path(folder))
        for number, one in enumerate(chosen):
            share = max(5.0, (until - time.monotonic()) / (len(chosen) - number) * 2)
            results.append(attempt(one, lab, given.scale, share))
            last = results[-1]
            why = "" if last.is_kept else f"  NOT KEPT: {last.reason[:300]}"
            sys.stderr.write(f"{last.seconds:6.1f} s  {last.attack}: {last.kept} of {last.tried}{why}\n")
    if given.output:
        write_json(given.output, {"machine": describe_machine(), "attacks": [asdict(one) for one in results]})
    if given.write:
        before, _, rest = given.write.read_text("utf-8").partition(_BEGIN)
        after = rest.partition(_END)[2]
        write_text(given.write, before + _BEGIN + table(results) + _END + after)
    else:
        sys.stdout.write(table(results))
    return int(not all(one.is_kept for one in results))


if __name__ == "__main__":
    sys.exit(main())
