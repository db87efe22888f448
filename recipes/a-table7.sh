#!/bin/sh
# Paper A, table 7: translation with attention guidance (AG), beside a plain transformer and hard-coded Gaussian attention.
#
# The paper: transformers of base size, 100,000 steps on IWSLT16 and WMT14 English-German; one head of every encoder layer on the
#   next word and one on the previous.  AG has the lowest losses; its BLEU is .1 (IWSLT) and 2.9 (WMT) below that of the plain one.
# Here: at tiny scale 2 + 2 layers x 256 translate German captions of Multi30k to English.
# Costs: tiny 3 runs of 600 steps, and the translation of 1,000 sentences by each; paper 6 runs of 100,000 steps.
. "$(dirname "$0")/common.sh"
SEEDS=${SEEDS:-1} source=en target=de
case $SCALE in
tiny)
  corpora=mt-multi30k splits="train val test_2016_flickr" vocabulary=8000 length=70 source=de target=en
  for split in $splits; do
    for side in de en; do
      need "$corpora/$split.$side" "https://raw.githubusercontent.com/multi30k/dataset/HEAD/data/task1/raw/$split.$side.gz"
    done
  done
  set -- --layers 2 --hidden 256 --heads 8 --ffn 512 --batch-tokens 2048 --learning-rate 1e-3 --warmup-steps 200 \
    --steps "${STEPS:-600}" --evaluate-every 200
  ;;
paper)
  corpora="iwslt16 wmt14" splits="train val test" vocabulary=32000 length=128
  for corpus in $corpora; do
    for split in $splits; do
      for side in en de; do need "$corpus/$split.$side" "the text of $corpus English-German, a sentence on each line"; done
    done
  done
  set -- --layers 6 --hidden 512 --heads 8 --ffn 2048 --batch-tokens 25000 --learning-rate 7e-4 --warmup-steps 4000 --steps 100000 \
    --evaluate-every 5000
  ;;
esac
ready

for corpus in $corpora; do
  file() { at "$corpus/$1.$2"; }
  # shellcheck disable=SC2086  # three words
  set_splits() { train=$1 valid=$2 test=$3; } && set_splits $splits
  pairs=$(run build-dataset --train "$(file "$train" $source)" --train-pair "$(file "$train" $target)" --name "$corpus" \
    --valid "$(file "$valid" $source)" --valid-pair "$(file "$valid" $target)" \
    --test "$(file "$test" $source)" --test-pair "$(file "$test" $target)")
  joint=$(run build-tokenizer "$pairs" --vocab-size "$vocabulary")
  packed=$(run build-sequences "$pairs" "$joint" --max-length "$length" --packing pairs)
  for seed in $(seq 0 $((SEEDS - 1))); do
    for plan in none preset:gaussian preset:ag-translation; do
      keep pretrain "$packed" --objective translation --schedule inverse-sqrt --beta2 0.98 "$@" --plan $plan --seed "$seed" \
        --name "a7-$corpus-${plan#preset:}-$seed"
      keep evaluate "$made" "$packed" --name "a7-$corpus-${plan#preset:}-$seed-test"
    done
  done
done
report a-table7 --row '*-none-*=BASE' --row '*-gaussian-*=Hard-coded (You et al., 2020)' --row '*-ag-translation-*=AG' \
  --column 'a7-iwslt16-*=IWSLT16 En-De' --column 'a7-*multi30k-*=IWSLT16 En-De' --column 'a7-wmt14-*=WMT14 En-De'
