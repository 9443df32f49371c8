"""A record as a table for people, with the terms that it holds under."""

import math
from typing import Any

from rich.table import Table

from kog_triton.backends.resources import Resources
from kog_triton.bench.bandwidth import TARGET_READ
from kog_triton.bench.machine import gpu_row
from kog_triton.bench.spans import read
from kog_triton.bench.startup import PHASES
from kog_triton.cli.console import Output, plain_table
from kog_triton.profiling.show import span_table

CLOCKS = {  # of a stage alone
    "kernel": "us: on the GPU, around a launch of the stage alone, its start and end with it",
    "call": "us: around run_stage, which lays out and reads back the stage's tensors besides",
}


def show(record: dict[str, Any]) -> None:
    """Print it on stdout."""
    console = Output()
    model, test = record["model"], record["test"]
    where = record["machine"]["gpu"] or record["machine"]["cpu"]
    title = f"{model['name']} ({model['family']}, {model['dtype']}), {test['name']}, on {where}"
    kinds = {"startup": startup_table, "stages": stage_table, "concurrency": concurrency_table}
    table = kinds.get(record["kind"], speed_table)(record)
    table.title = title
    console.write_table(table)
    gpu = gpu_row()
    for row in record["rows"]:
        if "profile" in row:
            title = f"{row['name']}: where a token goes"
            console.write_table(span_table(read(row["profile"]), gpu, title))
    for line in notes(record):
        console.write_line(line)


def speed_table(record: dict[str, Any]) -> Table:
    """A row an engine; an engine that was not timed says why below the table."""
    decoding = record["test"]["tokens"] > 1
    names = ["", "dtype", "top-1", "KL mean", "text"]
    if decoding:
        names += ["tokens/s", "device t/s", "p50 us", "p99 us", "p99/p50", "roofline us", "MBU"]
    names += ["TTFT ms"] if decoding else ["tokens/s", "roofline ms", "TTFT ms"]
    table = plain_table(names)
    for row in record["rows"]:
        if row["status"] == "absent":
            continue
        check, host, roofline = row["check"], row["host"], row["floor"] or {}
        cells = [row["name"], row["dtype"] or "-"]
        cells += [_n(check and check["top1"], ".3f"), _n(check and check["kl_mean"], ".1e")]
        cells.append("-" if not check else "right" if check["passed"] else "WRONG")
        if decoding:
            cells += [
                _n(host and host["tokens_per_s"], ",.1f"),
                _device_rate(row),
                _n(host and host["itl_p50_us"], ",.1f"),
                _n(host and host["itl_p99_us"], ",.1f"),
                f"{_n((host or {}).get('p99_over_p50'), '.3f')} / "
                f"{_n((row['device'] or {}).get('p99_over_p50'), '.3f')}",
                _n(roofline.get("measured_us"), ",.1f"),
                _n(roofline.get("measured_mbu"), ".1%"),
            ]
        else:
            cells.append(_n(row["prompt_tokens_per_s"], ",.1f"))
            pass_us = roofline.get("measured_us")
            cells.append(_n(pass_us and pass_us / 1e3, ",.2f"))
        cells.append(_n(row["ttft_us"] and row["ttft_us"] / 1e3, ",.2f"))
        table.add_row(*cells)
    return table


def _device_rate(row: dict[str, Any]) -> str:
    """tokens/s by the backend's own stamps; "none" of one that was timed and gives none."""
    if row["device"]:
        return f"{row['device']['tokens_per_s']:,.1f}"
    return "none" if row["host"] else "-"


def concurrency_table(record: dict[str, Any]) -> Table:
    """A row a backend and number of requests at a time; tokens/s are those of all of them."""
    names = ["", "requests", "text", "as alone", "tokens/s", "device t/s", "over one", "p50 us"]
    table = plain_table([*names, "p99 us", "roofline us", "MBU", "TTFT ms"])
    for row in record["rows"]:
        if not row["host"]:
            continue
        roofline = row["floor"]
        table.add_row(
            row["name"],
            str(row["requests"]),
            "right" if row["check"]["passed"] else "WRONG",
            "yes" if row["repeatable"] else "NO",
            _n(row["host"]["tokens_per_s"], ",.1f"),
            _device_rate(row),
            _n(row["over_one"], ".2f"),
            _n(row["host"]["itl_p50_us"], ",.1f"),
            _n(row["host"]["itl_p99_us"], ",.1f"),
            _n(roofline["measured_us"], ",.1f"),
            _n(roofline["measured_mbu"], ".1%"),
            _n(row["ttft_us"] / 1e3, ",.2f"),
        )
    return table


