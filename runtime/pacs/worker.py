"""The workers: each claims a job, analyses its file, stores the results, and sends them to the destination.

A file that is not a chest radiograph is refused and forgotten; a damaged one immediately becomes a dead letter. Other
failures are retried with growing delays and end as dead letters, much later if the archive, the gallery or the engine
is unavailable. While the destination accepts nothing, files are analysed and their results wait.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Collection
from dataclasses import replace

from cbmir import errors
from cbmir.runtime.dicom_output import answers_fingerprint, make_results, warm_up
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.logs import fields, pacs_log, what_failed
from cbmir.runtime.pacs.destinations import Destination
from cbmir.runtime.pacs.jobs import Job, ResultObject
from cbmir.runtime.pacs.queue import DurableQueue

#: Seconds after which an idle worker checks the clock, which may have been changed, or retries a queue that failed.
_LOOK_AGAIN = 5.0


class Workers:
    """Threads that process a queue until they are stopped."""

    def __init__(
        self, queue: DurableQueue, live: ReloadableFinder, destination: Destination, *,
        kinds: Collection[str] = ("sr",), count: int = 2,
    ) -> None:  # fmt: skip
        """`kinds` are DICOM objects of `make_results`: sr, sc, kos. Raises MissingDependencyError."""
        warm_up()
        self._queue, self._live, self._destination, self._kinds = queue, live, destination, tuple(kinds)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, name=f"cbmir-worker-{n}") for n in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish work in progress; jobs that wait stay in the queue. Returns when the last worker has ended."""
        self._stopping.set()
        self._queue.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while not self._queue.stopped:
            try:
                if (job := self._queue.claim(wait=_LOOK_AGAIN)) is not None:
                    self.work_on(job)
            except Exception as error:  # noqa: BLE001 - the disk may have space, or work, again later
                pacs_log.error("the queue failed", extra=fields(reason=what_failed(error), again_in_s=_LOOK_AGAIN))
                self._stopping.wait(_LOOK_AGAIN)

    def work_on(self, job: Job) -> None:
        """Answer a claimed job. Raises the queue's errors if it cannot write; then the job can be claimed again."""
        try:
            self._answer(job, time.monotonic())
        except BaseException:
            self._queue.release(job)
            raise

    def _answer(self, job: Job, began: float) -> None:
        try:
            fingerprint, results = job.fingerprint, self._queue.kept(job)
            if not fingerprint:
                fingerprint, results = self._analyse(job)
                self._queue.keep(job, results, fingerprint)
                job = replace(job, attempts=1)  # as `keep` counts
            if results and self._queue.is_holding:
                self._queue.hold_back(job)
                pacs_log.info("analysed: its results wait to be sent", extra=fields(**_about(job, began)))
                return
            self._destination.send(results)
            report = next((each.uid for each in results if each.kind == "sr"), "")
            self._queue.done(job, fingerprint, report, sent=bool(results))
        except (errors.DicomImageError, errors.BlankImageError) as error:  # valid, but something else
            # Logged first, because nothing else records it; a process killed in between logs it again.
            pacs_log.info("refused", extra=fields(**_about(job, began), reason=str(error)))
            with self._live.use() as finder:
                self._queue.refused(job, answers_fingerprint(finder.card), error.reason)
        except errors.ImageError as error:
            self._queue.bury(job, str(error))
            _log_failure(job, str(error), None, began)
        except (errors.DeliveryAwayError, errors.GalleryError, errors.NotReadyError, errors.EngineError) as error:
            delay = self._queue.put_off(job, str(error), hold=isinstance(error, errors.DeliveryAwayError))
            _log_failure(job, str(error), delay, began)
        except Exception as error:  # noqa: BLE001 - no file may end a worker
            reason = what_failed(error)
            _log_failure(job, reason, self._queue.failed(job, reason), began)
        else:
            pacs_log.info("done", extra=fields(**_about(job, began), results=[each.kind for each in results]))

    def _analyse(self, job: Job) -> tuple[str, list[ResultObject]]:
        data = self._queue.file(job)
        with self._live.use() as finder:
            fingerprint = answers_fingerprint(finder.card)
            image = finder.read(data)
            results = make_results(
                data, finder.analyze(image), finder, kinds=self._kinds, image=image, copies=False,
                predecessor=self._queue.predecessor(job, fingerprint),
            )  # fmt: skip
        objects = []
        for kind, dataset in results.named():
            stream = io.BytesIO()
            dataset.save_as(stream, enforce_file_format=True)
            objects.append(ResultObject(kind, str(dataset.SOPInstanceUID), stream.getvalue()))
        return fingerprint, objects


def _log_failure(job: Job, reason: str, delay: float | None, began: float) -> None:
    about = _about(job, began) | {"reason": reason}
    if delay is None:
        pacs_log.error("given up: now a dead letter", extra=fields(**about))
    else:
        pacs_log.warning("failed", extra=fields(**about, again_in_s=delay))


def _about(job: Job, began: float) -> dict[str, object]:
    return {
        "job": job.name,
        "source": job.source,
        "attempt": job.attempts,
        "seconds": round(time.monotonic() - began, 3),
        "waited_s": round(max(0.0, time.time() - job.received), 3),
    }
