"""The kinds of faults that users of such systems report most, and the tests of each.

`docs/faults.md` is written from this table and from the tests' own docstrings. A *case* is one of
those reports; its tests name it first in their docstring. The other tests of a kind have other
inputs: another model, layout or dtype.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
CASE = re.compile(r"(R\d\d), ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault, in the order of how often it is reported.

    Attributes:
        name: What goes wrong.
        cases: The reports that are tried.
        others: Tests with other inputs, as `file::test`; files of this folder by their name alone.
        deferred: What it would need is not built, so that it is refused.
    """

    name: str
    cases: tuple[str, ...]
    others: tuple[str, ...]
    deferred: bool = False


KINDS: tuple[Kind, ...] = (
    Kind(
        name="hang or deadlock: order of messages, groups, a rank that is missing",
        cases=("R08", "R09", "R12", "R13", "R14"),
        others=(
            "test_hangs.py::test_messages_past_a_stage_come_in_order",
            "test_hangs.py::test_both_directions_at_once_finish",
            "tests/test_verify.py::test_verify_finds_exactly_the_deadlocks",
        ),
    ),
    Kind(
        name="gradient or loss scaled wrongly",
        cases=("R01", "R03", "R05", "R06", "R35"),
        others=(
            "test_scale.py::test_calls_add_up_over_replicas_with_tied_weights",
            "test_scale.py::test_a_weight_of_a_microbatch_in_float32",
            "tests/test_zero.py::test_weights_are_summed_over_replicas",
        ),
    ),
    Kind(
        name="experts: gradients over the wrong group, experts without tokens",
        cases=("R15", "R16", "R18", "R19"),
        others=(
            "test_experts.py::test_idle_experts_under_a_pipeline",
            "test_experts.py::test_expert_gradients_in_float32",
            "tests/test_experts.py::test_uneven_and_empty_blocks_of_experts",
        ),
    ),
    Kind(
        name="stage interface: None, numbers, several outputs, tensors without a gradient",
        cases=("R10", "R22", "R24"),
        others=(
            "test_interface.py::test_nested_inputs_and_small_dtypes_cross",
            "tests/test_parity.py::test_structures",
            "tests/test_step.py::test_loss_by_path_and_outputs_on_their_owners",
        ),
    ),
    Kind(
        name="ZeRO with pipelines: when to gather and to reduce, the last backward",
        cases=("R30", "R31", "R32", "R33"),
        others=(
            "test_replicas.py::test_uneven_parameters_under_a_v",
            "test_replicas.py::test_tied_weights_are_reduced_once",
            "tests/test_zero.py::test_pipelines",
        ),
    ),
    Kind(
        name="checkpoints: save, resume, reshard, names",
        cases=("R37", "R38", "R40"),
        others=(
            "test_checkpoints.py::test_a_v_in_bfloat16_goes_on_in_one_process",
            "tests/test_checkpoint.py::test_a_chain_of_layouts_with_experts",
        ),
    ),
    Kind(
        name="tied or shared parameters",
        cases=("R43", "R45"),
        others=(
            "test_tied.py::test_two_tied_weights_on_four_stages",
            "test_tied.py::test_tied_weights_in_float32_over_replicas",
        ),
    ),
    Kind(
        name="global gradient norm",
        cases=("R47", "R48"),
        others=(
            "test_norms.py::test_norms_of_shards_of_which_some_are_empty",
            "test_norms.py::test_other_norms_in_float32",
        ),
    ),
    Kind(
        name="mixed dtypes, autocast, dtype of sums",
        cases=("R49", "R50"),
        others=(
            "test_dtypes.py::test_a_master_over_replicas_equals_the_casts_by_hand",
            "test_dtypes.py::test_parameters_of_two_dtypes_keep_theirs",
        ),
    ),
    Kind(
        name="frozen parameters and adapters",
        cases=("R52", "R53"),
        others=(
            "test_frozen.py::test_a_frozen_embedding_of_a_tied_model",
            "test_frozen.py::test_a_frozen_stage_of_replicas_in_float32",
        ),
    ),
    Kind(
        name="lengths that change",
        cases=("R54",),
        others=(
            "test_shapes.py::test_batches_of_experts_may_change_their_size",
            "test_shapes.py::test_sizes_change_under_a_v_in_float32",
        ),
    ),
    Kind(
        name="randomness: masks under recomputation, initial values, runs that repeat",
        cases=("R56", "R57", "R58"),
        others=(
            "test_random.py::test_masks_do_not_depend_on_the_schedule",
            "test_random.py::test_masks_of_float32_replicas_differ_by_their_rows",
        ),
    ),
    Kind(
        name="split backward",
        cases=("R59",),
        others=(
            "test_steps.py::test_a_weight_used_twice_under_a_split_backward",
            "test_steps.py::test_layer_norms_split_their_backward_in_float32",
        ),
    ),
    Kind(
        name="loss on the last stage only",
        cases=("R21", "R62"),
        others=(
            "tests/test_step.py::test_every_rank_gets_the_loss",
            "tests/test_step.py::test_a_rank_without_parameters_takes_part",
            "tests/test_moe_layer.py::"
            "test_the_balancing_loss_is_the_mean_over_microbatches_and_replicas",
        ),
    ),
    Kind(
        name="buffers that forward changes, running statistics",
        cases=("R63", "R64"),
        others=(
            "test_buffers.py::test_a_moving_average_by_assignment",
            "test_buffers.py::test_buffers_of_replicas_of_one_stage",
        ),
    ),
    Kind(
        name="skip connections between stages that are not neighbours",
        cases=("R66",),
        others=(
            "test_skips.py::test_a_u_in_float32",
            "test_skips.py::test_skips_between_replicas",
        ),
    ),
    Kind(
        name="evaluation with the same compiled model",
        cases=("R67",),
        others=(
            "test_steps.py::test_evaluation_of_experts_before_training",
            "test_steps.py::test_evaluation_of_shards_sees_the_last_update_in_float32",
        ),
    ),
    Kind(
        name="memory held longer than needed",
        cases=("R68",),
        others=(
            "test_memory.py::test_gathered_weights_are_let_go",
            "test_memory.py::test_the_predicted_peak_does_not_grow_with_microbatches",
        ),
    ),
    Kind(
        name="schedules and placements that are not checked",
        cases=("R13", "R69"),
        others=(
            "test_orders.py::test_a_placement_that_a_schedule_does_not_take",
            "test_orders.py::test_an_order_of_branches_that_waits_for_itself",
        ),
    ),
    Kind(
        name="tensor parallelism: replicated parameters that are not reduced",
        cases=("R72",),
        others=("test_tensor_sharding.py::test_weights_that_are_no_experts_are_not_split",),
        deferred=True,
    ),
    Kind(
        name="activation checkpoints and other graphs inside of the captured one",
        cases=("R73",),
        others=(
            "test_checkpointed.py::test_checkpoints_of_replicas_in_float32",
            "tests/test_precision.py::test_checkpointed_layers",
            "tests/test_experts_checkpointing.py::*",
        ),
    ),
    Kind(
        name="complex tensors",
        cases=("R29",),
        others=(
            "test_interface.py::test_complex_parameters_are_reduced",
            "test_interface.py::test_complex_activations_cross_a_v",
        ),
    ),
    Kind(
        name="graph breaks, recompilation, ranks that diverge",
        cases=("R74",),
        others=(
            "test_compile.py::test_replicas_with_unlike_batches_raise_together",
            "test_compile.py::test_ranks_whose_experts_differ_raise_together",
        ),
    ),
    Kind(
        name="values that are not finite on one rank",
        cases=("R77",),
        others=(
            "test_nonfinite.py::test_a_bad_row_of_an_expert_is_told_on_all_ranks",
            "test_nonfinite.py::test_a_v_in_float32_raises_on_both_ranks",
        ),
    ),
    Kind(
        name="optimizer groups and schedules",
        cases=("R78",),
        others=(
            "test_optimizers.py::test_groups_by_shape_in_float32",
            "test_optimizers.py::test_one_optimizer_per_stage_equals_one_for_all",
        ),
    ),
    Kind(
        name="the real error is hidden behind others",
        cases=("R14",),
        others=(
            "tests/test_gloo.py::test_launch_tells_the_first_failure_in_time",
            "tests/test_gloo.py::test_a_wait_has_a_deadline_and_says_for_what",
        ),
    ),
    Kind(
        name="uneven sharding",
        cases=("R36",),
        others=(
            "test_replicas.py::test_uneven_parameters_under_a_v",
            "tests/test_zero.py::test_shards_of_unlike_size",
        ),
    ),
    Kind(
        name="masks and offsets split along the batch",
        cases=("R28",),
        others=(
            "test_interface.py::test_what_is_kept_whole_is_whole_on_every_replica",
            "tests/test_inputs.py::test_an_input_is_sliced_along_the_dim_it_is_given",
        ),
    ),
    Kind(
        name="custom autograd.Function",
        cases=(),
        others=(
            "test_checkpointed.py::test_custom_functions_keep_their_backward",
            "test_checkpointed.py::test_custom_functions_of_several_values",
        ),
    ),
    Kind(
        name="hooks, sparse gradients",
        cases=(),
        others=(
            "test_optimizers.py::test_hooks_of_parameters_run_once_a_step",
            "test_optimizers.py::test_hooks_of_modules_see_what_they_would",
            "test_optimizers.py::test_sparse_gradients_are_refused",
        ),
    ),
)

