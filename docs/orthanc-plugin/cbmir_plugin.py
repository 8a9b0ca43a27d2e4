# SPDX-License-Identifier: AGPL-3.0-or-later
# See README.md in this folder: unlike the rest of cbmir, this file is under the AGPL, as Orthanc's Python plugin is.
"""An Orthanc plugin that sends each new chest radiograph to `cbmir serve`, and adds the report to its study.

Orthanc runs it in its own process (setting "PythonScript"). It only makes HTTP requests, so cbmir need not be installed
beside Orthanc, and a slow or missing service delays only this plugin. For research, not for diagnosis.
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
#: Metadata of an instance (1024 and up are free for users): it was answered, and is not sent again.
ANSWERED = "1848"
TIMEOUT = 60  # seconds


def on_change(change, level, resource):
    """Send a study's unanswered radiographs, once nothing of it has arrived for "StableAge" seconds."""
    if change != orthanc.ChangeType.STABLE_STUDY:
        return
    for series in json.loads(orthanc.RestApiGet(f"/studies/{resource}/series")):
        if series["MainDicomTags"].get("Modality") in MODALITIES:
            for instance in series["Instances"]:
                if ANSWERED not in json.loads(orthanc.RestApiGet(f"/instances/{instance}/metadata")):
                    answer(instance)


def answer(instance):
    """Send an image, and store its structured report. Refused images (not a chest, damaged) also count as answered."""
    try:
        report = ask(orthanc.RestApiGet(f"/instances/{instance}/file"))
    except urllib.error.HTTPError as error:
        if error.code >= 500 or error.code in (401, 403, 408, 421, 429):
            orthanc.LogWarning(f"cbmir: {error.code}; the image is sent again when its study changes")
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
    """Return the report on a DICOM file, in base64."""
    headers = {"Content-Type": "application/dicom"}
    if TOKEN_FILE:
        headers["Authorization"] = f"Bearer {Path(TOKEN_FILE).read_text().strip()}"
    request = urllib.request.Request(f"{URL}/v1/analyze?results=sr", data=data, headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        return json.load(response)["results"]["sr"]


orthanc.RegisterOnChangeCallback(on_change)
