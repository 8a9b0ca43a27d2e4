"""A PACS in memory, for tests of followers."""

from __future__ import annotations

import io
from collections.abc import Collection
from datetime import date

from pydicom import dcmread

from cbmir.runtime.pacs.dicomweb import InstanceFound, StudyFound

CR, CT = "1.2.840.10008.5.1.4.1.1.1", "1.2.840.10008.5.1.4.1.1.2"


class Archive:
    """A PACS in memory, with files by study, Orthanc's changes, and a date for each study."""

    url = "http://archive"

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.days: dict[str, date] = {}
        self.stable: list[str] = []
        self.retrieved: list[str] = []
        self.asked_since: list[date] = []
        self.broken: dict[str, Exception] = {}  # study or instance -> the error of reading it

    def cancel(self) -> None:
        pass

    def add(self, data: bytes, day: date = date(2026, 1, 1)) -> str:
        dataset = dcmread(io.BytesIO(data))
        study = str(dataset.StudyInstanceUID)
        self.files.setdefault(study, {})[str(dataset.SOPInstanceUID)] = data
        self.days[study] = day
        self.stable.append(study)
        return study

    def studies_since(self, first: date, modalities: Collection[str]) -> dict[str, StudyFound]:
        self.asked_since.append(first)
        return {
            uid: StudyFound(self.days[uid], len(files)) for uid, files in self.files.items() if self.days[uid] >= first
        }

    def instances(self, study_uid: str, modalities: Collection[str]) -> list[InstanceFound]:
        if study_uid in self.broken:
            raise self.broken[study_uid]
        return [InstanceFound(study_uid, "1", CR, uid) for uid in self.files.get(study_uid, {})]

    def retrieve(self, found: InstanceFound, max_bytes: int) -> bytes | None:
        self.retrieved.append(found.sop_instance_uid)
        if found.sop_instance_uid in self.broken:
            raise self.broken[found.sop_instance_uid]
        return self.files[found.study_uid].get(found.sop_instance_uid)

    def changes(self, since: int) -> tuple[list[str], int, bool]:
        page = self.stable[since : since + 2]
        return page, since + len(page), since + len(page) >= len(self.stable)

    def last_change(self) -> int:
        return len(self.stable)

    def study_uid(self, orthanc_id: str) -> str | None:
        return orthanc_id if orthanc_id in self.files else None
