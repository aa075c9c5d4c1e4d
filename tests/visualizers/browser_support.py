"""A real JupyterLab, started by ``refimpl lab``, and a real browser with one notebook open in it."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat.v4 as v4

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = [] if CHROMIUM else ["no chromium, chromium-browser or google-chrome on PATH"]
MISSING += [f"{name} is not installed" for name in ("playwright", "jupyterlab") if importlib.util.find_spec(name) is None]

PATIENCE = 240_000
"""Milliseconds: for a busy machine. Nothing here waits that long when all is well."""
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += " --disable-component-update --disable-sync"
IGNORED = ("favicon.ico", ".map", "colab-badge.svg")
"""Ends of addresses whose absence is nobody's fault; any other console error fails the test."""
SERVER = {
    "IdentityProvider": {"token": ""},
    "ServerApp": {"allow_root": True, "password": "", "ip": "127.0.0.1", "port_retries": 0},
    "LabApp": {"news_url": "", "check_for_updates_class": "jupyterlab.NeverCheckForUpdate", "extension_manager": "readonly"},
}
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight stay in the page
}


def write_notebook(path, *sources):
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [v4.new_code_cell(source) for source in sources]
    path.write_text(json.dumps(v4.new_notebook(metadata={"kernelspec": kernel}, cells=cells)), encoding="utf-8")


def free_port():
    """A port below those that the system gives to whoever asks for any: nobody takes it before the server does."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@contextlib.contextmanager
def lab(folder, home):
    """``refimpl lab FOLDER --no-browser --port N`` while the block runs; yields its address."""
    port = free_port()
    kinds = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR", "LAB_SETTINGS_DIR", "LAB_WORKSPACES_DIR")
    places = {f"JUPYTER{'' if kind.startswith('LAB') else '_'}{kind}": home / kind.lower() for kind in kinds}
    for place in places.values():
        place.mkdir(parents=True)
    (places["JUPYTER_CONFIG_DIR"] / "jupyter_server_config.json").write_text(json.dumps(SERVER))
    for name, values in SETTINGS.items():
        file = places["JUPYTERLAB_SETTINGS_DIR"] / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    environment = os.environ | {name: str(place) for name, place in places.items()} | {"OMP_NUM_THREADS": "1"}
    command = [Path(sys.executable).with_name("refimpl"), "lab", folder, "--no-browser", "--port", str(port)]
    with (home / "lab.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            yield _wait_for(f"http://127.0.0.1:{port}", process, home / "lab.log")
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # refimpl's, and the JupyterLab that it started
            process.wait()
            _wait_for_group(process.pid)


@contextlib.contextmanager
def chromium(profile):
    """A browser without a window; yields its context, in which pages are opened."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, viewport={"width": 1500, "height": 1400}, args=QUIET.split()
        )
        with contextlib.closing(browser):
            yield browser


def is_json(path):
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True


def wait_until(true, seconds=PATIENCE / 1000):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)


def photograph(element, name):
    """Take a screenshot; keep it in the folder of $REFIMPL_SCREENSHOTS, if that is set."""
    picture = element.screenshot()
    if place := os.environ.get("REFIMPL_SCREENSHOTS"):
        Path(place).mkdir(parents=True, exist_ok=True)
        (Path(place) / f"{name}.png").write_bytes(picture)


def _wait_for(address, process, log):
    for _ in range(2400):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/api/status", timeout=5):
            return address
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not come up:\n{log.read_text()}")


