"""From Dynamo's graph of a call to the joint graph of one microbatch.

The joint graph is traced anew at the microbatch's sizes with fake tensors only, so nothing is
computed and no state is touched. Dynamo's graph has symbols for the batch dims (see `backend.py`),
which take the microbatch's sizes here.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Node, map_arg

from piper_dynamo import _torch_compat as compat
from piper_dynamo.branches import refuse_other_sides
from piper_dynamo.errors import PiperCaptureError, format_error
from piper_dynamo.garbage import young_collector
from piper_dynamo.ir.alias import called, drop_aliases, operator_name, root
from piper_dynamo.ir.joint import OUTPUT_COPY, Arg, ArgKind, Capture, Output, Unjoined
from piper_dynamo.ir.spec import TensorSpec, shown_line
from piper_dynamo.naming import Names, is_module_state
from piper_dynamo.precision import Rule, insert_casts, refuse_mixed


def read_args(gm: fx.GraphModule, examples: Sequence[Any]) -> tuple[Arg, ...]:
    """What each placeholder of Dynamo's graph is, from its source."""
    args: list[Arg] = []
    names = Names()
    for position, (node, example) in enumerate(zip(_placeholders(gm.graph), examples, strict=True)):
        grapharg = node.meta.get("grapharg")
        source = grapharg.source if grapharg is not None else None
        if isinstance(example, torch.Tensor) and compat.is_python_float(node):
            raise PiperCaptureError(
                format_error(
                    "a float argument changes from call to call",
                    {"argument": names.of(source, node.name)},
                    hint="pass it as a 0-dim tensor, since numbers are part of the program; an "
                    "attribute of another model of the class: make its step by piper.compile",
                )
            )
        if isinstance(example, torch.Tensor):
            args.append(
                Arg(
                    kind=kind_of(example, source),
                    name=names.of(source, node.name, compat.example_of(node)),
                    position=position,
                    spec=TensorSpec.of(example),
                    requires_grad=example.requires_grad,
                )
            )
        elif isinstance(example, int | float | bool | torch.SymInt | torch.SymFloat):
            args.append(
                Arg(
                    kind=ArgKind.NUMBER,
                    name=names.of(source, node.name),
                    position=position,
                    size_of=_size_of(source, names),
                )
            )
        else:
            raise PiperCaptureError(
                format_error(
                    f"argument of an unsupported type: {type(example).__name__}",
                    {"argument": names.of(source, node.name)},
                    hint="pass tensors, numbers, strings or None (in lists, tuples and dicts)",
                )
            )
    return tuple(args)


def trace(  # noqa: PLR0913
    gm: fx.GraphModule,
    args: tuple[Arg, ...],
    numbers: dict[int, Any],
    batch_dims: dict[int, int],
    num_microbatches: int,
    *,
    loss: int | None,
    training: bool,
    paths: Mapping[int, str] | None = None,
    rules: Sequence[Rule] = (),
) -> Capture:
    """The graph of one microbatch.

    Args:
        gm: Dynamo's graph.
        args: Its arguments with the sizes of the whole batch.
        numbers: Value of each number argument that is not a tensor's size, by position.
        batch_dims: The dim along which each data argument is split, by position; others are
            replicated.
        num_microbatches: Into how many slices.
        loss: Which of the graph's tensor outputs is the loss; None chooses the only
            differentiable scalar.
        training: The joint graph, else the forward graph under no_grad.
        paths: The user's path of each output, for messages, where it is known.
        rules: What is computed in another dtype than it is held in.

    Raises:
        PiperCaptureError: The graph cannot run at the microbatch's size, changes its inputs, or
            has several possible losses.
    """
    _refuse_other_memory(gm, args)
    if num_microbatches > 1:
        refuse_other_sides(gm, batch_dims, num_microbatches)
    mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)
    computed: dict[int, torch.dtype] = {}
    has_casts = any(rule.param for rule in rules)
    if has_casts:
        whole = fake_args(mode, args, numbers, {}, 1)
        gm, computed = insert_casts(gm, args, rules, whole, mode)
    seen = tuple(_as_computed(arg, computed.get(arg.position)) for arg in args)
    fakes = fake_args(mode, seen, numbers, batch_dims, num_microbatches)
    full = fake_args(mode, seen, numbers, {}, 1)
    results = _fake_run(gm, fakes, mode, seen, is_sliced=num_microbatches > 1)
    at_full = results if num_microbatches == 1 else _fake_run(gm, full, mode, seen)
    loss = _choose_loss(results, at_full, loss, paths, training=training)
    kept = {loss} if loss is not None else _differentiable(results)
    if training and (not kept or (loss is None and any(map(_is_loss, results)))):
        raise PiperCaptureError(no_loss_message(at_full, paths))
    prepared = _detach_outputs(gm, kept)
    with young_collector():
        graph = (compat.trace_joint if training else compat.trace_forward)(prepared, fakes, mode)
    _refuse_graphs(graph)
    _refuse_sparse(graph)
    if has_casts:
        refuse_mixed(graph)
    _burn_numbers(graph, args, fakes)
    _drop_output_copies(graph)
    drop_aliases(graph)
    capture = _read_ends(graph, args, results, at_full, loss, mode)
    return replace(capture, computed=computed)


