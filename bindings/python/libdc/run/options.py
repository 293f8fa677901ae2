"""The launcher's command line."""

from __future__ import annotations

import argparse
import math
import re
import secrets
from typing import List, NoReturn, Optional, Sequence

from .._secret import environment_tls, run_secret
from ..launch import read_ports
from .ssh import choose_meeting, read_secret_line

MAX_RANKS = 1024  # over all machines


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        example = f"For example, two ranks of train.py: {self.prog} -n 2 train.py; all choices: {self.prog} --help"
        self.exit(2, f"{self.format_usage()}{self.prog}: {message}\n{example}\n")


def _make_parser() -> Parser:
    parser = Parser(prog="python -m libdc.run",
                     description="Runs a script on N ranks of this machine, or of each of several.")
    parser.add_argument("-n", "--ranks", metavar="N", default="1", help="number of processes (default 1)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("--hosts", metavar="A,B,...", help="machines, each of which ssh reaches without a password; "
                        "starts a launcher with N ranks on each, in this folder and with this Python")
    parser.add_argument("--secret-stdin", action="store_true", help="for programs that start launchers, as --hosts "
                        "does: the first line of standard input is the secret, others are numbers of signals for the "
                        "ranks, and its end ends the ranks")
    parser.add_argument("--nodes", default="1", help="machines, each with a launcher and N ranks (default 1)")
    parser.add_argument("--node-rank", default="0", help="which of them this is, from 0")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="for several machines: machine 0, and a free port of "
                        "its with a free one behind it")
    parser.add_argument("--master-port", default="0", help="MASTER_PORT of the ranks (default: a free one)")
    parser.add_argument("--secret-file", metavar="FILE", help="for several machines: a file of mode 0600 with the "
                        "run's secret, the same on all; the first launcher that finds none makes it and removes it at "
                        "the end, which serves machines with a common folder (default: LIBDC_SECRET or _FILE)")
    parser.add_argument("--interface", metavar="NAME|CIDR", help="where the ranks listen, for instance eth1 or "
                        "10.1.0.0/16 (default: LIBDC_INTERFACE, or all)")
    parser.add_argument("--ports", metavar="FIRST-LAST", help="ports of all listeners but the rendezvous "
                        "(default: LIBDC_PORTS, or any)")
    parser.add_argument("--tls", action="store_true", help="encrypt what goes between machines: TLS 1.3 by OpenSSL 3; "
                        "on all launchers or on none (default: LIBDC_TLS=1)")
    parser.add_argument("--grace", default="10", help="seconds from SIGTERM to SIGKILL (default 10)")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a Python program, which every rank runs, and its "
                        "arguments")
    return parser


def read_options(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """The checked options. A wrong value ends the process."""
    parser = _make_parser()
    options = parser.parse_args(argv)
    command = options.script[options.script[:1] == ["--"]:]
    if not command:
        parser.error("the following arguments are required: script")
    options.script, options.args = command[0], command[1:]  # argparse would drop the script's own first "--"
    options.hosts = _read_hosts(parser, options)
    _read_numbers(parser, options)
    _read_meeting(parser, options)
    options.control = 0 if options.secret_stdin else None  # signals come from standard input
    options.made_secret = False
    try:
        options.tls = options.tls or environment_tls()
    except RuntimeError as error:
        parser.error(str(error))
    try:
        if options.secret_stdin:
            options.secret = read_secret_line()
        elif options.hosts:
            options.secret = secrets.token_hex(32)
        elif options.nodes > 1:
            options.secret, options.made_secret = run_secret(options.secret_file)
    except (OSError, ValueError) as error:
        parser.error(f"--secret-file: {error}")
    return options


def _read_hosts(parser: Parser, options: argparse.Namespace) -> List[str]:
    if options.hosts is None:
        return []
    hosts = str(options.hosts).split(",")
    if not all(re.fullmatch(r"[^\s-][^\s]*", host) for host in hosts):
        parser.error(f"--hosts {options.hosts}: must be names with commas between, none of which begins with -")
    given = [name for name, value in (("--nodes", options.nodes != "1"), ("--node-rank", options.node_rank != "0"),
                                      ("--secret-file", options.secret_file), ("--master-port",
                                                                               options.master_port != "0")) if value]
    if given:
        parser.error(f"{given[0]}: goes not with --hosts, which says the machines and makes a secret for each run")
    options.nodes = str(len(hosts))
    return hosts


def _read_numbers(parser: Parser, options: argparse.Namespace) -> None:
    def number(name: str, text: str, minimum: int, maximum: int, why: str = "") -> int:
        if not re.fullmatch("-?[0-9]{1,18}", text) or not minimum <= int(text) <= maximum:
            parser.error(f"{name} {text}: must be in {minimum}..{maximum}{why}")
        return int(text)

    options.ranks = number("-n", options.ranks, 1, 64)
    options.nodes = number("machines of --hosts:" if options.hosts else "--nodes", options.nodes, 1,
                           MAX_RANKS // options.ranks, f", since there may be {MAX_RANKS} ranks")
    options.node_rank = number("--node-rank", options.node_rank, 0, options.nodes - 1)
    options.master_port = number("--master-port", options.master_port, 0, 65535)
    try:
        grace = float(options.grace)
    except ValueError:
        grace = math.nan
    if not 0 <= grace <= 1e9:  # refuses NaN, too
        parser.error(f"--grace {options.grace}: must be a number of seconds in 0..1e9")
    options.grace = grace
    if options.ports is not None:
        try:
            read_ports(f"--ports {options.ports}", options.ports)
        except ValueError as error:
            parser.error(str(error))


def _read_meeting(parser: Parser, options: argparse.Namespace) -> None:
    if options.rendezvous is None and len(options.hosts) > 1:
        options.rendezvous = choose_meeting(options.hosts)
    if (options.rendezvous is None) != (options.nodes == 1):
        parser.error("--rendezvous: several machines need it, one does not take it")
    if options.rendezvous is not None:
        host, _, port = options.rendezvous.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) < 65535:
            parser.error(f"--rendezvous {options.rendezvous}: must be HOST:PORT, with a port of 1 to 65534")
        options.rendezvous = host.strip("[]"), int(port)
