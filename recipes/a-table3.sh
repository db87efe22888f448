#!/bin/sh
# Paper A, table 3 and figure 3: losses of masked words with attention guidance (AG) and without (MLM).
#
# The paper: RoBERTa of 8, 12 and 16 layers x 768 on 2,116 (English), 36 (Filipino) and 4.6 (Oromo) million tokens; MLM with the
#   best of 18 settings, AG at 1e-4 without warm-up.  The validation loss of AG is lower in 8 of 9 cells.
# Here: Wikipedia in all three languages; batches of 256, since theirs are not published; MLM has the settings of AG.  At tiny
#   scale 4 and 8 layers x 128 read the documentation of Python, 64 tokens at a time, at a constant rate of 1e-3.
# Costs: tiny 4 runs of 600 steps; paper 18 runs, of 2 to 4 days on 4 to 8 GPUs each.
#
# For your own language copy this file, and change the two lines that have numbers; they count at tiny scale.
. "$(dirname "$0")/common.sh"
SEEDS=${SEEDS:-1}
case $SCALE in
tiny)
  texts=builtin:python-docs # 1: your text, a file or a folder without spaces in its name
  vocabulary=4000           # 2: its vocabulary, 2000 for less than a million words
  length=64 heads=4 depths="4 8"
  set -- --hidden 128 --learning-rate 1e-3 --schedule constant --steps "${STEPS:-600}" --evaluate-every 100
  ;;
paper)
  texts="20231101.en 20231101.tl 20231101.om" vocabulary=52000 length=512 heads=12 depths="8 12 16"
  for text in $texts; do
    need_wikipedia "${text#*.}"
  done
  set -- --hidden 768 --learning-rate 1e-4 --weight-decay 0 --batch-size 256 --evaluate-every 10000
  ;;
esac
ready

for text in $texts; do
  name=$(basename "$(basename "${text#*:}" .gz)" .txt)
  case $text in *.en) set -- "$@" --epochs 10 ;; 2023*) set -- "$@" --epochs 40 ;; esac
  pack "$name" "$(at "$text")" "$vocabulary" "$length"
  for layers in $depths; do
    for seed in $(seq 0 $((SEEDS - 1))); do
      for plan in none preset:ag; do
        keep pretrain "$packed" --architecture roberta --attention-dropout 0 --layers "$layers" "$@" \
          --heads "$([ "$layers" = 16 ] && echo 16 || echo "$heads")" --plan $plan --seed "$seed" \
          --name "a3-$name-$layers-${plan#preset:}-$seed"
      done
    done
  done
done
set --
for layers in 8 12 16; do
  set -- "$@" --row "*-$layers-none-*=RoBERTa-$layers-MLM" --row "*-$layers-ag-*=RoBERTa-$layers-AG"
done
report a-table3 "$@" --column 'a3-python-docs-*=English' --column 'a3-*.en-*=English' --column 'a3-*.tl-*=Filipino' \
  --column 'a3-*.om-*=Oromo'