def _refuse_other_memory(gm: fx.GraphModule, args: Sequence[Arg]) -> None:
    """`x.data = ...` gives an argument other memory, of which AOTAutograd makes no graph.

    Raises:
        PiperCaptureError: Forward does so; names it and the line.
    """
    at = {node: arg for node, arg in zip(_placeholders(gm.graph), args, strict=True)}
    for node in gm.graph.nodes:
        arg = at.get(node.args[0]) if called(node) == "set_" and node.args else None
        if arg is None:
            continue
        title = changed_in_place(arg.kind, arg.name)
        hint = instead_of_change(arg.kind)
        if arg.kind is ArgKind.BUFFER:
            title = f"forward gives its buffer {arg.name!r} other memory"
            hint = "change it in place: self.name.copy_(...)"
        raise PiperCaptureError(format_error(title, {"at": shown_line(node)}, hint=hint))


def _refuse_graphs(graph: fx.Graph) -> None:
    """Operators on graphs (torch.cond, flex attention) cannot be cut into regions.

    Raises:
        PiperCaptureError: There is one; names it and its line.
    """
    for node in graph.nodes:
        bodies = [i for i in node.all_input_nodes if isinstance(i.meta.get("constant"), nn.Module)]
        if bodies:
            raise PiperCaptureError(
                format_error(
                    f"{operator_name(node)} calls graphs of its own, which a strategy cannot place",
                    {"at": shown_line(node)},
                    hint="write it with ordinary operators: torch.where between values, or "
                    "scaled_dot_product_attention with attn_mask=; without a strategy it works",
                )
            )


def _refuse_sparse(graph: fx.Graph) -> None:
    """Gradients have their parameters' memory: sums, messages and shards are dense."""
    for node in graph.nodes:
        if node.op == "call_function" and "sparse_coo_tensor" in compat.target_name(node.target):
            raise PiperCaptureError(
                format_error(
                    "the model makes a sparse gradient",
                    {"at": shown_line(node), "node": node.format_node()},
                    hint="use nn.Embedding(..., sparse=False); the same numbers, as a dense tensor",
                )
            )


def _as_computed(arg: Arg, dtype: torch.dtype | None) -> Arg:
    """An argument as the graph takes it."""
    if dtype is None or arg.spec is None:
        return arg
    return replace(arg, spec=replace(arg.spec, dtype=dtype))


def no_loss_message(results: Sequence[Any], paths: Mapping[int, str] | None = None) -> str:
    """Why no output can be the loss; outputs by the user's path if known, else by number."""
    names = {i: (paths or {}).get(i, str(i)) for i in range(len(results))}
    tensors = {i: r for i, r in enumerate(results) if isinstance(r, torch.Tensor)}
    scalars = ", ".join(names[i] for i, r in tensors.items() if _is_loss(r))
    shapes = ", ".join(f"{names[i]}: {tuple(t.shape)}" for i, t in tensors.items()) or "none"
    title = (
        "no output of the model can be the loss"
        if not scalars
        else "several outputs could be the loss"
    )
    return format_error(
        title,
        {"tensor outputs": shapes, "differentiable scalars": scalars or "none"},
        hint=(
            "return a scalar loss from forward (forwards and backwards can only be put in an order "
            "if the loss is made inside the step), or name it: "
            "piper.Strategy(..., loss=<key, path or index>) with piper.prepare or piper.compile"
        ),
    )


def _placeholders(graph: fx.Graph) -> list[Node]:
    return list(graph.find_nodes(op="placeholder"))


def kind_of(example: torch.Tensor, source: Any) -> ArgKind:
    """What a tensor argument of a graph is."""
    if isinstance(example, nn.Parameter):
        return ArgKind.PARAMETER
    return ArgKind.BUFFER if is_module_state(source) else ArgKind.DATA


