"""Speculation on the embedded model in float32: token by token what comes without."""

from refimpl.bench.rounds import answer
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.speculative.lengths import FixedLength

ASKED = (
    "Repeat this list three times: red, green, blue, white, black.",
    "Write the numbers from 1 to 20, one on each line.",
    "Repeat word for word: the cat sat on the mat, the cat sat on the hat, the cat sat on the bat.",
)


def test_greedy_tokens_of_the_embedded_model_are_those_without_drafts(smollm2):
    options = {"model": smollm2, "dtype": "float32", "max_num_seqs": 3, "max_model_len": 128, "enable_prefix_caching": False}
    config = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
    engine = Engine(EngineArgs.from_options(options | {"speculative_config": config}))
    try:
        encode = engine.tokenizer.apply_chat_template
        requests = [(encode([{"role": "user", "content": text}]), 24) for text in ASKED]
        plain = answer(engine, requests, 3, None)
        drafted = answer(engine, requests, 3, FixedLength(5))
        assert drafted.runs[0].token_ids == plain.runs[0].token_ids
        assert sum(drafted.counted.accepted) >= 10
    finally:
        engine.close()
