"""Making transformers' ``generate`` stop each sequence after a given number of tokens: the lengths that the other side sampled.

Nothing is sampled differently otherwise, so both sides do the same work on the same ragged lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

__all__ = ["ForcedLengths"]


class ForcedLengths(LogitsProcessor):
    """Rules the end tokens out until a row's last token, which it makes an end token.

    Args:
        lengths: tokens of each row's completion, its end token included.
        end_token_ids: all tokens that end a sequence; the first is the one that is forced.
        prompt_tokens: width of the (left-padded) prompts.
    """

    def __init__(self, lengths: Sequence[int], end_token_ids: Sequence[int], prompt_tokens: int) -> None:
        self.lengths = torch.tensor(lengths)
        self.end_token_ids, self.prompt_tokens = list(end_token_ids), prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self.prompt_tokens + 1
        scores[:, self.end_token_ids] = float("-inf")
        ending = (self.lengths <= place).nonzero()[:, 0].to(scores.device)
        if len(ending):
            scores[ending] = float("-inf")
            scores[ending, self.end_token_ids[0]] = 0.0
        return scores
