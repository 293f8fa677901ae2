"""K-FAC for the linear layers and convolutions of a model. Hooks collect their inputs and output gradients."""

from __future__ import annotations

import collections
import copy
import math
import re
import warnings
import weakref
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

import libdc
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..torch.default_comm import resolve_comm
from ..torch.sharding.parameter import entry_of
from . import arrays
from .kfac_layers import Layer, Use, base_in_graph, has_own_forward, is_supported, padded_input, split_batches
from .native import NativeOptimizer

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def sampled_cross_entropy(logits: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
    """F.cross_entropy of logits [N, classes] with labels drawn from the distribution that the logits give. With the
    gradients of this mean over N, K-FAC's factors are those of the Fisher matrix."""
    labels = torch.multinomial(logits.detach().float().softmax(-1), 1, generator=generator)[:, 0]
    return F.cross_entropy(logits, labels)


def sampled_mse_loss(output: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
    """F.mse_loss of outputs [N, …] with targets drawn from the distribution whose likelihood it is: normal around
    the output, with half the number of elements of a sample as variance."""
    deviation = math.sqrt(output[0].numel() / 2)
    noise = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
    return F.mse_loss(output, output.detach() + deviation * noise)


class Choices(NamedTuple):
    """How factors are computed; see KFAC."""

    fisher: str
    approximation: str
    loss_terms: str
    reduction: str


_CHOICES = {"fisher": ("empirical", "sampled"), "approximation": ("expand", "reduce"),
            "loss_terms": ("samples", "positions"), "reduction": ("mean", "sum")}  # fmt: skip


class KFAC(NativeOptimizer):
    """K-FAC (Martens and Grosse 2015): gradients of linear layers and convolutions are multiplied by the inverse of the
    layer's damped curvature, all others are SGD's with momentum. See docs/kfac.md.

    model              the model to hook; it may be sharded (call libdc.torch.shard first)
    params             parameters or groups, as for other optimizers; None: all of the model's
    fisher             "empirical": the factors come from each backward of the loss in training mode; "sampled": from
                       the losses given to accumulate(), with labels drawn from the model's own distribution
    loss_terms         the terms of the loss: "samples", one for each index of the first dimension, or "positions", one
                       for each row of a linear layer's input (a language model's tokens)
    approximation      for layers that are used at many positions of a sample: "expand" or "reduce"
    reduction          how the loss reduces its terms: "mean" or "sum", whose steps are as many times longer as there
                       are terms; set loss_scale if it has another factor
    grad_scaler        a torch.amp.GradScaler: its scale is divided out, and batches that overflow are left out
    skip               patterns (re.search) of names and classes of modules to leave to SGD
    comm               the ranks; None: those over which the model is sharded, else one rank
    The other arguments are those of dc_kfac_options; kl_clip None: no clipping."""

    _native_class = arrays.KFAC
    _devices = ("cpu", "cuda")
    _owned_state = re.compile(r"counts$|(factor|vectors|values)_[ag]$")

    def __init__(self, model: nn.Module, params: Any = None, lr: float = 1e-3, momentum: float = 0.9,
                 weight_decay: float = 0.0, *, damping: float = 1e-3, decay: float = 0.95,
                 kl_clip: Optional[float] = 1e-3, factor_frequency: int = 1, refresh_frequency: int = 10,
                 inverse: str = "eigen", nesterov: bool = False, tolerated_failures: int = 3,
                 fisher: str = "empirical", loss_terms: str = "samples", approximation: str = "expand",
                 reduction: str = "mean", grad_scaler: Any = None, skip: Sequence[str] = (), comm: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"KFAC: model is a {type(model).__name__}, must be a torch.nn.Module; params come after it")
        self._choices = Choices(fisher, approximation, loss_terms, reduction)
        for name, value in self._choices._asdict().items():
            if value not in _CHOICES[name]:
                raise ValueError(f"KFAC: {name} = {value!r}, must be one of {', '.join(map(repr, _CHOICES[name]))}")
        patterns = _patterns(skip)
        self.loss_scale = 1.0  # a further factor of the loss: 1 / k for k micro-batches
        self._scaler = grad_scaler
        self._factors: Set[float] = set()  # of losses of accumulate() without it
        self._comm = _ranks(model, comm)
        self._has_batches = False  # whether the library got some since the last step
        self._recorded: List[Tuple[Use, Any]] = []  # "sampled": uses, with their output's gradient edge
        # "empirical": by running backward, the uses that wait for its end, with their output gradients.
        self._waiting: Dict[int, List[Tuple[Use, Tensor]]] = {}
        super().__init__(model.parameters() if params is None else params,
                         dict(lr=lr, momentum=momentum, weight_decay=weight_decay, damping=damping, decay=decay,
                              kl_clip=kl_clip, factor_frequency=factor_frequency, refresh_frequency=refresh_frequency,
                              inverse=inverse, nesterov=nesterov, tolerated_failures=tolerated_failures))
        self._hooked: List[Layer] = []
        self.layers: List[str] = []  # names of the modules that are preconditioned
        self._hook_layers(model, patterns)

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        names = ("decay", "damping", "kl_clip", "momentum", "weight_decay", "factor_frequency", "refresh_frequency",
                 "inverse", "nesterov", "tolerated_failures")
        return {name: group[name] for name in names}

    def _create_native(self, options: Dict[str, Any]) -> arrays.Optimizer:
        return arrays.KFAC(handle=self._handle(), comm=self._comm, **options)

    def __getstate__(self) -> Any:
        raise TypeError("KFAC cannot be copied or pickled: it has hooks in its model. Save its state_dict()")

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        self._recorded.clear()
        if self._has_batches:  # of a step that was abandoned: loading makes the library drop them
            assert self._native is not None
            self._native.load(self._native.save())
            self._has_batches = False

    def _is_remade(self, groups: List[Dict[str, Any]]) -> bool:
        """With a communicator that is collective, so it is done only where it must."""
        return [group["momentum"] > 0 for group in groups] != [group["momentum"] > 0 for group in self.param_groups]

    def _make_native(self, groups: List[Dict[str, Any]]) -> None:
        super()._make_native(groups)
        for layer in self._hooked:
            self._add_layer(layer)

    # ---- layers ----

    def _hook_layers(self, model: nn.Module, skip: List["re.Pattern[str]"]) -> None:
        indices = {id(part.param): i for i, part in enumerate(self._parts)}
        groups = {id(param): i for i, group in enumerate(self.param_groups) for param in group["params"]}
        owners: Dict[int, List[nn.Module]] = {}
        for module in model.modules():
            for param in module._parameters.values():
                owners.setdefault(id(param), []).append(module)
        layers: Dict[Tuple[int, int], Layer] = {}
        for name, module in model.named_modules():
            if _skipped(name, module, skip) or not is_supported(module, indices, owners):
                continue
            if has_own_forward(module):
                warnings.warn(f"KFAC: {name or 'the model'} is a {type(module).__name__} with a forward of its own, so "
                              "its parameters take SGD's step. skip= says so without a warning", stacklevel=3)
                continue
            weight, bias = module._parameters["weight"], module._parameters.get("bias")
            layer = layers.get((id(weight), id(bias)))
            if layer is None:
                layer = layers[id(weight), id(bias)] = Layer(name, module)
                layer.group, layer.part = groups[id(weight)], indices[id(weight)]
                layer.bias_part = None if bias is None else indices[id(bias)]
                self._add_layer(layer)
                self.layers.append(name)
                self._hooked.append(layer)
            # This hook runs before others, which may replace the layer's output.
            module.register_forward_hook(_Forward(self, layer), prepend=True, with_kwargs=True)

    def _add_layer(self, layer: Layer) -> None:
        assert isinstance(self._native, arrays.KFAC)
        layer.index = self._native.add_layer(layer.constants, layer.part, layer.bias_part, self._choices.approximation)

    def _needs_factors(self, layer: Layer) -> bool:
        """Whether the next step updates the layer's factors."""
        if not (layer.weight.requires_grad or (layer.bias is not None and layer.bias.requires_grad)):
            return False
        steps = [int(self.state[p]["step"]) for p in (layer.weight, layer.bias) if p is not None and p in self.state]
        frequency = max(1, int(self.param_groups[layer.group]["factor_frequency"]))  # the step refuses frequencies < 1
        return max(steps, default=0) % frequency == 0

    def _after_forward(self, layer: Layer, module: nn.Module, x: Tensor, output: Tensor) -> None:
        """Records a forward whose factors the next step needs."""
        if not (torch.is_grad_enabled() and module.training and output.requires_grad and self._needs_factors(layer)):
            return
        use, output = Use(layer, padded_input(module, x), output.shape), base_in_graph(output)
        if self._choices.fisher == "sampled":
            self._recorded.append((use, get_gradient_edge(output)))
        elif (task := _graph_task()) != -1:  # a checkpoint recomputes it, in a nested backward
            output.register_hook(lambda delta: self._on_recomputed_grad(use, delta, task))
        else:
            layer.uses.add(use)
            output.register_hook(lambda delta: self._on_output_grad(use, delta))

    def _on_recomputed_grad(self, use: Use, delta: Tensor, task: int) -> None:
        """task: the outer backward."""
        self._refuse_mixed(use.layer, task, True)
        self._add_batch(use, delta, 1)

    def _refuse_mixed(self, layer: Layer, task: int, recomputed: bool) -> None:
        """Refuses a backward that reaches uses in and outside a reentrant checkpoint, or several in them. Their number
        is not known until all such checkpoints have run."""
        if task in (layer.tasks.get(True), layer.tasks.get(not recomputed)):
            raise RuntimeError(f"KFAC: one backward comes to several uses of {layer.name}, one of which is in a "
                               "reentrant checkpoint: take use_reentrant=False")
        layer.tasks[recomputed] = task

    def _on_output_grad(self, use: Use, delta: Tensor) -> None:
        """Adds a use that a backward reaches. If the backward may reach several uses of the layer, they wait for its
        end."""
        task = _graph_task()
        self._refuse_mixed(use.layer, task, False)
        if len(use.layer.uses) == 1:
            self._add_batch(use, delta, 1)
            return
        waiting = self._waiting.get(task)
        if waiting is None:
            waiting = self._waiting[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self._add_batches(self._waiting.pop(task, [])))
        waiting.append((use, delta))

    def _add_batches(self, pairs: List[Tuple[Use, Tensor]]) -> None:
        uses = collections.Counter(use.layer.index for use, _ in pairs)
        for use, delta in pairs:
            self._add_batch(use, delta, uses[use.layer.index])

    def accumulate(self, loss: Tensor, retain_graph: bool = False) -> None:
        """With fisher="sampled": adds the gradients of `loss` to the factors, and to no parameter. `loss` uses labels
        drawn from the model's distribution. retain_graph=True: the same forward also serves the loss of the true
        labels. With a grad_scaler, pass grad_scaler.scale(loss); the scale is divided out."""
        if self._choices.fisher != "sampled":
            raise RuntimeError('KFAC.accumulate: fisher = "empirical", must be "sampled"')
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        self._factors.update(_factors_of(loss) if self._scaler is None else ())
        if scale != 1.0 and scale not in _factors_of(loss):
            raise RuntimeError("KFAC.accumulate: the optimizer has a grad_scaler, whose scale it takes out of the "
                               "loss's gradients: give it grad_scaler.scale(loss) itself")
        recorded, self._recorded = self._recorded, []
        if not recorded:
            return
        deltas = torch.autograd.grad(loss, [edge for _, edge in recorded], retain_graph=retain_graph, allow_unused=True)
        self._add_batches([(use, delta) for (use, _), delta in zip(recorded, deltas) if delta is not None])

    def _add_batch(self, use: Use, delta: Tensor, uses: int) -> None:
        """Adds a batch to the library. Several uses of a weight for one sample count as positions do: gradients are
        summed, not averaged."""
        if use.x is None:
            raise RuntimeError(f"KFAC: a backward comes again to a forward of {use.layer.name} from before the last "
                               "step")
        use.reached = True
        if use.x._version != use.version:
            raise RuntimeError(f"KFAC: the input of {use.layer.name} was changed in place after its forward")
        x, delta = split_batches(use.layer, use.x, delta.detach().reshape(use.shape), self._choices.loss_terms)
        scale = self.loss_scale * (1.0 if self._scaler is None else float(self._scaler.get_scale()))
        terms = x.shape[0] if self._choices.reduction == "mean" else 1
        assert isinstance(self._native, arrays.KFAC)
        self._use_current_stream()  # the first batch comes before the first step
        self._has_batches = True
        try:
            self._native.accumulate(use.layer.index, x, delta, math.sqrt(uses) * terms / scale if terms else 1.0)
        except libdc.Error as error:
            if self._scaler is None or error.status != libdc.Status.E_NOT_FINITE:
                raise

    def _step_native(self, grads: List[Optional[Tensor]]) -> None:
        is_scaled, scale = getattr(self, "found_inf", None) is not None, getattr(self, "grad_scale", None)
        factors, self._factors = self._factors, set()
        if is_scaled and self._scaler is None:
            # After unscale_() the scale is not known here, but no other factor belongs into a loss of accumulate().
            factors = factors - {1.0, self.loss_scale} if scale is None else factors & {float(scale)}
            if self._choices.fisher == "empirical" or factors:
                raise RuntimeError("KFAC: a GradScaler makes the step, whose scale is in the factors: give it as "
                                   "grad_scaler=")
        self._recorded.clear()  # forwards that no loss used
        self._waiting.clear()  # of backwards that failed
        for layer in self._hooked:
            for use in list(layer.uses):
                if use.reached:
                    use.x = None  # so that a loss that the caller keeps does not keep it
                    layer.uses.discard(use)
        super()._step_native(grads)
        if not is_scaled:  # else the step may have been skipped, and its batches kept
            self._has_batches = False
        for layer in self._hooked:  # a frozen weight has its layer's factors, if the bias is trained
            if self._parts[layer.part].pieces is None and layer.bias is not None and layer.bias in self.state:
                self._show_state(layer.part, self._views(layer.part))
            self._watch(layer, grads[layer.part] is not None)

    def _watch(self, layer: Layer, has_grad: bool) -> None:
        """counts: of the layer's owner."""
        state = self.state.get(layer.weight, {}) if layer.is_watched and has_grad else {}
        if "counts" in state and int(state["step"]) > 0:
            layer.is_watched = False
            if int(state["counts"][0]) == 0:
                why = "accumulate() gives them" if self._choices.fisher == "sampled" else \
                    "they come from forwards of the module itself in training mode"
                warnings.warn(f"KFAC: {layer.name} has had no batches for its factors, so its gradients are taken as "
                              f"they are: {why}. skip= leaves modules to SGD", stacklevel=2)


class _Forward:
    """A module's forward hook. It does not keep the optimizer alive."""

    def __init__(self, optimizer: KFAC, layer: Layer) -> None:
        self.optimizer: Callable[[], Optional[KFAC]] = weakref.ref(optimizer)
        self.layer = layer

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Tensor) -> None:
        optimizer = self.optimizer()
        if optimizer is not None:
            optimizer._after_forward(self.layer, module, args[0] if args else kwargs["input"], output)

    def __deepcopy__(self, memo: Dict[int, Any]) -> "_Forward":
        """The optimizer does not have a copied model, so the copy's hooks do nothing."""
        copied = copy.copy(self)
        copied.optimizer = lambda: None
        return copied


def _ranks(model: nn.Module, comm: Any) -> Optional[libdc.Comm]:
    groups = [entry.group for entry in map(entry_of, model.parameters()) if entry is not None]
    replicated = next((group for group in groups if group.options.replicas > 1), None)
    if replicated is not None:
        raise ValueError(f"KFAC: the model is sharded with mesh = ({replicated.options.replicas}, "
                         f"{replicated.comm.size}), so each replica would have curvatures of its own batches, and "
                         "weights of its own in the end: shard it without mesh, or use libdc.optim.Shampoo or SOAP")
    if comm is not None:
        return resolve_comm(comm)
    return groups[0].comm if groups else None


def _patterns(skip: Sequence[str]) -> List["re.Pattern[str]"]:
    if isinstance(skip, str):  # else each letter would be a pattern
        raise TypeError(f"KFAC: skip = {skip!r}, must be a list of patterns: [{skip!r}]")
    try:
        return [re.compile(pattern) for pattern in skip]
    except re.error as error:
        raise ValueError(f"KFAC: skip = {skip!r} has a pattern that re.compile() refuses: {error}") from None


def _skipped(name: str, module: nn.Module, skip: Iterable["re.Pattern[str]"]) -> bool:
    return any(pattern.search(name) or pattern.search(type(module).__name__) for pattern in skip)


def _factors_of(loss: Tensor) -> List[float]:
    """The constants that a loss is a product with, as GradScaler.scale() makes it; it may then have been divided."""
    factors: List[float] = []
    node: Any = loss.grad_fn
    while type(node).__name__ in ("MulBackward0", "DivBackward0"):
        inner = [function for function, _ in node.next_functions if function is not None]
        constants = [saved for saved in (node._saved_self, node._saved_other) if saved is not None]
        if len(inner) != 1 or len(constants) != 1 or constants[0].numel() != 1:
            break
        factors += [float(constants[0])] if type(node).__name__ == "MulBackward0" else []
        node = inner[0]
    return factors
