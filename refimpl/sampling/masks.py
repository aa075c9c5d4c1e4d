"""Ids that are allowed, forbidden or favoured in single rows of logits.

Each function takes its ids as cells: ``rows[i]`` and ``ids[i]`` are the row and the token of cell ``i``. They return new
logits and change no argument.
"""

from __future__ import annotations

import math

from jaxtyping import Float, Int64
from torch import Tensor


def allow_only(
    logits: Float[Tensor, "R V"], rows: Int64[Tensor, "cells"], ids: Int64[Tensor, "cells"]
) -> Float[Tensor, "R V"]:
    """Minus infinity for every token of the named rows that is in none of the cells. Other rows stay as they are."""
    result = logits.clone()
    result[rows] = -math.inf
    result[rows, ids] = logits[rows, ids]
    return result


def forbid(logits: Float[Tensor, "R V"], rows: Int64[Tensor, "cells"], ids: Int64[Tensor, "cells"]) -> Float[Tensor, "R V"]:
    """Minus infinity for the tokens of the cells."""
    return logits.index_put((rows, ids), logits.new_full((), -math.inf))


def add_bias(
    logits: Float[Tensor, "R V"],
    rows: Int64[Tensor, "cells"],
    ids: Int64[Tensor, "cells"],
    bias: Float[Tensor, "cells"],
) -> Float[Tensor, "R V"]:
    """Add a number to the logit of each cell; a forbidden token stays forbidden."""
    return logits.index_put((rows, ids), bias.to(logits.dtype), accumulate=True)
