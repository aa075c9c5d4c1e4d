"""One legend of axis names, used in every signature, docstring, test and notebook.

========  ==========================================================================================
axis      what it counts
========  ==========================================================================================
``T``     tokens computed in this step, of all sequences laid end to end (no padding)
``S``     sequences in this step
``R``     rows of logits: the sequences of this step whose next token is drawn
``L``     positions of one sequence's context (prompt + output)
``N``     slots: the most sequences that may run at once (``max_num_seqs``)
``H``     hidden size of the model
``Hq``    query heads
``Hkv``   key/value heads (``Hq`` is a multiple of it: grouped-query attention)
``G``     query heads that share one key/value head, ``Hq // Hkv``
``D``     head dimension
``I``     intermediate size of the feed-forward layer
``V``     vocabulary size
``B``     block size: token slots in one block of the KV cache
``blocks`` blocks of the pool and the null block: ``num_blocks + 1``
``K``     drafted tokens of one sequence (speculative decoding)
========  ==========================================================================================

Intervals are half open. A sequence's context splits as ::

    [0 ............ num_computed_tokens) [num_computed_tokens ..... num_computed_tokens + num_new_tokens)
     keys and values are in the cache     queries of this step; their keys and values are written first

A *slot* has two meanings in the field, and both are used here in their usual places: a row of the running batch
(``Admission.slot``), and a token's place in the cache (``slot_mapping``: ``block_id * B + offset``).
"""
