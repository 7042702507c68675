"""Static batches on a transformers model: what `generate` does, one token of all rows a step."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.request import FinishReason, Request


@dataclass(kw_only=True)
class Row:
    """One request in a batch."""

    request: Request
    output: list[int] = field(default_factory=list)
    is_dropped: bool = False

    @property
    def limit(self) -> int:
        """Tokens of output at most."""
        return self.request.params.max_tokens or 1

    @property
    def is_done(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.is_dropped or len(self.output) >= self.limit

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it goes on."""
        return "length" if len(self.output) >= self.limit else None


class StaticBatch:
    """Prompts padded on the left to one length, prefilled at once, then decoded until all end.

    A row that ended is computed with the others until the last one ends, as `generate` does.

    Args:
        model: a transformers model for causal language modelling.
        rows: the requests; their tokens are appended here.
        device: where the model runs, as torch calls it.
    """

    def __init__(self, model: Any, rows: Sequence[Row], device: str) -> None:
        self._model, self.rows, self._device = model, list(rows), device
        self._cache, self._cache_key = _new_cache(model)
        self._mask: Any = None
        self._last: Any = None

    @property
    def is_done(self) -> bool:
        """Whether every row ended."""
        return all(row.is_done for row in self.rows)

    @property
    def num_open(self) -> int:
        """Rows that go on."""
        return sum(not row.is_done for row in self.rows)

    def step(self) -> list[Row]:
        """Compute one token of each row; return the rows that got one."""
        import torch  # noqa: PLC0415  takes seconds

        open_rows = [not row.is_done for row in self.rows]
        with torch.inference_mode():
            inputs = self._prompts() if self._last is None else self._next()
            out = self._model(
                **inputs,
                **{self._cache_key: self._cache},
                attention_mask=self._mask,
                use_cache=True,
                logits_to_keep=1,
            )
            self._last = out.logits[:, -1].argmax(dim=-1)
            tokens = self._last.tolist()
        found = []
        for row, token, is_open in zip(self.rows, tokens, open_rows, strict=True):
            if is_open:
                row.output.append(token)
                found.append(row)
        return found

    def _prompts(self) -> dict[str, Any]:
        """Return the padded prompts and their positions; set the mask."""
        import torch  # noqa: PLC0415  takes seconds

        prompts = [row.request.prompt_token_ids for row in self.rows]
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._mask = torch.tensor(seen, device=self._device)
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        return {
            "input_ids": torch.tensor(ids, device=self._device),
            "position_ids": positions,
        }

    def _next(self) -> dict[str, Any]:
        """Return the newest tokens and their positions; lengthen the mask."""
        import torch  # noqa: PLC0415  takes seconds

        one = self._mask.new_ones((len(self.rows), 1))
        self._mask = torch.cat([self._mask, one], dim=1)
        positions = self._mask.sum(-1, keepdim=True) - 1
        return {"input_ids": self._last[:, None], "position_ids": positions}


def _new_cache(model: Any) -> tuple[Any, str]:
    """Return an empty KV cache and the name under which the model takes it."""
    from transformers import DynamicCache

    taken = inspect.signature(type(model).forward).parameters
    # Newer versions of transformers renamed it.
    return DynamicCache(config=model.config), "cache" if "cache" in taken else "past_key_values"
