"""Planted faults: each must turn its test file red. Run by hand:

    python tests/faults.py              all of them; --list prints them
    python tests/faults.py --quick      one in each floor of the house, as .ci/run does
    python tests/faults.py RoPE top-p   those whose sentence has one of these words in it

A gate that nobody has seen red is not known to work. Faults are planted in copies of the tree, one
at a time; first every test file that they name must be green in a copy without a fault. Exit code 0
if all are caught, 1 if not, 2 if the command line is wrong.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKERS = 2


@dataclass(frozen=True)
class Fault:
    """`before` becomes `after` in a file of the package; `tests` must notice."""

    path: str
    before: str
    after: str
    tests: str
    what: str
    quick: bool = False


FAULTS = (
    # ---- model ----
    Fault(
        "model/rope_config.py",
        "return Rope(theta, scaling, _factor(parameters))",
        "return Rope(theta)",
        "host/test_families.py",
        "linear RoPE scaling is read and forgotten",
    ),
    Fault(
        "model/families/laneformer.py",
        "early if layer < delay else late",
        "early if layer <= delay else late",
        "host/test_families.py",
        "the delayed reduction starts a layer late",
    ),
    Fault(
        "model/families/decoder.py",
        "windows=windows or (0,) * layers,",
        "windows=(0,) * layers,",
        "host/test_families.py",
        "sliding windows are ignored",
    ),
    Fault(
        "model/families/decoder.py",
        "default=1e-6),\n        rope=rope",
        "default=1e-5),\n        rope=rope",
        "host/test_families.py",
        "a norm epsilon that is left out takes another family's value",
    ),
    Fault(
        "model/spec.py",
        "min(position + 1, window or position + 1)",
        "min(position, window or position)",
        "host/test_metrics.py",
        "the step's own position is not counted in the KV bytes",
    ),
    # ---- checkpoint ----
    Fault(
        "checkpoint/folder.py",
        "pairs.transpose(2, 3).reshape",
        "pairs.reshape",
        "host/test_families.py",
        "interleaved RoPE rows are not reordered",
    ),
    Fault(
        "checkpoint/folder.py",
        "    if stored.shape != wanted:",
        "    if len(stored.shape) != len(wanted):",
        "host/test_checkpoint.py",
        "a tensor of another shape is accepted",
    ),
    Fault(
        "checkpoint/tensor_files.py",
        "if expected is not None and names != expected:",
        "if expected is not None and names < expected:",
        "host/test_checkpoint.py",
        "a shard may hold tensors that the index does not name",
    ),
    # ---- schedule ----
    Fault(
        "schedule/rope.py",
        "blend + (1 - blend) / rope.factor",
        "blend / rope.factor + (1 - blend)",
        "host/test_rope.py",
        "llama3 scaling slows the short waves",
    ),
    Fault(
        "schedule/rope.py",
        "* rope.attention_factor",
        "",
        "host/test_rope.py",
        "YaRN forgets its attention factor",
    ),
    Fault(
        "schedule/exchanges.py",
        "(known[:, None, :] >= use.read)",
        "(known[:, None, :] >= use.at)",
        "host/test_exchanges.py",
        "the proof forgets who still reads a word",
    ),
    Fault(
        "schedule/schedule.py",
        "return rank * v // n, (rank + 1) * v // n",
        "return rank * (v // n), (rank + 1) * (v // n)",
        "host/test_schedule.py",
        "the vocabulary's last rows belong to no rank",
    ),
    Fault(
        "schedule/exchanges.py",
        "        if some:\n            rows",
        "        if False:\n            rows",
        "host/test_exchanges.py",
        "the proof learns from blocks that may not take part",
    ),
    Fault(
        "schedule/check.py",
        "if sorted(owned) != list(range(partition.num_rows(stage, rank))):",
        "if not set(owned) <= set(range(partition.num_rows(stage, rank))):",
        "host/test_partitions.py",
        "check takes rows without an owner",
    ),
    Fault(
        "schedule/shards.py",
        "    out[1:] = 0\n",
        "",
        "host/test_walks.py",
        "every shard adds the bias of a matrix that is cut along K",
    ),
    # ---- lowering, packing, wire ----
    Fault(
        "schedule/lowering.py",
        "return range(group_index * units // size, (group_index + 1) * units // size)",
        "return range(group_index * (units // size), (group_index + 1) * (units // size))",
        "host/test_walks.py",
        "a partition drops the units that do not divide",
        quick=True,
    ),
    Fault(
        "schedule/lowering.py",
        "return rows.reshape(2, -1).T.reshape(-1)",
        "return rows",
        "host/test_lowering.py",
        "gate and up are not woven",
    ),
    Fault(
        "schedule/packing.py",
        "(0, 1, 5, 2, 4, 3, 6)",
        "(0, 1, 5, 4, 2, 3, 6)",
        "host/test_lowering.py",
        "warps of row groups and of K parts change places",
        quick=True,
    ),
    Fault(
        "schedule/packing.py",
        ": stage.cols] = w[_index(w, rows.reshape(-1)[real])]",
        ": stage.cols] = w[: len(real)]",
        "host/test_lowering.py",
        "every block packs the first rows",
    ),
    Fault(
        "schedule/cuda.py",
        "return rank * self.schedule.shards_per_rank + block // self.group_size(stage)",
        "return block // self.group_size(stage)",
        "host/test_lowering.py",
        "every rank packs the first rank's lanes",
    ),
    Fault(
        "schedule/wire.py",
        "first + ((first >> 1) & 1)",
        "first",
        "host/test_wire.py",
        "the first of a float16 pair is truncated",
    ),
    Fault(
        "schedule/wire.py",
        "np.where(first & EXPONENT_TOP, first, first & 0x8000)",
        "first",
        "host/test_wire.py",
        "a tiny first of a bfloat16 pair becomes a huge one",
    ),
    Fault(
        "schedule/wire.py",
        "bits = np.where(np.isnan(values), np.uint32(LEAST_NAN_PAYLOAD), bits)\n",
        "pass\n",
        "host/test_wire.py",
        "a NaN whose payload is the phase bit becomes an infinity",
    ),
    # ---- reference ----
    Fault(
        "backends/reference.py",
        "torch.cat([a * cos - b * sin, b * cos + a * sin], -1)",
        "torch.cat([a * cos + b * sin, b * cos - a * sin], -1)",
        "host/test_families.py",
        "RoPE turns the other way",
        quick=True,
    ),
    Fault(
        "backends/reference.py",
        "hidden |= key <= position[:, None] - window",
        "hidden |= key < position[:, None] - window",
        "host/test_families.py",
        "a window is one key too wide",
    ),
    Fault(
        "backends/reference.py",
        "return x + o + (old.sum(0, keepdim=True) - old)",
        "return x + o + old.sum(0, keepdim=True)",
        "host/test_families.py",
        "a lane adds its own late output twice",
    ),
    Fault(
        "backends/reference.py",
        "return x + math.sqrt(self.spec.num_lanes) * o",
        "return x + self.spec.num_lanes * o",
        "host/test_families.py",
        "lanes that do not exchange scale by their number",
    ),
    Fault(
        "backends/block_walk.py",
        "for k in range(0, x.shape[2], step):",
        "for k in range(0, x.shape[2] - step + 1, step):",
        "host/test_walks.py",
        "the last part of K is left out where it is padded",
    ),
    Fault(
        "backends/kv_cache.py",
        "new[..., : self._size, :] = old",
        "pass",
        "host/test_families.py",
        "a cache that grows forgets",
    ),
    # ---- sampling, text, engine ----
    Fault(
        "sampling/definition.py",
        "return head[np.searchsorted(sums, target)]",
        "return head[np.searchsorted(sums, target) - 1]",
        "host/test_sampling_definition.py",
        "top-p keeps one token too few",
    ),
    Fault(
        "sampling/philox.py",
        "odd ^ round_key)[::-1]",
        "odd ^ round_key)",
        "host/test_sampling_fixed.py",
        "Philox does not swap its halves",
    ),
    Fault(
        "sampling/definition.py",
        "np.where(wide > 0, wide / factor, wide * factor)",
        "wide / factor",
        "host/test_sampling_definition.py",
        "a repetition penalty rewards negative logits",
        quick=True,
    ),
    Fault(
        "text/stop.py",
        "shown = len(text) - max(_overlap(text, stop) for stop in self._stops)",
        "shown = len(text)",
        "host/test_text_stop.py",
        "the beginning of a stop string is shown",
    ),
    Fault(
        "text/stop.py",
        "self._exempt = len(text)",
        "self._exempt = 0",
        "host/test_text_stop.py",
        "a stop string ends within min_tokens",
    ),
    Fault(
        "text/render_template.py",
        "    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))",
        "",
        "host/test_text_sandbox.py",
        "a template may take any amount of memory",
    ),
    Fault(
        "text/tokenizer_growth.py",
        "times, plus = t * times, t * plus + p",
        "times, plus = max(t, times), plus + p",
        "host/test_tokenizer_growth.py",
        "the steps of a normalizer are not put into each other",
    ),
    Fault(
        "text/tokenizer.py",
        " and not self._guard.loose:",
        ":",
        "host/test_text_chat.py",
        "wide letters of a user fold into a special token",
    ),
    Fault(
        "text/detokenize.py",
        'return self._utf8.decode(self._bytes_of(token) or b"")',
        'return (self._bytes_of(token) or b"").decode(errors="replace")',
        "host/test_text_detokenize.py",
        "a character of several tokens is split",
    ),
    Fault(
        "engine.py",
        "if slot.salt == claim.salt else 0",
        "",
        "host/test_kv_reuse.py",
        "callers with different salts share keys and values",
    ),
    Fault(
        "engine.py",
        "ids = claim.request.prompt[:-1]",
        "ids = claim.request.prompt",
        "host/test_kv_reuse.py",
        "nothing is left to compute of a prompt that was seen before",
    ),
    Fault(
        "engine.py",
        "                    self._forget()\n",
        "",
        "host/test_kv_reuse.py",
        "what a crash left in free slots is reused",
    ),
    Fault(
        "engine.py",
        "-len(s.tokens)",
        "len(s.tokens)",
        "host/test_conversations.py",
        "of two slots that keep alike the one with more to lose is taken",
    ),
    Fault(
        "claim.py",
        "                self._made.append(step.token)\n",
        "                pass\n",
        "host/test_kv_reuse.py",
        "a slot forgets what was made in it",
    ),
    Fault(
        "request_queue.py",
        "self._claims.popleft()",
        "self._claims.pop()",
        "host/test_queue.py",
        "who came last is served first",
    ),
)


def plant(fault: Fault, tree: Path) -> bool:
    """Whether the fault's tests went red in this copy of the tree, which is left as it was."""
    file = tree / "kog_triton" / fault.path
    source = file.read_text()
    file.write_text(source.replace(fault.before, fault.after, 1))
    try:
        return not green([fault.tests], tree)
    finally:
        file.write_text(source)