def _wait_for_group(group):
    """JupyterLab ends its kernels before itself."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(100):
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)


class Notebook:
    """A notebook in a browser's page. Its last cell is empty: that is where code is typed."""

    def __init__(self, page, address):
        self.page, self.address, self.errors = page, address, []
        page.set_default_timeout(PATIENCE)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(error.stack or str(error)))
        page.on("dialog", lambda dialog: dialog.accept())
        self.open()

    def _on_console(self, message):
        where = message.location.get("url", "")
        if message.type == "error" and not where.endswith(IGNORED):
            self.errors.append(f"{message.text} ({where})")

    def open(self):
        """Load the page, or load it again."""
        self.page.goto(self.address, wait_until="domcontentloaded")
        self.wait_for_kernel()

    def wait_for_kernel(self):
        """Wait until the page speaks to a kernel that has nothing to do."""
        self.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']")
        self.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()

    def add_cell(self):
        """An empty code cell at the end."""
        count = self.cells.count()
        self.page.locator(".jp-Notebook .jp-Cell").last.click()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("b")
        self.cells.nth(count).wait_for()

    def save(self):
        self.page.keyboard.press("Control+s")
        self.page.wait_for_selector(".lm-TabBar-tab.jp-mod-current:not(.jp-mod-dirty)")

    def choose(self, menu, command):
        """Click on a command in a menu."""
        self.page.click(f".lm-MenuBar-itemLabel:text-is('{menu}')")
        self.page.click(f"li[data-command='{command}']")

    @property
    def cells(self):
        return self.page.locator(".jp-Notebook .jp-CodeCell")

    def start(self, code):
        """Type code into the last cell and run it; returns the cell while it runs."""
        self.cells.last.locator(".cm-content").click()
        cell = self.cells.nth(self.cells.count() - 1)
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Shift+Enter")
        return cell

    def wait(self, cell):
        """Wait until a cell has run; what it raised fails the test."""
        from playwright.sync_api import expect

        expect(cell.locator(".jp-InputArea-prompt")).to_have_text(re.compile(r"\[\d+\]"), timeout=PATIENCE)
        raised = cell.locator("[data-mime-type='application/vnd.jupyter.stderr']").filter(has_text="Traceback")
        assert raised.count() == 0, raised.inner_text()

    def run(self, code):
        cell = self.start(code)
        self.wait(cell)
        return cell

    def show(self, code):
        """Run code whose last line is a widget; returns the widget, drawn."""
        return Widget(self.run(code)).drawn()


class Widget:
    """A live widget in a cell's output."""

    def __init__(self, cell):
        self.cell, self.root, self.page = cell, cell.locator(".refimpl"), cell.page

    @property
    def last(self):
        """The last position of the log."""
        return int(self.root.locator("input[type=range]").get_attribute("max"))

    def drawn(self):
        self.root.wait_for()
        self.root.scroll_into_view_if_needed()
        self.root.locator("xpath=self::*[@data-position]").wait_for()
        return self

    def click(self, label):
        self.root.locator(f"button[aria-label='{label}']").click()

    def at(self, position):
        """Wait until it shows a position of the log."""
        self.has("data-position", str(position))

    def has(self, attribute, value):
        """Wait until its root has an attribute."""
        from playwright.sync_api import expect

        expect(self.root).to_have_attribute(attribute, value, timeout=PATIENCE)

    @property
    def position(self):
        return int(self.root.get_attribute("data-position"))

    @property
    def step(self):
        found = re.search(r"Step ([\d,]+)", self.root.locator("[data-refimpl=step]").inner_text())
        return int(found[1].replace(",", "")) if found else None

    @property
    def why(self):
        return self.root.locator("[data-refimpl=why]").inner_text()

    def says(self, text):
        """Wait until the line under the transport holds a text."""
        from playwright.sync_api import expect

        expect(self.root.locator("[data-refimpl=why]")).to_contain_text(text, timeout=PATIENCE)

    def click_block(self, block):
        canvas = self.root.locator("canvas[data-refimpl=block-map]")
        d = {
            name: float(value)
            for name, value in canvas.evaluate("canvas => ({...canvas.dataset})").items()
            if name != "refimpl"
        }
        row, column = divmod(block, int(d["columns"]))
        half = d["cell"] / 2
        canvas.click(position={"x": d["left"] + column * d["pitch"] + half, "y": d["top"] + row * d["pitch"] + half})

    def bottom_lines(self, blocks):
        """The colours in the lowest line of pixels of some blocks' cells, where no letter is."""
        return self.root.locator("canvas[data-refimpl=block-map]").evaluate(
            """(canvas, blocks) => blocks.map((id) => {
                const d = Object.fromEntries(Object.entries(canvas.dataset).map(([k, v]) => [k, Number(v)]));
                const density = canvas.width / parseFloat(canvas.style.width), px = (v) => Math.round(v * density);
                const x = d.left + (id % d.columns) * d.pitch, y = d.top + Math.floor(id / d.columns) * d.pitch;
                const { data } = canvas.getContext("2d").getImageData(px(x + 2), px(y + d.cell) - 1, px(d.cell - 4), 1);
                const colours = new Set();
                for (let i = 0; i < data.length; i += 4)
                    colours.add("#" + [0, 1, 2].map((k) => data[i + k].toString(16).padStart(2, "0")).join(""));
                return [...colours];
            })""",
            blocks,
        )
