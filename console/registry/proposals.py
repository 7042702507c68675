"""Proposals: whether a profile fits a card, settings with which it does, and what each costs.

Every figure is that of a plan that was made, or was measured. Pure arithmetic, no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import yaml

from catalogue.cards import card_names, card_sheet, like_card
from catalogue.files import facts_folder
from console.registry.checks import FieldError, check_settings, config_of, naming, spec_of
from console.registry.results import settings_of
from console.registry.tables import Model, Performance, TestRun
from engine.asked.config import EngineConfig, EngineSettings
from engine.asked.keywords import keywords_of
from engine.asked.kv import KVConfig
from engine.device.machine import Machine, machine_of
from engine.errors import CapacityError, ConfigError
from engine.lines import wrapped
from engine.model.checkpoint import read_unpackable
from engine.model.spec import ModelSpec
from engine.plan.memory import MemoryPlan
from engine.plan.planner import answer, plan_memory
from engine.plan.times import CONTEXT_TOKENS
from server.flags import as_flags, engine_settings, keyword_of
from server.plan_lines import plan_lines

MOST_SEQUENCES: Final = 256
"""The most that is proposed for max_num_seqs."""
STILL_AS_FAST: Final = 0.98
PRICES: Final[tuple[str, ...]] = (
    "decode_step_ms",
    "decode_tokens_s",
    "full_batch",
    "decode_tokens_full_s",
    "ttft_ms",
    "ttft_prompt_tokens",
    "load_s",
    "context_tokens",
)
"""What is said of a plan's predicted times."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings with which a model fits, or is faster, and their price."""

    settings: dict[str, Any]
    """Those of the whole profile."""
    words: str
    """What it changes, as flags."""
    tokens_s: float
    """Predicted output of one sequence."""
    host_weights_bytes: int
    host_total_bytes: int
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What is said of a profile on a card."""

    card: str
    """Its name, or CPU."""
    is_here: bool
    """Whether it is in this machine."""
    verdict: str
    """fits | fits_with (other settings: `choices`) | no_fit."""
    lines: tuple[str, ...]
    """Why, and what each choice costs; 80 columns wide."""
    choices: tuple[Choice, ...] = ()
    """The best first."""
    settings: dict[str, Any]
    """What is proposed for the whole profile; as it is where nothing fits."""
    price: dict[str, Any] | None = None
    """Predicted times with the proposed settings; None: they do not fit."""
    memory: dict[str, Any] | None = None
    """Bytes by part with the proposed settings, else those that do not fit."""
    measured: tuple[dict[str, Any], ...] = field(default=())
    """What was measured of the model on this card: settings and output_tok_s, the fastest first."""


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A model's plans on one card."""

    name: str
    spec: ModelSpec
    machine: Machine
    card: Mapping[str, Any] | None
    """The sheet of a card that was asked for; None: what the settings say."""
    unpackable: Mapping[str, str]

    def config(self, settings: Mapping[str, Any]) -> EngineConfig:
        config = config_of(settings, self.spec, self.name)
        return config if self.card is None else replace(config, gpu=config.gpu.on_card(self.card))

    def plan(self, settings: Mapping[str, Any]) -> MemoryPlan | None:
        """Return the plan of settings; None: they do not fit."""
        try:
            return plan_memory(
                self.config(settings),
                self.spec,
                self.machine.facts,
                unpackable=self.unpackable,
                explain=False,
            )
        except (CapacityError, ConfigError):
            return None


