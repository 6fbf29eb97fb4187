#!/usr/bin/env bash
# Trains a chat model from documents, and then holds a conversation:
#
#     documents -> tokenizer and model -> chats -> preferences -> conversation
#
# A model of a million weights, on this CPU, in about five minutes:
#
#     examples/nanochat/run.sh
#
# A model of 124 or 350 million weights on a GPU, from data of your own:
#
#     SIZE=124m TEXTS=fineweb/ CHATS=smoltalk.jsonl PAIRS=ultrafeedback.jsonl \
#         examples/nanochat/run.sh --device cuda --precision bf16
#
# Arguments are given to each training. UPDATES is the number of updates on documents, and OUT the
# folder of the results.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-target/nanochat}

if [ -n "${SIZE:-}" ]; then
    data=("${TEXTS:?give documents}" "${CHATS:?give chats}" "${PAIRS:?give pairs of answers}")
    base=(--data "${data[0]}" --size "$SIZE" --arch qwen3 --tokenizer bpe --optimizer muon --batch 32 --updates "${UPDATES:-5000}")
    chats=(--batch 8 --epochs 1)
    pairs=(--batch 8 --epochs 1)
    features=(--features cuda)
else
    data=("" examples/finetune/chats.jsonl examples/finetune/pairs.jsonl)
    base=(--updates "${UPDATES:-350}")
    chats=(--batch 2 --epochs 30 --learning-rate 1e-3)
    pairs=(--batch 2 --epochs 4 --learning-rate 2e-5)
    features=()
fi
stepscope() { cargo run --release --quiet ${features[@]+"${features[@]}"} -- "$@"; }

stepscope train "${base[@]}" --out "$out/base" "$@"
stepscope finetune --weights "$out/base/transformers" --data "${data[1]}" "${chats[@]}" --out "$out/chats" "$@"
stepscope finetune --weights "$out/chats/transformers" --data "${data[2]}" --preferences dpo "${pairs[@]}" \
    --out "$out/pairs" "$@"
echo "Ask, for example: What is 3+4?  Ctrl-D ends the conversation."
stepscope generate --weights "$out/pairs/transformers" --chat
