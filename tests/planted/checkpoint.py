"""Faults in reading checkpoints."""

from tests.planted.fault import Fault

FAULTS = (
    # ---- checkpoint: narrow weights ----
    Fault(
        "checkpoint/formats/awq.py",
        "ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
        "ORDER = (0, 1, 2, 3, 4, 5, 6, 7)",
        "host/test_formats.py",
        "AWQ's rows are not interleaved in a word",
        quick=True,
    ),
    Fault(
        "checkpoint/formats/gptq.py",
        "zeros = zeros + self.stored_less",
        "zeros = zeros",
        "host/test_formats.py",
        "GPTQ's zero points are read less one",
    ),
    Fault(
        "checkpoint/narrow.py",
        "self.scales.double() - 127",
        "self.scales.double() - 128",
        "host/test_formats.py",
        "MXFP4's scales are half of what they are",
    ),
    Fault(
        "checkpoint/narrow.py",
        "if step != 1 or (edge % (group or size) and edge != size):",
        "if step != 1:",
        "host/test_formats.py",
        "a narrow weight is cut through a scale group",
    ),
    Fault(
        "checkpoint/quantizing.py",
        "largest / (E4M3_MAX if how.code is Code.E4M3 else half)",
        "largest / (E4M3_MAX if how.code is Code.E4M3 else half + 0.5)",
        "host/test_quantize.py",
        "kog quantize divides by another largest code than compressed-tensors",
    ),
    Fault(
        "checkpoint/gguf/tensors.py",
        "codes = torch.cat([packed & 15, packed >> 4], -1)",
        "codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)",
        "host/test_gguf.py",
        "a GGUF byte's two weights are taken for neighbors",
    ),
    Fault(
        "checkpoint/gguf/file.py",
        "if entry.first % alignment or first + entry.num_bytes > len(self.data):",
        "if entry.first % alignment:",
        "host/test_gguf.py",
        "a GGUF tensor may lie beyond the file's end",
    ),
    Fault(
        "text/gguf_tokenizer.py",
        "found.append((-scores[i], -len(left), -len(right), left, right))",
        "found.append((scores[i], -len(left), -len(right), left, right))",
        "host/test_gguf_tokenizer.py",
        "SentencePiece's worst-scored pieces are merged first",
    ),
    Fault(
        "backends/__init__.py",
        'return judge(spec) if judge else f"it does not read {spec.narrow_formats} weights yet"',
        'return judge(spec) if judge else ""',
        "conformance/test_narrow.py",
        "a GPU backend unpacks narrow weights in silence",
    ),
    Fault(
        "schedule/narrow_packing.py",
        "place // 4 * 4 + 2 * (1 - place % 2) + place % 4 // 2",
        "place // 4 * 4 + 2 * (place % 2) + place % 4 // 2",
        "host/test_narrow_lowering.py",
        "the bytes of two target words change places",
        quick=True,
    ),
    Fault(
        "schedule/narrow_packing.py",
        "value = place // 2 + place % 2 * (each // 2)",
        "value = place",
        "host/test_narrow_lowering.py",
        "the nibbles of int4 lie in the order of K",
    ),
    Fault(
        "schedule/narrow_packing.py",
        "codes = codes ^ 0x88",
        "codes = codes ^ 0x80",
        "host/test_narrow_lowering.py",
        "the low nibbles of int4 keep their eight",
    ),
    Fault(
        "schedule/narrow_packing.py",
        "inside * weights.granule // weights.format.group_cols",
        "(inside * weights.granule // weights.format.group_cols + 1) % -(-cols // weights.format.group_cols)",
        "host/test_narrow_lowering.py",
        "scales are those of the next group along K",
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
)
