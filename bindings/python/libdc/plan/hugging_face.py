"""Models from Hugging Face's config.json: the families llama, gpt2 and bert.

Parameters are those of the family's model with its head. Activations are an estimate: those that PyTorch keeps if
attention forms no matrix of all pairs of tokens. Other kernels keep more or less."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from .checks import whole
from .model import MAX_LAYERS, Layer, Model

Shapes = Tuple[Tuple[int, ...], ...]


class _Config:
    """Reads integers of a configuration, by the first of several names that is present; null counts as absent."""

    def __init__(self, name: str, table: Mapping[str, Any]) -> None:
        self.name, self.table = name, table

    def __call__(self, *keys: str, default: int = 0, most: int = 1 << 32) -> int:
        for key in keys:
            if self.table.get(key) is not None:
                return whole(f"{self.name}: {key}", self.table[key], 1, most)
        if default:
            return default
        raise ValueError(f"{self.name} has no {keys[0]!r}")

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.table.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{self.name}: {key} = {value!r}, must be true or false")
        return default if value is None else value

    def positions(self, tokens: int, *keys: str) -> int:
        """The number of learned position embeddings. Longer samples are refused."""
        count = self(*keys)
        if tokens > count:
            raise ValueError(f"tokens = {tokens}, must be at most {count}, the positions of {self.name}")
        return count

    def layers(self, *keys: str) -> int:
        return self(*keys, most=MAX_LAYERS)


def _block(name: str, shapes: Shapes, tokens: int, element: int, wide: int, attention: int, norms: int) -> Layer:
    """A layer that multiplies each token by all its matrices. wide: elements kept for a token; attention: total length
    of the heads; norms: how many of the last shapes are norms'. The backward reads no linear layer's bias."""
    hidden = shapes[0][-1]
    matrices = sum(rows * columns for rows, columns in (shape for shape in shapes if len(shape) == 2))
    flops = 2 * tokens * matrices + 4 * tokens * tokens * attention
    kept = tokens * wide * element
    read = tuple(i for i, shape in enumerate(shapes) if len(shape) == 2 or i >= len(shapes) - norms)
    return Layer(name, shapes, read, flops, kept, tokens * hidden * element, tokens * max(hidden, wide // 4) * element)


def _ends(tokens: int, element: int, hidden: int, vocabulary: int, embeddings: Shapes, head: Shapes,
          tied: bool = True) -> Tuple[Layer, Layer]:
    """The embeddings, and the head with its loss, whose logits are kept in float32. tied: the head multiplies by the
    embeddings; otherwise it has its own matrix."""
    logits = tokens * vocabulary
    first = Layer("embeddings", embeddings, (), 0, tokens * 8, tokens * 8, tokens * hidden * element)
    last = Layer("head", head, tuple(range(len(head))), 2 * logits * hidden, logits * (element + 4),
                 logits * (element + 4), logits * 4, ((0, 0, True),) if tied else ())
    return first, last


def _llama(c: _Config, tokens: int, element: int) -> List[Layer]:
    hidden, wide, vocabulary = c("hidden_size"), c("intermediate_size"), c("vocab_size")
    heads = c("num_attention_heads")
    keys = c("num_key_value_heads", default=heads)
    if c.table.get("head_dim") is None and hidden % heads:
        raise ValueError(f"{c.name}: num_attention_heads = {heads}, must divide hidden_size = {hidden}")
    if heads % keys:
        raise ValueError(f"{c.name}: num_key_value_heads = {keys}, must divide num_attention_heads = {heads}")
    size = c("head_dim", default=hidden // heads)
    biases: Shapes = ((heads * size,), (keys * size,), (keys * size,), (hidden,)) if c.flag("attention_bias") else ()
    biases += ((wide,), (wide,), (hidden,)) if c.flag("mlp_bias") else ()
    shapes = ((heads * size, hidden), (keys * size, hidden), (keys * size, hidden), (hidden, heads * size),
              (wide, hidden), (wide, hidden), (hidden, wide), *biases, (hidden,), (hidden,))
    # Two norms' inputs and outputs; queries, keys and values; attention's result; gate, up, their product.
    kept = 4 * hidden + 2 * (heads + keys) * size + 4 * wide
    tied = c.flag("tie_word_embeddings")
    first, last = _ends(tokens, element, hidden, vocabulary, ((vocabulary, hidden),),
                        ((hidden,),) if tied else ((hidden,), (vocabulary, hidden)), tied)
    blocks = [_block(f"layers.{i}", shapes, tokens, element, kept, heads * size, 2)
              for i in range(c.layers("num_hidden_layers"))]
    return [first, *blocks, last]


def _dense_block(hidden: int, wide: int) -> Shapes:
    return ((3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,), (wide, hidden), (wide,), (hidden, wide),
            (hidden,), (hidden,), (hidden,), (hidden,), (hidden,))


def _gpt2(c: _Config, tokens: int, element: int) -> List[Layer]:
    hidden, vocabulary = c("n_embd", "hidden_size"), c("vocab_size")
    wide = c("n_inner", "intermediate_size", default=4 * hidden)
    if c.flag("add_cross_attention"):
        raise ValueError(f"{c.name}: add_cross_attention = True, must be false")
    tied = c.flag("tie_word_embeddings", True)
    first, last = _ends(tokens, element, hidden, vocabulary,
                        ((vocabulary, hidden), (c.positions(tokens, "n_positions", "max_position_embeddings"), hidden)),
                        ((hidden,), (hidden,)) if tied else ((hidden,), (hidden,), (vocabulary, hidden)), tied)
    blocks = [_block(f"h.{i}", _dense_block(hidden, wide), tokens, element, 10 * hidden + 3 * wide, hidden,
                     4) for i in range(c.layers("n_layer", "num_hidden_layers"))]
    return [first, *blocks, last]


def _bert(c: _Config, tokens: int, element: int) -> List[Layer]:
    hidden, wide, vocabulary = c("hidden_size"), c("intermediate_size"), c("vocab_size")
    if c.flag("add_cross_attention"):
        raise ValueError(f"{c.name}: add_cross_attention = True, must be false")
    tied = c.flag("tie_word_embeddings", True)
    head = ((hidden, hidden), (hidden,), (hidden,), (hidden,), (vocabulary,))
    first, last = _ends(tokens, element, hidden, vocabulary,
                        ((vocabulary, hidden), (c.positions(tokens, "max_position_embeddings"), hidden),
                         (c("type_vocab_size", default=2), hidden), (hidden,), (hidden,)),
                        head if tied else (*head, (vocabulary, hidden)), tied)
    blocks = [_block(f"encoder.layer.{i}", _dense_block(hidden, wide), tokens, element, 10 * hidden + 3 * wide, hidden,
                     4) for i in range(c.layers("num_hidden_layers"))]
    return [first, *blocks, last]


_FAMILIES: Dict[str, Callable[[_Config, int, int], List[Layer]]] = {"llama": _llama, "mistral": _llama, "gpt2": _gpt2,
                                                                    "bert": _bert}


def from_config(table: Mapping[str, Any], name: str, tokens: Optional[int], element: int) -> Model:
    """A model from Hugging Face's configuration. tokens of a sample; None: 1024, or the model's positions if those are
    fewer."""
    family = table.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ValueError(f"{name}: model_type = {family!r}, must be one of {', '.join(_FAMILIES)}; others can be given "
                         f"as layers")
    config = _Config(name, table)
    if tokens is None:
        tokens = min(1024, config("n_positions", "max_position_embeddings", default=1024))
    return Model(name, tuple(_FAMILIES[family](config, tokens, element)), tokens)
