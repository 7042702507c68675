"""What copies units to the GPU, for tests that disturb it."""

from collections.abc import Iterator

from engine.weights.residence import LayerFeed
from engine.weights.store import WeightStore


def feeds(store: WeightStore) -> list[LayerFeed]:
    """Return what copies units of each residence."""
    return [units.feed for units in store.held.values() if units.feed is not None]


def only_feed(store: WeightStore) -> LayerFeed:
    """Return what copies units where they have one residence."""
    (feed,) = feeds(store)
    return feed


def numbers(store: WeightStore, layer: int) -> Iterator[tuple[LayerFeed, int]]:
    """Yield what copies each unit of a layer, with the unit's number there."""
    for units, k in store._parts[layer]:
        if units.feed is not None:
            yield units.feed, k
