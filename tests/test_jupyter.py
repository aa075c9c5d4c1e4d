"""Real Jupyter kernels: cells that generate, await, are interrupted and close; and clicks that come while a cell blocks."""

import os
import queue
import time

import pytest
from jupyter_client.manager import KernelManager

PATIENCE = 240

PRELUDE = """
import asyncio, gc, sys, threading, time
import torch
torch.set_num_threads(1)
from refimpl import LLM, AsyncLLM, SamplingParams
def short(tokens=4, **options):
    return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, **options)
"""


class Kernel:
    """A kernel and one client: cells are sent and waited for, in order."""

    def __init__(self):
        self.manager = KernelManager()
        self.manager.start_kernel(env=os.environ | {"OMP_NUM_THREADS": "1"})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def send(self, source):
        return self.client.execute(source)

    def next_reply(self, message_id):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            reply = self.client.get_shell_msg(timeout=PATIENCE)
            if reply["parent_header"].get("msg_id") == message_id:
                return reply["content"]
        raise AssertionError("no reply came")

    def printed(self, message_id, until_idle=True, last=None):
        """What a cell prints: until it has ended, or has printed ``last``."""
        text = ""
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=PATIENCE)
            except queue.Empty:
                raise AssertionError(f"the kernel is silent; it printed {text!r}") from None
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text += content["text"]
                if last is not None and last in text:
                    return text
            elif kind == "status" and content["execution_state"] == "idle":
                return text

    def run(self, source):
        """Run a cell that must succeed; what it printed."""
        message_id = self.send(source)
        text = self.printed(message_id)
        reply = self.next_reply(message_id)
        assert reply["status"] == "ok", "\n".join(reply["traceback"])
        return text

    def fail(self, source):
        """Run a cell that must raise; the name of what it raised."""
        message_id = self.send(source)
        self.printed(message_id)
        reply = self.next_reply(message_id)
        assert reply["status"] == "error"
        return reply["ename"]

    def interrupt(self, source, once_printed):
        """Run a cell, and press the stop button when it has printed something; the name of what it raised."""
        message_id = self.send(source)
        self.printed(message_id, last=once_printed)
        self.manager.interrupt_kernel()
        self.printed(message_id)
        reply = self.next_reply(message_id)
        assert reply["status"] == "error"
        return reply["ename"]

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture(scope="module")
def kernel():
    """One for all tests. It ends with open engines, one of them in the middle of a request, and must end by itself."""
    kernel = Kernel()
    kernel.run(PRELUDE)
    yield kernel
    try:
        kernel.run("""
left, right = AsyncLLM("tiny"), LLM("tiny", async_scheduling=True)
stream = left.generate("Hello", short(1000))
await anext(stream)
""")
        kernel.client.shutdown()
        end = time.monotonic() + PATIENCE
        while kernel.manager.is_alive():
            assert time.monotonic() < end, "the kernel did not end"
            time.sleep(0.02)
    finally:
        kernel.stop()


# ---------------------------------------------------------------------- cells


def test_a_stream_is_awaited_at_top_level_and_leaves_the_loop_as_it_was(kernel):
    kernel.run("before = set(threading.enumerate()); allm = AsyncLLM('tiny')")
    printed = kernel.run("""
tokens = []
async for output in allm.generate("Hello", short(6, output_kind="delta")):
    tokens += output.outputs[0].token_ids
whole = await allm.generate("Hello", short(6))
print(tokens == whole.outputs[0].token_ids, len(tokens))
""")
    assert printed.strip() == "True 6"
    kernel.run("""
async for output in allm.generate("Hello", short(1000), "left"):
    break
""")
    assert kernel.run("""
while allm.engine.has_unfinished_requests():
    await asyncio.sleep(0.001)
print(await allm.audit(), (await allm.memory_report()).usage.num_sequences)
await allm.aclose()
print(set(threading.enumerate()) <= before)
""").split("\n") == ["[] 0", "True", ""]


def test_the_stop_button_ends_a_cell_that_awaits_and_nothing_else(kernel):
    kernel.run("""
allm = AsyncLLM("tiny")
other = asyncio.ensure_future(allm.generate("Other", short(30))._whole())
allm.engine.gate.close()
""")
    ended = kernel.interrupt(
        """
print("waiting")
await allm.generate("Hello", short(1000), "stopped")
""",
        once_printed="waiting",
    )
    assert ended in ("CancelledError", "KeyboardInterrupt")
    printed = kernel.run("""
allm.engine.gate.open()
print(len((await other).outputs[0].token_ids), allm.engine.is_unfinished("stopped"))
print(len((await allm.generate("Hello", short(5))).outputs[0].token_ids))
await allm.aclose()
""")
    assert printed.split("\n") == ["30 False", "5", ""]


def test_the_stop_button_ends_a_cell_that_blocks_and_the_next_one_generates(kernel):
    kernel.run("llm = LLM('tiny')")
    ended = kernel.interrupt(
        """
llm.engine.events.subscribe(lambda record: print("stepped", flush=True) if record.step == 2 else None)
llm.generate(["Hello"] * 4, short(2000), use_tqdm=False)
""",
        once_printed="stepped",
    )
    assert ended == "GenerationInterrupted"  # a KeyboardInterrupt with what had finished
    printed = kernel.run("""
[output] = llm.generate("Hello", short(5), use_tqdm=False)
print(len(output.outputs[0].token_ids), llm.engine.audit())
llm.close()
""")
    assert printed.strip() == "5 []"