def propose(
    model: Model,
    settings: Mapping[str, Any],
    *,
    card: str | None = None,
    measured: Sequence[tuple[TestRun, Performance]] = (),
    explain: bool = True,
) -> Proposal:
    """Say whether a profile fits, and propose what it leaves open.

    Where it does not fit as it is, the fastest settings with which it does are proposed; where
    max_num_seqs is not set, as many sequences as have room, or as were measured to be fastest.

    Args:
        model: its files need not be here.
        settings: of the profile, by flags with underscores.
        card: a card of conf/gpu, or cpu; None: that of this machine, or what the settings say.
        measured: tests of the model with what they measured of throughput.
        explain: look for choices, which takes a second or more; else the profile is planned as it
            is, in a tenth of that, and nothing is proposed.

    Raises:
        FieldError: there is no such card, or a setting is refused.
    """
    spec = spec_of(model)
    asked = check_settings(settings, spec)
    sheet = None if card is None else _sheet(card)
    with naming(asked):
        gpu = config_of(asked, spec).gpu
        machine = machine_of(gpu if sheet is None else gpu.on_card(sheet))
        question = _Question(
            name=model.name,
            spec=spec,
            machine=machine,
            card=sheet,
            unpackable=read_unpackable(str(facts_folder()), model.path),
        )
        runs = _measured(measured, machine.facts.name)
        return _answered(question, asked, runs) if explain else _as_set(question, asked, runs)


def _as_set(
    question: _Question, settings: dict[str, Any], runs: tuple[dict[str, Any], ...]
) -> Proposal:
    """Say whether settings fit as they are."""
    facts, known = question.machine.facts, question.unpackable
    plan, memory = None, None
    lines: tuple[str, ...] = ()
    try:
        plan = plan_memory(
            question.config(settings), question.spec, facts, unpackable=known, explain=False
        )
    except CapacityError as error:
        memory, lines = error.plan, (as_flags(str(error)),)
    return Proposal(
        card=facts.name,
        is_here=question.machine.is_here,
        verdict="no_fit" if plan is None else "fits",
        lines=lines if plan is None else tuple(plan_lines(plan)),
        settings=settings,
        price=None if plan is None else _price(plan),
        memory=_memory(memory) if plan is None else _memory(plan.to_dict()),
        measured=runs,
    )


def _answered(
    question: _Question, settings: dict[str, Any], runs: tuple[dict[str, Any], ...]
) -> Proposal:
    facts, config = question.machine.facts, question.config(settings)
    memory: dict[str, Any] | None = None
    ways: Sequence[dict[str, Any]]
    try:
        found = answer(config, question.spec, facts, question.unpackable)
        lines, ways, verdict = found.lines, found.ways, "fits"
    except CapacityError as error:
        memory = dict(error.plan or {})
        lines, ways = tuple(str(error).split("\n")), memory.get("ways", ())
        verdict = "fits_with" if ways else "no_fit"
    choices = tuple(_choice(settings, way) for way in ways)
    chosen = choices[0].settings if verdict == "fits_with" else settings
    is_open = "max_num_seqs" not in {*settings, *settings.get("auto_fields", ())}
    if verdict != "no_fit" and is_open:
        count = _measured_sequences(runs, chosen) or _sequences(question, chosen)
        chosen = {**chosen, "max_num_seqs": count}
    plan = question.plan(chosen)
    return Proposal(
        card=facts.name,
        is_here=question.machine.is_here,
        verdict=verdict,
        lines=tuple(as_flags(line) for line in (*wrapped(lines[0]), *lines[1:])),
        choices=choices,
        settings=chosen,
        price=None if plan is None else _price(plan),
        memory=_memory(memory) if plan is None else _memory(plan.to_dict()),
        measured=runs,
    )


def _sheet(card: str) -> dict[str, Any]:
    if card == "cpu":
        return {"device": "cpu"}
    known = ["cpu", *card_names()]
    if card not in known:
        words = like_card(card, known).removeprefix("gpu: expected auto, ")
        raise FieldError("card", f"card: expected {words}")
    return card_sheet(card)


def _choice(settings: Mapping[str, Any], way: Mapping[str, Any]) -> Choice:
    return Choice(
        settings=_with(settings, way["settings"]),
        words=as_flags(" ".join(way["settings"])),
        tokens_s=way["tokens_s"],
        host_weights_bytes=way["host_weights_bytes"],
        host_total_bytes=way["host_total_bytes"],
        max_model_len=way["max_model_len"],
    )