def _size_of(source: Any, names: Names) -> tuple[str, int] | None:
    if type(source).__name__ != "TensorPropertySource" or "SIZE" not in str(source.prop):
        return None
    return names.of(source.base, ""), int(source.idx)


def fake_args(
    mode: compat.FakeTensorMode,
    args: tuple[Arg, ...],
    numbers: dict[int, Any],
    batch_dims: dict[int, int],
    num_microbatches: int,
) -> list[Any]:
    """Fresh fake tensors, data at the microbatch's sizes and contiguous like its slices."""
    fakes: dict[int, Any] = {}
    shapes: dict[str, Sequence[int]] = {}
    for arg in args:
        if arg.spec is None:
            continue
        spec = arg.spec
        if arg.kind is ArgKind.DATA:
            spec = spec.contiguous()
            if arg.position in batch_dims:
                spec = spec.divided(batch_dims[arg.position], num_microbatches)
        with mode:
            fake = torch.empty_strided(
                spec.shape, spec.stride, dtype=spec.dtype, device=spec.device
            )
        fakes[arg.position] = fake.requires_grad_(arg.requires_grad)
        shapes[arg.name] = spec.shape
    for arg in args:
        if arg.spec is None:
            if arg.size_of is not None and arg.size_of[0] in shapes:
                fakes[arg.position] = shapes[arg.size_of[0]][arg.size_of[1]]
            elif arg.size_of is not None and num_microbatches > 1:
                raise PiperCaptureError(
                    format_error(
                        f"the size of argument {arg.size_of[0]!r} is used, but not its values",
                        {"dim": arg.size_of[1], "why": "it is not known whether it is sliced"},
                        hint="take the size from an argument whose values the model uses",
                    )
                )
            else:
                fakes[arg.position] = numbers[arg.position]
    return [fakes[arg.position] for arg in args]


class _Locate(fx.Interpreter):
    """Runs the graph and remembers the node it is at, for the error message."""

    node: Node | None = None

    def run_node(self, n: Node) -> Any:
        self.node = n
        return super().run_node(n)


_BAKED = (
    "a batch size is baked into the graph: take sizes from the inputs (x.shape[0], -1), "
    'or keep the argument whole with piper.Split(..., inputs={name: "replicate"})'
)
_REGISTER = (
    "an operator of your own needs a fake implementation (torch.library.register_fake) of the "
    "shapes that it gives"
)


def _fake_run(
    gm: fx.GraphModule,
    fakes: list[Any],
    mode: compat.FakeTensorMode,
    args: tuple[Arg, ...],
    *,
    is_sliced: bool = False,
) -> list[Any]:
    """The graph's outputs on fake arguments, gradients on, so that the differentiable ones show.

    Raises:
        PiperCaptureError: An operator fails; names it, its line, and what is likely if only the
            sizes of a microbatch are new (`is_sliced`).
    """
    with mode:
        copies = [
            f.clone().detach().requires_grad_(f.requires_grad) if isinstance(f, torch.Tensor) else f
            for f in fakes
        ]
    runner = _Locate(gm)
    try:
        with mode, torch.enable_grad():
            results = runner.run(*copies)
    except Exception as error:
        node = runner.node
        sizes = {
            arg.name: tuple(fake.shape)
            for arg, fake in zip(args, fakes, strict=True)
            if arg.kind is ArgKind.DATA
        }
        cause = error.__cause__ or error
        title = (
            "the model cannot run on one microbatch"
            if is_sliced
            else "the model cannot run on tensors without values"
        )
        details = {
            "at": shown_line(node),
            "node": node.format_node() if node is not None else "none yet",
            "inputs": sizes,
            "why": str(cause).splitlines()[0] if str(cause) else type(cause).__name__,
        }
        hint = _BAKED if is_sliced else _REGISTER
        raise PiperCaptureError(format_error(title, details, hint=hint)) from error
    return list(results) if isinstance(results, tuple | list) else [results]


def _is_loss(value: Any) -> bool:
    return _is_scalar(value) and bool(value.requires_grad)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _choose_loss(
    results: Sequence[Any],
    at_full: Sequence[Any],
    loss: int | None,
    paths: Mapping[int, str] | None,
    *,
    training: bool,
) -> int | None:
    if loss is not None:
        if not 0 <= loss < len(results) or not isinstance(results[loss], torch.Tensor):
            raise PiperCaptureError(no_loss_message(at_full, paths))
        if results[loss].dim() != 0:
            name = (paths or {}).get(loss, str(loss))
            raise PiperCaptureError(
                format_error(
                    f"the output {name!r}, named as the loss, is not a scalar",
                    {"shape": tuple(at_full[loss].shape)},
                    hint="reduce it in forward, e.g. with .mean()",
                )
            )
        return loss
    candidates = [i for i, r in enumerate(results) if _is_loss(r)]
    if not candidates and not training:  # nothing asks for a gradient: any single scalar will do
        candidates = [i for i, r in enumerate(results) if _is_scalar(r)]
    return candidates[0] if len(candidates) == 1 else None


