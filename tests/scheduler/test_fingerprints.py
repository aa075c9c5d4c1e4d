"""The real tensors under the real scheduler: keys are (token, position) fingerprints, and every row's context is checked.

What the shadow executor proves of the plans, this proves of InputBatch, slot mapping, block copies and shared logits rows.
"""

import pytest
import torch
from sharing_support import Driver

from refimpl.attention import Setting, choose_backend
from refimpl.cache.kv_cache import KVCache
from refimpl.executor.input_batch import InputBatch
from refimpl.executor.model_runner import ModelRunner
from refimpl.models.tiny import tiny
from refimpl.sampling.slots import SamplingSlots

VOCABULARY = 64
CONFIG = tiny(vocab_size=VOCABULARY, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=2).config


class FingerprintModel:
    """Writes (token, position) as keys and values, and draws a token that follows from the last one."""

    def __call__(self, input_ids, positions, layers, attention):
        fingerprints = torch.stack((input_ids, positions), dim=-1).double().unsqueeze(1)  # [T, 1, 2]
        for number, layer in enumerate(layers):
            attention.write(layer, fingerprints + number, -fingerprints)
        return input_ids.double().unsqueeze(1)

    def compute_logits(self, hidden):
        following = (hidden.long() * 5 + 3) % (VOCABULARY - 1) + 1  # never 0, which would end a sequence
        return torch.nn.functional.one_hot(following.squeeze(1), VOCABULARY).double()


class FingerprintExecutor:
    """Runs the real ModelRunner, and reads every context of a step back through its block table."""

    def __init__(self, driver):
        blocks, block_size = driver.kv.num_blocks, driver.kv.block_size
        limits = driver.scheduler.config
        device = torch.device("cpu")
        self.cache = KVCache(CONFIG, blocks, block_size, torch.float64, device)
        for layer in self.cache.layers:
            layer.k.fill_(float("nan"))
            layer.v.fill_(float("nan"))
        sampling = SamplingSlots(limits.max_num_seqs, CONFIG.vocab_size, device)
        self.batch = InputBatch(limits.max_num_seqs, limits.max_model_len, block_size, device, sampling)
        self.runner = ModelRunner(FingerprintModel(), self.cache, self.batch, choose_backend("auto", Setting(2)))
        self.violations = []
        self.num_checked = 0

    def run(self, output):
        result = self.runner.execute(output)
        for slot in output.batch.slots:
            self.check(slot, output.step)
        return result

    def table(self, slot):
        """As the shadow executor tells it; here it is the table on the device."""
        return tuple(self.batch.block_table[slot, : self.batch.num_blocks[slot]].tolist())

    def check(self, slot, step):
        computed = int(self.batch.num_computed_tokens[slot])
        positions = torch.arange(computed)
        block_ids = self.batch.block_table[slot, positions // self.batch.block_size].long()
        expected = torch.stack((self.batch.token_ids[slot, :computed], positions), dim=-1).double()
        for number, layer in enumerate(self.cache.layers):
            for cached, wanted in ((layer.k, expected + number), (layer.v, -expected)):
                found = cached[block_ids, positions % self.batch.block_size, 0]
                wrong = (found != wanted).any(-1).nonzero().flatten().tolist()
                if wrong:
                    self.violations.append(f"step {step}, slot {slot}, layer {number}: wrong at positions {wrong[:5]}")
        self.num_checked += computed


def drive(depth, num_blocks, block_size, break_it=lambda executor: None):
    driver = Driver(num_blocks, block_size, depth, max_num_seqs=4, max_num_batched_tokens=20)
    driver.executor = FingerprintExecutor(driver)
    break_it(driver.executor)
    for number in range(8):
        stem = [3] * 6 + [number % 2 + 1] * 3
        driver.add(stem, n=3, max_tokens=8)
        driver.add([5, number + 1] * 4, max_tokens=9)
        for _ in range(3):
            driver.step()
        running = list(driver.scheduler.running)
        if running:
            driver.fork(running[0], max_tokens=6)
            if number % 2:
                driver.scheduler.preempt_at(driver.scheduler.step, running[-1].request.request_id)
        driver.step()
    for _ in range(500):
        if not driver.scheduler.has_unfinished and not driver.in_flight:
            return driver
        driver.step()
    raise AssertionError("not done")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(40, 1), (14, 3), (12, 4), (30, 4)])
def test_every_context_holds_the_keys_of_its_own_tokens(depth, num_blocks, block_size):
    driver = drive(depth, num_blocks, block_size)
    assert driver.executor.num_checked > 2000
    assert driver.cache.stats.hits
    assert any(output.forks for output in driver.outputs)
    if block_size > 1:
        assert driver.copies


def violations_of(break_it):
    broken = []

    def keep(executor):
        break_it(executor)
        broken.append(executor)

    with pytest.raises(AssertionError):
        drive(0, 30, 4, keep)
    return broken[0].violations


def test_a_copy_that_is_not_made_is_seen(monkeypatch):
    monkeypatch.setattr(KVCache, "copy_blocks", lambda self, copies: None)
    assert "wrong at positions" in violations_of(lambda executor: None)[0]


def test_a_block_table_that_is_not_updated_by_a_copy_is_seen():
    def forget_the_new_block(executor):
        apply = executor.batch.apply

        def broken(output):
            before = executor.batch.block_table.clone()
            apply(output)
            for copy in output.copies:
                executor.batch.block_table[copy.slot, copy.index] = before[copy.slot, copy.index]

        executor.batch.apply = broken

    assert "wrong at positions" in violations_of(forget_the_new_block)[0]
