#!/bin/sh
# Paper E, tables 3 and 6: patterns in heads that are added to BERT (PAL), on summaries.
#
# The paper: BERTSum 42.33 ROUGE-1 on CNN/DM, + PAL 42.34, + PAL with patterns 42.58; 48.37, 48.56 and 48.74 on NYT-50.  Table 6 is
#   the same with trigram blocking, which the report has as rouge1_blocked.
# Here: only the last map of PAL is zero at first; as published all of it is, and nothing but a bias learns.  At tiny scale a model of
#   4 layers x 128 that read Python's documentation, and ScisummNet.
# Costs: tiny 3 fine-tunings beside the small model; paper 18.
. "$(dirname "$0")/common.sh"
case $SCALE in
tiny)
  SEEDS=${SEEDS:-1} tasks=scisummnet
  set -- --batch-size 4 --epochs "${EPOCHS:-4}" --learning-rate 3e-4
  ;;
paper)
  SEEDS=${SEEDS:-3} tasks="cnn-dm nyt-50" init=bert-base-uncased
  need_model $init
  set -- --batch-size 36 --steps 50000 --evaluate-every 1000 --keep-best 3 --schedule inverse-sqrt --learning-rate 2e-5 \
    --warmup-steps 10000 --weight-decay 0 --epsilon 1e-9
  ;;
esac
need_tasks "$tasks"
ready

[ "$SCALE" = paper ] || small_model
for task in $tasks; do
  task "$task"
  case $task in nyt-50) length=800 ;; *) length=512 ;; esac
  for plan in none "$recipes/plans/pal.toml" preset:pal-patterns; do
    keep search "$data" --init "$(at "$init")" --max-length $length --extend-positions "$@" --plan "$plan" --seeds "$SEEDS" \
      --name "e3-$task-$(basename "${plan#preset:}" .toml)"
  done
done
report e-table3 --row '*-none=BERTSum' --row '*-pal=+ PAL' --row '*-pal-patterns=+ PAL + Patterns' \
  --column '*-cnn-dm-*=CNN/DM' --column '*-scisummnet-*=CNN/DM' --column '*-nyt-50-*=NYT-50'
