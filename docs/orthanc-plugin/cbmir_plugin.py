# SPDX-License-Identifier: AGPL-3.0-or-later
# See README.md in this folder: unlike the rest of cbmir this file is under the AGPL, since Orthanc's Python plugin is.
"""An Orthanc plugin that has each new chest radiograph answered by `cbmir serve`, and keeps the report in its study.

Orthanc runs it in its own process (setting "PythonScript"), and all that it does is to ask over HTTP: Orthanc needs
nothing of cbmir, and a model that is slow or away delays no one but this plugin. For research, not for diagnosis.
"""

import base64
import json
import os
import urllib.error
import urllib.request
from pathlib import Path

import orthanc

URL = os.environ.get("CBMIR_URL", "http://127.0.0.1:8000")
TOKEN_FILE = os.environ.get("CBMIR_TOKEN_FILE")
MODALITIES = ("CR", "DX")
#: Orthanc's own metadata of an instance (1024 and up are users'): that it was answered, so that none is asked twice.
ANSWERED = "1848"
TIMEOUT = 60  # seconds


def on_change(change, level, resource):
    """Once nothing of a study has come for "StableAge" seconds: all of its radiographs that have no answer yet."""
    if change != orthanc.ChangeType.STABLE_STUDY:
        return
    for series in json.loads(orthanc.RestApiGet(f"/studies/{resource}/series")):
        if series["MainDicomTags"].get("Modality") in MODALITIES:
            for instance in series["Instances"]:
                if ANSWERED not in json.loads(orthanc.RestApiGet(f"/instances/{instance}/metadata")):
                    answer(instance)


def answer(instance):
    """Ask, and store the structured report beside the image; what is refused (no chest, damaged) is done with too."""
    try:
        report = ask(orthanc.RestApiGet(f"/instances/{instance}/file"))
    except urllib.error.HTTPError as error:
        if error.code >= 500 or error.code in (401, 403, 408, 421, 429):
            orthanc.LogWarning(f"cbmir: {error.code}; the image is asked for again when its study changes")
            return
        orthanc.LogInfo(f"cbmir: refused ({json.load(error).get('type')})")
        report = None
    except OSError as error:
        orthanc.LogWarning(f"cbmir: no answer ({type(error).__name__})")
        return
    if report is not None:
        orthanc.RestApiPost("/instances", base64.b64decode(report))
    orthanc.RestApiPut(f"/instances/{instance}/metadata/{ANSWERED}", "1")


def ask(data):
    """The report of a DICOM file, base64."""
    headers = {"Content-Type": "application/dicom"}
    if TOKEN_FILE:
        headers["Authorization"] = f"Bearer {Path(TOKEN_FILE).read_text().strip()}"
    request = urllib.request.Request(f"{URL}/v1/analyze?results=sr", data=data, headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        return json.load(response)["results"]["sr"]


orthanc.RegisterOnChangeCallback(on_change)
