"""Replaceable parts: a student's allocator or prefix index runs in the real engine, and wrong answers are refused."""

import pytest

from refimpl import LLM, SamplingParams
from refimpl.cache import (
    BlockPool,
    ChainedHash,
    FirstFreedFirst,
    KVCacheManager,
    LowestFirst,
    PrefixCache,
    TokenTree,
    audit,
)
from refimpl.errors import AllocatorError, ConfigError, PartError, PrefixIndexError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["one prompt of some length", "one prompt of some other length", "x"]
OPTIONS = {
    "dtype": "float64",
    "num_gpu_blocks_override": 24,
    "block_size": 4,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
}


class Stack:
    """A student's allocator: last freed, first reused. No base class, no torch."""

    def __init__(self, num_blocks):
        self.free_blocks = list(range(1, num_blocks + 1))

    def allocate(self, count):
        return [self.free_blocks.pop() for _ in range(count)]

    def free(self, block_ids):
        self.free_blocks += block_ids


class GivesTwice(Stack):
    def allocate(self, count):
        return [1] * count


class GivesTheNullBlock(Stack):
    def allocate(self, count):
        return [0] * count


class GivesWhatDoesNotExist(Stack):
    def allocate(self, count):
        return [10_000 + i for i in range(count)]


class GivesTooFew(Stack):
    def allocate(self, count):
        return super().allocate(count)[:-1]


class GivesNothing(Stack):
    def allocate(self, count):
        return None


class NeverFrees(Stack):
    def free(self, block_ids):
        pass


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected():
    with LLM("tiny", **OPTIONS) as llm:
        return tokens(llm.generate(PROMPTS * 2, GREEDY, use_tqdm=False))


@pytest.mark.parametrize("allocator", ["first_freed_first", "lowest_first", Stack, LowestFirst])
@pytest.mark.parametrize("index", ["chained_hash", "token_tree", TokenTree, TokenTree()])
def test_every_allocator_and_index_serves_the_same_tokens(allocator, index, expected):
    with LLM("tiny", block_allocator=allocator, prefix_index=index, **OPTIONS) as llm:
        assert tokens(llm.generate(PROMPTS * 2, GREEDY, use_tqdm=False)) == expected
        assert llm.engine.prefix_cache_stats.hits > 0
        assert llm.engine.audit() == []


@pytest.mark.parametrize(
    ("allocator", "sentence"),
    [
        (GivesTwice, "gave block 1 twice"),
        (GivesTheNullBlock, "0 is the null block"),
        (GivesWhatDoesNotExist, "gave block 10000; blocks are whole numbers, 1 to 24"),
        (GivesTooFew, "was asked for 4 of 24 free blocks and gave 3 blocks"),
        (GivesNothing, "gave None"),
    ],
)
def test_a_wrong_allocator_is_refused_with_a_sentence_and_the_engine_stays_usable(allocator, sentence):
    made = []

    def make(num_blocks):
        made.append(allocator(num_blocks))
        return made[-1]

    with LLM("tiny", block_allocator=make, **OPTIONS) as llm:
        with pytest.raises(AllocatorError, match=sentence):
            llm.generate("a prompt of about 28 letters", GREEDY, use_tqdm=False)
        assert llm.engine.audit() == []
        assert not llm.engine.has_unfinished_requests()
        made[-1].allocate = Stack(24).allocate  # mended, the same engine serves again
        assert len(llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


class Raises(Stack):
    def allocate(self, count):
        raise KeyError("no block")


class RaisesOnFree(Stack):
    def free(self, block_ids):
        raise ZeroDivisionError


class GivesTrue(Stack):
    def allocate(self, count):
        return [True] * count


@pytest.mark.parametrize(
    ("allocator", "sentence"), [(Raises, r"raised KeyError\('no block'\)"), (GivesTrue, "gave block True")]
)
def test_an_allocator_that_raises_ends_what_runs_and_nothing_else(allocator, sentence):
    with LLM("tiny", block_allocator=allocator, **OPTIONS) as llm:
        for _ in range(2):
            with pytest.raises(AllocatorError, match=sentence):
                llm.generate("a prompt", GREEDY, use_tqdm=False)
            assert llm.engine.audit() == []


def test_an_allocator_that_raises_when_blocks_come_back_is_told_of_at_the_next_question():
    with LLM("tiny", block_allocator=RaisesOnFree, enable_prefix_caching=False, **OPTIONS) as llm:
        assert len(llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12
        with pytest.raises(AllocatorError, match=r"raised ZeroDivisionError\(\) when blocks"):
            llm.generate("y", GREEDY, use_tqdm=False)
        assert llm.engine.audit() == []


def test_an_honest_allocator_is_not_blamed_for_a_refused_answer():
    class TooFewOnce(Stack):
        asked = 0

        def allocate(self, count):
            TooFewOnce.asked += 1
            return super().allocate(count)[: count - 1 if TooFewOnce.asked == 1 else count]

    pool = BlockPool(6, TooFewOnce(6))
    with pytest.raises(AllocatorError):
        pool.allocate(4)
    assert len(pool.allocate(5)) == 5, "what was refused went back to it"


class RaisesOnRelease(ChainedHash):
    def release(self, block_id):
        raise ValueError("release")


class RaisesOnLookup(ChainedHash):
    def lookup(self, *arguments):
        raise ValueError("lookup")


@pytest.mark.parametrize("index", [RaisesOnRelease, RaisesOnLookup])
def test_an_index_that_raises_ends_what_runs_and_the_books_stay_right(index):
    with LLM("tiny", prefix_index=index, **OPTIONS) as llm:
        with pytest.raises(PrefixIndexError, match="raised ValueError"):
            [llm.generate("a prompt of some length", GREEDY, use_tqdm=False) for _ in range(2)]
        assert llm.engine.audit() == []
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.scheduler.kv.num_free_blocks == 24


def test_an_allocator_that_loses_blocks_is_found_out_when_it_runs_dry():
    pool = BlockPool(3, NeverFrees(3))
    pool.free(pool.allocate(3))
    with pytest.raises((AllocatorError, IndexError)):
        pool.allocate(1)


def test_a_block_that_is_given_twice_is_refused_and_nothing_is_taken():
    class Again(Stack):
        def allocate(self, count):
            return [2] * min(count, 1)

    kv = KVCacheManager(4, 4, allocator=Again(4))
    assert kv.admit(0, 4).new_blocks == [2]
    for call in (lambda: kv.admit(1, 4), lambda: kv.allocate(0, 4, 5)):
        before = kv.snapshot({0: 4})
        with pytest.raises(AllocatorError, match="gave block 2 twice: it is not free until it is given back"):
            call()
        assert kv.snapshot({0: 4}) == before
    assert audit(before) == []


class FindsWhatIsNotCached(ChainedHash):
    def lookup(self, root, token_ids, block_size, max_blocks):
        return [20][:max_blocks]


class FindsOtherTokens(ChainedHash):
    def lookup(self, root, token_ids, block_size, max_blocks):
        return list(self._by_block)[:1] if max_blocks else []


class FindsTooMany(ChainedHash):
    def lookup(self, root, token_ids, block_size, max_blocks):
        return super().lookup(root, token_ids, block_size, max_blocks + 1)


class EvictsWhatIsInUse(ChainedHash):
    def evict(self, count):
        return [block for block, entry in self._by_block.items() if entry.used][:count]


class EvictsTooFew(ChainedHash):
    def evict(self, count):
        return super().evict(count)[1:]


def cache_with(index, block_ids, tokens=(7, 7)):
    cache = PrefixCache(index)
    key = cache.root(None)
    for block_id in block_ids:
        key = cache.publish(block_id, key, tokens)
    return cache


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (FindsWhatIsNotCached(), "found block 20 as number 0 of a prompt, but that block is not cached"),
        (FindsOtherTokens(), "found block 1 as number 0 of a prompt, but that block holds other tokens"),
    ],
)
def test_a_hit_that_is_none_is_refused(index, sentence):
    with pytest.raises(PrefixIndexError, match=sentence):
        cache_with(index, [1]).lookup(b"root", [8, 8, 8], 2, 1)