# Cases that need tensor sharding, which is put off: they are refused by name.
DEFERRED = ("R72",)
PARTLY_DEFERRED = ("R16", "R36", "R48")


def tests_of(path: Path) -> Iterator[tuple[str, str]]:
    """Names and first lines of the tests of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, (ast.get_docstring(node) or "").partition("\n")[0]


def case_tests() -> dict[str, list[tuple[str, str, str]]]:
    """By case: file, test, and what the test's docstring says of it."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        for name, told in tests_of(path):
            match = CASE.match(told)
            if match is not None:
                found.setdefault(match.group(1), []).append((path.name, name, told[match.end() :]))
    return dict(sorted(found.items()))


def full(test: str) -> tuple[Path, str]:
    """The file and the name of a test of the table."""
    file, _, name = test.partition("::")
    return (ROOT / file if file.startswith("tests/") else FOLDER / file), name


def text() -> str:
    """The tables of docs/faults.md."""
    lines = ["| | kind | cases | tests with other inputs |", "| --- | --- | --- | --- |"]
    for number, kind in enumerate(KINDS, start=1):
        cases = ", ".join(kind.cases) or "-"
        others = "<br>".join(f"`{one.removeprefix('tests/')}`" for one in kind.others)
        name = f"{kind.name} (refused: not built)" if kind.deferred else kind.name
        lines.append(f"| {number} | {name} | {cases} | {others} |")
    lines += ["", "| case | what is tried | test |", "| --- | --- | --- |"]
    for case, found in case_tests().items():
        for file, name, told in found:
            lines.append(f"| {case} | {told.rstrip('.')} | `{file}::{name}` |")
    return "\n".join(lines) + "\n"