def _differentiable(results: Sequence[Any]) -> set[int]:
    return {i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and r.requires_grad}


def _detach_outputs(gm: fx.GraphModule, kept: AbstractSet[int]) -> fx.GraphModule:
    """A copy whose outputs, other than the kept ones, are cut from the backward.

    AOTAutograd would give a view of an input back to its own runtime to rebuild; a copy keeps it in
    the graph. `_drop_output_copies` takes away the copies that turn out not to be needed.
    """
    graph = fx.Graph()
    values: dict[Node, Node] = {}
    outputs = graph.graph_copy(gm.graph, values)
    assert isinstance(outputs, tuple | list)
    new = []
    for index, out in enumerate(outputs):
        if not isinstance(out, Node) or not isinstance(out.meta.get("example_value"), torch.Tensor):
            new.append(out)
            continue
        node = out
        if index not in kept:
            node = graph.call_method("detach", (node,))
            node.meta = _copied_meta(out)
        node = graph.call_method("clone", (node,))
        node.meta = _copied_meta(out)
        node.meta["custom"] = {**node.meta.get("custom", {}), OUTPUT_COPY: index}
        new.append(node)
    graph.output(tuple(new))
    return fx.GraphModule(gm, graph)


def _copied_meta(node: Node) -> dict[str, Any]:
    keep = ("custom", "stack_trace", "nn_module_stack", "example_value")
    return {key: node.meta[key] for key in keep if key in node.meta}


def _burn_numbers(graph: fx.Graph, args: tuple[Arg, ...], values: Sequence[Any]) -> None:
    """Put this program's numbers in place of their placeholders; programs are keyed by them."""
    for arg, node in zip(args, _placeholders(graph), strict=False):
        if arg.kind is not ArgKind.NUMBER:
            continue
        value = values[arg.position]

        def swap(other: Node, node: Node = node, value: Any = value) -> Any:
            return value if other is node else other

        for user in list(node.users):
            user.args = map_arg(user.args, swap)
            user.kwargs = map_arg(user.kwargs, swap)


def _drop_output_copies(graph: fx.Graph) -> None:
    """Take away copies of values that the graph made itself."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.clone.default:
            continue
        if OUTPUT_COPY not in (node.meta.get("custom") or {}):
            continue
        source = node.args[0]
        if isinstance(source, Node) and source.target is torch.ops.aten.detach.default:
            source = source.args[0]
        if isinstance(source, Node) and root(source).op != "placeholder":
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _read_ends(
    graph: fx.Graph,
    args: tuple[Arg, ...],
    results: Sequence[Any],
    at_full: Sequence[Any],
    loss: int | None,
    mode: compat.FakeTensorMode,
) -> Capture:
    """The graph without its output node, and by name what was in it."""
    output = graph.find_nodes(op="output")[0]
    ends: list[tuple[Any, Any]] = list(zip(output.args[0], output.meta["desc"], strict=True))
    placeholders = _placeholders(graph)
    primals = [p for p in placeholders if not str(p.target).startswith("tangents")]
    tangents = [p for p in placeholders if str(p.target).startswith("tangents")]
    assert len(primals) == len(args), (len(primals), len(args))
    buffers = _new_buffers(ends, args, tangents)
    tangent_of = {t.meta["desc"].output.idx: t.name for t in tangents}
    outputs = _outputs(ends, results, at_full, {*tangent_of, loss})
    grads = _gradients(ends)
    graph.erase_node(output)
    graph.output(())
    return Capture(
        graph=graph,
        args=args,
        placeholders={arg.position: p.name for arg, p in zip(args, primals, strict=True)},
        tangents=tangent_of,
        loss=loss,
        outputs=outputs,
        buffers=buffers,
        grads=grads,
        mode=mode,
    )


def _new_buffers(
    ends: Sequence[tuple[Any, Any]], args: tuple[Arg, ...], tangents: Sequence[Node]
) -> dict[int, str]:
    """The node of each changed argument's new value, by its position.

    Raises:
        PiperCaptureError: It is no buffer, or a later backward goes through the value.
    """
    with_gradient = {_changed_input(t.meta["desc"].output) for t in tangents}
    buffers: dict[int, str] = {}
    for node, desc in ends:
        if (position := _changed_input(desc)) is not None:
            _refuse_change(args[position], node, has_gradient=position in with_gradient)
            buffers[position] = node.name
    return buffers


def _outputs(
    ends: Sequence[tuple[Any, Any]],
    results: Sequence[Any],
    at_full: Sequence[Any],
    needed: AbstractSet[int | None],
) -> tuple[Output, ...]:
    """Each output of the forward: of the graph, or a value that is known from the run."""
    nodes = {d.idx: n for n, d in ends if type(d).__name__ == "PlainAOTOutput"}
    outputs: list[Output] = []
    for index, result in enumerate(results):
        node, value = nodes.get(index), at_full[index]
        held = node.meta["val"] if isinstance(node, Node) else None
        if isinstance(node, Node) and isinstance(held, torch.Tensor):
            spec = TensorSpec.of(held)
            outputs.append(_tensor_output(node.name, spec, value, is_needed=index in needed))
        else:
            assert index in nodes or not isinstance(result, torch.Tensor), (index, nodes)
            outputs.append(Output(node=None, value=value))
    return tuple(outputs)


def _gradients(ends: Sequence[tuple[Any, Any]]) -> dict[int, str]:
    """The node of each argument's gradient, by its position; none where nothing depends on it."""
    found: dict[int, str] = {}
    for node, desc in ends:
        kind = type(desc).__name__
        if kind == "GradAOTOutput" and isinstance(node, Node):
            found[int(desc.grad_of.idx)] = node.name
        elif desc is not None and kind not in _KNOWN_ENDS:
            raise PiperCaptureError(
                format_error(
                    "the captured graph has an output of an unknown kind",
                    {"output": str(desc), "torch": torch.__version__},
                    hint="use a torch that Piper is tested with (setup.py names them)",
                )
            )
    return found