def green(tests: list[str], tree: Path) -> bool:
    """Whether test files pass in a copy of the tree. A run that hangs is red."""
    argv = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
    # Bytecode is off: a fault and its repair may fall into the same second.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    env |= {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*argv, *(f"tests/{t}" for t in tests)],
            cwd=tree,
            env=env,
            capture_output=True,
            timeout=300,
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):  # not even collected: the fault would be caught for nothing
        raise SystemExit(f"pytest ended with {done.returncode}: {done.stdout.decode()[-2000:]}")
    return done.returncode == 0


def asked(argv: list[str]) -> tuple[Fault, ...]:
    """Those that a command line asks for; it exits where that is none."""
    parser = argparse.ArgumentParser("tests/faults.py", description="Plant faults, see tests red.")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    parser.add_argument("--quick", action="store_true", help="those of .ci/run alone")
    parser.add_argument("words", nargs="*", metavar="WORD", help="part of a fault's sentence")
    args = parser.parse_args(argv)
    for word in args.words:
        if not any(word in f.what for f in FAULTS):
            parser.error(f"{word!r} stands in no fault's sentence: --list prints them")
    wanted = args.words or [""]
    faults = tuple(
        f for f in FAULTS if f.quick >= args.quick and any(word in f.what for word in wanted)
    )
    if not faults:
        parser.error(f"none of the quick faults has {' or '.join(map(repr, wanted))} in it")
    if args.list:
        print(*(f"{f.tests:34}{f.what}" for f in faults), sep="\n")
        parser.exit()
    return faults


def main(argv: list[str]) -> int:
    faults = asked(argv)
    for fault in faults:
        count = (ROOT / "kog_triton" / fault.path).read_text().count(fault.before)
        if count != 1:
            sys.exit(f"{fault.path} has {count} places for {fault.what!r}: plant it anew")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for i in range(WORKERS):
            tree = Path(folder) / f"tree{i}"
            skip = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
            shutil.copytree(ROOT, tree, ignore=skip, symlinks=True)
            trees.put(tree)
        tests = sorted({f.tests for f in faults})
        shares = [share for i in range(WORKERS) if (share := tests[i::WORKERS])]
        folders = [Path(folder) / f"tree{i}" for i in range(WORKERS)]
        if not all(pool.map(green, shares, folders)):
            sys.exit("the tests are red without a fault")

        def run(fault: Fault) -> bool:
            tree = trees.get()
            red = plant(fault, tree)
            trees.put(tree)
            print(f"{'caught' if red else 'MISSED':8}{fault.what}", flush=True)
            return red

        caught = sum(pool.map(run, faults))
    print(f"{caught} of {len(faults)} faults caught")
    return caught < len(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
