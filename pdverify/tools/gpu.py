"""The checks that need a GPU, in one go: ``python -m pdverify.tools.gpu`` (``make gpu``).

Tests marked ``cuda`` (correctness at T = 8,192 and V = 151,936 among them), then `pdverify bench`
on the device; what they print, and the bench as JSON and page, go to a folder.  Where there is no
GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

LIMIT = 8 * 60
"""Seconds for everything."""


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; 0 if all pass or no GPU is present."""
    parser = argparse.ArgumentParser(prog="python -m pdverify.tools.gpu", description=__doc__)
    parser.add_argument("--out", default="build/gpu", metavar="FOLDER", help="default: build/gpu")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU: torch sees none here; nothing was run")
        return 0
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name()
    print(f"device: {name}")
    (out / "device.txt").write_text(f"{name}\n")
    python = sys.executable, "-m"
    bench = "bench", "--device", "cuda", "--json", f"{out}/bench.json", "--page", f"{out}/bench.md"
    steps = {
        "tests": (*python, "pytest", "-q", "-m", "cuda", "tests"),
        "bench": (*python, "pdverify", *bench),
    }
    end = time.monotonic() + LIMIT
    return max(_step(step, command, end, out) for step, command in steps.items())


def _step(step: str, command: tuple[str, ...], end: float, out: Path) -> int:
    """Run a command in what time is left; its exit status, 1 if the time ran out."""
    left = end - time.monotonic()
    print(f"{step}: {' '.join(command)}", flush=True)
    with (out / f"{step}.txt").open("w") as log:
        try:
            done = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=max(left, 1), check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{step}: stopped, {LIMIT} seconds are over; the rest is in {log.name}")
            return 1
    print(f"{step}: exit {done.returncode}, see {log.name}")
    return min(done.returncode, 1)


if __name__ == "__main__":
    sys.exit(main())
