# SPDX-License-Identifier: MIT
"""The wheel, an editable install and a bare checkout work alike; importing has no side effects."""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(__file__).resolve().parent.parent
KERNELS = sorted(
    path.relative_to(ROOT / "kernels").as_posix()
    for path in (ROOT / "kernels").rglob("*.cu*")
    if path.suffix in (".cu", ".cuh")
)
# What the project is; a checkout that is worked in has more.
FOLDERS = (".ci", "cupyflash", "docs", "kernels", "tests")
FILES = (
    *(".clang-format", ".gitignore", "LICENSE", "MANIFEST.in", "Makefile", "README.md"),
    *("pyproject.toml", "setup.cfg"),
)
UNWANTED = ("__pycache__", ".ruff_cache")

# Calls attention and says where things were found, as one line of JSON.
USE = """
import json, sys
import numpy as np
import cupyflash
from cupyflash import _compile
q = np.eye(4, 8, dtype=np.float32)
o = cupyflash.attention(q, q, np.ones((4, 3), np.float32))
print(json.dumps({
    "package": cupyflash.__file__,
    "kernels": str(_compile.kernels_folder()),
    "sources": sorted(_compile.kernel_sources()),
    "shape": o.shape,
    "ones": bool(np.allclose(o, 1)),
    "torch": "torch" in sys.modules,
    "cupy": "cupy" in sys.modules,
}))
"""


