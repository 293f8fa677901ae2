#!/usr/bin/env python3
"""The header is a complete manual: every declaration, parameter, field and constant has a description. A function names
its errors, its thread class and its version; its result has an owner. Tensors and untyped memory say what happens to
their data, and const agrees. A context's functions are named after it. Each chapter names the source of its
mathematics. Planted faults show that omissions are found."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import manual

OWNER = re.compile(r"[Ss]tatic|[Ll]ives as long|the caller's|the library's|[Kk]ept|argument|buffer's|context's")
# Pointers whose types do not tell the direction of their data; `user` and `native` are passed on, not followed.
DATA = re.compile(r"(?:const )?(?:dc_tensor|dc_matrix_source|void) \*")
HANDED_ON = ("user", "native", "log_user")
# Functions of a context whose names lack "context": the original's operators and bindings, and their opposites.
ORIGINAL = """allgather_param prefetch_params_fused wait_allgather release_param reduce_grad free_tensors offload_tensor
reload_tensor wait_offload wait_reload offload_parameter reload_parameter end_backward init cleanup reset register_param
register_z3_param register_graph_z1 register_graph_z2 register_graph_z3 set_persistent enable_profiling is_profiling
invalidate_gathered_param clear_all_gathered_params start_forward end_forward start_backward take_param
register_graph_z0 unregister_graph unregister_param clear_persistent""".split()
# Expected directions in dc_api.json, one of each kind.
DIRECTIONS = {
    ("dc_comm_all_reduce", "data"): "in,out", ("dc_comm_all_gather", "recv"): "out",
    ("dc_optimizer_step", "weights"): "in,out", ("dc_optimizer_step", "grads"): "in",
    ("dc_layer_forward", "output"): "out", ("dc_register_param", "grad_buffer"): "in,out",
    ("dc_allgather_param", "token"): "none", ("dc_allgather_param", "out"): "view",
    ("dc_optimizer_save", "memory"): "out", ("dc_optimizer_load", "memory"): "in",
    ("dc_optimizer_get_state_name", "name"): "out", ("dc_device_open", "device"): "out",
    ("dc_layer_create", "device"): "in", ("dc_stream_wrap", "native"): "in", ("dc_comm_all_gather", "counts"): "in",
    ("dc_layer_call", "reserve"): "in,out", ("dc_layer_call", "mask"): "in", ("dc_layer_cost", "kept_bytes"): "out",
    ("dc_adamw_options", "beta1"): "in", ("dc_matrix_source", "fd"): "in", ("dc_tensor", "ndim"): "in,out",
}
# Texts that give a tensor's shape, or refer to another argument's, or need none.
SHAPE = re.compile(r"\[|[Ss]hape|elements|[Tt]oken|\bas (in |weights|input|dc_)|struct to fill in")


def check_function(name: str, function: Dict[str, Any], model: Dict[str, Any]) -> Iterator[str]:
    said = " ".join([function["summary"], *function["doc"], function["returns_doc"]])
    if not re.match(r"(?:[A-Z0-9\"]|dc_).*\.$", function["summary"]):
        yield f"{name}: its comment does not begin with a sentence"
    for param in function["params"]:
        if not param["doc"]:
            yield f"{name}: parameter {param['name']} is not described"
        elif ("dc_tensor" in param["type"] and param["direction"] != "none"
              and not SHAPE.search(manual.TAG.sub("", param["doc"]))):
            yield f"{name}: parameter {param['name']} has no shape"
    yield from check_directions(name, "parameter ", function["params"])
    first = function["params"][0]["type"] if function["params"] else ""
    if first.endswith("dc_context *") and not name.startswith("dc_context_") and name[3:] not in ORIGINAL:
        yield f"{name}: a function of a context is dc_context_…"
    if "_get_" in name and function["returns"] != "dc_status" and name != "dc_get_optimal_device":
        yield f"{name}: a getter that returns its value has no get in its name"
    if not function["threads"]:
        yield f"{name}: no thread class, [any] or [handle]"
    if re.search(r"(?<!Not )\bCollective( in the sense|[.:,])", said) and not function["collective"]:
        yield f"{name}: is said to be collective, and has no [..., collective]"
    if not function["since"]:
        yield f"{name}: no 'Since'"
    if function["returns"] == "dc_status" and "DC_OK" not in function["errors"] and not re.search(
            r"^(Also|Errors as|Otherwise as)", function["returns_doc"]) and not errors_of_chapter(model, function):
        yield f"{name}: does not say what it returns"
    if function["returns"] == "dc_status" and len(set(function["errors"]) - {"DC_OK"}) == 0:
        yield f"{name}: names no error"
    for code in function["errors"]:
        if code not in {member["name"] for member in model["enums"]["dc_status_code"]["members"]}:
            yield f"{name}: names {code}, which is no status"
    for other in re.findall(r"\b(dc_\w+)\b", said):
        if not is_known(other, model):
            yield f"{name}: names {other}, which is not there"
    if function["returns"].endswith("*") and not OWNER.search(said):
        yield f"{name}: does not say whose its result is"


def check_directions(name: str, what: str, items: List[Dict[str, Any]]) -> Iterator[str]:
    for item in items:
        tag, kind = manual.tag(item["doc"]), item["type"]
        if not DATA.fullmatch(kind) or item["name"] in HANDED_ON:
            if tag and kind.rstrip("*").strip() != "char":
                yield f"{name}: {what}{item['name']} has a tag, and its type tells the direction"
        elif not tag and kind != "const void *":
            yield f"{name}: {what}{item['name']} has none of [in], [out], [in,out], [view], [none]"
        elif tag and kind.startswith("const ") != (tag in ("in", "none")):
            yield f"{name}: {what}{item['name']} is [{tag}], and its type is {kind}"


def check_table(model: Dict[str, Any]) -> Iterator[str]:
    for (owner, name), expected in DIRECTIONS.items():
        items = (model["functions"][owner]["params"] if owner in model["functions"]
                 else model["structs"][owner]["fields"])
        found = [item["direction"] for item in items if item["name"] == name]
        if found != [expected]:
            yield f"{owner}: the direction of {name} is {found}, must be {expected}"


def errors_of_chapter(model: Dict[str, Any], function: Dict[str, Any]) -> bool:
    return any(chapter["number"] == function["chapter"] and "Errors that all share" in " ".join(chapter["intro"])
               for chapter in model["chapters"])


def is_known(name: str, model: Dict[str, Any]) -> bool:
    return name in ("dc_x_init", "dc_x", "dc_api") or any(name in model[kind] for kind in (
        "functions", "structs", "enums", "callbacks", "opaque", "aliases"))


def check_model(model: Dict[str, Any]) -> List[str]:
    found: List[str] = []
    for name, function in model["functions"].items():
        found += check_function(name, function, model)
    for kind in ("structs", "enums", "callbacks", "opaque", "aliases", "macros"):
        found += [f"{name}: has no comment" for name, item in model[kind].items()
                  if not item["doc"] and name not in ("DC_API", "DC_API_H")]
    for name, struct in model["structs"].items():
        found += check_directions(name, "field ", [field for field in struct["fields"] if "(" not in field["type"]])
        found += [f"{name}.{field['name']}: not described" for field in struct["fields"] if not field["doc"]]
    for name, enum in model["enums"].items():
        found += [f"{member['name']}: not described" for member in enum["members"] if not member["doc"]]
    for chapter in model["chapters"]:
        inside = [" ".join(chapter["intro"])] + [
            " ".join([function["summary"], *function["doc"]]) for function in model["functions"].values()
            if function["chapter"] == chapter["number"]]
        if not re.search(r"Source: |Computes nothing", " ".join(inside)):
            found.append(f"chapter {chapter['number']}, {chapter['title']}: no 'Source: ' and no 'Computes nothing'")
    found += check_layout(model)
    found += check_table(model)
    header = manual.HEADER.read_text(encoding="utf-8")
    if len("".join(re.findall(r"/\*.*?\*/", header, re.S))) < len(header) / 2:
        found.append("less than half of the header is comment")
    empty = [kind for kind in ("functions", "structs", "enums", "chapters", "arguments") if not model[kind]]
    return found + [f"no {kind} found in the header" for kind in empty]


def check_layout(model: Dict[str, Any]) -> Iterator[str]:
    """Checks that the manual's offsets are those that were locked, as the compiler gave them, for each release."""
    locks = sorted((manual.ROOT / "tests" / "abi").glob("layout_*.c"))
    for lock in locks:
        offsets = re.findall(r"offsetof\((\w+), (\w+)\) == (\d+)", lock.read_text(encoding="utf-8"))
        if not offsets:
            yield f"{lock.name} has no offsets"
        for name, field, offset in offsets:
            at = [item["offset"] for item in model["structs"][name]["fields"] if item["name"] == field]
            if at != [int(offset)]:
                yield f"{name}.{field}: the manual puts it at {at}, {lock.name} at {offset}"
    if not locks:
        yield "there is no tests/abi/layout_*.c"


