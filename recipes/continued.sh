#!/bin/sh
# A published model trained further, on English and on Oromo, with and without guides, and what that is worth for a task afterwards.
#
# MODEL is the folder of an encoder, by default of all-MiniLM-L6-v2 as the extra `models` of guide installs it.  It has no head for
#   masked words, so it gets a new one on its own embedding.  Its pieces of words are English: guide prints how many Oromo words need.
# All models have the same rate, which was the best of three for the plain model on the novels.  The weights of preset:neighbours, which are
#   new and start at zero, have it once, and once a greater one, the best of four.  The report has the same short searches on your first
#   text, and says whether other rates would be better.
# Costs: tiny three hours of one core, for this model of 22.7 million parameters.
#
# For your own text copy this file, and change the line that has a number; it counts at tiny scale.
. "$(dirname "$0")/common.sh"
SEEDS=${SEEDS:-1}
case $SCALE in
tiny)
  texts="lm-litbank-books/books lm-hornmt/orm.txt" # 1: your texts, files or folders without spaces in their names
  set -- --max-length 64
  need lm-litbank-books/books "git clone https://github.com/dbamman/litbank '$DATA/litbank' && mkdir -p '$DATA/lm-litbank-books' && ln -s ../litbank/original '$DATA/lm-litbank-books/books'"
  need lm-hornmt/orm.txt https://raw.githubusercontent.com/asmelashteka/HornMT/HEAD/data/orm.txt
  steps=${STEPS:-500} tried=$((steps / 5)) batch=32
  ;;
paper)
  texts="20231101.en 20231101.om"
  set -- --max-length 128
  for text in $texts; do need_wikipedia "${text#*.}"; done
  steps=20000 tried=1000 batch=256
  ;;
esac
rate=3e-4 greater=3e-3
need_published
need_tasks sst
ready

task sst
sst=$data searched=''
for text in $texts; do
  name=$(basename "$(basename "${text#*:}" .gz)" .txt)
  corpus=$(run build-corpus "$(at "$text")" --name "$name")
  packed=$(run build-sequences "$corpus" "$MODEL" "$@" --name "$name-continued")
  if [ -z "$searched" ]; then
    keep search "$packed" --init "$MODEL" --grid learning-rate=1e-4,3e-4,1e-3 --seed 100 --steps "$tried" --batch-size "$batch" \
      --name continued-rates
    keep search "$packed" --init "$MODEL" --plan preset:neighbours --grid added-learning-rate=1e-3,3e-3,1e-2,3e-2 --seed 100 --steps "$tried" \
      --batch-size "$batch" --learning-rate $rate --name continued-added-rates
    searched=yes
  fi
  for seed in $(seq 0 $((SEEDS - 1))); do
    for arm in none ag neighbours neighbours-faster; do
      case $arm in
      none) plan=none faster='' ;;
      *-faster) plan=preset:${arm%-*} faster="--added-learning-rate $greater" ;;
      *) plan=preset:$arm faster='' ;;
      esac
      # shellcheck disable=SC2086  # two words, or none
      keep pretrain "$packed" --init "$MODEL" --plan $plan --steps "$steps" --batch-size "$batch" --learning-rate $rate $faster \
        --evaluate-every $((steps / 5)) --seed "$seed" --name "continued-$name-$arm-$seed"
      model=$made
      tuned=$(run finetune "$sst" --init "$model" --epochs "${EPOCHS:-1}" --learning-rate 1e-4 --max-length 64 --bucket --seed "$seed" \
        --name "continued-$name-$arm-$seed-sst")
      keep evaluate "$tuned" "$sst" --name "continued-$name-$arm-$seed-sst-test"
    done
  done
done
tuned=$(run finetune "$sst" --init "$MODEL" --epochs "${EPOCHS:-1}" --learning-rate 1e-4 --max-length 64 --bucket --name continued-not-sst)
keep evaluate "$tuned" "$sst" --name continued-not-sst-test
page --title "A published model trained further"
