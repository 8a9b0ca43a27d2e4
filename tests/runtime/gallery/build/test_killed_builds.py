"""Builds and additions killed (SIGKILL) at any point: a build leaves the old or the new gallery, an addition whole
batches, and the next run continues.

A child process counts calls of Python functions and kills itself at one of them, so that any point between two calls is
reached, reproducibly.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

#: Forks a child for each point, which opens the engine. Prints one line of JSON per child.
DRIVER = """
import json, os, shutil, signal, sys
from pathlib import Path
from cbmir.manifest import read_manifest
from cbmir.runtime import Gallery, open_engine
from cbmir.runtime.gallery.build import build as builds, work as filling
import cbmir.runtime.imaging.workers, cbmir.runtime.engines.ort, cbmir.runtime.novelty, onnxruntime, tqdm, usearch.index

folder, model, manifest, kind, kills, seed = sys.argv[1:]
folder, table = Path(folder), read_manifest(manifest)
filling.BATCH = 4
builds.FEWEST = 1
embedded = folder / "embedded.txt"  # a line a batch: how many images the engine was given


def work(kill_at):
    real, calls = filling.embed_pictures, 0

    def counted(engine, pictures, **options):
        vectors = real(engine, pictures, **options)
        with embedded.open("a") as stream:
            stream.write(f"{len(pictures)}\\n")
        return vectors

    def called(frame, event, argument):
        nonlocal calls
        if event == "call":
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    filling.embed_pictures = counted
    with open_engine(model, threads=1) as engine:
        sys.setprofile(called)
        if kind == "build":
            builds.build_gallery(engine, table, folder / "g", workers=0, replace_others=True)
        else:
            builds.add_to_gallery(engine, table, folder / "g", workers=0)
        sys.setprofile(None)
    return calls


def in_child(kill_at=-1):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        (folder / "calls").write_text(str(work(kill_at)))
        os._exit(0)
    except BaseException as error:
        print(json.dumps({"error": repr(error)}), flush=True)
        os._exit(3)


def state():
    with Gallery.open(folder / "g") as gallery:
        return gallery.ids()


def anew():
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(folder.parent / "start", folder / "g")


folder.mkdir()
anew()
assert in_child() == 0
total = int((folder / "calls").read_text())
assert kind == "add" or any((folder / "g").glob("gallery-*/derived-*")), "no index is written: no kill is in it"
import random
for kill_at in sorted(random.Random(int(seed)).sample(range(1, total), int(kills))):
    status = 0
    while status == 0 and kill_at > 0:  # the number of calls varies a little: if this run had fewer, kill it earlier
        anew()
        before = state()
        status = in_child(kill_at)
        kill_at -= 5
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    after_kill = state()
    status = in_child()
    batches = embedded.read_text().split()
    print(json.dumps({
        "killed": killed, "at": kill_at + 5, "of": total, "before": before, "after": after_kill,
        "end": state(), "status": status, "embedded": sum(map(int, batches)),
        "left": len([path for path in (folder / "g").iterdir() if path.is_dir()]),
    }), flush=True)
"""


def kill(folder: Path, model: Path, manifest: Path, kind: str, kills: int, seed: int) -> list[dict[str, object]]:
    from cbmir.manifest import read_manifest
    from cbmir.runtime import build_gallery, open_engine

    with open_engine(model, threads=1) as engine:
        build_gallery(engine, read_manifest(manifest), folder / "start", splits=["test"])
    words = [sys.executable, "-c", DRIVER, folder / "work", model, manifest, kind, kills, seed]
    found = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def check(kind: str, results: list[dict[str, object]]) -> None:
    test = [f"image_{number}" for number in range(20, 24)]
    train = [f"image_{number:02}" for number in range(20)]
    whole = train if kind == "build" else test + train
    for result in results:
        assert "error" not in result, result
        assert result["killed"], result
        assert result["before"] == test
        batches = [test + train[:done] for done in range(0, 21, 4)]
        assert result["after"] in ([test, whole] if kind == "build" else batches), result
        assert result["status"] == 0
        assert result["end"] == whole, result
        assert result["left"] == 1, result
        # Only a batch that was embedded but not yet stored when killed is embedded again. If the build was complete,
        # running it again is a new build.
        again = 20 if kind == "build" and result["after"] == whole else 0
        assert result["embedded"] in (20 + again, 24 + again), result


@pytest.mark.skipif(sys.platform != "linux", reason="needs SIGKILL")
@pytest.mark.parametrize("kind", ["build", "add"])
def test_a_killed_build_resumes(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, kind: str) -> None:
    results = kill(tmp_path, tiny_model, tiny_manifest, kind, 12, 0)
    assert len(results) == 12
    check(kind, results)


@pytest.mark.release
@pytest.mark.parametrize("kind", ["build", "add"])
def test_a_build_killed_at_many_points_resumes(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, kind: str
) -> None:
    check(kind, kill(tmp_path, tiny_model, tiny_manifest, kind, 150, 1))
