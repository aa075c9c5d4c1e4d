"""The law of routing: where a key goes, that it stays, how loads are bounded, and what moves when a replica dies."""

import math
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.server.routing import BOUND, SLACK, choose, preference, prefix_key

KEYS = [number.to_bytes(16, "little") for number in range(2000)]
NAMES = st.lists(st.integers(0, 50).map(str), min_size=2, max_size=8, unique=True)


def test_a_key_is_that_of_the_first_blocks_and_the_salt():
    ids = list(range(100))
    key = prefix_key(ids, 16)
    assert key == prefix_key([*ids[:64], *range(500, 900)], 16), "what comes after the first four blocks"
    assert key != prefix_key([7, *ids[1:]], 16)
    assert key != prefix_key(ids, 16, salt="tenant")
    assert prefix_key(ids, 16, salt="a") != prefix_key(ids, 16, salt="b")
    assert key != prefix_key(ids[:63], 16), "three blocks are full"
    assert prefix_key(ids[:33], 16) == prefix_key([*ids[:32], 9, 9], 16)


def test_a_prompt_that_fills_no_block_has_no_key():
    assert prefix_key(list(range(16)), 16) is None, "its last token is always computed, so this block is never found"
    assert prefix_key(list(range(17)), 16) is not None


def test_keys_are_the_same_in_every_process():
    assert prefix_key(list(range(32)), 8, "s").hex() == prefix_key(tuple(range(32)), 8, "s").hex()
    assert preference(b"k" * 16, ["0", "1", "2", "3"]) == preference(b"k" * 16, ["3", "1", "0", "2"])


def test_keys_are_spread_evenly():
    found = Counter(preference(key, ["0", "1", "2", "3"])[0] for key in KEYS)
    assert all(abs(count - 500) < 4 * math.sqrt(2000 * 0.25 * 0.75) for count in found.values())


@settings(max_examples=50, deadline=None)
@given(names=NAMES, data=st.data())
def test_when_a_replica_dies_its_keys_alone_move(names, data):
    dead = data.draw(st.sampled_from(names))
    left = [name for name in names if name != dead]
    for key in KEYS[:50]:
        before, after = preference(key, names), preference(key, left)
        assert after == [name for name in before if name != dead]


@settings(max_examples=100, deadline=None)
@given(names=NAMES, loads=st.lists(st.integers(0, 200), min_size=8, max_size=8), number=st.integers(0, 1999))
def test_the_first_of_a_keys_order_that_is_not_over_its_share_serves(names, loads, number):
    known = dict(zip(names, loads, strict=False))
    most = max(SLACK, math.ceil(BOUND * (sum(known.values()) + 1) / len(known)))
    chosen = choose(KEYS[number], known)
    assert known[chosen] < most
    for name in preference(KEYS[number], names):
        if name == chosen:
            break
        assert known[name] >= most, "it was passed over for its load"


@settings(max_examples=50, deadline=None)
@given(names=NAMES, loads=st.lists(st.integers(0, 200), min_size=8, max_size=8))
def test_without_a_key_the_least_busy_one_serves(names, loads):
    known = dict(zip(names, loads, strict=False))
    assert known[choose(None, known)] == min(known.values())


def test_a_key_stays_where_it_is_while_loads_are_even():
    for key in KEYS[:100]:
        assert len({choose(key, dict.fromkeys("0123", load)) for load in (0, 5, 50, 500)}) == 1


def test_one_hot_prefix_is_shared_out_within_the_bound():
    loads = dict.fromkeys("0123", 0)
    for _ in range(400):
        loads[choose(KEYS[0], loads)] += 1
    assert sum(loads.values()) == 400
    assert max(loads.values()) <= math.ceil(BOUND * 100)
    assert loads[preference(KEYS[0], list("0123"))[0]] == max(loads.values())


def test_many_prefixes_that_come_and_go_stay_at_home_nearly_always():
    rng, loads, running, away = random.Random(0), dict.fromkeys("0123", 0), [], 0
    for _ in range(4000):
        if len(running) >= 64:
            loads[running.pop(rng.randrange(len(running)))] -= 1
        key = rng.choice(KEYS)
        chosen = choose(key, loads)
        away += chosen != preference(key, list(loads))[0]
        loads[chosen] += 1
        running.append(chosen)
    assert away / 4000 < 0.35
