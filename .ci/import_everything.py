"""Import every module of an installed refimpl, and look for what must be in the wheel."""

import importlib
import pkgutil
from importlib.resources import files

import refimpl

package = files("refimpl")
assert "site-packages" in str(package), f"this is not the installed refimpl: {package}"
names = [module.name for module in pkgutil.walk_packages(refimpl.__path__, "refimpl.")]
names += [f"refimpl.kernels.{path.name[:-3]}" for path in package.joinpath("kernels").iterdir() if path.name.endswith(".py")]
NEED_TRITON = ("refimpl.kernels.", "refimpl.attention.triton_paged")  # torch brings it with its CUDA builds
NEED_NOTEBOOKS = {
    f"refimpl.visualizers.{name}" for name in ("attention_view", "view", "widgets")
}  # pip install "refimpl[notebooks]"
NEED_SERVER = {"fastapi", "starlette", "uvicorn", "prometheus_client", "llguidance"}  # pip install "refimpl[server]"
for name in sorted(set(names) - NEED_NOTEBOOKS):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        for_kernels = error.name == "triton" and name.startswith(NEED_TRITON)
        for_server = error.name in NEED_SERVER and name.startswith("refimpl.server.")
        if not for_kernels and not for_server:
            raise
assert "refimpl.kernels.reference" in names, names
for data in (
    "py.typed",
    "bench/workloads/parity-20.jsonl",
    "bench/workloads/azure-2023.json",
    "visualizers/static/shell.js",
    "visualizers/static/base.css",
    "notebooks/00_quickstart.ipynb",
    "notebooks/claims.toml",
    "bench/workloads/alice.txt.gz",
    "server/static/ui_page.js",
    "server/monitoring/grafana.json",
):
    assert package.joinpath(data).is_file(), f"{data} is not in the wheel"
print(f"{len(set(names))} modules imported")  # noqa: T201
