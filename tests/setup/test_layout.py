"""The repository's shape: import roots, pinned packages, the wheel."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True, **options)


@pytest.mark.parametrize("folder", ["platform", "serving", "jobs"])
def test_a_source_root_is_not_a_package(folder):
    assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py would make {folder} a package"


def test_platform_is_the_standard_library_module_from_the_repository_root():
    code = "import platform, fathom, fathom_serve; print(platform.__file__, platform.python_version())"
    file, version = run(sys.executable, "-c", code, cwd=ROOT).stdout.split()
    assert Path(file).parent == Path(sysconfig.get_paths()["stdlib"])
    assert version == ".".join(map(str, sys.version_info[:3]))


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {re.split("[=<>]", line)[0]: line for line in lines if not line.startswith("#")}


def test_every_declared_package_is_pinned():
    declared = [*(importlib.metadata.requires("fathomlm") or []), "hatchling"]
    names = {re.split(r"[\[<>=~!;]", requirement)[0].strip().lower() for requirement in declared}
    assert names <= set(pinned())


def test_pins_hold_no_path_and_no_local_build():
    for line in pinned().values():
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*( ; .+)?", line), f"not a plain pin: {line}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (file,) = folder.glob("fathomlm-*.whl")
    return file


def test_the_wheel_holds_both_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fathom", "fathom_serve"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_installs_and_gives_the_command(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    # The dependencies come from this environment, in which make has installed them; fathom itself must not.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = run(python, "-c", "import fathom, fathom_serve; print(fathom.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(packages))
    assert "deploy" in run(tmp_path / "env" / "bin" / "fathom", "--help", cwd=tmp_path).stdout


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_wheel_installs_with_its_dependencies(wheel, tmp_path):
    uv = next((path for path in (ROOT / ".uv" / "bin" / "uv",) if path.exists()), "uv")
    run(uv, "venv", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run(uv, "pip", "install", "--python", python, "-c", ROOT / "constraints.txt", wheel)
    report = run(tmp_path / "env" / "bin" / "fathom", "doctor", cwd=tmp_path).stdout
    assert "fail" not in report


def test_make_hands_find_links_to_uv(tmp_path):
    environment = {**os.environ, "PIP_FIND_LINKS": "/some/wheels"}
    environment.pop("UV_FIND_LINKS", None)
    command = ["make", "-C", str(ROOT), "-pn", "test"]
    database = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^export UV_FIND_LINKS|^UV_FIND_LINKS = .*PIP_FIND_LINKS", database, re.MULTILINE)
