"""The table of docs/benchmarks.md, out of bench/results: hardware x work x system.

    python -m bench.results_table

Each row names the newest file that has it. After a measurement name its file here and run `python -m docs.generate`.
"""

from __future__ import annotations

from bench.result_keys import document_of, number_at

REVIEW = "h100_b7a4f03_outside_look.json"
TOGETHER, BEST = "rows[system=together].tokens_per_second", "rows[best=true].tokens_per_second"
FIRST, SECOND = (f"launches[{number}].steady_tokens_per_second" for number in (0, 1))
SLOWEST_RANK = "parts.{}[1].micro_batch.tokens_per_second_of_all_ranks"
FSDP = "parts.fsdp[0].compiled, kept, {} samples a GPU.tokens_per_second_of_all_ranks"
RIVAL = "rivals[0].rows[{}].tokens_per_second"
SPANNING = "rows[0].together.steady_tokens_per_second"

System = tuple[str, str, str]  # its name, a result file, a key

# fmt: off
WORKS: tuple[tuple[str, str, tuple[System, ...]], ...] = (
    ("1 H100", "eight mixed jobs over real texts, 8B; measured by a reviewer", (
        ("tlora", REVIEW, "rows[0].tokens_per_second"),
        ("Unsloth, one after another, rows packed: other, larger batches", REVIEW, "rows[4].tokens_per_second"),
        ("LoRAFusion's kernels", REVIEW, "rows[1].tokens_per_second"),
        ("TRL, one after another, best setting found", REVIEW, "rows[2].tokens_per_second"),
        ("Unsloth, one after another, the jobs' own batches", REVIEW, "rows[3].tokens_per_second"),
        ("mLoRA", REVIEW, "rows[5].tokens_per_second"))),
    ("1 H100", "eight mixed jobs over real texts, 8B; one run", (
        ("tlora", "h100_6a3054d_real_8b.json", SECOND),
        ("tlora with an A100's kernels", "h100_6a3054d_sm80_real_8b.json", SECOND))),
    ("1 H100", "four jobs in LoRAFusion's setting, 8B", (
        ("tlora, caches empty", "h100_470af3c_lorafusion_heterogeneous_8b.json", FIRST),
        ("LoRAFusion, as published", "h100_470af3c_lorafusion_heterogeneous_8b.json", "setup.published_tokens_per_second"))),
    ("1 H100", "the same, lengths like CNN/DailyMail", (
        ("tlora, caches empty", "h100_eb19e95_lorafusion_cnn_dailymail_8b.json", FIRST),
        ("LoRAFusion, as published", "h100_eb19e95_lorafusion_cnn_dailymail_8b.json", "setup.published_tokens_per_second"))),
    ("1 H100", "the same, lengths mixed", (
        ("tlora", "h100_eb19e95_lorafusion_mixed_8b.json", FIRST),
        ("LoRAFusion, as published", "h100_eb19e95_lorafusion_mixed_8b.json", "setup.published_tokens_per_second"))),
    ("1 H100", "eight mixed jobs over real texts, 1.7B", (
        ("tlora", "h100_6a3054d_real_1.7b.json", SECOND),
        ("tlora with an A100's kernels", "h100_6a3054d_sm80_real_1.7b.json", SECOND),
        ("tlora, plain path", "h100_2ecdd65_plain_real_1.7b.json", SECOND),
        ("tlora, plain path, caches empty; in one run with the next", "h100_de0977a_plain_trl_1.7b.json", FIRST),
        ("TRL, one after another, rows packed", "h100_de0977a_plain_trl_1.7b.json", "rivals[0].rows[0].tokens_per_second"),
        ("TRL, fastest setting; a reviewer, another card", REVIEW, "rows[14].tokens_per_second"),
        ("TRL, slowest setting; a reviewer, another card", REVIEW, "rows[13].tokens_per_second"))),
    ("1 H100", "eight mixed jobs, 8B in 4 bits; one run", (
        ("tlora, `base_precision: nf4`", "h100_6202eb9_nf4_qlora_8b.json", FIRST),
        ("TRL with bitsandbytes, one after another, padded", "h100_6202eb9_nf4_qlora_8b.json", "rivals[0].rows[1].tokens_per_second"))),
    ("1 H100", "four jobs, 8B in 4 bits, `memory_limit: 12GiB`", (
        ("tlora, `base_precision: nf4`", "h100_6202eb9_nf4_12gib_8b.json", FIRST),)),
    ("1 H100", "eight jobs, 8B streamed from the host's memory", (
        ("tlora, `layout: streamed`", "h100_d4e0052_streamed_8b.json", "arms[arm=streamed].tokens_per_second"),
        ("the same base resident", "h100_d4e0052_streamed_8b.json", "arms[arm=resident].tokens_per_second"))),
    ("1 H100", "a lone job of 8 samples a step, 8B", (
        ("tlora, `packing: true`", "h100_c6f8f72_packed_8b.json", FIRST),
        ("Unsloth, rows packed; a reviewer, another card", REVIEW, "rows[8].tokens_per_second"),
        ("tlora", "h100_c6f8f72_lone_8b.json", "median launches[].steady_tokens_per_second"),
        ("Unsloth, QLoRA; a reviewer, another card", REVIEW, "rows[10].tokens_per_second"))),
    ("1 H200", "eight mixed jobs over real texts, 8B", (
        ("tlora", "h200_fb2f609_real_8b.json", SECOND),
        ("TRL, packed, best setting found; another card", "h200_226c6a3_trl_8b.json", "rows[setting=packed-by-1].tokens_per_second"))),
    ("1 H200", "eight mixed jobs over real texts, 1.7B", (
        ("tlora", "h200_6141e34_real_2b.json", SECOND),)),
    ("1 H200", "eight mixed jobs over real texts, adapters at experts too, 36 of 48 layers of Qwen3-30B-A3B", (
        ("tlora, caches empty", "h200_23e31b29_real_jobs_30b_a3b.json", FIRST),
        ("tlora, caches empty, smaller micro-batches; in one run with the next", "h200_36d66d6c_real_jobs_30b_a3b.json", FIRST),
        ("transformers' Trainer with PEFT, one after another, better setting", "h200_36d66d6c_real_jobs_30b_a3b.json", RIVAL.format(1)))),
    ("1 H200", "the same over gpt-oss-20b in 16 bits", (
        ("tlora, caches empty", "h200_23e31b29_real_jobs_gpt_oss_20b.json", FIRST),)),
    ("1 H200", "eight mixed jobs over real texts, Qwen3.5-9B (hybrid); one run", (
        ("tlora, caches empty", "h200_23e31b29_real_jobs_qwen3.5_9b.json", FIRST),
        ("transformers' Trainer with PEFT, one after another, padded", "h200_23e31b29_real_jobs_qwen3.5_9b.json", RIVAL.format(0)),
        ("tlora, caches empty, a dense 8B", "h200_23e31b29_real_jobs_8b.json", FIRST))),
    ("1 H200", "the same with inverses that are kept; one machine", (
        ("tlora, caches empty", "h200_29bc89d8_real_jobs_qwen3.5_9b.json", FIRST),
        ("tlora, caches empty, a dense 8B", "h200_29bc89d8_real_jobs_8b.json", FIRST))),
    ("1 H200", "eight mixed jobs over real texts, Qwen3.5-9B, beside TRL; one run", (
        ("tlora, caches empty", "h200_190e7bd0_real_jobs_qwen3.5_9b.json", FIRST),
        ("TRL with flash-linear-attention's kernels, one after another, best of three settings",
         "h200_190e7bd0_real_jobs_qwen3.5_9b.json", RIVAL.format(1)))),
    ("1 H200", "jobs of 1,024 tokens a step, adapters at experts too, 36 of 48 layers of Qwen3-30B-A3B", (
        ("tlora, eight", "h200_190e7bd0_small_steps_30b_a3b_eight.json", FIRST),
        ("tlora, one of them", "h200_190e7bd0_small_steps_30b_a3b_lone.json", SECOND))),
    ("1 H200", "eight jobs, equal samples of 2,048 tokens, 8B; one run", (
        ("tlora", "h200_226c6a3_8b_2048.json", TOGETHER),
        ("PEFT, one after another, best setting found", "h200_226c6a3_8b_2048.json", BEST))),
    ("1 H200", "the same, base in 8 bits", (
        ("tlora, `base_precision: fp8`", "h200_ea23a16_turns_fp8.json", "tokens_per_second.new"),)),
    *(("1 H200", f"eight jobs of 4 x 128 tokens a step, {shape.upper()}; one run", (
        ("tlora", f"h200_a316ad7_small_{shape}.json", "rows[3].tokens_per_second"),
        ("PEFT compiled, CUDA graphs, one after another", f"h200_a316ad7_small_{shape}.json", "rows[5].tokens_per_second"),
        ("tlora, one after another", f"h200_a316ad7_small_{shape}.json", "rows[1].tokens_per_second"),
    )) for shape in ("0.6b", "1.7b", "8b")),
    ("1 H200", "two samples of 512 tokens a step, 1.7B in fp32; one run", (
        ("tlora", "h200_226c6a3_qwen_fp32.json", TOGETHER),
        ("PEFT, best setting found", "h200_226c6a3_qwen_fp32.json", BEST))),
    ("2 H200", "one job over both, 8B", (
        ("tlora", "h200x2_f911a0b_many_gpus.json", "rows[row=spanning].together.steady_tokens_per_second"),
        ("FSDP2, PEFT, Liger, compiled", "h200x2_f911a0b_fsdp_8b.json", FSDP.format(4)))),
    ("2 H200", "eight mixed jobs over real texts, 8B; one machine", (
        ("tlora, the whole base on each", "h200x2_bd9f3d49_whole_8b.json", FIRST),
        ("tlora, in stages, links through the host's memory", "h200x2_bd9f3d49_stages_1536_8b.json", FIRST))),
    ("2 H200", "the same, batches four times as large; one machine", (
        ("tlora, the whole base on each", "h200x2_0c9d8944_stages_8b_4x.json", FIRST),
        ("tlora, in stages, links through the host's memory", "h200x2_0c9d8944_stages_8b_4x.json", SECOND))),
    ("2 H200", "eight mixed jobs over real texts, 32B in bf16; one machine", (
        ("tlora, the base shared over NVLink", "h200x2_bd9f3d49_shared_32b.json", FIRST),
        ("tlora, in stages, links through the host's memory", "h200x2_bd9f3d49_stages_32b.json", FIRST))),
    ("4 H200", "one job over all four, 8B; one machine", (
        ("tlora", "h200x4_e232b2f_many_gpus.json", SPANNING),
        ("FSDP2, PEFT, Liger, compiled", "h200x4_e232b2f_fsdp_8b.json", FSDP.format(4)))),
    ("4 H200", "eight jobs, one GPU each at a time, 8B", (
        ("tlora", "h200x4_4fbd0d2_many_gpus.json", "rows[row=placed].together.steady_tokens_per_second"),)),
    ("4 H200", "70B in bf16 in parts on all, samples of 2,048 tokens", (
        ("tlora, without optimizer steps", "h200x4_fb2f609_big_equal.json", SLOWEST_RANK.format("big")),
        ("FSDP2, PEFT, Liger, compiled; other cards", "h200x4_caad1df_fsdp_70b.json", FSDP.format(1)))),
    ("4 H200", "70B in fp8 whole on each, mixed lengths", (
        ("tlora, without optimizer steps", "h200x4_4fbd0d2_fp8.json", "min parts.fp8[].micro_batch.tokens_per_second_of_all_ranks"),)),
    ("2 CPU cores", "eight small jobs, a 4-layer model; one run", (
        ("tlora", "cpu_270be5e.json", "tokens_per_second.together"),
        ("tlora, one after another", "cpu_270be5e.json", "tokens_per_second.one after another"),
        ("PEFT, one after another", "cpu_270be5e.json", "tokens_per_second.PEFT one after another"))),
)
# fmt: on


def format_table(results: str) -> str:
    """Markdown, whose links lead to `results`, where the files lie as seen from the page."""
    lines = ["| hardware | work | system | tokens/s |", "| --- | --- | --- | ---: |"]
    for hardware, work, systems in WORKS:
        for place, (system, file, key) in enumerate(systems):
            figure = f'[{number_at(document_of(file), key):,.0f}]({results}/{file} "{key}")'
            lines.append(f"| {hardware if place == 0 else ''} | {work if place == 0 else ''} | {system} | {figure} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(format_table("bench/results"))
