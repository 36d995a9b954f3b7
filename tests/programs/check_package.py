"""Check the wheel and the source archive in a folder, and run the main job from the wheel: ``check_package.py FOLDER``.

The wheel goes into an environment of its own, outside the checkout, which borrows this environment's other packages.
What is tracked by git decides what belongs in the archives.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = {"torch", "pytorch-lightning", "typing-extensions"}
EXTRAS = {"lightning": {"lightning"}, "demo": {"scikit-learn"}, "plot": {"matplotlib"}, "parquet": {"pyarrow"}}
DEVELOPERS_EXTRAS = {"test", "docs"}
MAIN_JOB_BOUND_S = 300


def tracked(*folders: str) -> set[str]:
    """The files in these folders of the checkout, or at these paths, that git knows of."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split("\0")) - {""}


def same(what: str, found: set[str], expected: set[str]) -> None:
    """Exit with an error that names each difference, if there is one."""
    if found != expected:
        sys.exit(f"{what}: not wanted: {sorted(found - expected)}; missing: {sorted(expected - found)}")


def check_wheel(path: Path) -> None:
    """The package's files, ``py.typed`` among them, its metadata and its licence, and nothing else."""
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "top_level.txt", "licenses/LICENSE")}
        same(path.name, names, tracked("adaptive_ddp") | metadata)
        if "adaptive_ddp/py.typed" not in names:
            sys.exit(
                f"{path.name}: adaptive_ddp/py.typed is missing, without which type checkers ignore the annotations"
            )
        check_metadata(Parser().parsestr(wheel.read(f"{info}/METADATA").decode()))


def check_metadata(metadata: Message) -> None:
    """What is required always and by each extra, each with a lower bound; and the licence."""
    requirements: dict[str | None, set[str]] = {}
    for text in metadata.get_all("Requires-Dist", []):
        requirement, _, marker = text.partition(";")
        parts = re.fullmatch(r"\s*([\w-]+)(\[[\w,-]+\])?(.*)", requirement)
        extra = re.search(r'extra == "([\w-]+)"', marker)
        assert parts is not None
        name, bound = parts[1], parts[3].strip()
        requirements.setdefault(extra[1] if extra else None, set()).add(name)
        if extra is None or extra[1] in EXTRAS:
            same(f"the bound of {name}", {bound[:2]}, {">="})
    same("what is required", requirements.pop(None, set()), REQUIRED)
    for name, required in EXTRAS.items():
        same(f"what the extra {name} requires", requirements.pop(name, set()), required)
    same("further extras", set(requirements) - DEVELOPERS_EXTRAS, set())
    same("the licence", {metadata["License-Expression"]}, {"Apache-2.0"})


def check_source_archive(path: Path) -> None:
    """What the wheel is built from."""
    with tarfile.open(path) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    wanted = tracked("adaptive_ddp", "LICENSE", "README.md", "pyproject.toml")
    same(path.name, names & wanted, wanted)


def run_main_job(wheel: Path, folder: Path) -> None:
    """Install the wheel and run ``python -m adaptive_ddp`` with it, as a user would who has no checkout."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=120)
    (installed,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    # A path file that is named in no site directory is not read, so the checkout's editable install stays out.
    (installed / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    where = [str(python), "-c", "import adaptive_ddp; print(adaptive_ddp.__file__)"]
    done = subprocess.run(where, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=120)
    same("where the package is", {str(Path(done.stdout.strip()).parent)}, {str(installed / "adaptive_ddp")})
    subprocess.run(
        [str(python), "-m", "adaptive_ddp"], cwd=folder, env=environment, check=True, timeout=MAIN_JOB_BOUND_S
    )


def main(folder: Path) -> None:
    """Check what ``python -m build`` left in the folder."""
    (wheel,) = folder.glob("*.whl")
    (archive,) = folder.glob("*.tar.gz")
    check_wheel(wheel)
    check_source_archive(archive)
    print(f"{wheel.name} and {archive.name} hold what they should")
    with tempfile.TemporaryDirectory() as elsewhere:
        run_main_job(wheel, Path(elsewhere))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
