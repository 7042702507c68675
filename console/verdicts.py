"""Whether profiles, and settings that are being typed, fit, and what they cost, in words."""

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Final

from catalogue.checkpoint import ModelUnavailableError
from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.models import Models, default_of
from console.registry.proposals import Proposal
from console.registry.tables import Model
from engine.errors import EngineError
from reports.record.text import number

logger = logging.getLogger("console")

FRESH_S: Final = 60.0
"""Seconds that a verdict on typed settings holds: others may take memory meanwhile."""
MOST: Final = 2000
"""Verdicts that are kept."""
Verdict = dict[str, Any]
"""kind (good, warn, bad; None: unknown), brief and answer, price, why (lines), settings (proposed),
max_model_len_limit."""
PLANNING: Final[Verdict] = {"kind": None, "brief": "being planned", "why": []}


class Verdicts:
    """Verdicts on settings, kept for a while; safe to use from several threads.

    Args:
        database: of the registry.
        clock: Seconds that never go back.
        worker: plans profiles behind the pages; None: a thread of its own.
    """

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float] = time.monotonic,
        worker: Executor | None = None,
    ) -> None:
        self._models, self._clock = Models(database), clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[float, Verdict]] = OrderedDict()
        self._profiles: dict[int, tuple[float, Verdict]] = {}
        self._worker = worker or ThreadPoolExecutor(1, thread_name_prefix="verdicts")

    def close(self) -> None:
        """Drop what is still to be planned."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def of_model(self, model: Model) -> Verdict:
        """Return the verdict on a model's default profile at once; PLANNING where it is not known.

        It holds until the settings change: pages ask for those of many models every few seconds.
        """
        stamp = max(model.changed_s, *(profile.changed_s for profile in model.profiles))
        with self._lock:
            known = self._profiles.get(model.id)
            if known is not None and known[0] == stamp:
                return known[1]
            self._profiles[model.id] = (stamp, PLANNING)
        with contextlib.suppress(RuntimeError):  # the console ends: nobody plans any more
            self._worker.submit(self._plan, model, stamp)
        return PLANNING

    def _plan(self, model: Model, stamp: float) -> None:
        try:
            found = self._verdict(model, default_of(model).settings, explain=False)
        except EngineError as error:
            found = {"kind": None, "brief": "unknown", "why": [str(error)]}
        except Exception as error:  # it would read "being planned" for good
            logger.exception("%s could not be planned", model.name)
            found = {"kind": None, "brief": "unknown", "why": [repr(error)]}
        with self._lock:
            self._profiles[model.id] = (stamp, found)

    def ask(
        self, settings: Mapping[str, Any], *, source: str | None = None, model_id: int | None = None
    ) -> Verdict:
        """Return the verdict on settings, planned now unless it is known; blocks.

        Args:
            settings: by flags of `tightfit serve` with underscores.
            source: of a model that is not in the registry.
            model_id: of one that is.

        Raises:
            FieldError: a field is refused.
        """
        if (source is None) == (model_id is None):
            raise FieldError(
                "source", "source: expected either source or model_id, got both or none."
            )
        key = _key(f"#{model_id}" if source is None else source, settings)
        with self._lock:
            found = self._fresh(key)
        if found is None:
            try:
                row = (
                    self._models.get(model_id)
                    if model_id is not None
                    else self._models.describe(str(source))
                )
            except ModelUnavailableError as error:
                raise FieldError("source", f"source: {error}") from error
            found = self._verdict(row, settings, explain=False)
            if found["kind"] == "bad":
                found = self._verdict(row, settings, explain=True)
            with self._lock:
                self._keep(key, found)
        return found

    def _verdict(self, row: Model, settings: Mapping[str, Any], *, explain: bool) -> Verdict:
        proposal = self._models.plan(row, settings, explain=explain)
        return _worded(proposal) | {"max_model_len_limit": row.max_model_len}

    def _fresh(self, key: str) -> Verdict | None:
        known = self._kept.get(key)
        return None if known is None or self._clock() - known[0] > FRESH_S else known[1]

    def _keep(self, key: str, found: Verdict) -> None:
        self._kept.pop(key, None)
        self._kept[key] = (self._clock(), found)
        while len(self._kept) > MOST:
            self._kept.popitem(last=False)


def _key(model: str, settings: Mapping[str, Any]) -> str:
    return repr((model, sorted(settings.items(), key=lambda item: item[0])))


def _worded(found: Proposal) -> Verdict:
    card = "the CPU of this machine" if found.card == "CPU" else found.card
    brief = "does not fit as set"
    match found.verdict:
        case "fits":
            kind, answer = "good", f"Fits {card}"
            rate = (found.price or {}).get("decode_tokens_s")
            brief = "fits" if rate is None else f"fits, about {number(float(rate))} tokens/s"
        case "fits_with":
            words = found.choices[0].words
            kind, answer = "warn", f"Does not fit {card} as set; fits with {words}"
        case _:
            kind, answer = "bad", f"Does not fit {card}"
    return {
        "kind": kind,
        "brief": brief,
        "answer": answer,
        "price": None if found.price is None else _price(found.price),
        "why": [line for line in found.lines if line.strip()],
        "settings": found.settings,
    }


def _price(price: Mapping[str, Any]) -> str:
    """Return the predicted times that are known, in a line."""
    parts = []
    if (rate := price.get("decode_tokens_s")) is not None:
        parts.append(f"about {rate:.3g} tokens/s for one sequence")
    batch, full = price.get("full_batch"), price.get("decode_tokens_full_s")
    if batch and batch > 1 and full is not None:
        parts.append(f"{full:.3g} for {batch} together")
    ttft, tokens = price.get("ttft_ms"), price.get("ttft_prompt_tokens")
    if ttft is not None and tokens:
        parts.append(f"first token after {ttft / 1e3:.2g} s ({tokens} tokens of prompt)")
    if (load := price.get("load_s")) is not None:
        parts.append(f"loads in {load:.2g} s")
    return f"Predicted: {', '.join(parts)}" if parts else "Times are not predicted for this device"
