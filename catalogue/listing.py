"""What commands print of models: a table of the catalogue, and the facts of one model."""

from collections.abc import Sequence

from catalogue.entry import Model
from catalogue.models import state
from catalogue.terminal import columns
from engine.model.checkpoint import ModelFolder
from engine.model.spec import ModelSpec
from engine.sealed import GIB


def catalogue_table(models: Sequence[Model]) -> list[str]:
    """Return a line for each model of the catalogue."""
    rows = [("model", "here", "GiB on disk", "billion weights", "source")]
    for model in models:
        found, spec = state(model), model.spec
        size = size_text(found.num_bytes / GIB) if found.num_bytes else "-"
        weights = "-" if spec is None else size_text(spec.num_parameters / 1e9)
        rows.append((model.name, found.kind, size, weights, source_text(model)))
    return columns(rows, left={0, 1, 4})


def size_text(value: float, digits: int = 2) -> str:
    """Return a size with some digits after the point, or a small one with two digits in all."""
    return f"{value:.{digits}f}" if value >= 0.1 else f"{value:.2g}"


def source_text(model: Model) -> str:
    """Return where a model's weights are from: a folder, a repository or a package."""
    source = model.source
    if model.path is not None:
        return model.path
    return str(source.repo) if source.kind == "hub" else f"{source.package} {source.version}"


def model_lines(model: Model, folder: ModelFolder) -> list[str]:
    """Return what is known of a model of the catalogue, a line for each fact."""
    found = state(model)
    size = f"{size_text(found.num_bytes / GIB)} GiB"
    rows = [
        ("model", model.name),
        ("source", source_text(model)),
        ("here", f"{found.kind}, {size}" if found.num_bytes else "absent"),
        ("folder", str(found.path or "-")),
        *size_rows(folder.spec, folder.spec.weight_bytes()),
    ]
    notes = (f"  note: {note}" for note in folder.notes)
    return [*columns(rows, left={0, 1}, has_paths=True), *notes]


def size_rows(spec: ModelSpec, weights_bytes: int) -> list[tuple[str, str]]:
    """Return the sizes of a model, each with its name."""
    billion = size_text(spec.num_parameters / 1e9, 3)
    return [
        ("family", spec.model_type),
        ("weights", f"{billion} billion, {size_text(weights_bytes / GIB)} GiB"),
        ("layers", str(spec.num_hidden_layers)),
        ("longest sequence", f"{spec.max_position_embeddings:,} tokens"),
        ("KV of a token", f"{spec.kv_bytes_per_token() / 1024:.1f} KiB"),
    ]
