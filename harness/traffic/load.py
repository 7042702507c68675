"""What a run of the serve scenario sends: the scenario, and what was read for it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.traffic.prompts import fill_tokens
from harness.traffic.scenario import ServeScenario
from harness.traffic.schedule import Schedule, plan_requests
from harness.traffic.trace import TraceRow


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent: the scenario and what was read for it."""

    config: ServeScenario
    rows: Sequence[Sequence[int]] = ()
    """Encoded rows of the file of prompts."""
    trace: Sequence[TraceRow] = ()
    """Rows of the trace."""
    vocab_size: int
    avoid: Collection[int] = ()
    """Ids that synthetic prompts do not hold."""
    salt: str | None = None
    """Begins the salts of all schedules; None: their prefixes are shared."""

    def of_repeat(self, number: int) -> "Load":
        """Return what one repeat sends: draws, and rows of the file, of its own.

        Args:
            number: of the repeat, from 0.
        """
        if not number:
            return self  # with its schedule
        count = self.config.num_rows // self.config.repeats
        return replace(
            self,
            config=self.config.for_repeat(number),
            rows=self.rows[number * count : (number + 1) * count],
            salt=self.salt and f"{self.salt}/{number}",
        )

    @cached_property
    def first(self) -> Schedule:
        """What is sent first; drawn once, before anything is timed where the warm-up asks for it.

        Long prompts take a minute for 150 million tokens.
        """
        search = self.config.search
        return self.schedule() if search is None else self.schedule(search.low_per_s, trial=1)

    def schedule(self, rate_per_s: float | None = None, trial: int = 0) -> Schedule:
        """Return what to send, with token ids; each trial has prompts, or a salt, of its own."""
        name = f"serve-{trial}" if trial else "serve"
        config = self.config if rate_per_s is None else self.config.for_rate(rate_per_s)
        planned = plan_requests(config, self.trace, rate_per_s=rate_per_s, name=name)
        planned = replace(planned, salt=self.salt and f"{self.salt}/{name}")
        return fill_tokens(
            planned,
            config,
            vocab_size=self.vocab_size,
            avoid=self.avoid,
            rows=self.rows,
            stream=name,
        )
