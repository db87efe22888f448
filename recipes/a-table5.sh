#!/bin/sh
# Paper A, table 5: which of the patterns are needed?  The loss of masked words without each of them.
#
# The paper: after 100,000 steps 2.99 with all patterns; without next and previous 7.74, without first 3.02, period 3.03, delimiters
#   2.99.  Model and language are not named.
# Here: 12 layers and English.  Next and previous are also left out one at a time.  At tiny scale 4 layers x 192 with
#   12 heads, and Python's documentation.
# Costs: tiny 7 runs of 600 steps; paper 7 runs of 100,000 steps of 256 x 512 tokens.
. "$(dirname "$0")/common.sh"
SEEDS=${SEEDS:-1}
case $SCALE in
tiny)
  text=builtin:python-docs vocabulary=4000 length=64
  set -- --layers 4 --hidden 192 --heads 12 --learning-rate 1e-3 --schedule constant --steps "${STEPS:-600}" --evaluate-every 100
  ;;
paper)
  text=20231101.en vocabulary=52000 length=512
  need_wikipedia en
  set -- --layers 12 --hidden 768 --heads 12 --learning-rate 1e-4 --weight-decay 0 --batch-size 256 --steps 100000 \
    --evaluate-every 10000
  ;;
esac
ready

pack a5 "$(at "$text")" "$vocabulary" "$length"
set -- "$packed" --architecture roberta --attention-dropout 0 --plan "$recipes/plans/a-table5.toml" --seeds "$SEEDS" "$@"
keep search "$@" --leave-one-out --name a5-one
keep search "$@" --grid plan.next.enabled=false --grid plan.previous.enabled=false --name a5-neighbours
report a-table5 --row 'a5-neighbours: *=[Next,Prev]' --row '*: without first=[First]' --row '*: without period=[Period]' \
  --row '*: without delimiter=[Delim]'
