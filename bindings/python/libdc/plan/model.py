"""A model as the planner has it: layers with parameters, operations and kept activations."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .checks import known, read_json, stem, title, whole

MAX_LAYERS, MAX_TOKENS = 1 << 16, 1 << 32
_MAX_LENGTH, _MAX_DIMENSIONS, _MAX_FLOPS, _MAX_BYTES = 1 << 40, 64, 1 << 60, 1 << 50
_LAYER_KEYS = ("name", "shapes", "backward", "uses", "flops", "kept_bytes", "input_bytes", "workspace_bytes", "repeat",
               "frozen")


class Layer(NamedTuple):
    """Parameters that are gathered together. Operations and bytes are those of one sample."""

    name: str
    shapes: Tuple[Tuple[int, ...], ...]
    backward: Tuple[int, ...]  # indices of the shapes whose weights the backward reads again
    flops: int  # operations of the forward's matrix products
    kept_bytes: int  # bytes that the forward keeps for the backward
    input_bytes: int  # the part of kept_bytes that recomputation still has to keep
    workspace_bytes: int  # further bytes while the layer runs
    uses: Tuple[Tuple[int, int, bool], ...] = ()  # tied weights: index of layer and shape, if backward reads it
    frozen: Tuple[int, ...] = ()  # indices of the shapes that are not trained
    idle: Tuple[int, ...] = ()  # indices of shapes, then of uses, that are gathered but get no gradient
    recomputed: bool = False  # whether training always recomputes its forward, and keeps only input_bytes
    reentrant: bool = False  # whether a nested backward follows that, and gathers its weights once more

    @property
    def parameters(self) -> int:
        """The layer's own parameters, without tied ones."""
        return sum(numel(shape) for shape in self.shapes)


class Model(NamedTuple):
    name: str
    layers: Tuple[Layer, ...]
    tokens: int  # in a sample

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def trained_parameters(self) -> int:
        return sum(numel(shape) for layer in self.layers for i, shape in enumerate(layer.shapes)
                   if i not in layer.frozen)

    @property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers)

    def _weights(self, number: int) -> List[Tuple[Tuple[int, ...], bool]]:
        """The shapes that a layer's forward reads, with tied ones, and whether each is trained."""
        places = [*((number, i) for i in range(len(self.layers[number].shapes))),
                  *((other, i) for other, i, _ in self.layers[number].uses)]
        return [(self.layers[owner].shapes[i], i not in self.layers[owner].frozen) for owner, i in places]

    @property
    def first_trained(self) -> int:
        """The first layer with something to train, where the backward ends. A layer without weights counts too."""
        every = (self._weights(i) for i in range(len(self.layers)))
        return next((i for i, weights in enumerate(every) if not weights or any(trained for _, trained in weights)),
                    len(self.layers))

    def backward_passes(self, number: int, first: int) -> float:
        """A layer's backward operations over its forward's: 1 for the input's gradient, and the trained share of the
        weights' elements. first: first_trained."""
        weights = self._weights(number)
        weights = [pair for pair in weights if len(pair[0]) > 1] or weights  # only matrices have products
        whole = sum(numel(shape) for shape, _ in weights)
        share = sum(numel(shape) for shape, trained in weights if trained) / whole if whole else 1.0
        return 0.0 if number < first else int(number > first or share == 1) + share

    @property
    def trained_flops(self) -> float:
        """Operations of a forward and a backward."""
        first = self.first_trained
        return sum(layer.flops * (1 + self.backward_passes(i, first)) for i, layer in enumerate(self.layers))


