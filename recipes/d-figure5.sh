#!/bin/sh
# Paper D, figures 5 and 6: which share of the attention does the adversary mask, layer by layer and task by task?
#
# The paper: BERT with τ = .3; the share falls from the lowest layer to the highest, and is greater for named entities and reading
#   than for sentiment.  No figures are printed.
# Here: at tiny scale the small model of d-table1.sh, and two tasks.  The maps of layer 11 are in maps.png of the probe.
# Costs: tiny 2 fine-tunings beside the small model; paper 7.
. "$(dirname "$0")/common.sh"
case $SCALE in
tiny) tasks="sst wnut" layer=3 && set -- --learning-rate 3e-4 ;;
paper)
  tasks="sst-2 mnli qnli qqp sts-b wnut dream" layer=10 init=bert-base-uncased && set -- --learning-rate 2e-5
  need_model $init
  ;;
esac
need_tasks "$tasks"
ready

[ "$SCALE" = paper ] || small_model
for task in $tasks; do
  task "$task"
  model=$(run finetune "$data" --init "$(at "$init")" --plan preset:asa --max-length 128 --epochs "${EPOCHS:-3}" "$@" \
    --name "d5-$task")
  keep probe attack "$model" "$data" --layer "$layer" --limit 200 --name "d5-$task-attack"
done
report d-figure5