def stage_table(record: dict[str, Any]) -> Table:
    """A row a stage and backend; below them what a token's runs add up to."""
    table = plain_table(["", "stage", "runs", "error", "us", "roofline us", "ratio", "MB", "us/token"])
    for row in record["rows"]:
        stages = row.get("stages") or []
        for s in stages:
            table.add_row(
                row["name"],
                s["stage"],
                str(s["runs"]),
                f"{s['error']:.1e}",
                f"{s['us']:,.2f}",
                _n(s["floor_us"], ",.2f"),
                _n(s["ratio"], ".1%"),
                f"{s['bytes'] / 1e6:,.2f}",
                f"{s['us'] * s['runs']:,.1f}",
            )
        if row["status"] == "timed":
            whole = sum(s["us"] * s["runs"] for s in stages)
            table.add_row(row["name"], "all", *[""] * 6, f"{whole:,.1f}")
    return table


def startup_table(record: dict[str, Any]) -> Table:
    """A row a round: seconds of each phase."""
    table = plain_table(["", "round", *(phase.removesuffix("_s") + " s" for phase in PHASES)])
    for row in record["rows"]:
        for index in range(record["test"]["rounds"]):
            timed = row["startup"]  # records of before 2026-11-23 have not all phases
            seconds = (f"{timed[phase][index]:.2f}" if phase in timed else "" for phase in PHASES)
            table.add_row(row["name"], str(index + 1), *seconds)
    return table


def notes(record: dict[str, Any]) -> list[str]:
    """What has to be known to read the table."""
    test, machine = record["test"], record["machine"]
    lines = [f"{row['name']}: {row['status']}: {row['note']}" for row in record["rows"] if row["status"] != "timed"]
    lines += [
        f"{row['name']}: {row['note']}"
        for row in record["rows"]
        if row["kind"] == "peer" and row["status"] == "timed" and row["note"]
    ]
    lines += [
        f"{row['name']}: rounds did not give the same tokens" for row in record["rows"] if row["repeatable"] is False
    ]
    if record["kind"] == "stages":
        clocks = {s["clock"] for row in record["rows"] for s in row.get("stages") or []}
        lines += [CLOCKS[clock] for clock in sorted(clocks)]
        lines.append(
            f"each stage alone on one token, {test['prompt']}, behind {test['prompt_tokens']} positions; "
            f"medians of {test['rounds']} rounds; weights: {record['model']['weights']}"
        )
    elif record["kind"] != "startup":
        many = record["kind"] == "concurrency"
        rate = "tokens/s without the first token"
        if test["tokens"] == 1:
            rate = "tokens/s are the prompt's, until the first token"
        lines.append(
            f"{'' if many else 'batch 1, '}{test['sampling']}, {test['prompt']}; "
            f"{test['warmup']} warm-up and {test['rounds']} timed rounds, interleaved; medians; "
            f"{rate}; weights: {record['model']['weights']}"
        )
        if not many and test["tokens"] > 1:
            lines.append("p99/p50: at constant depth, as tokens arrived at the host / as the backend stamped them")
    if record["kind"] != "startup":
        lines.append(_bandwidth(record["bandwidth"]))
        lines.append(_conditions(record["conditions"]))
    for row in record["rows"]:
        if "resources" in row:
            lines.append(f"{row['name']}: {Resources(**row['resources'])}")
        if row["kernels"]:
            k = row["kernels"]
            lines.append(
                f"{row['name']}: {k['launches']} kernel launches for one request, "
                f"{k['copies']} copies, {k['fills']} fills"
            )
    packages = ", ".join(f"{n} {v}" for n, v in machine["packages"].items() if v)
    changes = f" with {len(machine['changed'])} files changed" if machine["dirty"] else ""
    commit = (machine["commit"] or "unknown")[:12] + changes
    lines.append(
        f"python {machine['python']}, {packages}; {machine['driver'] or 'no GPU driver'}; "
        f"commit {commit}, source {machine['source'][:12]}"
    )
    return lines


def _bandwidth(bandwidth: dict[str, Any]) -> str:
    rates = bandwidth["methods"]
    small = max(rates.values(), default=math.inf) < 1e11  # a CPU's
    unit, scale, places = ("GB/s", 1e9, 1) if small else ("TB/s", 1e12, 3)
    methods = ", ".join(f"{name} {rate / scale:.{places}f}" for name, rate in rates.items())
    line = f"read bandwidth measured: {methods or 'nothing'} {unit}"
    if bandwidth["datasheet"]:
        line += f" (datasheet {bandwidth['datasheet'] / 1e12:.2f})"
    if bandwidth["scale"]:
        line += f"; {bandwidth['scale']:.3f} of the {TARGET_READ / 1e12} TB/s that targets assume"
    absent = "; ".join(f"{name} absent: {why}" for name, why in bandwidth["absent"].items())
    return f"{line}; {absent}" if absent else line


def _conditions(conditions: dict[str, Any]) -> str:
    samples = conditions["samples"]
    if not samples:
        return "clocks, temperature and power: not known here"
    ends = " -> ".join(
        f"SM {_n(s['sm_mhz'], '.0f')} MHz, memory {_n(s['memory_mhz'], '.0f')} MHz, "
        f"{_n(s['temperature_c'], '.0f')} C, {_n(s['power_w'], '.0f')} W"
        for s in samples
    )
    return f"{ends}; throttling: {', '.join(conditions['throttled']) or 'none seen'}"


def _n(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)
