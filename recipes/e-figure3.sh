#!/bin/sh
# Paper E, figures 3 and 4: are the heads with patterns more important than the others?
#
# The paper: 6 layers with 12 heads on NYT-50: heads 1 to 4, which have patterns, are the most important, most of all *same sentence*
#   in the last layer; heads that are added to BERT are a hundred times as important with patterns as without.
# Here: at tiny scale the models of e-table1.sh and e-table3.sh, on ScisummNet.
# Costs: tiny 3 trainings beside the small model; paper 3.
. "$(dirname "$0")/common.sh"
case $SCALE in
tiny) task=scisummnet length=512 layers=4 hidden=128 heads=8 && set -- --batch-size 4 --epochs "${EPOCHS:-4}" --learning-rate 3e-4 ;;
paper)
  task=nyt-50 length=800 layers=6 hidden=768 heads=12 init=bert-base-uncased
  need_model $init
  set -- --batch-size 36 --steps 50000 --evaluate-every 1000 --schedule inverse-sqrt --learning-rate 2e-5 --warmup-steps 10000
  ;;
esac
need_tasks "$task"
ready

[ "$SCALE" = paper ] || small_model
task "$task"
important() {
  name=$1 && shift
  model=$(run finetune "$data" --max-length "$length" "$@" --name "ef3-$name")
  keep probe importance "$model" "$data" --name "ef3-$name-importance"
}
important own-heads "$@" --architecture bert --layers "$layers" --hidden "$hidden" --heads "$heads" --plan preset:patterns
for plan in "$recipes/plans/pal.toml" preset:pal-patterns; do
  important "$(basename "${plan#preset:}" .toml)" "$@" --init "$(at "$init")" --extend-positions --plan "$plan"
done
report e-figure3