_KNOWN_ENDS = ("PlainAOTOutput", "GradAOTOutput", "InputMutationAOTOutput")


def _refuse_change(arg: Arg, node: Any, *, has_gradient: bool) -> None:
    """Only buffers may change, to values that no later backward goes through.

    Raises:
        PiperCaptureError: Another argument changes, or to a value with a gradient.
    """
    at = {"at": shown_line(node)}
    if arg.kind is not ArgKind.BUFFER:
        title = changed_in_place(arg.kind, arg.name)
        raise PiperCaptureError(format_error(title, at, hint=instead_of_change(arg.kind)))
    if has_gradient:
        raise PiperCaptureError(
            format_error(
                f"the model changes its buffer {arg.name!r} to a value with a gradient",
                at,
                hint="change it by values without one: .detach(), or under torch.no_grad()",
            )
        )


def changed_in_place(kind: ArgKind, name: str) -> str:
    """That the model changes an argument which is no buffer."""
    what = "parameter" if kind is ArgKind.PARAMETER else "input"
    return f"the model changes its {what} {name!r} in place"


def instead_of_change(kind: ArgKind) -> str:
    """What to do about it."""
    if kind is ArgKind.PARAMETER:
        return (
            "only buffers may change in forward: change it after optimizer.step(), or, if no "
            "optimizer steps it, register it by register_buffer"
        )
    return "work on a copy (x = x.clone()); only buffers may change in forward"


def _changed_input(desc: Any) -> int | None:
    """The argument whose new value an output of the captured graph is; None if it is another."""
    if type(desc).__name__ != "InputMutationAOTOutput":
        return None
    return int(desc.mutated_input.idx)


def _tensor_output(name: str, spec: TensorSpec, at_full: Any, *, is_needed: bool) -> Output:
    """An output, and the dim in which one microbatch's is smaller than the whole batch's.

    One that grows in several dims, such as the similarities of all pairs, cannot be joined: it is
    not computed, and who touches it is told.

    Raises:
        PiperCaptureError: It cannot be joined, but its gradient starts the backward.
    """
    dims = [d for d, (a, b) in enumerate(zip(spec.shape, at_full.shape, strict=True)) if a != b]
    if len(dims) <= 1:
        return Output(node=name, spec=spec, batch_dim=dims[0] if dims else None)
    if not is_needed:
        return Output(node=None, value=Unjoined(spec=TensorSpec.of(at_full), part=spec))
    raise PiperCaptureError(
        format_error(
            "an output of the model grows with the batch in several dims",
            {"shape": tuple(at_full.shape), "of one microbatch": spec.shape},
            hint="microbatches cannot be joined to it: leave it out, or use one microbatch",
        )
    )