def test_more_hits_than_a_prompt_may_have_are_refused():
    cache = cache_with(FindsTooMany(), [1, 2])
    with pytest.raises(PrefixIndexError, match="found 2 blocks for a prompt that may begin with at most 1"):
        cache.lookup(cache.root(None), [7, 7, 7, 7], 2, 1)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (EvictsWhatIsInUse(), "gave back block 1, which is in use"),
        (EvictsTooFew(), r"to give back 1 different blocks, and gave \[\]"),
    ],
)
def test_a_wrong_eviction_is_refused_and_nothing_is_lost(index, sentence):
    cache = cache_with(index, [1, 2])
    cache.release(2)
    with pytest.raises(PrefixIndexError, match=sentence):
        cache.evict(1)
    assert cache.unused_ids == (2,)


def test_a_wrong_index_in_the_engine_ends_what_runs_and_the_engine_goes_on():
    with LLM("tiny", prefix_index=EvictsTooFew, **OPTIONS) as llm:
        with pytest.raises(PrefixIndexError):
            llm.generate([f"{i} prompts that fill the pool" for i in range(9)], GREEDY, use_tqdm=False)
        assert llm.engine.audit() == []
        assert llm.engine.scheduler.kv.num_free_blocks == 24
        assert len(llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"block_allocator": "best_fit"}, "must be one of first_freed_first, lowest_first, or a class"),
        ({"block_allocator": 3}, "block_allocator is a int; it must be a name, or a class"),
        ({"block_allocator": lambda num_blocks: []}, "makes a list; a BlockAllocator has allocate and free"),
        ({"prefix_index": "radix"}, "must be one of chained_hash, token_tree, or a PrefixIndex object"),
        ({"prefix_index": object()}, "prefix_index is a object; a PrefixIndex has name, root, lookup"),
        ({"kv_cache_manager": "contiguous", "block_allocator": Stack}, "block_allocator is for kv_cache_manager='paged'"),
        ({"kv_cache_manager": "unified"}, "kv_cache_manager is 'unified'; it must be one of paged, contiguous"),
        ({"scheduler": "dynamic"}, "scheduler is 'dynamic'; it must be one of continuous, static"),
        ({"static_drop_finished": True}, "static_drop_finished is for scheduler='static'"),
        ({"watermark": 1}, "watermark is 1; it must be a number from 0 to under 1"),
    ],
)
def test_parts_that_do_not_exist_or_do_not_fit_are_refused_before_a_model_is_loaded(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LLM("/no/such/model", **options)


def test_part_errors_are_of_one_kind():
    assert issubclass(AllocatorError, PartError)
    assert issubclass(PrefixIndexError, PartError)


def test_the_lowest_block_is_next_where_blocks_are_to_stay_together():
    pool = BlockPool(5, LowestFirst(5))
    assert pool.allocate(4) == [1, 2, 3, 4]
    pool.free([3, 1])
    assert pool.allocate(2) == [1, 3]
    queue = BlockPool(5, FirstFreedFirst(5))
    queue.free(queue.allocate(2))
    assert queue.allocate(4) == [3, 4, 5, 1]