# (pattern, replacement, beginning of the expected fault): the omissions.
PLANTED: List[Tuple[str, str, str]] = [
    (r" \*  update  1 if.*?\n.*?\n", "", "dc_start_backward: parameter update is not described"),
    (r"12 tensors, shapes as in enum dc_layer_weight, of the layer's dtype\n", "12 tensors of the layer's dtype\n",
     "dc_layer_forward: parameter weights has no shape"),
    (r"not on this machine: the text says what is missing\), DC_E_INVALID", "x), DC_E_WRONG",
     "dc_device_open: names DC_E_WRONG, which is no status"),
    (r"Returns DC_OK; DC_E_STATE \(a forward has begun and not ended\)\. ", "", "dc_start_forward: "),
    (r"(?<=Begins a forward pass\.)(.*?)\[handle\] ", r"\1", "dc_start_forward: no thread class"),
    (r"\[any, collective\](?= Since 0\.1\. \*/\nDC_API dc_status dc_comm_create_processes)", "[any]",
     "dc_comm_create_processes: is said to be collective"),
    (r"(?<=Begins a forward pass\.)(.*?) Since 0\.1\.", r"\1", "dc_start_forward: no "),
    (r"Static, never NULL\. (?=\[any\] Since 0\.1\. \*/\nDC_API const char \*dc_op_name)", "",
     "dc_op_name: does not say"),
    (r"/\*\*< bucket reductions started \*/", "", "dc_memory_stats.flushes: not described"),
    (r"data    \[in,out\] contiguous", "data    contiguous", "dc_comm_all_reduce: parameter data has none of [in]"),
    (r"data    \[in,out\] contiguous", "data    [in] contiguous", "dc_comm_all_reduce: parameter data is [in], and"),
    (r"recv    \[out\] contiguous, sum", "recv    [in,out] contiguous, sum",
     "dc_comm_all_gather: the direction of recv"),
    (r"/\*\*< \[in\] added to", "/**< added to", "dc_layer_call: field mask has none of [in]"),
    (r"dc_context_dry_run\(dc_context", "dc_dry_run(dc_context", "dc_dry_run: a function of a context"),
    (r"int32_t dc_comm_rank\(", "int32_t dc_comm_get_rank(", "dc_comm_get_rank: a getter that returns its value"),
    (r"/\*\*< four bytes \*/", "", "DC_INT32: not described"),
    (r"/\*\* How reductions combine ranks\. \*/\n", "", "dc_reduce_op: has no comment"),
    (r"\n \* Source: the stages are those of ZeRO[^\n]*\n?", " */\n", "chapter 8, Graphs: no "),
    (r"Begins a forward pass\.", "begins a forward pass", "dc_start_forward: its comment does not begin"),
    (r"Errors as dc_register_graph_z0\. (?=\[handle, collective\] Since 0\.1\. \*/\n"
     r"DC_API dc_status dc_register_graph_z2)",
     "Errors as dc_register_graph. ", "dc_register_graph_z2: names dc_register_graph, which"),
]


def undetected_faults() -> List[str]:
    """Planted faults that are not found."""
    text = manual.HEADER.read_text(encoding="utf-8")
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (pattern, instead, expected) in enumerate(PLANTED):
            changed, count = re.subn(pattern, instead, text, count=1, flags=re.S)
            path = Path(folder) / f"{number}.h"
            path.write_text(changed, encoding="utf-8")
            if count != 1:
                missed.append(f"planted fault {number} ({expected}): the header has no such place")
            elif not any(fault.startswith(expected) for fault in check_model(manual.read(path))):
                missed.append(f"planted fault {number} is not found: {expected}")
    return missed


def main() -> int:
    model = manual.read()
    found = check_model(model) + undetected_faults()
    print("\n".join(found) or f"{len(model['functions'])} functions, {len(model['structs'])} structs and "
          f"{len(model['enums'])} enums say what they must; {len(PLANTED)} planted faults are found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
