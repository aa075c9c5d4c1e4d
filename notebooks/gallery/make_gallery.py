"""Make the pictures that the README shows, from a real run of the tiny model and from a server under load.

    python notebooks/gallery/make_gallery.py [run] [server] [board]

run: run.jsonl.gz (the event log), run.html (the exported page), dashboard-light.png and dashboard-dark.png. The run has a
preemption, copies on write, a fork and prefix hits. server: server-light.png, the page /ui while `refimpl serve` answers
with the embedded model. board: board-light.png, the panels of the dashboard for Grafana over two minutes of such a server;
it needs Prometheus on PATH. Pictures need playwright and a Chromium on PATH.
"""

import contextlib
import importlib.resources
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from refimpl import Engine, EngineArgs, EventLog, SamplingParams
from refimpl.notebooks.gallery.board import Series, draw
from refimpl.visualizers import export_html

HERE = Path(__file__).parent
MONITORING = importlib.resources.files("refimpl.server").joinpath("monitoring")
LATE = [
    ("fox again", "The quick brown fox jumps over the lazy cat", 40),
    ("paging", "What is paging?", 50),
    ("waiting", "Why do requests wait?", 50),
    ("long", "A prompt that comes late, and is so long that it must be split by the budget of a step. " * 2, 40),
]
RULES = "You answer in short sentences, and you say so when you do not know."
QUESTIONS = [
    ("What is a KV cache?", 160),
    ("Why do requests wait?", 45),
    ("Name three rivers, and where they end.", 110),
    ("How does a page table work?", 140),
    ("What does a scheduler decide?", 60),
    ("Tell me of the sea.", 120),
    ("What is a token?", 80),
    ("Who was Ada Lovelace?", 100),
]


def run() -> EventLog:
    """A small pool, so that requests wait and one gives way."""
    engine = Engine(
        EngineArgs(
            model="tiny",
            dtype="float32",
            num_gpu_blocks_override=51,
            block_size=8,
            max_num_seqs=6,
            max_num_batched_tokens=48,
        )
    )

    def add(name: str, prompt: str, max_tokens: int, seed: int, n: int = 1) -> None:
        engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed, n=n))

    add("fox", "The quick brown fox jumps over the lazy dog", 60, 1)
    add("story", "Once upon a time there was a model that liked long prompts, and its readers were patient.", 90, 2)
    add("samples", "Three answers to one question", 70, 3, n=3)
    late = list(LATE)
    while engine.has_unfinished_requests():
        engine.step()
        step = engine.scheduler.step
        if step % 7 == 0 and late:
            add(*late.pop(0), seed=step)
        if step == 20:
            engine.fork("fox", "branch")
    engine.close()
    return engine.events


@contextlib.contextmanager
def new_tab(height: int) -> Iterator[Any]:
    """A tab of a browser without a window, in light colours."""
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        yield browser.new_page(viewport={"width": 1264, "height": height})
        browser.close()


def screenshots(page: Path) -> None:
    """The page at its first preemption, light and dark."""
    with new_tab(1500) as tab:
        tab.goto(page.as_uri())
        tab.wait_for_selector(".refimpl canvas")
        tab.click("button[aria-label='Next preemption']")
        for theme in ("light", "dark"):
            tab.wait_for_function(f"document.querySelector('.refimpl').dataset.theme === '{theme}'")
            tab.wait_for_timeout(600)
            tab.screenshot(path=HERE / f"dashboard-{theme}.png", full_page=True)
            tab.click("button[aria-label='Light or dark']")


@contextlib.contextmanager
def served(*flags: str) -> Iterator[str]:
    """The address of a server of the embedded model."""
    command = [sys.executable, "-c", "from refimpl.cli import main; main()", "serve", "smollm2", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1].removesuffix("/v1")
        finally:
            server.terminate()


def ask(url: str, question: str, max_tokens: int) -> None:
    """One question, with an answer of so many tokens."""
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600, trust_env=False).raise_for_status()


def photograph_server() -> None:
    """Its page while answers come, each of which began a little later; their prompts begin alike."""
    flags = "--num-gpu-blocks-override 40 --max-num-seqs 5 --max-num-batched-tokens 48 --max-model-len 512"
    with served(*flags.split()) as url, new_tab(860) as tab:
        tab.goto(f"{url}/ui")
        tab.wait_for_selector(".refimpl[data-position]")
        asking = [threading.Thread(target=ask, args=(url, *question)) for question in QUESTIONS]
        for number, thread in enumerate(asking):
            wait_for_step(tab, 12 * number)
            thread.start()
        wait_for_step(tab, 125)
        tab.screenshot(path=HERE / "server-light.png", full_page=True)
        for thread in asking:
            thread.join()


def wait_for_step(tab: Any, step: int) -> None:
    """Until the page shows it. The page lets nobody evaluate scripts, so it is asked again and again."""
    while int(tab.locator(".refimpl").get_attribute("data-position")) < step - 1:
        tab.wait_for_timeout(50)


# ---------------------------------------------------------------------- the dashboard for Grafana


@contextlib.contextmanager
def prometheus(url: str) -> Iterator[str]:
    """The address of a Prometheus that asks a server every second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    text = MONITORING.joinpath("prometheus.yml").read_text(encoding="utf-8")
    text = text.replace("scrape_interval: 5s", "scrape_interval: 1s").replace("127.0.0.1:8000", url.removeprefix("http://"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prometheus.yml").write_text(text, encoding="utf-8")
        flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        command = ["prometheus", *flags, f"--web.listen-address={address}", "--log.level=error"]
        with subprocess.Popen(command) as process:
            try:
                yield f"http://{address}"
            finally:
                process.terminate()


def answers(address: str, query: str, start: float, seconds: float) -> list[Series]:
    """What Prometheus says to a query, for all models and engines."""
    for name, value in {"$model": ".*", "$engine": ".*", "$__rate_interval": "10s"}.items():
        query = query.replace(name, value)
    asked: dict[str, str | float] = {"query": query, "start": start, "end": start + seconds, "step": 1}
    reply = httpx.get(f"{address}/api/v1/query_range", params=asked, timeout=60, trust_env=False).raise_for_status()
    found = reply.json()["data"]["result"]
    return [Series(one["metric"], [(at - start, float(value)) for at, value in one["values"]]) for one in found]


def photograph_board() -> None:
    """A pool that is too small for what is asked, with room to swap and with drafts, so that every panel has a line."""
    flags = "--num-gpu-blocks-override 40 --max-num-seqs 6 --max-model-len 512 --swap-space 0.05 --num-speculative-tokens 3"
    load = "--workload prefix:3*64+16-96/16-160 --request-rate 0.4 --num-prompts 44 --seed 3"
    load += " --goodput ttft:60000,tpot:60000"  # whatever the machine
    with served(*flags.split()) as url, prometheus(url) as address, new_tab(860) as tab:
        start = time.time()
        command = [
            sys.executable,
            "-c",
            "from refimpl.cli import main; main()",
            "bench",
            "serve",
            "--url",
            url,
            *load.split(),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.time() - start
        board = json.loads(MONITORING.joinpath("grafana.json").read_text(encoding="utf-8"))
        tab.set_content(
            f"<body style='margin:0'>{draw(board, lambda query: answers(address, query, start, seconds), seconds)}"
        )
        tab.locator("svg").screenshot(path=HERE / "board-light.png")


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["run", "server", "board"]
    if "run" in wanted:
        log = run()
        log.save(HERE / "run.jsonl.gz")
        screenshots(export_html(log, HERE / "run.html"))
    if "server" in wanted:
        photograph_server()
    if "board" in wanted:
        photograph_board()