def without_path():
    """This process's environment but for PYTHONPATH, where another cupyflash may lie."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(python, code, cwd, **environment):
    """Run code in an interpreter of its own, without this process's PYTHONPATH."""
    environment = without_path() | environment
    result = subprocess.run(
        [python, "-W", "error", "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def pip(python, *arguments):
    command = [python, "-m", "pip", *arguments, "--no-deps", "--no-build-isolation", "--no-index"]
    quiet = ["--quiet", "--disable-pip-version-check"]
    result = subprocess.run([*command, *quiet], env=without_path(), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def sources_copy(tmp_path):
    """What a build reads, where it may leave its files behind."""
    import shutil

    copy = tmp_path / "checkout"
    ignore = shutil.ignore_patterns(*UNWANTED)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for file in FILES:
        shutil.copy(ROOT / file, copy / file)
    return copy


@pytest.fixture
def empty_environment(tmp_path):
    """An interpreter that sees this one's dependencies, but no cupyflash."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # Plain entries of a .pth file add packages without running the .pth files there, which an
    # editable install of this project has put beside them.
    paths = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("platlib")])
    if site.ENABLE_USER_SITE:
        paths[site.getusersitepackages()] = None
    Path(purelib, "dependencies.pth").write_text("\n".join(paths) + "\n")
    return str(python), Path(purelib)


def check_use(answer, package, kernels):
    answer = json.loads(answer)
    assert Path(answer["package"]).parent == package
    assert Path(answer["kernels"]) == kernels
    assert answer["sources"] == KERNELS
    assert answer["shape"] == [4, 3]
    assert answer["ones"]
    assert not answer["torch"]
    assert not answer["cupy"]


def test_wheel(tmp_path, empty_environment):
    python, purelib = empty_environment
    (empty := tmp_path / "empty").mkdir()
    pip(sys.executable, "wheel", str(sources_copy(tmp_path)), "--wheel-dir", str(tmp_path))
    (wheel,) = tmp_path.glob("cupyflash-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        required = re.findall(r"^Requires-Dist: ([^;\n]+)$", archive.read(metadata).decode(), re.M)
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cupyflash").glob("*.py")}
    data = {f"cupyflash/kernels/{name}" for name in KERNELS}
    assert installed == modules | data | {"cupyflash/py.typed"}
    assert sorted(required) == ["ml_dtypes", "numpy>=1.25", "threadpoolctl>=3"]

    pip(sys.executable, "--python", python, "install", str(wheel))
    package = purelib / "cupyflash"
    check_use(run(python, USE, empty), package, package / "kernels")


def test_sdist(tmp_path):
    """Its tests have all that they import and read, and it builds what a checkout builds."""
    checkout = sources_copy(tmp_path)
    (checkout / "tests" / "stray.pyc").touch()
    wanted = {path.relative_to(checkout) for path in checkout.rglob("*") if path.is_file()}
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run(sys.executable, code, checkout)
    (sdist,) = tmp_path.glob("cupyflash-*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {Path(*Path(member.name).parts[1:]) for member in archive if member.isfile()}
    made = {
        path for path in packed if path.name == "PKG-INFO" or path.parts[0].endswith("egg-info")
    }
    assert packed - made == wanted - {Path("tests/stray.pyc")}


def test_editable_install(tmp_path, empty_environment):
    python, _ = empty_environment
    (empty := tmp_path / "empty").mkdir()
    checkout = sources_copy(tmp_path)
    pip(sys.executable, "--python", python, "install", "--editable", str(checkout))
    check_use(run(python, USE, empty), checkout / "cupyflash", checkout / "kernels")


def test_bare_checkout(tmp_path, empty_environment):
    python, _ = empty_environment
    (empty := tmp_path / "empty").mkdir()
    answer = run(python, USE, empty, PYTHONPATH=str(ROOT))
    check_use(answer, ROOT / "cupyflash", ROOT / "kernels")


def test_import_has_no_side_effects(tmp_path):
    """Nothing is compiled or written, and nothing of a GPU or of torch is imported."""
    code = """
import os, sys

def refuse(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        raise SystemExit(f"wrote {arguments[0]}")
    if event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "socket.connect"):
        raise SystemExit(f"{event} {arguments}")

sys.addaudithook(refuse)
import cupyflash
for name in cupyflash.__all__:
    getattr(cupyflash, name)
print(sorted({"cupy", "cuda", "torch", "hypothesis", "pytest"} & set(sys.modules)))
"""
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    answer = run(sys.executable, code, tmp_path, HOME="/dev/null", **environment)
    assert answer.strip() == "[]"
    assert list(tmp_path.iterdir()) == []


def test_import_without_a_home_folder(tmp_path):
    code = "import os; del os.environ['HOME']; import cupyflash; print(cupyflash.__version__)"
    answer = run(sys.executable, code, tmp_path, PYTHONPATH=str(ROOT))
    assert answer.strip() == cupyflash.__version__


def test_testing_without_hypothesis_says_what_to_install():
    code = """
import sys
sys.modules["hypothesis"] = None
try:
    import cupyflash.testing
except ImportError as error:
    print(error)
"""
    answer = run(sys.executable, code, ROOT, PYTHONPATH=str(ROOT))
    assert answer.startswith("cupyflash.testing needs hypothesis (")
    assert answer.strip().endswith("pip install 'cupyflash[testing]'")


def test_exports():
    """A name more or less is a promise made or broken: both are to be meant."""
    exported = ["Algorithm1", "Plan", "attention", "clear_cache", "plan", "warmup"]
    assert cupyflash.__all__ == exported
    names = {}
    exec("from cupyflash import *", names)
    assert sorted(names.keys() - {"__builtins__"}) == exported
    # The functions, not the modules of the same names.
    assert all(callable(names[name]) for name in exported)
    # Nothing else but modules, which may be imported or not.
    others = {name for name in vars(cupyflash) if not name.startswith("_")} - set(exported)
    assert others - {"annotations"} <= {path.stem for path in (ROOT / "cupyflash").glob("*.py")}


def test_supported_python_versions_agree():
    metadata = ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    listed = re.findall(r"Python :: (3\.\d+)", metadata["metadata"]["classifiers"])
    assert metadata["options"]["python_requires"] == f">={listed[0]}"
    for version in (listed[0], listed[-1]):
        assert f"({version.replace('.', ', ')})" in (ROOT / "Makefile").read_text()