def _with(settings: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return a profile's settings with those of a way, as a configuration's keys write them."""
    paths = {found.path: keyword for keyword, found in keywords_of().items()}
    offload = {name for path, name in paths.items() if path.startswith("offload.")} | {"choose"}
    host_kv = {*KVConfig.SIZES, "kv_transfer_config"}
    found = {keyword_of(name): value for name, value in settings.items()}
    for word in words:
        key, _, text = word.partition("=")
        if key == "offload":
            found = {name: value for name, value in found.items() if name not in offload}
            found |= {"offload": text}
        elif key == "kv":
            found = {name: value for name, value in found.items() if name not in host_kv}
        else:
            found |= {paths[key]: yaml.safe_load(text)}
    is_none = found.get("offload") == "none"
    return engine_settings(
        {
            name: value
            for name, value in found.items()
            if value != [] and not (is_none and name == "offload")
        }
    )


def _sequences(question: _Question, settings: Mapping[str, Any]) -> int:
    """Return the greatest power of two of sequences that have room, each of a usual length.

    Beyond the engine's own default only while one sequence alone stays as fast: buffers for more
    sequences may move more weights to host memory.
    """
    best, count, fastest = 1, EngineSettings().max_num_seqs, 0.0
    most = count if question.machine.facts.emulated else MOST_SEQUENCES
    while count <= most:
        plan = question.plan({**settings, "max_num_seqs": count})
        if plan is None:
            break
        speed = float((plan.predicted or {}).get("decode_tokens_s", 0.0))
        if speed < fastest * STILL_AS_FAST:
            break
        fastest = max(fastest, speed)
        tokens = min(CONTEXT_TOKENS, plan.max_model_len)
        room = plan.kv.concurrency(tokens)
        best = 1 << (room.bit_length() - 1)
        if best < count:
            break
        count *= 2
    return best


def _measured(rows: Sequence[tuple[TestRun, Performance]], card: str) -> tuple[dict[str, Any], ...]:
    """Return settings and rates that were measured on a card, the fastest first."""
    found = [
        {"settings": settings_of(run, row), "output_tok_s": rate}
        for run, row in rows
        if _is_card(row.card, card)
        and (rate := row.metrics.get("throughput/output_tok_s")) is not None
    ]
    return tuple(sorted(found, key=lambda each: -float(each["output_tok_s"])))


def _is_card(measured: str, planned: str) -> bool:
    """Whether a measurement is of the device of a plan; of CPUs there is this machine's."""
    return measured == planned or (planned == "CPU" and measured.startswith("CPU: "))


def _measured_sequences(
    runs: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> int | None:
    """Return max_num_seqs of the fastest test that has these settings else; None: there is none."""
    default = {"max_num_seqs": EngineSettings().max_num_seqs}
    for run in runs:
        found = default | run["settings"]
        count: int = found.pop("max_num_seqs")
        if found == settings:
            return count
    return None


def _price(plan: MemoryPlan) -> dict[str, Any]:
    found = plan.predicted or {}
    return {
        **{name: found.get(name) for name in PRICES},
        "queue_output_tokens_s": found.get("queue", {}).get("output_tokens_s"),
        "source": found.get("rates", {}).get("source"),
    }


def _memory(plan: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return bytes by part of a plan as plain data, with its notes as flags."""
    if not plan:
        return None
    names = ("max_model_len", "tokens", "max_concurrency", "longest_tokens")
    return {
        "dtype": plan["dtype"],
        "gpu": plan["gpu"],
        "host": plan["host"],
        "kv": {name: plan["kv"][name] for name in names},
        "placements": plan["placements"],
        "notes": [as_flags(note) for note in plan["notes"]],
    }
