"""A model as the planner sees it: layers with parameters, work and kept activations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from ..arguments import check_size


class Layer(NamedTuple):
    """Parameters that are gathered together. Numbers are of one sample."""

    name: str
    shapes: Tuple[Tuple[int, ...], ...]
    backward: Tuple[int, ...]  # numbers of the shapes whose weights the backward reads again
    flops: int  # of the matrix products of a forward
    kept_bytes: int  # by the forward for the backward
    input_bytes: int  # of kept_bytes, what recomputation has to keep
    workspace_bytes: int  # beside that, while the layer runs
    uses: Tuple[Tuple[int, int, bool], ...] = ()  # tied weights: a layer's number, its shape's, if backward reads it

    @property
    def parameters(self) -> int:
        """Its own."""
        return sum(numel(shape) for shape in self.shapes)


class Model(NamedTuple):
    name: str
    layers: Tuple[Layer, ...]
    tokens: int  # of a sample

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers)


def numel(shape: Tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _number(where: str, table: Mapping[str, Any], key: str, default: Any = None) -> int:
    if key not in table and default is not None:
        return int(default)
    if key not in table:
        raise ValueError(f"{where} has no {key!r}")
    return check_size(f"{where}: {key}", table[key])


def _layer(where: str, table: Any) -> List[Layer]:
    if not isinstance(table, dict):
        raise ValueError(f"{where} = {table!r}, must be an object")
    shapes = table.get("shapes")
    if not isinstance(shapes, list) or not all(isinstance(shape, list) for shape in shapes):
        raise ValueError(f"{where}: shapes = {shapes!r}, must be an array of arrays of lengths")
    checked = tuple(tuple(check_size(f"{where}: a length of shapes", length) for length in shape) for shape in shapes)
    kept = _number(where, table, "kept_bytes", 0)
    backward = table.get("backward", list(range(len(checked))))
    if not isinstance(backward, list) or not set(backward) <= set(range(len(checked))):
        raise ValueError(f"{where}: backward = {backward!r}, must be an array of numbers of shapes")
    layer = Layer(str(table.get("name", where)), checked, tuple(backward), _number(where, table, "flops", 0), kept,
                  min(kept, _number(where, table, "input_bytes", kept)), _number(where, table, "workspace_bytes", 0))
    uses = table.get("uses", [])
    if not isinstance(uses, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in uses):
        raise ValueError(f"{where}: uses = {uses!r}, must be an array of pairs of a layer's number and its shape's")
    layer = layer._replace(uses=tuple((check_size(f"{where}: uses", other), check_size(f"{where}: uses", shape), True)
                                      for other, shape in uses))
    repeat = _number(where, table, "repeat", 1)
    return [layer] if repeat == 1 else [layer._replace(name=f"{layer.name}.{i}") for i in range(repeat)]


def from_layers(table: Mapping[str, Any], name: str) -> Model:
    """The planner's own format: {"tokens": …, "layers": [{"shapes": [[4, 3], [4]], "flops": …, "kept_bytes": …}]}."""
    if not isinstance(table["layers"], list) or not table["layers"]:
        raise ValueError(f"{name}: layers = {table['layers']!r}, must be an array of objects")
    layers = [layer for i, entry in enumerate(table["layers"]) for layer in _layer(f"{name}: layers[{i}]", entry)]
    for layer in layers:
        for other, shape, _ in layer.uses:
            if other >= len(layers) or shape >= len(layers[other].shapes):
                raise ValueError(f"{name}: {layer.name}: uses = [{other}, {shape}], must be a layer's number and that "
                                 f"of one of its shapes; there are {len(layers)} layers")
    return Model(str(table.get("name", name)), tuple(layers), max(1, _number(name, table, "tokens", 1)))


def read(path: str, tokens: int, element: int) -> Model:
    """A file of layers, or a configuration of Hugging Face. tokens: of a sample, for a configuration; element: bytes of
    an element of the weights."""
    from .hugging_face import from_config

    table: Dict[str, Any] = read_json(path)
    name = Path(path).stem
    return from_layers(table, name) if "layers" in table else from_config(table, name, tokens, element)


def read_json(path: str) -> Dict[str, Any]:
    """An object from a file, with the file's name in each error."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path} holds no JSON object")
    return table
