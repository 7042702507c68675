"""Pictures that are drawn once, and what is in them."""

import functools
import io

import numpy as np
from PIL import Image

from reports.figures.run import FIGURES
from reports.figures.theme import THEMES
from tests.reports.examples import ok_record

LIGHT = THEMES["light"]


@functools.cache
def drawn(name, theme="light"):
    """Return the figure of the usual record, drawn once."""
    return FIGURES[name](ok_record(), THEMES[theme])


@functools.cache
def pixels(drawing):
    """Return the pixels of a figure, rows x columns x 3; of a figure rendered once."""
    with Image.open(io.BytesIO(drawing.png())) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def rgb(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def share_near(drawing, colour):
    """Return the share of pixels within 12 of a colour in each channel."""
    return float((np.abs(pixels(drawing) - rgb(colour)).max(axis=2) <= 12).mean())
