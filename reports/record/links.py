"""Addresses of MLflow's pages."""

from typing import Final
from urllib.parse import quote, urlencode

LOCAL: Final = "http://127.0.0.1:5000"
"""Where `tightfit ui` serves them."""
SWEEPS: Final = "harness.sweep_ids"
"""Tag of a point: the sweeps that it is of, those that took it over too."""


def runs_search(tag: str, value: str) -> str:
    """Return what MLflow searches to find runs with a value in a tag."""
    return f"tags.`{tag}` LIKE '%{value}%'"


def experiment_page(
    base: str, experiment_id: str | None, search: str = "", *, is_chart: bool = False
) -> str:
    """Return the address of an experiment's runs in the UI, all or those of a search.

    MLflow opens on its pages for traces unless the address says otherwise.

    Args:
        base: the server's address.
        experiment_id: None: the page of all experiments.
        search: which runs; empty: all.
        is_chart: whether the page shows charts first.
    """
    query = {"workflowType": "machine_learning"}
    if is_chart:
        query["compareRunsMode"] = "CHART"
    if search:
        query["searchFilter"] = search
    if is_chart:
        # Sorted by time, points are folded into their sweep, and its charts lack them.
        query |= {"orderByKey": "tags.`mlflow.runName`", "orderByAsc": "true"}
    place = "experiments" if experiment_id is None else f"experiments/{experiment_id}/runs"
    return f"{base.rstrip('/')}/#/{place}?{urlencode(query, quote_via=quote)}"