def test_close_gives_everything_back_though_outputs_and_a_traceback_hold_on(kernel):
    kernel.run("""
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
from refimpl import tiny
gc.collect()
threads, before = set(threading.enumerate()), resident()
model = tiny(hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
             head_dim=64)
llm = LLM(model, dtype="float32", async_scheduling=True, num_gpu_blocks_override=300)
runner = llm.engine.executor.runner
storages = [tensor.untyped_storage() for tensor in runner.model.parameters()]
caches = [kv.untyped_storage() for layer in runner.kv_cache.layers for kv in (layer.k, layer.v)]
del runner
storages += caches
for storage in caches:
    storage.fill_(0)  # a page that was never written takes no memory
held = sum(storage.size() for storage in caches) / 1024**2
""")
    kernel.run("llm.generate([[5] * 20] * 2, short(3), use_tqdm=False)")  # stays in Out and _
    assert (
        kernel.fail("""
def inner():
    runner, layers = llm.engine.executor.runner, llm.engine.executor.runner.kv_cache.layers
    raise ZeroDivisionError
inner()
""")
        == "ZeroDivisionError"
    )
    printed = kernel.run("""
grown = resident() - before
llm.close()
llm.close()
print(sum(storage.size() for storage in storages), set(threading.enumerate()) <= threads)
left = resident() - before
print(held > 70 and grown > 0.8 * held and left < 0.4 * held, f"held {held:.0f}, grew {grown:.0f}, left {left:.0f} MiB")
print(type(sys.last_value).__name__, len(_oh) > 0)
""").split("\n")
    assert printed[0] == "0 True"
    assert printed[1].startswith("True"), printed[1]
    assert printed[2] == "ZeroDivisionError True"


# ---------------------------------------------------------------------- clicks while a cell blocks


WIDGET = """
from refimpl.visualizers import Dashboard
llm = LLM("tiny")
view = Dashboard(llm)
print(view.comm.comm_id)
"""


def click(kernel, comm_id, message):
    """A message as a browser sends it when a button is pressed; without a subshell."""
    content = {"comm_id": comm_id, "data": {"method": "custom", "content": message}}
    kernel.client.shell_channel.send(kernel.client.session.msg("comm_msg", content))


def wait_for_answer(kernel, comm_id, running):
    """Until the widget speaks; the cell must not have ended before."""
    while True:
        message = kernel.client.get_iopub_msg(timeout=PATIENCE)
        if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == comm_id:
            return
        ended = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
        assert not (ended and message["parent_header"]["msg_id"] == running), "the cell ended first"


@pytest.fixture
def comm_id(kernel):
    """Of a dashboard's comm; its engine is ``llm``."""
    yield kernel.run(WIDGET).strip()
    kernel.run("view.close(); llm.close()")


def test_a_click_is_handled_while_generate_steps(kernel, comm_id):
    running = kernel.send("""
llm.engine.events.subscribe(lambda record: print("stepped", flush=True) if record.step == 2 else None)
try:
    llm.generate(["Hello"] * 4, short(2000), use_tqdm=False)
except KeyboardInterrupt:
    print("stopped")
""")
    kernel.printed(running, last="stepped")
    click(kernel, comm_id, {"type": "hello"})
    wait_for_answer(kernel, comm_id, running)
    kernel.manager.interrupt_kernel()
    assert "stopped" in kernel.printed(running)
    assert kernel.next_reply(running)["status"] == "ok"


def test_clicks_step_and_free_a_held_generate_and_the_cells_behind_it_stay_in_order(kernel, comm_id):
    running = kernel.send("""
order = []
llm.engine.gate.close()
llm.engine.events.subscribe(lambda record: print(f"step {record.step}", flush=True))
print("begins", flush=True)
llm.generate("Hello", short(5), use_tqdm=False)
order.append(0)
""")
    kernel.printed(running, last="begins")
    behind = [kernel.send(f"order.append({number})") for number in (1, 2, 3)]
    click(kernel, comm_id, {"type": "hello"})
    wait_for_answer(kernel, comm_id, running)
    behind += [kernel.send(f"order.append({number})") for number in (4, 5)]
    click(kernel, comm_id, {"type": "engine_step"})
    kernel.printed(running, last="step 0")
    click(kernel, comm_id, {"type": "engine_step"})
    kernel.printed(running, last="step 1")
    click(kernel, comm_id, {"type": "hold", "hold": False})
    assert kernel.printed(running).split() == ["step", "2", "step", "3", "step", "4"]
    for message_id in (running, *behind):
        assert kernel.next_reply(message_id)["status"] == "ok"
    assert kernel.run("print(order)").strip() == "[0, 1, 2, 3, 4, 5]"


def test_messages_for_other_widgets_wait_for_the_end_of_the_cell(kernel, comm_id):
    other = kernel.run("""
from ipywidgets import Button
button = Button()
button.on_click(lambda _: seen.append(len(order)))
order, seen = [], []
print(button.comm.comm_id)
""").strip()
    running = kernel.send("""
print("begins", flush=True)
llm.engine.gate.close()
llm.generate("Hello", short(5), use_tqdm=False)
order.append(0)
""")
    kernel.printed(running, last="begins")
    click(kernel, other, {"event": "click"})
    click(kernel, comm_id, {"type": "hello"})
    wait_for_answer(kernel, comm_id, running)
    click(kernel, comm_id, {"type": "hold", "hold": False})
    kernel.printed(running)
    assert kernel.next_reply(running)["status"] == "ok"
    assert kernel.run("print(seen)").strip() == "[1]"
