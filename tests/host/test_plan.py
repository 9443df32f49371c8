"""`kog plan`: its figures are the model's, and its errors name the item."""

import re

import pytest
from safetensors.torch import load_file

from kog_triton.backends.cuda_archs import not_compiled_for
from kog_triton.backends.hip.layout import lay_out_hip
from kog_triton.model.shapes import SHAPES, named_shape
from kog_triton.model.spec import Head, Reduce
from kog_triton.plan import main, tile_bytes
from kog_triton.schedule.cuda import WARPS
from kog_triton.schedule.hip import lower_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import find_gpu
from kog_triton.schedule.triton import lower_tiles
from tests.lib import narrow_cases, tiny
from tests.lib.refusals import refusal
from tests.lib.ring_walker import spec_of

STAGES = ["embed", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj"]
ON_HIP = ("--backend", "hip", "--device", "mi300x")


@pytest.fixture
def plan(capsys):
    """(exit code, stdout, stderr) of `kog plan`."""

    def call(*argv):
        try:
            code = main(list(argv))
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return call


def table(text):
    """{stage: {column: cell}}; columns lie two or more spaces apart."""
    lines = [line.strip() for line in text.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("stage"))
    names = re.split(r"\s{2,}", lines[start])
    rows = {}
    for line in lines[start + 2 :]:
        if not line:
            return rows
        cells = re.split(r"\s{2,}", line)
        rows[cells[0]] = dict(zip(names, cells, strict=False))
    raise AssertionError("the table has no end")


def split_warps(cell):
    """(K parts, groups of rows) of a cell such as "8 x 2"."""
    return map(int, cell.split(" x "))


def matrix_bytes(spec):
    """What the five matrix stages read, in bytes: everything but the embedding, norms and biases."""
    sizes = {name: shape for name, shape in spec.shapes.items() if "norm" not in name}
    total = 0
    for name, shape in sizes.items():
        if "bias" in name or (name == "embed" and not spec.tied_embeddings):
            continue
        count = 1
        for n in shape:
            count *= n
        total += count * (spec.num_layers if "{}" in name else 1)
    return 2 * total


@pytest.mark.parametrize(
    ("shape", "gpus", "device"),
    [(shape, "1", "h200") for shape in SHAPES]
    + [
        (shape, gpus, device)
        for shape in ("llama-3.2-1b", "laneformer-2b", "qwen2.5-coder-1.5b", "smollm2-360m")
        for gpus, device in (("2", "h200"), ("4", "h200"), ("1", "mi300x"), ("4", "mi300x"))
    ],
)
def test_every_shape_has_a_plan(plan, shape, gpus, device):
    code, out, err = plan("--shape", shape, "--gpus", gpus, "--device", device)
    heads, kv_heads = named_shape(shape).num_heads, named_shape(shape).num_kv_heads
    if shape == "smollm2-360m" and int(gpus) > 1:
        assert code == 3 and "15 heads with 5 KV heads do not divide over" in err
        return
    assert heads % int(gpus) == 0 and not (kv_heads % int(gpus) and int(gpus) % kv_heads)
    assert (code, err) == (0, "") and f"on {gpus} x {device}" in out
    rows, spec = table(out), named_shape(shape)
    mixes = ["mix"] if spec.num_lanes > 1 else []
    assert list(rows) == [*STAGES, *mixes, "lm_head", "sample"]
    if device == "h200":
        warps = [row["warps K x rows"] for row in rows.values() if "warps K x rows" in row]
        assert len(warps) == 5 and all(k * by == WARPS for k, by in map(split_warps, warps))
    read = sum(float(row["MB/token"]) for row in rows.values() if "MB/token" in row)
    assert read == pytest.approx(matrix_bytes(spec) / 1e6, abs=0.3)
    assert int(rows["qkv_proj"]["runs"]) == spec.num_layers
    for name in STAGES[1:]:
        assert int(rows[name]["shards"]) == max(spec.num_lanes, int(gpus)), name
    assert rows["lm_head"]["shards"] == rows["sample"]["shards"] == "1"
    gigabytes = float(re.search(r"([\d.]+) GB a token", out)[1])
    assert gigabytes * int(gpus) >= matrix_bytes(spec) / 1e9 - 0.002
    bandwidth, rate = re.search(r"([\d.]+) TB/s \(datasheet\) allow ([\d,]+) tokens/s", out).groups()
    tokens = float(bandwidth) * 1e3 / gigabytes
    assert float(bandwidth) == pytest.approx(find_gpu(device).bandwidth / 1e12, abs=0.005)
    assert int(rate.replace(",", "")) == pytest.approx(tokens, rel=5e-3, abs=0.5)
    # of one GPU, as the gigabytes are
    microseconds = sum(float(row["roofline us"]) for row in rows.values() if "roofline us" in row)
    whole = gigabytes * 1e3 / float(bandwidth)
    assert microseconds == pytest.approx(whole, rel=2e-2, abs=0.5)
    assert int(re.search(r"tokens/s: (\d+) us a token", out)[1]) == pytest.approx(whole, rel=5e-3, abs=0.6)
    copies = max(1, int(gpus) // kv_heads) if spec.num_lanes == 1 else 1
    assert f"{spec.kv_bytes_per_position * copies:,} bytes of KV cache" in out
    assert (f"each KV head on {copies} GPUs" in out) == (copies > 1)


@pytest.mark.parametrize("device", ["a100", "l40s"])
def test_a_gpu_that_cuda_is_not_compiled_for_has_triton_s_plan(plan, device):
    """And with --backend cuda the backend's own refusal; of weights that Triton does not read, a plain cut."""
    shape, gpu = ("--shape", "llama-3.2-1b", "--device", device), find_gpu(device)
    code, out, err = plan(*shape, "--backend", "cuda")
    refused = f"the cuda backend cannot run: {not_compiled_for(device, gpu.arch).reason}; choose --backend triton"
    assert (code, out, err) == (4, "", f"error: {refused}\n") and f"{device} is {gpu.arch}" in err
    assert plan(*shape)[1] == plan(*shape, "--backend", "triton")[1] != ""
    lanes = ("--shape", "laneformer-2b", "--device", device)
    assert "no lowering for" in plan(*lanes, "--format", "mxfp4")[1]


def test_an_amd_plan_says_that_it_is_a_plain_one(plan):
    _, out, _ = plan("--shape", "laneformer-2b", "--device", "mi300x")
    rows = table(out)
    assert "--backend hip shows the lowering of AMD GPUs" in out and "warps" not in out
    assert rows["qkv_proj"]["blocks"] == "32" and rows["lm_head"]["blocks"] == "256"
    assert int(rows["o_proj"]["rows/block"]) * 32 >= 3072
    assert "warps K x rows" in plan("--shape", "laneformer-2b")[1]


def test_the_hip_plan_is_its_lowering(plan):
    code, out, err = plan("--shape", "laneformer-2b", "--device", "mi300x", "--backend", "hip")
    rows = table(out)
    assert (code, err) == (0, "") and "on 1 x mi300x, one token" in out
    assert "304 CUs on 8 XCDs; weights go straight to registers, 8192 bytes of a block at once" in out
    assert rows["qkv_proj"]["blocks"] == "32" and rows["lm_head"]["blocks"] == "256"
    warps = [row["warps K x rows"] for row in rows.values() if "warps K x rows" in row]
    assert len(warps) == 5 and all(k * by == WARPS for k, by in map(split_warps, warps))
    read = sum(float(row["MB/token"]) for row in rows.values() if "MB/token" in row)
    assert read == pytest.approx(matrix_bytes(named_shape("laneformer-2b")) / 1e6, abs=0.3)


@pytest.mark.parametrize(
    ("shape", "gpus", "has", "first"),
    [
        ("laneformer-2b", "2", "4 of 8 lanes: 0 to 3 on GPU 0, 4 to 7 on GPU 1.", "lane 0"),
        ("laneformer-2b", "8", f"1 of 8 lanes: {', '.join(f'{n} on GPU {n}' for n in range(8))}.", "KV head 0"),
        ("qwen2.5-coder-1.5b", "4", "1 of 2 KV heads: 0 on GPU 0, 0 on GPU 1, 1 on GPU 2, 1 on GPU 3.", "KV head 0"),
    ],
)
def test_the_hip_plan_of_several_gpus_places_the_blocks_of_one(plan, shape, gpus, has, first):
    code, out, err = plan(*ON_HIP, "--shape", shape, "--gpus", gpus)
    assert (code, err) == (0, "") and f"on {gpus} x mi300x, one token" in out
    assert f"\nEach GPU has {has}\nPlaced by " in out
    assert re.search(rf"on each XCD of GPU 0:\n  XCD 0 \(IOD 0\): blocks 0 to \d+, {first}\n", out)


def test_the_hip_plan_of_a_block_for_each_compute_unit(plan):
    code, out, err = plan(*ON_HIP, "--shape", "laneformer-2b", "--blocks", "304")
    assert (code, err) == (0, "") and table(out)["lm_head"]["blocks"] == "304"
    assert "  XCD 7 (IOD 3): blocks 266 to 303, lane 7\n" in out


def test_what_the_hip_backend_refuses_has_no_plan(plan, monkeypatch):
    """In the backend's words."""
    shape, gpu = "llama-3.2-1b", find_gpu("mi300x")
    monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | {"intermediate_size": 1 << 16})
    spec = named_shape(shape)
    said = refusal(lambda: lay_out_hip(lower_hip(build(spec), gpu), spec.max_context))
    code, out, err = plan("--shape", shape, "--device", "mi300x", "--backend", "hip")
    assert (code, out, err) == (3, "", f"error: {said}\n") and "bytes of LDS: mi300x has" in said


def test_the_demo_is_the_default(plan):
    code, out, _ = plan()
    assert code == 0 and out.startswith("demo (laneformer) on 1 x h200")


def test_a_checkpoint_has_a_plan(plan, tmp_path):
    folder = tiny.save_folder(tmp_path / "small", tiny.LLAMA, tiny.llama_tensors())
    code, _, err = plan("--model", str(folder))
    assert code == 3 and "choose --dtype bf16 or fp16" in err
    code, out, _ = plan("--model", str(folder), "--dtype", "bf16")
    assert code == 0 and out.startswith("small (llama) on 1 x h200")
    assert plan("--model", str(folder), "--device", "mi300x")[0] == 0


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--shape", "llama-9"], 3, "no shape is named 'llama-9': have laneformer-2b"),
        (["--device", "h300"], 4, "no GPU named 'h300': have h200"),
        (["--gpus", "3"], 3, "8 lanes do not divide over 3 GPUs: choose one of 1, 2, 4, 8"),
        (["--model", "/no/such/folder"], 3, "/no/such/folder"),
        (["--shape", "llama-3.3-70b", "--device", "rtx-5090"], 3, "shared memory of rtx-5090"),
        (["--blocks", "304"], 2, "--blocks goes with --backend hip"),
        (["--blocks", "0"], 2, "argument --blocks: 0 is below 1"),
        ([*ON_HIP, "--blocks", "305"], 2, "305 blocks: mi300x has 304 compute units, for one each"),
        (
            [*ON_HIP, "--shape", "laneformer-2b", "--blocks", "300"],
            2,
            "300 blocks: this model takes a multiple of 8, 304 at most",
        ),
        ([*ON_HIP, "--shape", "llama-3.2-1b", "--blocks", "304"], 2, "304 blocks: this model takes 256 at most"),
        (["--gpus", "16"], 3, "16 GPUs: 8 are the most: choose one of 1, 2, 4, 8"),
        (["--shape", "qwen3-32b", "--gpus", "16"], 3, "16 GPUs: 8 are the most: choose one of 1, 2, 4, 8"),
        (
            ["--shape", "qwen3-8b", "--format", "mxfp4", "--backend", "hip", "--device", "mi300x"],
            4,
            "backend hip cannot run this checkpoint: its kernel reads 16-bit weights, and these are",
        ),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(plan, argv, code, says):
    got, out, err = plan(*argv)
    assert (got, out) == (code, "") and says in err
    assert len([line for line in err.splitlines() if "error: " in line]) == 1


# ---- narrow weights ----


@pytest.mark.parametrize(
    ("shape", "name", "stored", "pad", "cut"),
    [
        # parameters of the layers' matrices and of the head by hand; bits of a weight with its scales. The stream has a
        # scale of 32 bits for 64 weights of eight rows, of gate and up of four; FP8 blocks have one for 128 of 128.
        (
            "qwen3-8b",
            "fp8-block",
            (6_945_767_424 * (8 + 32 / 128**2), 622_329_856),
            (1 + 24_576 / 47_104) * 32 / (8 * 64) - 32 / 128**2,
            "ring of",
        ),
        ("qwen3-8b", "int4-g128", (6_945_767_424 * 4.125, 622_329_856), 0, "ring of"),
        ("qwen3-8b", "mxfp4", (6_945_767_424 * 4.25, 622_329_856), 0, "ring of"),
        ("llama-3.2-1b", "int4-g32", (973_078_528 * 4.5, 262_668_288), 0, "ring of"),
    ],
    ids=str,
)
def test_bytes_of_a_format(shape, name, stored, pad, cut, plan):
    """A row shows what is stored, the sum what is read; `pad` in bits a weight of the layers."""
    code, out, _ = plan("--shape", shape, "--format", name)
    assert code == 0 and out.startswith(f"{shape} as {name} (")
    layers, head = stored[0] / 8e9, stored[1] * 2e-9
    read = head + layers + pad / 8e9 * 6_945_767_424
    assert f"{read:.3f} GB a token" in out and cut in out
    cells = [row["MB/token"] for row in table(out).values() if "MB/token" in row]
    assert sum(map(float, cells)) == pytest.approx((layers + head) * 1e3, abs=0.3)


def test_bytes_of_a_narrow_checkpoint(plan, tmp_path):
    narrow_cases.checkpoint("awq_g32", tmp_path)
    code, out, _ = plan("--model", str(tmp_path), "--device", "mi300x")
    stored = load_file(tmp_path / "model.safetensors")
    parts = ("qweight", "qzeros", "scales", "lm_head.weight")
    want = sum(t.nbytes for n, t in stored.items() if n.endswith(parts))
    assert code == 0 and f"{want / 1e9:.3f} GB a token" in out


def test_a_format_that_does_not_divide_is_refused(plan):
    code, _, err = plan("--shape", "smollm2-360m", "--format", "int4-g128")
    assert code == 3 and "layers.0.q_proj: 960 columns do not divide into groups of 128" in err


# ---- the Triton kernel's tiles ----


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-4b", "smollm2-135m", "laneformer-2b"])
def test_triton_s_tiles_cover_the_matrices(plan, shape):
    """Rows and words of the tiles by what the table says of them; what is read beyond the weights is its padding."""
    code, out, _ = plan("--shape", shape, "--backend", "triton")
    assert code == 0
    rows, total = table(out), 0
    assert list(rows) == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"]
    spec = named_shape(shape)
    for stage, cells in rows.items():
        high, words = re.fullmatch(r"(\d+) x \((.*)\)", cells["tile rows x words"]).groups()
        widths = [[int(n) for n in part.split(" x ")] for part in words.split(" + ")]
        width = sum(n[0] * n[1] if len(n) > 1 else n[0] for n in widths)
        assert 2 * width >= int(cells["cols"]) and int(cells["rows/block"]) % int(high) == 0
        blocks = int(cells["blocks"]) * (1 if stage == "lm_head" else spec.num_lanes)
        read = 4 * width * int(cells["rows/block"]) * blocks * int(cells["runs"])
        real = float(cells["MB/token"]) * 1e6
        assert float(cells["pad"][:-1]) == pytest.approx(100 * (read / real - 1), abs=0.2)
        total += real
    assert total == pytest.approx(matrix_bytes(spec), rel=1e-3)


def test_kilobytes_on_their_way_are_of_1024_bytes(plan):
    """What a block has asked for as the stage begins: rows of its tiles times words of 4 bytes."""
    rows = table(plan("--shape", "llama-3.2-1b", "--backend", "triton")[1])
    schedule, gpu = build(named_shape("llama-3.2-1b")), find_gpu("h200")
    tiles = lower_tiles(schedule, gpu.num_blocks, 131072, "nvidia")
    for t in tiles.stages:
        words = sum(t.widths[t.place(tile)[1]] for tile in range(t.asked_before(0)))
        assert rows[t.name]["KB on its way"] == f"{t.tile_rows * words / 256:.0f}"
    assert rows["qkv_proj"]["KB on its way"] == "32"


def test_triton_has_no_tiles_for_several_gpus_or_narrow_lanes(plan):
    code, _, err = plan("--shape", "llama-3.2-1b", "--backend", "triton", "--gpus", "2")
    assert code == 3 and "one GPU" in err
    code, _, err = plan("--shape", "laneformer-2b", "--backend", "triton", "--format", "mxfp4")
    assert code == 4 and "backend triton cannot run this checkpoint" in err


def test_a_concatenated_head_is_read_a_lane_at_a_time():
    """Each lane's part of K in tiles of its own: all of them, so no less than the matrix."""
    own = (Reduce.OWN,) * 3
    spec = spec_of(
        num_lanes=2, hidden_size=1024, intermediate_size=128, vocab_size=4096, num_heads=4, num_kv_heads=2, head_dim=16,
        reduce_attention=own, reduce_mlp=own, head=Head.CONCAT,
    )  # fmt: skip
    schedule = build(spec)
    tiles = lower_tiles(schedule, 8, spec.max_context, "nvidia")
    (_, real, read) = tile_bytes(schedule, tiles)[-1]
    assert tiles.stages[-1].name == "lm_head" and real <= read <= 2 * real
