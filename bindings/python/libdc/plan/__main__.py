"""The command: python -m libdc.plan MODEL, or libdc plan MODEL of the installed package."""

from __future__ import annotations

import argparse
import json
import sys
from typing import List, Optional

from . import Options, advise, as_json, as_text, load, names, read, run, search, timeline
from .checks import real, run_command
from .page import write as write_page
from .report import cost, settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="libdc plan", description="Plans a step of training: memory and bytes of a "
                                     "rank are exact, times are a model.")
    add = parser.add_argument
    add("model", help="a JSON of layers, or Hugging Face's config.json")
    add("--machine", default="h100", help=f"a file, or one of {', '.join(names())}")
    add("--ranks", type=int, default=8)
    add("--stage", type=int, default=3, choices=range(4))
    add("--tokens", type=int, help="of a sample, for a config.json: 1024, or its positions, if not given")
    add("--micro-batch", type=int, default=1, help="samples; with --search the most to try")
    add("--accumulate", type=int, default=1, help="micro-batches of a step")
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    add("--bucket", type=int, default=1 << 24, help="elements of a gradient bucket")
    add("--prefetch", type=int, default=1, help="layers to gather ahead")
    add("--recompute", action="store_true", help="keep the layers' inputs alone")
    add("--replicas", type=int, default=1, help="groups of ranks that have all parameters each: hybrid sharding")
    add("--offload", action="store_true", help="keep activations in host memory")
    add("--no-heap", action="store_true", help="ranks cannot read each other's memory, as over TCP")
    add("--price", type=float, default=0.0, help="of a rank and hour")
    add("--search", action="store_true",
        help="the five best of stage, replicas, recomputation, offload, bucket, prefetch")
    add("--timeline", action="store_true", help="memory at each point of the step")
    add("--html", metavar="FILE", help="writes a page with the memory, the step and the scaling, to zoom into")
    add("--json", action="store_true")
    return parser


def _print_search(arguments: argparse.Namespace, base: Options) -> int:
    machine = load(arguments.machine)
    found = search(read(arguments.model, arguments.tokens, base.element), machine, base)
    if arguments.json:
        print(json.dumps([{**as_json(each.plan, arguments.price), "why": each.why, "change": advise(each.plan)}
                          for each in found], indent=2))
    for number, each in enumerate([] if arguments.json else found, 1):
        price = f", {cost(each.plan, arguments.price):.4f} a million tokens" if arguments.price > 0 else ""
        print(f"{number}. {settings(each.plan)}: {each.plan.step_ns / 1e6:.2f} ms a step, "
              f"{each.plan.tokens * 1e9 / max(1, each.plan.step_ns):.0f} tokens a second{price}\n"
              f"   {each.why}")
    if not found:
        print("libdc plan: no setting fits", file=sys.stderr)
    elif not arguments.json:
        print(f"To change first: {advise(found[0].plan)}.")
    return 0 if found else 1


def _chosen(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuses options of a single plan with --search, which chooses them itself."""
    for name in ("stage", "prefetch", "recompute", "replicas", "offload", "html", "timeline"):
        value = getattr(arguments, name)
        if arguments.search and value != parser.get_default(name):
            raise ValueError(f"{name} = {value} is of one plan: without --search")


def _command(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    _chosen(arguments, parser)
    real("price", arguments.price, 0.0, 1e12)
    base = Options(arguments.ranks, arguments.stage, arguments.micro_batch, arguments.accumulate, arguments.dtype,
                   arguments.bucket, arguments.prefetch, arguments.recompute, not arguments.no_heap,
                   arguments.replicas, arguments.offload)
    if arguments.search:
        return _print_search(arguments, base)
    plan = run(read(arguments.model, arguments.tokens, base.element), load(arguments.machine), base,
               traced=arguments.html is not None)
    if arguments.html is not None:
        write_page(plan, arguments.html, arguments.price)
    if arguments.json:
        print(json.dumps(as_json(plan, arguments.price), indent=2))
    else:
        sys.stdout.write(as_text(plan, arguments.price))
        sys.stdout.write("\n" + timeline(plan) if arguments.timeline else "")
    return 0 if plan.fits else 1


def main(argv: Optional[List[str]] = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    return run_command("libdc plan", lambda: _command(arguments, parser))


if __name__ == "__main__":
    sys.exit(main())
