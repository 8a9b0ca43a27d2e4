"""The workers: each claims a job, analyses its file, keeps the results, hands them to the outlet, and is done with it.

What is no chest radiograph is refused and forgotten; a damaged file becomes a dead letter at once. What fails though it
might have worked is tried again with ever longer delays, and becomes a dead letter in the end: much later where the
archive, the gallery or the engine is away. While the outlet takes nothing, files are analysed, and results wait. Logs
name jobs, never patients.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Collection

from cbmir.errors import (
    BlankImageError,
    DeliveryAwayError,
    DicomImageError,
    EngineError,
    GalleryError,
    ImageError,
    NotReadyError,
)
from cbmir.runtime.dicom_output import Results, answers_fingerprint, make_results, warm_up
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.pacs.destinations import Destination
from cbmir.runtime.pacs.jobs import Job, ResultObject
from cbmir.runtime.pacs.log import fields, log, what_failed
from cbmir.runtime.pacs.queue import DurableQueue

#: Seconds after which an idle worker looks at the clock, which may have been set, and one whose queue failed tries it.
_LOOK_AGAIN = 5.0


class Workers:
    """Threads that work a queue off until they are stopped."""

    def __init__(
        self,
        queue: DurableQueue,
        live: ReloadableFinder,
        outlet: Destination,
        *,
        kinds: Collection[str] = ("sr",),
        count: int = 2,
    ) -> None:
        """`kinds` are DICOM objects of `make_results`: sr, sc, kos. Raises MissingDependencyError."""
        warm_up()
        self._queue, self._live, self._outlet = queue, live, outlet
        self._kinds = tuple(kinds)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, name=f"cbmir-worker-{n}") for n in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End what is begun; what waits stays in the queue. Returns when the last worker has ended."""
        self._stopping.set()
        self._queue.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    @property
    def alive(self) -> bool:
        """Whether all of them are at work."""
        return all(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while not self._queue.stopped:
            try:
                job = self._queue.claim(wait=_LOOK_AGAIN)
                if job is not None:
                    self.work_on(job)
            except Exception as error:  # noqa: BLE001 - the disk may have room again, or answer again, later
                log.error("the queue failed", extra=fields(reason=what_failed(error), again_in_s=_LOOK_AGAIN))
                self._stopping.wait(_LOOK_AGAIN)

    def work_on(self, job: Job) -> None:
        """Bring a claimed job on its way; whatever happens to it is settled in the queue and logged. Raises what the
        queue raises where it cannot write: then the job can be claimed again."""
        try:
            self._answer(job, time.monotonic())
        except BaseException:
            self._queue.release(job)
            raise

    def _answer(self, job: Job, began: float) -> None:
        try:
            fingerprint, made = job.fingerprint, self._queue.kept(job)
            if not fingerprint:
                fingerprint, made = self._analyse(job)
                self._queue.keep(job, made, fingerprint)
            if made and self._queue.is_holding:
                self._queue.hold_back(job)
                log.info("analysed: its results wait", extra=fields(**_about(job, began)))
                return
            self._outlet.send(made)
            report = next((one.uid for one in made if one.kind == "sr"), "")
            self._queue.done(job, fingerprint, report, sent=bool(made))
        except (DicomImageError, BlankImageError) as error:  # healthy files of something else
            # Told first: whoever is killed in between tells it again, and nothing else remembers it.
            log.info("refused", extra=fields(**_about(job, began), reason=str(error)))
            with self._live.use() as finder:
                self._queue.refused(job, answers_fingerprint(finder.card))
        except ImageError as error:
            self._queue.bury(job, str(error))
            self._tell_of_failure(job, str(error), None, began)
        except DeliveryAwayError as error:
            self._tell_of_failure(job, str(error), self._queue.put_off(job, str(error), hold=True), began)
        except (GalleryError, NotReadyError, EngineError) as error:
            self._tell_of_failure(job, str(error), self._queue.put_off(job, str(error)), began)
        except Exception as error:  # noqa: BLE001 - no file may end a worker
            reason = what_failed(error)
            self._tell_of_failure(job, reason, self._queue.failed(job, reason), began)
        else:
            log.info("done", extra=fields(**_about(job, began), results=[one.kind for one in made]))

    def _tell_of_failure(self, job: Job, reason: str, delay: float | None, began: float) -> None:
        about = _about(job, began) | {"reason": reason}
        if delay is None:
            log.error("given up: now a dead letter", extra=fields(**about))
        else:
            log.warning("failed", extra=fields(**about, again_in_s=delay))

    def _analyse(self, job: Job) -> tuple[str, list[ResultObject]]:
        data = self._queue.file(job)
        with self._live.use() as finder:
            fingerprint = answers_fingerprint(finder.card)
            image = finder.read(data)
            results = make_results(
                data, finder.analyze(image), finder, kinds=self._kinds, image=image, copies=False,
                predecessor=self._queue.predecessor(job, fingerprint),
            )  # fmt: skip
        return fingerprint, as_made(results)


def as_made(results: Results) -> list[ResultObject]:
    """Results as the files that are kept and sent."""
    made = []
    for kind, dataset in results.named():
        stream = io.BytesIO()
        dataset.save_as(stream, enforce_file_format=True)
        made.append(ResultObject(kind, str(dataset.SOPInstanceUID), stream.getvalue()))
    return made


def _about(job: Job, began: float) -> dict[str, object]:
    return {
        "job": job.name,
        "source": job.source,
        "attempt": job.attempts,
        "seconds": round(time.monotonic() - began, 3),
        "waited_s": round(max(0.0, time.time() - job.received), 3),
    }
