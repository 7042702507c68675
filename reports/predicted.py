"""What the plan predicted beside what was measured, as a section of a run's page."""

from reports import facts
from reports.page import Section, Table
from reports.record.metrics import PREDICTED
from reports.record.record import RunRecord
from reports.record.text import ABSENT, leaf, number


def predicted_section(record: RunRecord) -> Section | None:
    """Return the section; None where nothing was predicted."""
    rows = []
    for quantity, base in PREDICTED.items():
        predicted = record.metrics.get(f"predicted/{quantity}")
        if predicted is None:
            continue
        difference = record.metrics.get(f"predicted/{quantity}_difference_pct")
        measured = None if difference is None else predicted / (1 + difference / 100)
        rows.append(
            (
                base,
                number(predicted),
                ABSENT if measured is None else number(measured),
                ABSENT if difference is None else f"{difference:+.1f} %",
            )
        )
    if not rows:
        return None
    table = Table(
        columns=("", "predicted", "measured", "difference"), rows=rows, numeric=frozenset({1, 2, 3})
    )
    source = facts.dig_text(record.plan, "predicted.rates.source")
    text = () if source is None else (f"Rates: {leaf(source)}.",)
    return Section(title="Predicted and measured", text=text, tables=(table,))
