#!/bin/sh
# Paper E, figure 2: which heads of a fine-tuned model matter, and which patterns do they follow?
#
# The paper: BERTSum on CNN/DM; people looked at the three most important heads of each layer, and kept the patterns of which some
#   head has a relevance of three deviations above the mean: matching token, same sentence, position.
# Here: the patterns are those of the catalogue; after the report `discover score` proposes a plan, and `guide discover serve` has a
#   page to look at heads.  At tiny scale the small model of e-table3.sh, and ScisummNet.
# Costs: tiny 1 fine-tuning beside the small model; paper 1.
. "$(dirname "$0")/common.sh"
case $SCALE in
tiny) task=scisummnet && set -- --batch-size 4 --epochs "${EPOCHS:-4}" --learning-rate 3e-4 ;;
paper)
  task=cnn-dm init=bert-base-uncased
  need_model $init
  set -- --batch-size 36 --steps 50000 --evaluate-every 1000 --schedule inverse-sqrt --learning-rate 2e-5 --warmup-steps 10000
  ;;
esac
need_tasks "$task"
ready

[ "$SCALE" = paper ] || small_model
task "$task"
keep finetune "$data" --init "$(at "$init")" --max-length 512 --extend-positions "$@" --name e2-model
model=$made
keep probe importance "$model" "$data" --name e2-importance
keep probe relevance "$model" "$data" --name e2-relevance
report e-figure2
run discover score "$model" "$data" --limit 200
