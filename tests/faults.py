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
    """`before` becomes `after` in a file of the package, or of backends/cuda; `tests` must notice."""

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
        "target, half = 2 * word + 1 - place % 2, place // 2",
        "target, half = 2 * word + place % 2, place // 2",
        "host/test_narrow_lowering.py",
        "the bytes of two target words change places",
        quick=True,
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
        "if not np.array_equal(rows, np.arange(partition.num_rows(stage, rank))):",
        "if not np.isin(rows, np.arange(partition.num_rows(stage, rank))).all():",
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
    Fault(
        "schedule/shards.py",
        "    out[:, count:] = 0\n",
        "",
        "host/test_walks.py",
        "an FFN is padded with its last output",
    ),
    Fault(
        "schedule/shards.py",
        "for head in range(spec.num_kv_heads) for _ in range(schedule.kv_copies)",
        "for _ in range(schedule.kv_copies) for head in range(spec.num_kv_heads)",
        "host/test_walks.py",
        "ranks that share a KV head get different ones",
    ),
    Fault(
        "backends/cuda/include/kog/residual.h",
        "if (kRanks > 1 && to_all)",
        "if (false)",
        "cuda/test_cuda_ranks.py",
        "a rank's sums stay with it",
    ),
    Fault(
        "backends/cuda/rank_memory.py",
        "own = ranks[rank].pointers(",
        "own = ranks[0].pointers(",
        "cuda/test_cuda_ranks.py",
        "every rank reads the first one's weights",
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
        "order = rows.reshape(2, -1).T.reshape(-1) if pairs else rows",
        "order = rows",
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
        ": stage.cols] = w[index_like(w, rows.reshape(-1)[real])]",
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
        "shown = len(text) - max(overlap(text, stop) for stop in self._stops)",
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
        "text/limited_process.py",
        "    limit(resource.RLIMIT_AS, memory)",
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
    Fault(
        "backends/request_words.py",
        "int(p.top_p * 2.0**32)",
        "round(p.top_p * 2.0**32)",
        "host/test_request_words.py",
        "the share of top_p is rounded for kernels",
    ),
    Fault(
        "sampling/definition.py",
        "int(top_p * 2.0**32)",
        "round(top_p * 2.0**32)",
        "host/test_sampling_definition.py",
        "the share of top_p is rounded where floor is defined",
    ),
    Fault(
        "sampling/definition.py",
        "NOISE_SPAN = 26.01",
        "NOISE_SPAN = 18",
        "host/test_sampling_definition.py",
        "ids that rare noise would choose are left out",
    ),
    Fault(
        "backends/request_words.py",
        "min(p.logprobs or 0, vocab_size)",
        "p.logprobs or 0",
        "host/test_request_words.py",
        "more candidates are asked for than there are ids",
    ),
    Fault(
        "sampling/params.py",
        '(word, bare, " " + bare)',
        "(word, bare)",
        "host/test_sampling_params.py",
        "a bad word is not banned after a space",
    ),
    Fault(
        "sampling/definition.py",
        "seen = np.where(counts > 0, seen - np.float32(params.presence_penalty), seen)",
        "seen = seen - np.float32(params.presence_penalty)",
        "host/test_sampling_definition.py",
        "ids of the prompt are penalized as present",
    ),
    Fault(
        "text/chat.py",
        '("reasoning_content", "thinking", "reasoning")',
        '("thinking", "reasoning_content", "reasoning")',
        "host/test_text_chat.py",
        "thinking wins over reasoning_content",
    ),
    Fault(
        "generation.py",
        "self._num_tokens <= self._min_tokens",
        "self._num_tokens < self._min_tokens",
        "host/test_engine.py",
        "a stop string counts that ends with min_tokens",
    ),
    Fault(
        "generation.py",
        "self._cumulative += step.logprob",
        "self._cumulative = step.logprob",
        "host/test_engine.py",
        "the cumulative log-probability is the last one",
    ),
    Fault(
        "generation.py",
        "ends_text = step.token in self._eos_token_ids and not params.ignore_eos",
        "ends_text = step.token in self._eos_token_ids",
        "host/test_engine.py",
        "an ignored end that stops gives no reason",
    ),
    Fault(
        "llm.py",
        "running[key].poll(0)",
        "running[key].poll(None)",
        "host/test_queue.py",
        "a list waits for one of its requests",
    ),
    Fault(
        "cli/request.py",
        '{"max_tokens": None} | explicit',
        'explicit | {"max_tokens": None}',
        "host/test_cli.py",
        "the command forgets --max-tokens",
    ),
    Fault(
        "llm.py",
        "cache_salt=salt,\n            ends",
        "ends",
        "host/test_vllm_names.py",
        "callers of different salts share keys and values",
    ),
    Fault(
        "prompts.py",
        "_check_same(text, engine.check_ids(ids), engine)",
        "pass",
        "host/test_llm_arguments.py",
        "a prompt's text and ids may disagree",
    ),
    Fault(
        "vllm_names.py",
        "elif not _asks_for_nothing(name, value):",
        "elif value is ...:",
        "host/test_vllm_names.py",
        "what vLLM alone has is dropped",
    ),
    Fault(
        "engine.py",
        "(len(s.tokens) > 0, s.last_used)",
        "s.last_used",
        "host/test_conversations.py",
        "a slot that remembers makes room before an empty one",
    ),
    Fault(
        "engine.py",
        "-len(s.tokens), -s.last_used",
        "-len(s.tokens), s.last_used",
        "host/test_conversations.py",
        "of two slots alike the newer one is taken",
    ),
    Fault(
        "engine.py",
        "min(params.max_tokens, room)",
        "min(params.max_tokens, room - 1)",
        "host/test_engine.py",
        "the last position of the context stays empty",
    ),
    Fault(
        "engine.py",
        "ids = claim.request.prompt[:-1] if claim.request.prompt_logprobs is None else ()",
        "ids = claim.request.prompt[:-1]",
        "host/test_prompt_logprobs.py",
        "a prompt's log-probabilities begin behind what was cached",
    ),
    Fault(
        "request_queue.py",
        "if len(self) >= self._most:",
        "if len(self) > self._most:",
        "host/test_queue.py",
        "one request more than may waits",
    ),
    Fault(
        "metrics.py",
        "prompt_tokens + max(tokens - 1, 0)",
        "prompt_tokens + tokens",
        "host/test_metrics.py",
        "the last token counts as held",
    ),
    Fault(
        "backends/host_serving.py",
        "        one.position += len(tokens)\n",
        "        one.position += len(tokens) if not one.pending else 0\n",
        "host/test_kv_reuse.py",
        "the reference forgets where a long prompt stands",
    ),
    Fault(
        "backends/serving.py",
        "step = replace(step, held=one.position)",
        'step = replace(step, held=one.position if step.finish != "cancel" else 0)',
        "host/test_kv_reuse.py",
        "nothing is kept after a cancel",
    ),
    Fault(
        "backends/serving.py",
        " or self._queue.over(time.monotonic() - begun)",
        "",
        "cuda/test_cuda_launch_queue.py",
        "a second engine waits for the end of a request",
    ),
    Fault(
        "backends/prefill/library.py",
        "num_new_tokens >= least",
        "num_new_tokens > least",
        "host/test_library_prefill.py",
        "the library comes a token late",
    ),
    # ---- commands ----
    Fault(
        "cli/generate_arguments.py",
        '"--min-p",',
        '"--min-p", dest="p",',
        "host/test_cli.py",
        "--min-p is read and forgotten",
    ),
    Fault(
        "generate.py",
        "max_model_len=args.max_model_len,\n            num_slots",
        "num_slots",
        "host/test_cli.py",
        "--max-model-len is read and forgotten",
    ),
    Fault(
        "generate.py",
        "        prefill=args.prefill,\n",
        "",
        "host/test_cli.py",
        "--prefill is read and forgotten",
    ),
    Fault(
        "cli/request.py",
        "        return said[1:]\n    if said",
        "        return said\n    if said",
        "host/test_cli.py",
        "a prompt behind @@ keeps both signs",
    ),
    Fault(
        "cli/interactive.py",
        '[*asked, {"role": "assistant", "content": output.outputs[0].text}]',
        "asked",
        "host/test_cli_talk.py",
        "the answers of a conversation never enter it",
        quick=True,
    ),
    Fault(
        "cli/interactive.py",
        '"/reset":\n            self._messages = list(self._start)',
        '"/reset":\n            self._messages = []',
        "host/test_cli_talk.py",
        "/reset forgets the system message",
    ),
    Fault(
        "cli/interactive.py",
        "        opened = False\n",
        "        opened = True\n        stack.enter_context(STDERR_LOG.held())\n",
        "host/test_cli_talk.py",
        "a compiler is heard only behind the text that waited for it",
    ),
    Fault(
        "cli/command.py",
        "_drop_stdout()\n        return 0",
        "_drop_stdout()\n        return 1",
        "host/test_cli_process.py",
        "a reader that has enough is an error",
    ),
    Fault(
        "plan.py",
        "{WARPS // tiling.k_parts}",
        "{tiling.unit_rows // 8}",
        "host/test_plan.py",
        "plan counts warps by rows of eight",
    ),
    Fault(
        "plan.py",
        "read / s.num_ranks / gpu.bandwidth",
        "read / gpu.bandwidth",
        "host/test_plan.py",
        "plan's roofline is that of one GPU for all",
    ),
    Fault(
        "doctor.py",
        "g['memory_bytes'] / 1e9",
        "g['memory_bytes'] / 1e6",
        "host/test_doctor.py",
        "doctor's gigabytes are megabytes",
    ),
    Fault(
        "doctor.py",
        'if b["advice"] and not b["available"]:',
        'if b["advice"]:',
        "host/test_doctor.py",
        "doctor advises what runs already",
    ),
    Fault(
        "backends/choose.py",
        'if lacking and "cpu" in backend.vendors:',
        "if False:",
        "host/test_choose.py",
        "a GPU that lacks software is passed over for the CPU in silence",
    ),
    Fault(
        "backends/choose.py",
        "in sorted(found)]",
        "in sorted(found, reverse=True)]",
        "host/test_choose.py",
        "auto takes the slowest",
    ),
    Fault(
        "profile.py",
        "weights.spec.vocab_size, args.depth)",
        "weights.spec.vocab_size, DEPTH)",
        "cuda/test_profile.py",
        "profile's --depth is read and forgotten",
    ),
    Fault(
        "__main__.py",
        ".main(args[1:])",
        ".main(args)",
        "host/test_cli.py",
        "kog hands over its own command word",
    ),
    Fault(
        "bench/arguments.py",
        '"deepest": max(depths)',
        '"deepest": depths[0]',
        "bench/test_bench.py",
        "bench asks for room by the first depth",
    ),
    Fault(
        "bench/record.py",
        '"met": reached >= tps',
        '"met": reached > tps',
        "bench/test_bench_parts.py",
        "a target that is just reached is missed",
    ),
    Fault(
        "bench/task.py",
        "return max(positions, len(self.judged_ids()))",
        "return positions",
        "bench/test_bench_parts.py",
        "a short request has no room for what is judged",
    ),
    Fault(
        "bench/kl_limit.py",
        "max(FACTOR * kl, LEAST)",
        "max(kl, LEAST)",
        "bench/test_bench_parts.py",
        "a backend may be no further off than transformers",
    ),
    # ---- hub, cache, reports ----
    Fault(
        "checkpoint/hub.py",
        '    "tokenizer.json",\n',
        "",
        "host/test_checkpoint.py",
        "the hub's tokenizer is not fetched",
        quick=True,
    ),
    Fault(
        "checkpoint/hub.py",
        '    "model-*.safetensors",\n',
        "",
        "host/test_checkpoint.py",
        "the hub's shards are not fetched",
    ),
    Fault(
        "checkpoint/hub.py",
        '    "additional_chat_templates/*.jinja",\n',
        "",
        "host/test_checkpoint.py",
        "the hub's further chat templates are not fetched",
    ),
    Fault(
        "checkpoint/hub.py",
        "[\\w.-]{0,95}/",
        "[\\w.-]{0,9}/",
        "host/test_checkpoint.py",
        "long names are no names of the hub",
    ),
    Fault(
        "cli/stats.py",
        "_number(m.itl_p99_us, 1e-3)",
        "_number(m.itl_p50_us, 1e-3)",
        "host/test_cli.py",
        "p99 shows p50",
    ),
    Fault(
        "cli/stats.py",
        "_number(m.ttft_s, 1e3)",
        "_number(m.ttft_s)",
        "host/test_cli.py",
        "seconds are called milliseconds",
    ),
    Fault(
        "cli/stats.py",
        '"max_context": llm.engine.max_context',
        '"max_context": spec.max_context',
        "host/test_cli.py",
        "a record tells of the model's context, not of the one in use",
    ),
    Fault(
        "cli/stderr_log.py",
        "for line in waiting:",
        "for line in reversed(waiting):",
        "host/test_cli_talk.py",
        "lines of a log come in reverse",
    ),
    Fault(
        "bench/show.py",
        '_n(row["over_one"], ".2f"),\n            _n(row["host"]["itl_p50_us"], ",.1f"),',
        '_n(row["over_one"], ".2f"),\n            _n(row["host"]["itl_p99_us"], ",.1f"),',
        "bench/test_bench_concurrency.py",
        "bench's p50 shows p99",
    ),
    Fault(
        "bench/show.py",
        "f\"{s['us'] * s['runs']:,.1f}\"",
        "f\"{s['us']:,.1f}\"",
        "bench/test_bench_stages.py",
        "a stage's time a token is that of one run",
    ),
    Fault(
        "bench/table.py",
        "key=lambda pair: pair[0])]",
        "key=lambda pair: pair[0], reverse=True)]",
        "bench/test_bench_results.py",
        "of two records the older one counts",
    ),
    Fault(
        "progress.py",
        "            self._bar.advance(self._task)",
        "            pass",
        "host/test_progress.py",
        "the progress bar counts no samples",
    ),
    Fault(
        "backends/compile_log.py",
        "    timer.start()\n",
        "",
        "host/test_compile_log.py",
        "a slow compiler is silent",
    ),
    Fault(
        "backends/gpu_entry.py",
        "with self.queue.first(), self.on_stream():",
        "with self.queue.first():",
        "host/test_gpu_entry.py",
        "logits are computed on torch's default stream",
    ),
    Fault(
        "backends/gpu_entry.py",
        "        torch.cuda.empty_cache()",
        "        pass",
        "host/test_gpu_entry.py",
        "closing gives the driver nothing back",
    ),
    Fault(
        "backends/cuda/kernel_cache.py",
        "    if key in _unwritten:\n        return _unwritten[key]\n",
        "",
        "cuda/test_cuda_jit.py",
        "what cannot be kept is compiled twice",
    ),
    Fault(
        "backends/cuda/kernel_cache.py",
        "if hashlib.sha256(cubin).digest() != digest:",
        "if False:",
        "cuda/test_cuda_jit.py",
        "a damaged kernel is loaded",
    ),
    Fault(
        "backends/cuda/toolchain.py",
        "createProgram(text, source,",
        'createProgram(text, "decode.cu",',
        "cuda/test_cuda_jit.py",
        "every program is called decode.cu",
    ),
    Fault(
        "backends/cuda/compile_child.py",
        "    die_with_parent()\n    job",
        "    job",
        "cuda/test_compilers.py",
        "a compiler lives on after the process that began it",
    ),
    Fault(
        "backends/cuda/compilers.py",
        "if self._running < self._most:",
        "if True:",
        "cuda/test_compilers.py",
        "more compilers run than there are cores",
    ),
    Fault(
        "schedule/topology.py",
        "rate *= min(1.0, seen.memory_bytes / row.memory_bytes)",
        "rate *= 1.0",
        "host/test_gpus.py",
        "a MIG slice reads as fast as the whole GPU",
    ),
    Fault(
        "backends/nvidia_driver.py",
        "percent=mps_percent(),",
        "percent=100,",
        "host/test_gpus.py",
        "an MPS share is not read",
    ),
    Fault(
        "stage_check.py",
        "if gpu is None or gpu.proven:",
        "if gpu is None or not gpu.proven:",
        "host/test_stage_check.py",
        "stages are tested where they ran before, and nowhere else",
    ),
    Fault(
        "stage_check.py",
        "if not off < LIMIT:",
        "if off > LIMIT:",
        "host/test_stage_check.py",
        "a stage that gives NaN passes",
    ),
    # ---- the server ----
    Fault(
        "server/pacing.py",
        "return max(0.0, self._last + self._interval.seconds - now)",
        "return 0.0",
        "server/test_pace_of_streams.py",
        "a stream speaks as often as it can",
        quick=True,
    ),
    Fault(
        "server/samples.py",
        "if not self._resting or claim.ended:",
        "if not self._resting:",
        "server/test_pace_of_streams.py",
        "the end of a stream waits for the next event's time",
    ),
    Fault(
        "server/samples.py",
        "            if self.cancelled:\n                return\n",
        "",
        "server/test_pace_of_streams.py",
        "a stream that was left waits for tokens",
    ),
    Fault(
        "server/remote_claim.py",
        "most = self._most if self._read_some else 1",
        "most = self._most",
        "server/test_pace_of_streams.py",
        "the first token waits for others",
    ),
    Fault(
        "text/reasoning.py",
        " - overlap(self._held, CLOSE)",
        "",
        "host/test_answer_parsers.py",
        "half a tag is reasoning",
    ),
    Fault(
        "text/qwen3_coder.py",
        "return max(0, len(self._held) - len(END_FUNCTION))",
        "return len(self._held)",
        "host/test_answer_parsers.py",
        "an end of a call that was cut in two is not found",
    ),
    Fault(
        "server/figures.py",
        "if index % samples_a_job == 0:",
        "if True:",
        "server/test_chat.py",
        "a prompt counts once a sample",
    ),
    Fault(
        "server/limits.py",
        'frozenset({"/health", "/ready", "/"})',
        'frozenset({"/health", "/ready", "/", "/metrics"})',
        "server/test_limits.py",
        "a route is open without a key",
    ),
    Fault(
        "server/limits.py",
        'f"{matches.index(True)}:"',
        '""',
        "server/test_limits.py",
        "keys share prefixes",
    ),
    Fault(
        "server/admission.py",
        "            self.num_inside -= 1",
        "            pass",
        "server/test_limits.py",
        "a request keeps its place for ever",
    ),
    Fault(
        "server/answering.py",
        "            pass\n        self._samples.cancel()",
        "            pass",
        "server/test_limits.py",
        "a client's disconnect ends nothing",
    ),
    Fault(
        "server/supervisor.py",
        " or beat.compiling:",
        ":",
        "server/test_engine_lost.py",
        "a kernel's compiler is taken for an engine that stands still",
    ),
    Fault(
        "server/routes/generation.py",
        "            await service.check_shapes(jobs)\n",
        "",
        "server/test_hostile_grammars.py",
        "a stranger's grammar goes to the engine untried",
    ),
    Fault(
        "text/grammar.py",
        "        if self._matcher.is_error():\n            why",
        "        if False:\n            why",
        "host/test_grammar.py",
        "a grammar beyond llguidance's limits is the engine's error",
    ),
    Fault(
        "server/supervisor.py",
        "if beat.beats != self._beats or not beat.running or beat.compiling:",
        "if True:",
        "server/test_engine_lost.py",
        "an engine that stands still is alive",
    ),
)


def place(fault: Fault) -> Path:
    """Where a fault's file lies in a tree: `backends/cuda` is the package kog_triton.backends.cuda."""
    path = Path(fault.path)
    return path if path.parts[:2] == ("backends", "cuda") else "kog_triton" / path


def plant(fault: Fault, tree: Path) -> bool:
    """Whether the fault's tests went red in this copy of the tree, which is left as it was."""
    file = tree / place(fault)
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
        count = (ROOT / place(fault)).read_text().count(fault.before)
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
