#!/usr/bin/env bash
# Held-out accuracy on a task of reasoning-gym that SmolLM2-135M solves now and then: LoRAP, DiReFTP and LoRA by three seeds,
# 200 steps each, before and after, beside the best constant answer. For a GPU; on two CPU cores with fewer steps.
#   bash examples/rl/reasoning.sh letter_counting    # writes examples/results/rl-letter_counting.json, .csv and .png
#   JOBS=9 bash examples/rl/reasoning.sh gcd --set serve.gpu_memory_utilization=0.08 \
#     --set 'serve.vllm_args={kv-cache-memory-bytes: 2147483648, enforce-eager: true}'      # nine runs share one GPU, or several
#   METHODS=lorap:3e-3 SEEDS=0 bash examples/rl/reasoning.sh gcd --set train.max_steps=5    # a part of it, on a CPU
# A method is written as method:learning rate. Further arguments are options of preft train, such as --resume.
set -euo pipefail
task=${1:?usage: bash examples/rl/reasoning.sh TASK [OPTION ...]}
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH"
declare -A settings=([word_sequence_reversal]="{min_words: 2, max_words: 3}")

preft train --config examples/rl/reasoning.yaml \
  --set train.grpo.environment="$task" --set train.grpo.environment_args="${settings[$task]:-{\}}" \
  --set train.output_dir="runs/$task" \
  --sweep adapter.method:train.learning_rate="${METHODS:-lorap:3e-4,direftp:3e-4,lora:2e-4}" \
  --sweep project.seed="${SEEDS:-0,1,2}" \
  --jobs "${JOBS:-1}" --out "${OUT:-examples/results/rl-$task.json}" "$@"
