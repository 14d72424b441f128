"""Check that the packages of a release install and work: `make release-check`.

    python bench/release.py [--keep FOLDER]

Builds the sdist, and the wheel from the sdist. Checks what they contain. Installs the wheel into two clean
environments, with the lowest and with the newest version of every dependency, and runs the commands of the
README there. torch is the release in constraints.txt in both: other releases are not tried. Needs a network,
or pip settings that name a folder of packages. Takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGEST_WHEEL_BYTES = 3_000_000
IN_SDIST = ("src/trimtab/version.py", "tests/conftest.py", "docs/tutorial.md", "bench/release.py", "LICENSE")
"""Files without which nobody could build, test or read the source."""
CONFIG = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
SCRIPT = """\
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
options = parser.parse_args()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(options.batch_size, 64, device="cuda")).square().mean().backward()
    optimizer.step()
"""
"""The `train.py` of the README's commands."""
INLINE = ("trimtab launch plan.json --slurm", "trimtab apply plan.json --to your_config.yaml")
"""Commands in the README's sentences that run without a GPU."""


def main() -> int:
    """Run all checks; return 0 if they passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="keep the packages in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trimtab-release-") as folder:
        work = Path(folder)
        wheel, sdist = build_packages(work)
        faults = [*check_wheel(wheel), *check_sdist(sdist)]
        for name, requirements in (("lowest", lowest_requirements()), ("highest", [])):
            python = install_wheel(work / name, wheel, requirements)
            faults += [f"{name}: {fault}" for fault in run_readme(python, work / f"{name}-readme")]
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for package in (wheel, sdist):
                shutil.copy2(package, options.keep)
    for fault in faults:
        print(f"fault: {fault}")
    print("not ready" if faults else "ready: trimtab can be published")
    return 1 if faults else 0


def build_packages(work: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return both files."""
    python = make_environment(work / "build")
    run_pip(python, "build")
    subprocess.run([python, "-m", "build", "--outdir", work / "dist", ROOT], check=True, capture_output=True)
    (wheel,), (sdist,) = (work / "dist").glob("*.whl"), (work / "dist").glob("*.tar.gz")
    print(f"built {wheel.name}, {wheel.stat().st_size:,} bytes, and {sdist.name}, {sdist.stat().st_size:,}")
    return wheel, sdist


def check_wheel(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel: its size, files that do not belong there, torch as a dependency."""
    faults = []
    if wheel.stat().st_size > LARGEST_WHEEL_BYTES:
        faults.append(f"{wheel.name} has {wheel.stat().st_size:,} bytes, more than {LARGEST_WHEEL_BYTES:,}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    outside = [name for name in names if not re.match(r"trimtab(-[\w.]+\.dist-info)?/", name)]
    outside += [name for name in names if re.search(r"(^|/)(tests?|bench|docs|__pycache__)/", name)]
    faults += [f"{wheel.name} contains {name}" for name in outside]
    faults += [
        f"{wheel.name} requires {requirement}"
        for requirement in re.findall(r"^Requires-Dist: (torch\b.*)$", metadata, re.MULTILINE)
        if "extra ==" not in requirement
    ]
    return faults


def check_sdist(sdist: Path) -> list[str]:
    """Return what a source archive lacks."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    return [f"{sdist.name} lacks {name}" for name in IN_SDIST if name not in names]


def lowest_requirements() -> list[str]:
    """Return every dependency of pyproject.toml at its lowest version, as pip requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [re.sub(r">=([\w.]+).*", r"==\1", dependency) for dependency in project["dependencies"]]


def install_wheel(folder: Path, wheel: Path, requirements: list[str]) -> Path:
    """Install the wheel and torch into a new environment; return its Python."""
    (torch,) = re.findall(
        r"^torch==.+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    python = make_environment(folder)
    run_pip(python, f"{wheel}[torch]", torch, *requirements)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    print(f"{folder.name}: {' '.join(listed.stdout.split())}")
    return python


def make_environment(folder: Path) -> Path:
    """Make a virtual environment; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def run_pip(python: Path, *requirements: str) -> None:
    """Install requirements; raise with pip's own words if that fails."""
    words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    done = subprocess.run([str(python), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"pip install {' '.join(requirements)} failed:\n{done.stderr}")


def list_readme_commands() -> list[str]:
    """Return the commands of trimtab in the README's blocks, and those of its sentences that need no GPU."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^(?:\$ )?(trimtab [a-z].*)$", "\n".join(blocks), re.MULTILINE)
    missing = [command for command in INLINE if f"`{command}`" not in text]
    if missing:
        sys.exit(f"README.md has no `{missing[0]}` any more: change INLINE in {Path(__file__).name}")
    return [*commands, *INLINE]


def run_readme(python: Path, folder: Path) -> list[str]:
    """Run the README's commands with an installed trimtab; return those that failed."""
    folder.mkdir()
    job = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    for name, text in (("job.py", job), ("train.py", SCRIPT), ("your_config.yaml", CONFIG)):
        (folder / name).write_text(text, encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRIMTAB"))}
    env |= {"PATH": f"{python.parent}:{env['PATH']}", "TRIMTAB_CACHE": str(folder / "cache")}
    faults = []
    for command in list_readme_commands():
        start = time.perf_counter()
        done = subprocess.run(
            shlex.split(command), cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        print(f"  {time.perf_counter() - start:5.1f} s  exit code {done.returncode}  {command}", flush=True)
        if done.returncode:
            faults.append(f"{command}: exit code {done.returncode}\n{done.stderr}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
