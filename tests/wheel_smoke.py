"""Install a wheel into clean environments and train ten steps there with no compiler in reach.

Run by ``make wheel``: ``python tests/wheel_smoke.py dist/NAME.whl [PYTHON ...]``.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UV = Path(sys.executable).parent / "uv"

TRAIN = """
import math, pathlib, shutil, sys
import torch
import zenflow, zenflow._core

package = pathlib.Path(zenflow.__file__).parent
assert package.is_relative_to(sys.prefix), f"{package} is not the installed package"
for name in ("py.typed", "_core.pyi"):
    assert (package / name).is_file(), f"{name} is missing from the wheel"
for tool in ("cc", "gcc", "g++", "clang", "ld", "cargo", "rustc", "nvcc"):
    assert shutil.which(tool) is None, f"{tool} is in reach"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
x = torch.randn(64, 16)
y = x.sum(dim=1, keepdim=True)
optimizer = zenflow.ZenFlowAdamW(model, lr=1e-3, update_interval=4, min_offload_numel=1)
losses = []
for _ in range(10):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert all(map(math.isfinite, losses)), losses
assert losses[-1] < losses[0], losses
print(f"zenflow {zenflow.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}: "
      f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
"""


def try_wheel(wheel: Path, python: str) -> None:
    """Exit with what went wrong if ``wheel`` doesn't install and train with the interpreter ``python``."""
    with tempfile.TemporaryDirectory(prefix="zenflow-wheel-") as folder:
        venv = Path(folder) / "venv"
        base = subprocess.check_output([python, "-c", "import sys; print(sys._base_executable)"], text=True)
        subprocess.run([UV, "venv", "--quiet", "--no-project", "--python", base.strip(), venv], check=True)
        inner = venv / "bin" / "python"
        subprocess.run([UV, "pip", "install", "--quiet", "--python", inner, wheel], check=True)
        # Nothing of the outer environment is inherited: no compiler on PATH, no CC, no CUDA_HOME.
        environment = {"PATH": str(venv / "bin"), "HOME": folder}
        trained = subprocess.run([inner, "-I", "-c", TRAIN], check=False, env=environment, cwd=folder)
        if trained.returncode != 0:
            sys.exit(f"{wheel.name} failed with {python}")


def main() -> None:
    """Try the wheel named first with every interpreter named after it."""
    wheel, *pythons = sys.argv[1:]
    for python in pythons or [sys.executable]:
        started = time.monotonic()
        try_wheel(Path(wheel).resolve(), os.fspath(python))
        print(f"    {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