def numel(shape: Tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _shapes(where: str, shapes: Any) -> Tuple[Tuple[int, ...], ...]:
    if not isinstance(shapes, list) or not all(isinstance(shape, list) for shape in shapes):
        raise ValueError(f"{where}: shapes = {shapes!r}, must be an array of arrays of lengths")
    for shape in shapes:
        whole(f"{where}: the number of a shape's lengths", len(shape), 0, _MAX_DIMENSIONS)
    return tuple(tuple(whole(f"{where}: a length of shapes", length, 1, _MAX_LENGTH) for length in shape)
                 for shape in shapes)


def _numbers(where: str, key: str, numbers: Any, count: int) -> Tuple[int, ...]:
    if not isinstance(numbers, list) or len({str(number) for number in numbers}) < len(numbers):
        raise ValueError(f"{where}: {key} = {numbers!r}, must be an array of numbers of shapes, each once")
    return tuple(whole(f"{where}: {key}", number, 0, count - 1) for number in numbers)


def _uses(where: str, uses: Any) -> Tuple[Tuple[int, int, bool], ...]:
    if not isinstance(uses, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in uses):
        raise ValueError(f"{where}: uses = {uses!r}, must be an array of pairs of a layer's number and its shape's")
    pairs = [(whole(f"{where}: uses", other, 0, MAX_LAYERS), whole(f"{where}: uses", shape, 0, MAX_LAYERS), True)
             for other, shape in uses]
    if len(set(pairs)) < len(pairs):
        raise ValueError(f"{where}: uses = {uses!r}, must have each pair once")
    return tuple(pairs)


def _layer(where: str, table: Any) -> List[Layer]:
    if not isinstance(table, dict):
        raise ValueError(f"{where} = {table!r}, must be an object")
    known(where, table, _LAYER_KEYS)
    shapes = _shapes(where, table.get("shapes"))
    kept = whole(f"{where}: kept_bytes", table.get("kept_bytes", 0), 0, _MAX_BYTES)
    layer = Layer(title(f"{where}: name", table.get("name", where)), shapes,
                  _numbers(where, "backward", table.get("backward", list(range(len(shapes)))), len(shapes)),
                  whole(f"{where}: flops", table.get("flops", 0), 0, _MAX_FLOPS), kept,
                  whole(f"{where}: input_bytes (a part of kept_bytes)", table.get("input_bytes", kept), 0, kept),
                  whole(f"{where}: workspace_bytes", table.get("workspace_bytes", 0), 0, _MAX_BYTES),
                  _uses(where, table.get("uses", [])), _numbers(where, "frozen", table.get("frozen", []), len(shapes)))
    repeat = whole(f"{where}: repeat", table.get("repeat", 1), 1, MAX_LAYERS)
    return [layer] if repeat == 1 else [layer._replace(name=f"{layer.name}.{i}") for i in range(repeat)]


def from_layers(table: Dict[str, Any], name: str) -> Model:
    """The planner's own format: {"tokens": …, "layers": [{"shapes": [[4, 3], [4]], "flops": …, "kept_bytes": …}]}."""
    known(name, table, ("name", "tokens", "layers"))
    if not isinstance(table["layers"], list) or not table["layers"]:
        raise ValueError(f"{name}: layers = {table['layers']!r}, must be an array of objects")
    layers = [layer for i, entry in enumerate(table["layers"]) for layer in _layer(f"{name}: layers[{i}]", entry)]
    for number, layer in enumerate(layers):
        for other, shape, _ in layer.uses:
            if other == number or other >= len(layers) or shape >= len(layers[other].shapes):
                raise ValueError(f"{name}: {layer.name}: uses = [{other}, {shape}], must be another layer's number and "
                                 f"that of one of its shapes; there are {len(layers)} layers")
    return Model(title(f"{name}: name", table.get("name", name)), tuple(layers),
                 whole(f"{name}: tokens", table.get("tokens", 1), 1, MAX_TOKENS))


def read(path: str, tokens: Optional[int], element: int) -> Model:
    """Reads a file of layers, which gives its own tokens, or Hugging Face's configuration.
    tokens: of a sample, for a configuration; None: 1024, or its positions if those are fewer
    element: bytes of an element of the weights"""
    from .hugging_face import from_config

    if tokens is not None:
        whole("tokens", tokens, 1, MAX_TOKENS)
    table, name = read_json(path), stem(path)
    if "layers" not in table:
        return from_config(table, name, tokens, element)
    if tokens is not None:
        raise ValueError(f"tokens = {tokens}, must not be given for layers: {path} has its own")
    return from_layers(table, name)
