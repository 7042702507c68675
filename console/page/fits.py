"""Whether models fit this machine's card, planned one after the other behind the pages."""

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Final

from console.page import texts
from console.registry.models import default_of
from console.registry.proposals import Proposal, propose
from console.registry.tables import Model
from engine.errors import EngineError

logger = logging.getLogger("console")

PLANNING: Final[Mapping[str, Any]] = {"answer": "being planned", "kind": None, "why": ()}


class Fits:
    """Verdicts of plans of default profiles; pages do not wait for the tenth of a second of each.

    A verdict is of the card's memory as it is in whole, so it holds until the settings change.

    Args:
        worker: plans; None: a thread of its own.
    """

    def __init__(self, worker: Executor | None = None) -> None:
        self._known: dict[int, tuple[float, Mapping[str, Any]]] = {}
        self._lock = threading.Lock()
        self._worker = worker or ThreadPoolExecutor(1, thread_name_prefix="fits")

    def of(self, model: Model) -> Mapping[str, Any]:
        """Return answer, kind and why of a model; they are planned now where they are not known."""
        stamp = max(model.changed_s, *(profile.changed_s for profile in model.profiles))
        with self._lock:
            known = self._known.get(model.id)
            if known is not None and known[0] == stamp:
                return known[1]
            self._known[model.id] = (stamp, PLANNING)
        self._worker.submit(self._plan, model, stamp)
        return PLANNING

    def close(self) -> None:
        """Drop what is still to be planned."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _plan(self, model: Model, stamp: float) -> None:
        try:
            found = said(propose(model, default_of(model).settings, explain=False))
        except EngineError as error:
            found = {"answer": texts.UNKNOWN, "kind": None, "why": (str(error),)}
        except Exception as error:  # it would read "being planned" for good
            logger.exception("%s could not be planned", model.name)
            found = {"answer": texts.UNKNOWN, "kind": None, "why": (repr(error),)}
        with self._lock:
            self._known[model.id] = (stamp, found)


def said(proposal: Proposal) -> dict[str, Any]:
    """Return a verdict in a few words, how it is marked, and its lines."""
    if proposal.verdict == "no_fit":
        return {"answer": "does not fit as set", "kind": "bad", "why": proposal.lines}
    rate = (proposal.price or {}).get("decode_tokens_s")
    price = "" if rate is None else f", about {texts.number(float(rate), 'tokens/s')}"
    return {"answer": f"fits{price}", "kind": "good", "why": proposal.lines}
